// What programs that time grouped matmuls share: device memory and timed bursts of calls.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "grouped/report.cuh"

namespace jax_ep::cuda {

constexpr double kBurstMs = 40;

class Timer {
 public:
  Timer() {
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }

  // Returns milliseconds per call.
  template <typename Run>
  double Burst(Run run, int calls) {
    CHECK_CUDA(cudaEventRecord(begin_, stream));
    for (int i = 0; i < calls; ++i) run(stream);
    CHECK_CUDA(cudaEventRecord(end_, stream));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms / calls;
  }

  cudaStream_t stream;

 private:
  cudaEvent_t begin_;
  cudaEvent_t end_;
};

template <typename T>
class Memory {
 public:
  explicit Memory(uint64_t count) : count_(count) {
    CHECK_CUDA(cudaMalloc(&data_, count * sizeof(T)));
  }
  explicit Memory(const std::vector<T>& from) : Memory(from.size()) {
    CHECK_CUDA(cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  T* get() const { return data_; }
  uint64_t size() const { return count_; }

  std::vector<T> Read() const {
    std::vector<T> made(count_);
    CHECK_CUDA(cudaMemcpy(made.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return made;
  }

 private:
  T* data_ = nullptr;
  uint64_t count_;
};

template <typename T>
void Filled(void (*kernel)(T*, uint64_t, uint64_t), const Memory<T>& to, uint64_t seed) {
  kernel<<<1024, 256>>>(to.get(), to.size(), seed);
  CHECK_CUDA(cudaGetLastError());
}

inline int CallsOf(double ms) { return std::max(1, static_cast<int>(std::lround(kBurstMs / ms))); }

}  // namespace jax_ep::cuda
