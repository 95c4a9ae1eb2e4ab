#include "cuda/portable/launch.cuh"

namespace jax_ep::cuda::portable {

JAX_EP_PORTABLE_IN_ALL(kGateUp)
JAX_EP_PORTABLE_IN_ALL(kDownDgrad)

}  // namespace jax_ep::cuda::portable
