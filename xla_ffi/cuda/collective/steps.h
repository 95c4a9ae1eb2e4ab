// The CUDA steps of the collective transport, as cpu/steps.h for a stream, and what ep_init needs
// of every transport: each enqueues its kernels and returns. None allocates, waits or reads device
// memory, so all may run under graph capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/steps.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

template <typename Format>
cudaError_t Pack(const PackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t Unpack(const UnpackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t CachedPack(const CachedPackStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t CachedUnpack(const CachedUnpackStep& step, cudaStream_t stream);

// Rows to codes and scales, and back; of quantised formats.
template <typename Format>
cudaError_t Quantize(const QuantizeStep& step, cudaStream_t stream);
template <typename Format>
cudaError_t Dequantize(const DequantizeStep& step, cudaStream_t stream);

cudaError_t CombinePack(const CombinePackStep& step, cudaStream_t stream);
cudaError_t CombineUnpack(const CombineUnpackStep& step, cudaStream_t stream);

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
cudaError_t PreloadPackKernels();
cudaError_t PreloadUnpackKernels();
cudaError_t PreloadCombineKernels();
cudaError_t PreloadQuantizeKernels();

// As PreloadKernels, of the window transports; only for devices that can run them.
cudaError_t PreloadWindowKernels();

}  // namespace jax_ep::cuda
