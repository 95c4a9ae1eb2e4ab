// Quantises matrices to codes of fp8_block128 per 128 x 128, in their own order and transposed.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

// Enqueues the step on `stream`. Returns cudaErrorInvalidValue for sizes that are not multiples of
// 128, and for pointers that are not aligned to 16 bytes.
cudaError_t QuantizeMatrices(const QuantizeMatricesStep& step, cudaStream_t stream);

// Loads its kernels, as PreloadMatmulKernels does the others.
cudaError_t PreloadQuantizeMatrices();

}  // namespace jax_ep::cuda
