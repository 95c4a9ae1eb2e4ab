// The steps of the collective transport on a CUDA stream, as cpu/steps.h declares them for the
// host. Each enqueues its kernels and returns. None of them allocates, waits or reads device
// memory, so all may run under graph capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/steps.h"

namespace jax_ep::cuda {

template <typename Format>
cudaError_t DispatchPack(const DispatchPackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t DispatchUnpack(const DispatchUnpackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t DispatchCachedPack(const DispatchCachedPackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t DispatchCachedUnpack(const DispatchCachedUnpackStep& step, cudaStream_t stream);

// Stand-alone quantisation, for quantised formats only.
template <typename Format>
cudaError_t Quantize(const QuantizeStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t Dequantize(const DequantizeStep& step, cudaStream_t stream);

cudaError_t CombinePack(const CombinePackStep& step, cudaStream_t stream);
cudaError_t CombineUnpack(const CombineUnpackStep& step, cudaStream_t stream);

// Called by PreloadKernels (cuda/init.h).
cudaError_t PreloadDispatchPackKernels();
cudaError_t PreloadDispatchUnpackKernels();
cudaError_t PreloadCombineKernels();
cudaError_t PreloadQuantizeKernels();

}  // namespace jax_ep::cuda
