// Products of few rows with four-bit matrices, which are read once: for decoding, on Hopper and
// newer GPUs.
//
// N rows lie in L groups of `sizes`. What protocol/matmul_steps.h says about rows past the groups,
// NaN and wrong sizes holds here, too. Weights are codes of "mxfp4": e2m1 with a power of two per
// 32 of the contracted dimension K.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

// Enqueues the step on `stream`. Returns cudaErrorNotSupported on GPUs older than Hopper, and
// cudaErrorInvalidValue for sizes that do not fit.
cudaError_t MultiplyFourBits(const FourBitStep& step, cudaStream_t stream);

// Loads the kernels. A graph capture must not be the first to use them.
cudaError_t PreloadFourBitKernels();

}  // namespace jax_ep::cuda
