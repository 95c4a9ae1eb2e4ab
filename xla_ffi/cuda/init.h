// The device side of ep_init, for every transport.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/window.h"

namespace jax_ep::cuda {

// The results of ep_init on a device.
struct InitResults {
  uint64_t dev_ptrs[kBufferGroups][3];  // (send, recv, recv_count) of each buffer group
  int32_t rank;
};

// Writes each device pointer to `dev_ptrs` as two words, the low one first.
cudaError_t WriteInit(const InitResults& results, uint32_t* dev_ptrs, int32_t* my_rank,
                      cudaStream_t stream);

// Loads all kernels of the collective transport on the current device, so that no later launch
// does. A lazy load waits for the device while other ranks may be waiting for this one.
cudaError_t PreloadKernels();

// The same for the window transports. Only for devices that can run them.
cudaError_t PreloadWindowKernels();

}  // namespace jax_ep::cuda
