// Enqueues grouped matmuls (protocol/matmul_steps.h) that are `portable`.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

using jax_ep::MatmulKind;
using jax_ep::MatmulStep;

// Whether the current device runs PortableMatmul: one of compute capability 8.0 or newer.
bool PortableSupported();

// Enqueues the step on `stream`, on the current device. Returns cudaErrorNotSupported on devices
// that are too old, and cudaErrorInvalidValue for sizes that do not fit: columns that are not whole
// vectors of 16 bytes, pointers that are not aligned to them.
cudaError_t PortableMatmul(const MatmulStep& step, cudaStream_t stream);

// Loads the kernels of all kinds. A graph capture must not be the first to use them.
cudaError_t PreloadPortableKernels();

}  // namespace jax_ep::cuda
