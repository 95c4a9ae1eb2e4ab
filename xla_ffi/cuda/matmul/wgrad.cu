// wgrad: for each group, the transposed rows by the cotangents.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kWgrad, BFloat16)
JAX_EP_MATMUL(kWgrad, Float16)

}  // namespace jax_ep::cuda
