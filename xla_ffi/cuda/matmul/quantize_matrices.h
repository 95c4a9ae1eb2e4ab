// Makes codes of e4m3 with a scale per 128 x 128: of matrices of numbers, in their own order and
// transposed, of mxfp4, transposed, and of rows, transposed.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

// These enqueue a step on `stream`. They return cudaErrorInvalidValue for sizes that are not
// multiples of 128, and for pointers that are not aligned to 16 bytes.
cudaError_t QuantizeMatrices(const QuantizeMatricesStep& step, cudaStream_t stream);
cudaError_t Fp8OfMxfp4(const Fp8OfMxfp4Step& step, cudaStream_t stream);
cudaError_t TransposeRows(const TransposeRowsStep& step, cudaStream_t stream);

// Loads their kernels, as PreloadMatmulKernels does the others.
cudaError_t PreloadQuantizeMatrices();

}  // namespace jax_ep::cuda
