// Tests of ffi/cpu_executor.h: every item runs exactly once and the future completes exactly once,
// after all of them, whenever and wherever the helpers run, also if items throw. Needs XLA's FFI
// headers; the test's own thread pool replaces XLA's. Runs under ThreadSanitizer as well.
#include "ffi/cpu_executor.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/memory/bounded.h"

// The pool reports failures through these two types, whose contents are private to XLA.
struct XLA_FFI_Error {
  std::string message;
};
struct XLA_FFI_ExecutionContext {
  std::function<bool(XLA_FFI_Task*, void*)> schedule;  // false: no pool
  int64_t threads = 0;                                 // < 0: no pool
};

namespace jax_ep::ffi_layer {
namespace {

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  return args->ctx->schedule(args->task, args->data) ? nullptr : new XLA_FFI_Error{"no pool"};
}
XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  if (args->ctx->threads < 0) return new XLA_FFI_Error{"no pool"};
  *args->num_threads = args->ctx->threads;
  return nullptr;
}
void GetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

// A thread pool as handlers see it, over the test's context.
class Pool {
 public:
  explicit Pool(XLA_FFI_ExecutionContext& context)
      : api_(MakeApi()),
        pool_(xla::ffi::CtxDecoding<xla::ffi::ThreadPool>::Decode(&api_, &context, diagnostic_)) {}
  xla::ffi::ThreadPool& get() { return *pool_; }

 private:
  static XLA_FFI_Api MakeApi() {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.XLA_FFI_ThreadPool_Schedule = Schedule;
    api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
    api.XLA_FFI_Error_GetMessage = GetMessage;
    api.XLA_FFI_Error_Destroy = DestroyError;
    return api;
  }

  const XLA_FFI_Api api_;
  xla::ffi::DiagnosticEngine diagnostic_;
  std::optional<xla::ffi::ThreadPool> pool_;
};

// The items of one task. `runs` is not atomic: ThreadSanitizer reports an item that two threads
// run, and a completion that does not see what the items wrote.
struct Ledger {
  explicit Ledger(int64_t items) : runs(static_cast<size_t>(items), 0) {}

  cpu::RowTask Task(int64_t bytes, std::function<void(int64_t)> each = {}) {
    return {static_cast<int64_t>(runs.size()), bytes, [this, each](int64_t begin, int64_t end) {
              CHECK(0 <= begin && begin < end && end <= static_cast<int64_t>(runs.size()));
              for (int64_t item = begin; item < end; ++item) {
                ++runs[static_cast<size_t>(item)];
                if (each) each(item);
              }
            }};
  }
  void CheckAllOnce() const {
    for (const int count : runs) CHECK(count == 1);
  }

  std::vector<int> runs;
};

// Counts completions; on completion every item must have run.
struct Watcher {
  Watcher(xla::ffi::Future& future, const Ledger& ledger) {
    future.OnReady([this, &ledger](const std::optional<xla::ffi::Error>& error) {
      CHECK(!error.has_value());
      ledger.CheckAllOnce();
      // Release pairs with the acquire in Await.
      completions.fetch_add(1, std::memory_order_release);
    });
  }
  void Await() const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (completions.load(std::memory_order_acquire) == 0) {
      CHECK(std::chrono::steady_clock::now() < limit);
      std::this_thread::yield();
    }
  }
  int count() const { return completions.load(std::memory_order_relaxed); }

  std::atomic<int> completions{0};
};

// Keeps a thread in its item for a while, so that the others get items as well.
void Linger(int64_t item) {
  if (item % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(item % 3 * 10));
  std::this_thread::yield();
}

// Any number of threads, more or fewer chunks than threads, and workers that come too late.
void TestSharedTask() {
  Random random(21);
  for (int round = 0; round < 300; ++round) {
    const int64_t items = random.In(1, 60), chunks = random.In(1, items);
    const int64_t threads = random.In(1, 4);
    CurrentCase() = std::to_string(items) + " items, " + std::to_string(chunks) + " chunks, " +
                    std::to_string(threads) + " threads";
    Ledger ledger(items);
    auto shared = std::make_shared<SharedTask>(ledger.Task(0, Linger), chunks);
    xla::ffi::Future future = shared->future();
    std::optional<Watcher> watcher;
    const bool watch_first = random.OneIn(2);
    if (watch_first) watcher.emplace(future, ledger);
    std::vector<std::thread> workers;
    for (int64_t i = 0; i < threads; ++i) workers.emplace_back([shared] { shared->Work(); });
    if (!watch_first) watcher.emplace(future, ledger);
    watcher->Await();
    for (std::thread& worker : workers) worker.join();
    shared->Work();
    ledger.CheckAllOnce();
    CHECK(watcher->count() == 1);
  }
}

struct Scheduled {
  XLA_FFI_Task* task;
  void* data;
};

