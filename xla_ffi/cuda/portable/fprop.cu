#include "cuda/portable/launch.cuh"

namespace jax_ep::cuda::portable {

JAX_EP_PORTABLE_IN_ALL(kFprop)
JAX_EP_PORTABLE(kFprop, BFloat16, float)
JAX_EP_PORTABLE(kFprop, Float16, float)

}  // namespace jax_ep::cuda::portable
