// Host side of the window kernels: how many blocks a call gets, and the preloading of its kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Blocks are so large that a multiprocessor holds only one; more would wait for the first ones to
// end.
inline unsigned Processors() {
  int device = 0, processors = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return static_cast<unsigned>(processors);
}

// The number that the config gives, or `most`; never more than the device has multiprocessors.
inline unsigned BlockLimit(const WindowGroup& group, unsigned most) {
  return std::min(group.num_sms != 0 ? group.num_sms : most, Processors());
}

template <typename... Params>
cudaError_t PreloadShared(void (*kernel)(Params...), int64_t shared_bytes) {
  const cudaError_t loaded = Preload(kernel);
  if (loaded != cudaSuccess) return loaded;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

}  // namespace jax_ep::cuda
