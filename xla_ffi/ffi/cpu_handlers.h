// The CPU targets, for cpu_module.cc to register.
#pragma once

#include "ffi/targets.h"

namespace jax_ep::ffi_layer {

std::vector<Target> CpuTargets();

}  // namespace jax_ep::ffi_layer
