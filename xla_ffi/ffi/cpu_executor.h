// Runs a RowTask on the handler's thread and on XLA's pool. Nobody waits: the handler's thread
// takes chunks like any other, and whoever finishes the last one completes the future. A pool whose
// threads are all busy (in XLA's own collectives, say) therefore costs speed, never progress.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "cpu/denormals.h"
#include "cpu/row_task.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

// Below this size a second thread costs more than it saves.
inline constexpr int64_t kChunkBytes = int64_t{512} << 10;

class SharedTask {
 public:
  SharedTask(cpu::RowTask task, int64_t chunks)
      : task_(std::move(task)), chunk_((task_.items + chunks - 1) / chunks) {}

  void Work() {
    cpu::ScopedDenormals denormals;
    while (true) {
      const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= task_.items) return;
      const int64_t end = std::min(begin + chunk_, task_.items);
      RunItems(begin, end);
      // Release pairs with the acquire of the thread that finishes last: it publishes all items,
      // and what they have thrown.
      const int64_t before = done_.fetch_add(end - begin, std::memory_order_acq_rel);
      if (before + end - begin == task_.items) Complete();
    }
  }

  xla::ffi::Future future() const { return xla::ffi::Future(promise_); }

 private:
  // Items may run out of memory. Nothing may escape into XLA's pool, and the operands must stay
  // until no thread writes to them any more, so the future fails instead.
  void RunItems(int64_t begin, int64_t end) {
    try {
      task_.run(begin, end);
    } catch (const std::exception&) {
      // Relaxed: done_ publishes what the first thread has caught.
      if (!failed_.exchange(true, std::memory_order_relaxed)) thrown_ = std::current_exception();
    }
  }
  void Complete() {
    if (thrown_ == nullptr) return promise_.SetAvailable();
    try {
      std::rethrow_exception(thrown_);
    } catch (const std::exception& e) {
      promise_.SetError(xla::ffi::Error::Internal(std::string("jax_ep: ") + e.what()));
    }
  }

  cpu::RowTask task_;
  int64_t chunk_;
  xla::ffi::Promise promise_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr thrown_;
};

inline xla::ffi::Future Completed() {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetAvailable();
  return future;
}

inline xla::ffi::Future Failed(xla::ffi::Error error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

inline xla::ffi::Future Run(xla::ffi::ThreadPool& pool, cpu::RowTask task) {
  if (task.items == 0) return Completed();
  const int64_t chunks = std::clamp<int64_t>(task.bytes / kChunkBytes, 1, task.items);
  auto shared = std::make_shared<SharedTask>(std::move(task), chunks);
  xla::ffi::Future future = shared->future();
  // XLA's pool may have many more threads than the machine has cores.
  const int64_t threads =
      std::min<int64_t>(pool.num_threads(), std::max(1u, std::thread::hardware_concurrency()));
  try {
    for (int64_t helper = 1; helper < std::min(threads, chunks); ++helper) {
      pool.Schedule([shared] { shared->Work(); });
    }
  } catch (const std::bad_alloc&) {
    // The helpers that were scheduled, and this thread, are enough.
  }
  shared->Work();
  return future;
}

}  // namespace jax_ep::ffi_layer
