// Matmuls of few rows by matrices in "mxfp4", which are read once: for decoding, on Hopper and
// newer GPUs. What protocol/matmul_steps.h says about rows past the groups, NaN and wrong sizes
// holds here, too.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

// Enqueues the step on `stream`. Returns cudaErrorNotSupported on GPUs older than Hopper, and
// cudaErrorInvalidValue for sizes that do not fit.
cudaError_t MultiplyMxfp4(const Mxfp4Step& step, cudaStream_t stream);

// Loads the kernels. A graph capture must not be the first to use them.
cudaError_t PreloadMxfp4Kernels();

}  // namespace jax_ep::cuda
