#include "cuda/portable/launch.cuh"

namespace jax_ep::cuda::portable {

JAX_EP_PORTABLE_IN_ALL(kDgrad)
JAX_EP_PORTABLE(kDgrad, BFloat16, float)
JAX_EP_PORTABLE(kDgrad, Float16, float)

}  // namespace jax_ep::cuda::portable
