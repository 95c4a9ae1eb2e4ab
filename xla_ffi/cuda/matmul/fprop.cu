// fprop and dgrad: rows by a matrix per group, or by its transpose.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kFprop, BFloat16)
JAX_EP_MATMUL(kFprop, Float16)
JAX_EP_MATMUL(kDgrad, BFloat16)
JAX_EP_MATMUL(kDgrad, Float16)

}  // namespace jax_ep::cuda
