// Enqueues grouped matmuls (protocol/matmul_steps.h) on Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

using jax_ep::ColumnsAlign;
using jax_ep::ExpertsStep;
using jax_ep::IsFp8;
using jax_ep::IsWgrad;
using jax_ep::MatmulKind;
using jax_ep::MatmulStep;

// Enqueues the step on `stream`, on the current device, whose compute capability must be 9.0.
// Returns cudaErrorNotSupported on other devices, and cudaErrorInvalidValue for sizes that do not
// fit: columns that are not aligned, pointers that are not aligned to 16 bytes.
cudaError_t GroupedMatmul(const MatmulStep& step, cudaStream_t stream);

// Enqueues both matmuls, as GroupedMatmul does each. The second kernel begins before the first one
// has ended, and loads weights meanwhile.
cudaError_t ApplyExperts(const ExpertsStep& step, cudaStream_t stream);

// Loads the kernels of all kinds. A graph capture must not be the first to use them.
cudaError_t PreloadMatmulKernels();

// Whether the current device runs GroupedMatmul.
bool MatmulSupported();

}  // namespace jax_ep::cuda