// Helpers run before the caller, beside it, after everything is over or not at all.
void TestRun() {
  enum Mode { kInline, kThreads, kLate, kNoPool, kModes };
  Random random(22);
  for (int round = 0; round < 400; ++round) {
    const int mode = round % kModes;
    const int64_t items = random.In(1, 60);
    const int64_t bytes = random.In(0, 40) * (kChunkBytes / 4);
    CurrentCase() = "mode " + std::to_string(mode) + ", " + std::to_string(items) + " items, " +
                    std::to_string(bytes) + " bytes";
    Ledger ledger(items);
    std::vector<Scheduled> scheduled;
    std::vector<std::thread> threads;
    XLA_FFI_ExecutionContext context;
    context.threads = random.OneIn(5) ? -1 : random.In(0, 64);
    context.schedule = [&](XLA_FFI_Task* task, void* data) {
      scheduled.push_back({task, data});
      if (mode == kInline) task(data);
      if (mode == kThreads) threads.emplace_back(task, data);
      return mode != kNoPool;
    };
    Pool pool(context);
    xla::ffi::Future future = Run(pool.get(), ledger.Task(bytes, Linger));
    Watcher watcher(future, ledger);
    if (mode != kThreads) CHECK(watcher.count() == 1);
    watcher.Await();
    if (mode == kLate) {
      for (const Scheduled& helper : scheduled) helper.task(helper.data);
    }
    for (std::thread& thread : threads) thread.join();
    ledger.CheckAllOnce();
    CHECK(watcher.count() == 1);

    const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
    const int64_t wanted = std::min({context.threads, cores, items, bytes / kChunkBytes}) - 1;
    CHECK(static_cast<int64_t>(scheduled.size()) == std::max<int64_t>(wanted, 0));
  }
}

// The helpers of a pool that never runs them. They are kept here, as XLA keeps them in its queue.
std::vector<Scheduled>& Abandoned() {
  static auto* kept = new std::vector<Scheduled>;
  return *kept;
}

void TestHelpersThatNeverRun() {
  for (int round = 0; round < 50; ++round) {
    Ledger ledger(1000);
    XLA_FFI_ExecutionContext context;
    context.threads = 8;
    context.schedule = [](XLA_FFI_Task* task, void* data) {
      Abandoned().push_back({task, data});
      return true;
    };
    Pool pool(context);
    xla::ffi::Future future = Run(pool.get(), ledger.Task(64 * kChunkBytes));
    Watcher watcher(future, ledger);
    CHECK(watcher.count() == 1);
  }
}

// The handler does not wait for a helper that is stuck in its chunk: it returns with the future
// pending, and the helper completes it.
void TestRunDoesNotBlock() {
  if (std::thread::hardware_concurrency() < 2) return;  // no helper is requested
  Ledger ledger(8);
  std::mutex mutex;
  std::condition_variable changed;
  bool helper_inside = false, released = false;
  std::thread::id helper_id;
  std::thread helper;
  XLA_FFI_ExecutionContext context;
  context.threads = 2;
  context.schedule = [&](XLA_FFI_Task* task, void* data) {
    helper = std::thread(task, data);
    std::unique_lock<std::mutex> lock(mutex);
    helper_id = helper.get_id();
    changed.wait(lock, [&] { return helper_inside; });
    return true;
  };
  const auto each = [&](int64_t item) {
    std::unique_lock<std::mutex> lock(mutex);
    if (item != 0) return;
    helper_inside = true;
    changed.notify_all();
    changed.wait(lock, [&] { return released; });
  };
  Pool pool(context);
  xla::ffi::Future future = Run(pool.get(), ledger.Task(8 * kChunkBytes, each));
  std::atomic<bool> completed_by_helper{false};
  std::atomic<int> completions{0};
  future.OnReady([&](const std::optional<xla::ffi::Error>&) {
    completed_by_helper = std::this_thread::get_id() == helper_id;
    ++completions;
  });
  CHECK(completions == 0);
  {
    std::lock_guard<std::mutex> lock(mutex);
    released = true;
  }
  changed.notify_all();
  helper.join();
  CHECK(completions == 1 && completed_by_helper);
  ledger.CheckAllOnce();
}

void TestEmptyAndFailed() {
  XLA_FFI_ExecutionContext context;
  context.threads = 4;
  context.schedule = [](XLA_FFI_Task*, void*) -> bool {
    CHECK(false);
    return false;
  };
  Pool pool(context);
  Ledger nothing(0);
  xla::ffi::Future empty = Run(pool.get(), nothing.Task(64 * kChunkBytes));
  CHECK(Watcher(empty, nothing).count() == 1);
  xla::ffi::Future completed = Completed();
  CHECK(Watcher(completed, nothing).count() == 1);
  xla::ffi::Future failed = Failed(xla::ffi::Error::InvalidArgument("what must hold"));
  int failures = 0;
  failed.OnReady([&](const std::optional<xla::ffi::Error>& error) {
    CHECK(error.has_value() && error->message() == "what must hold");
    ++failures;
  });
  CHECK(failures == 1);
}

