// Products of rows with a matrix per group.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kRows, BFloat16)
JAX_EP_MATMUL(kRows, Float16)
JAX_EP_MATMUL(kRowsTransposed, BFloat16)
JAX_EP_MATMUL(kRowsTransposed, Float16)

}  // namespace jax_ep::cuda
