// How programs that run kernels of xla_ffi/cuda/matmul begin.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/matmul/step.h"
#include "grouped/report.cuh"

namespace jax_ep::cuda {

// Takes GPU 0, which must have the kernels, loads them, and begins the report.
inline void StartMatmuls(uint64_t seed, double seconds) {
  CHECK_CUDA(cudaSetDevice(0));
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  if (!MatmulSupported()) {
    Fail(std::string("needs a GPU of compute capability 9.0, got ") + properties.name);
  }
  CHECK_CUDA(PreloadMatmulKernels());
  Report()
      .Add("device", properties.name)
      .Add("count", 1)
      .Add("seed", static_cast<double>(seed))
      .Add("seconds_each", seconds);
}

}  // namespace jax_ep::cuda
