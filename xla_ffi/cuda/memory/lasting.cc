// Allocates blocks that are cut into cells and never freed.
#include "cuda/memory/lasting.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

#include "cuda/memory/driver.h"

namespace jax_ep::cuda {
namespace {

constexpr int64_t kBlockBytes = int64_t{64} << 10;

class Pool {
 public:
  // `allocate(bytes)` provides a new block when this one is used up. `bytes` must keep the cells
  // aligned.
  uint8_t* Take(int64_t bytes, const std::function<void*(int64_t)>& allocate) {
    if (bytes > left_) {
      const int64_t size = std::max(bytes, kBlockBytes);
      next_ = static_cast<uint8_t*>(allocate(size));
      left_ = size;
    }
    uint8_t* cell = next_;
    next_ += bytes;
    left_ -= bytes;
    return cell;
  }

 private:
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
};

std::mutex& PoolMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

}  // namespace

void* LastingPinned(int64_t bytes) {
  static Pool pool;
  std::lock_guard<std::mutex> lock(PoolMutex());
  return pool.Take(RoundUp(bytes, kMessageAlignBytes), [](int64_t size) {
    void* block = nullptr;
    OnDevice(OpenDevice(), [&] {
      Check(cudaHostAlloc(&block, static_cast<size_t>(size),
                          cudaHostAllocPortable | cudaHostAllocMapped),
            "pinned host memory");
    });
    std::memset(block, 0, static_cast<size_t>(size));
    return block;
  });
}

WindowControl* LastingControl(int device, uint64_t first_epoch) {
  static auto* pools = new std::map<int, Pool>;
  std::lock_guard<std::mutex> lock(PoolMutex());
  WindowControl start{};
  for (CallState& calls : start.calls) calls = StartState(first_epoch);
  WindowControl* control = nullptr;
  OnDevice(device, [&] {
    // cudaMalloc aligns blocks to 256 bytes.
    control =
        reinterpret_cast<WindowControl*>((*pools)[device].Take(sizeof(start), [](int64_t size) {
          void* block = nullptr;
          Check(cudaMalloc(&block, static_cast<size_t>(size)), "device memory");
          return block;
        }));
    Stream stream;
    stream.Copy(control, &start, sizeof(start));
    stream.Wait();
  });
  return control;
}

}  // namespace jax_ep::cuda
