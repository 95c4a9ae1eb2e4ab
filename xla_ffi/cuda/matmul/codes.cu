// Products of codes.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kCodeRows, void)
JAX_EP_MATMUL(kCodeGateUp, void)
JAX_EP_MATMUL(kCodeDownBack, void)

}  // namespace jax_ep::cuda
