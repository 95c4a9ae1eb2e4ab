// Sums of outer products over each group's rows.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kOuter, BFloat16)
JAX_EP_MATMUL(kOuter, Float16)

}  // namespace jax_ep::cuda
