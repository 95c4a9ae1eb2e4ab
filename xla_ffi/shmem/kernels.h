// The kernels that reach ranks on other nodes. module.cc hands them to the module of the calls.
#pragma once

#include "cuda/internode/group.h"

namespace jax_ep::shmem {

#if defined(JAX_EP_INTERNODE_IMAGE)
inline constexpr bool kHasKernels = true;
#else
inline constexpr bool kHasKernels = false;
#endif

// Loads them for the device of Start, which must have been called; returns the same ones each time.
// Throws std::runtime_error.
cuda::InternodeKernels LoadKernels();

}  // namespace jax_ep::shmem
