// Runs a RowTask on the handler's thread and on XLA's pool. Nobody waits: the handler's thread
// takes chunks like any other, and whoever finishes the last one completes the future. A pool whose
// threads are all busy (in XLA's own collectives, say) therefore costs speed, never progress.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "cpu/denormals.h"
#include "cpu/row_task.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

// Under this a second thread costs more than it saves.
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
      task_.run(begin, end);
      // Release pairs with the acquire of the thread that finishes last: it publishes all items.
      const int64_t before = done_.fetch_add(end - begin, std::memory_order_acq_rel);
      if (before + end - begin == task_.items) promise_.SetAvailable();
    }
  }

  xla::ffi::Future future() const { return xla::ffi::Future(promise_); }

 private:
  cpu::RowTask task_;
  int64_t chunk_;
  xla::ffi::Promise promise_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
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
  for (int64_t helper = 1; helper < std::min(threads, chunks); ++helper) {
    pool.Schedule([shared] { shared->Work(); });
  }
  shared->Work();
  return future;
}

}  // namespace jax_ep::ffi_layer