// What an item throws does not leave the task, on any thread. Instead the future fails once no
// item is running.
void TestItemsThatThrow() {
  Random random(23);
  for (int round = 0; round < 100; ++round) {
    const int64_t items = random.In(1, 60), chunks = random.In(1, items);
    const int64_t throws = random.In(0, items - 1), every = random.In(1, 20);
    CurrentCase() = std::to_string(items) + " items, " + std::to_string(chunks) + " chunks, item " +
                    std::to_string(throws) + " throws";
    std::atomic<int> running{0};
    auto shared = std::make_shared<SharedTask>(
        cpu::RowTask{items, 0,
                     [&](int64_t begin, int64_t end) {
                       ++running;
                       bool failed = false;
                       for (int64_t item = begin; item < end; ++item) {
                         Linger(item);
                         failed |= item == throws || (item > throws && item % every == 0);
                       }
                       --running;
                       if (failed) throw std::bad_alloc();
                     }},
        chunks);
    std::atomic<int> failures{0};
    xla::ffi::Future future = shared->future();
    future.OnReady([&](const std::optional<xla::ffi::Error>& error) {
      CHECK(error.has_value() && error->message().find("bad_alloc") != std::string::npos);
      CHECK(running == 0);
      ++failures;
    });
    std::vector<std::thread> workers;
    for (int64_t i = random.In(1, 4); i > 0; --i)
      workers.emplace_back([shared] { shared->Work(); });
    for (std::thread& worker : workers) worker.join();
    CHECK(failures == 1);
  }
}

// If the pool cannot take a helper for lack of memory, the task goes on with those that it has.
void TestPoolThatThrows() {
  if (std::thread::hardware_concurrency() < 2) return;  // no helper is requested
  Ledger ledger(64);
  XLA_FFI_ExecutionContext context;
  context.threads = 64;
  context.schedule = [](XLA_FFI_Task* task, void* data) -> bool {
    Abandoned().push_back({task, data});
    throw std::bad_alloc();
  };
  Pool pool(context);
  xla::ffi::Future future = Run(pool.get(), ledger.Task(64 * kChunkBytes));
  CHECK(Watcher(future, ledger).count() == 1);
}

#if defined(__SSE2__)
// Items see denormals on the handler's thread and on helpers, and the threads' modes are restored.
void TestDenormals() {
  constexpr uint32_t kFlushToZero = 0x8040;
  const auto flushes = [] { return (_mm_getcsr() & kFlushToZero) == kFlushToZero; };
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero);
  Ledger ledger(64);
  std::vector<std::thread> threads;
  XLA_FFI_ExecutionContext context;
  context.threads = 2;
  context.schedule = [&](XLA_FFI_Task* task, void* data) {
    threads.emplace_back([=] {
      _mm_setcsr(_mm_getcsr() | kFlushToZero);
      task(data);
      CHECK(flushes());
    });
    return true;
  };
  Pool pool(context);
  const auto each = [](int64_t) { CHECK((_mm_getcsr() & kFlushToZero) == 0); };
  xla::ffi::Future future = Run(pool.get(), ledger.Task(64 * kChunkBytes, each));
  CHECK(flushes());
  Watcher watcher(future, ledger);
  watcher.Await();
  for (std::thread& thread : threads) thread.join();
  _mm_setcsr(before);
}
#else
void TestDenormals() {}
#endif

// EndsWithin gives up on a wait that does not end in time; the wait may still end later.
void TestEndsWithin() {
  using cuda::EndsWithin;
  constexpr auto kLong = std::chrono::seconds(60);
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  CHECK(EndsWithin(kLong, [ended] { ended->store(true); }) && ended->load());
  CHECK(!EndsWithin(kLong, [] { throw std::runtime_error("no such device"); }));
  auto gate = std::make_shared<std::promise<void>>();
  ended->store(false);
  const auto wait = [ended, gone = gate->get_future().share()] {
    gone.wait();
    ended->store(true);
  };
  const auto start = std::chrono::steady_clock::now();
  CHECK(!EndsWithin(std::chrono::milliseconds(30), wait) && !ended->load());
  CHECK(std::chrono::steady_clock::now() - start < kLong / 2);
  gate->set_value();
  while (!ended->load()) std::this_thread::yield();
}

}  // namespace
}  // namespace jax_ep::ffi_layer

int main() {
  jax_ep::ffi_layer::TestSharedTask();
  jax_ep::ffi_layer::TestRun();
  jax_ep::ffi_layer::TestHelpersThatNeverRun();
  jax_ep::ffi_layer::TestRunDoesNotBlock();
  jax_ep::ffi_layer::TestEmptyAndFailed();
  jax_ep::ffi_layer::TestItemsThatThrow();
  jax_ep::ffi_layer::TestPoolThatThrows();
  jax_ep::ffi_layer::TestDenormals();
  jax_ep::ffi_layer::TestEndsWithin();
  std::printf("executor_test: ok\n");
  return 0;
}
