// The choice of experts by a router, on a CUDA stream.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/router_step.h"

namespace jax_ep::cuda {

// Enqueues its kernel; it does not allocate, wait or read device memory on the host.
cudaError_t ChooseExperts(const RouterStep& step, cudaStream_t stream);

// Loads the kernels on the current device.
cudaError_t PreloadRouterKernels();

}  // namespace jax_ep::cuda
