// Takes the place of xla_ffi/cuda/memory/driver.h on the include path: for cuda/internode/calls.cc,
// launches of kernels that another module has loaded; for cuda/matmul/tensor_map.cc, tensor maps.
#pragma once

#include <cuda.h>

#include <functional>

#include "cuda_runtime_api.h"

// Binds a kernel to the parameters of a launch.
struct EmulatedFunction {
  std::function<void()> (*bind)(void** params);
};
using CUfunction = const EmulatedFunction*;
enum CUlaunchAttributeID { CU_LAUNCH_ATTRIBUTE_PRIORITY };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  struct {
    int priority;
  } value;
};
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  cudaStream_t hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace jax_ep::cuda {

struct Driver {
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void** params, void** extra);
  decltype(&cuTensorMapEncodeTiled) encode_tensor_map = &cuTensorMapEncodeTiled;

  static const Driver& Get() {
    static const Driver driver{
        [](const CUlaunchConfig* config, CUfunction function, void** params, void**) {
          emulator::Launch launch;
          launch.grid = dim3(config->gridDimX, config->gridDimY, config->gridDimZ);
          launch.threads = config->blockDimX * config->blockDimY * config->blockDimZ;
          launch.shared_bytes = config->sharedMemBytes;
          launch.body = function->bind(params);
          emulator::Enqueue(std::move(launch), config->hStream);
          return CUDA_SUCCESS;
        }};
    return driver;
  }
};

}  // namespace jax_ep::cuda
