// The CUDA steps of the collective transport, as cpu/steps.h for a stream: each enqueues its
// kernels and returns. None allocates, waits or reads device memory, so all may run under graph
// capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/steps.h"

namespace jax_ep::cuda {

template <typename Format>
cudaError_t Pack(const PackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t Unpack(const UnpackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t CachedPack(const CachedPackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t CachedUnpack(const CachedUnpackStep& step, cudaStream_t stream);

cudaError_t CombinePack(const CombinePackStep& step, cudaStream_t stream);
cudaError_t CombineUnpack(const CombineUnpackStep& step, cudaStream_t stream);

// The results of ep_init: `words` zeros and this device's rank.
cudaError_t WriteInit(uint32_t* dev_ptrs, int64_t words, int32_t* my_rank, int32_t rank,
                      cudaStream_t stream);

// Loads every kernel on the current device, so that no later launch does: a lazy load waits for the
// device, and other ranks may be waiting for this one.
cudaError_t PreloadKernels();
cudaError_t PreloadDispatchKernels();
cudaError_t PreloadCombineKernels();

}  // namespace jax_ep::cuda
