// How many blocks a window call gets, and the preloading of its kernel. Host side of window_*.cu.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Blocks are so large that a multiprocessor holds one; more would wait for the first to leave.
inline unsigned Processors() {
  int device = 0, processors = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return static_cast<unsigned>(processors);
}

// What the config gives, else `most`, as far as the device has them.
inline unsigned BlockLimit(const WindowGroup& group, unsigned most) {
  return std::min(group.num_sms != 0 ? group.num_sms : most, Processors());
}

// As many as have work, up to what the config or the device gives.
inline unsigned WindowBlocks(const WindowGroup& group, const WorkPlan& work, uint32_t senders,
                             uint32_t placers) {
  const unsigned limit = BlockLimit(group, UINT32_MAX);
  const int64_t sending = CeilDiv(work.route_items + work.send_items, senders);
  const int64_t placing = CeilDiv(work.place_items, placers);
  return static_cast<unsigned>(std::clamp<int64_t>(std::max(sending, placing), 1, limit));
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
