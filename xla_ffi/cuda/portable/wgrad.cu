#include "cuda/portable/launch.cuh"

namespace jax_ep::cuda::portable {

JAX_EP_PORTABLE_IN_ALL(kWgrad)
JAX_EP_PORTABLE(kWgrad, BFloat16, float)
JAX_EP_PORTABLE(kWgrad, Float16, float)

}  // namespace jax_ep::cuda::portable
