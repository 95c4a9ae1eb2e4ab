// The CUDA targets, for cuda_module.cc to register.
#pragma once

#include <cstdint>
#include <utility>

#include "ffi/targets.h"

namespace jax_ep::ffi_layer {

std::vector<Target> CudaTargets();

// Calls of this process so far that were enqueued on a capturing stream, and on others. A replayed
// graph adds nothing: that is how tests and benchmarks see that there was one.
std::pair<int64_t, int64_t> LaunchCounts();

}  // namespace jax_ep::ffi_layer
