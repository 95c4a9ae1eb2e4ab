// The CUDA targets, for cuda_module.cc to register.
#pragma once

#include "ffi/targets.h"

namespace jax_ep::ffi_layer {

std::vector<Target> CudaTargets();

}  // namespace jax_ep::ffi_layer
