// Matmuls whose results go through SwiGLU, or its derivative.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kGateUp, BFloat16)
JAX_EP_MATMUL(kGateUp, Float16)
JAX_EP_MATMUL(kDownDgrad, BFloat16)
JAX_EP_MATMUL(kDownDgrad, Float16)

}  // namespace jax_ep::cuda
