// The device side of ep_init, for every transport.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/window.h"

namespace jax_ep::cuda {

// What ep_init returns on a device.
struct InitResults {
  uint64_t dev_ptrs[kBufferGroups][3];  // (send, recv, recv_count) of each buffer group
  int32_t rank;
};

// `dev_ptrs`: as pairs of words, the low one first.
cudaError_t WriteInit(const InitResults& results, uint32_t* dev_ptrs, int32_t* my_rank,
                      cudaStream_t stream);

// Loads every kernel of the steps on the current device, so that no later launch does: a lazy load
// waits for the device, and other ranks may be waiting for this one.
cudaError_t PreloadKernels();

// As PreloadKernels, of the window transports; only for devices that can run them.
cudaError_t PreloadWindowKernels();

}  // namespace jax_ep::cuda
