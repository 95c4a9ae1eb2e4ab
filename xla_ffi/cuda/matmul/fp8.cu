// Matmuls of fp8.
#include "cuda/matmul/launch.cuh"

namespace jax_ep::cuda {

JAX_EP_MATMUL(kFp8Matmul, void)
JAX_EP_MATMUL(kFp8GateUp, void)
JAX_EP_MATMUL(kFp8DownDgrad, void)
JAX_EP_MATMUL(kFp8Wgrad, void)

}  // namespace jax_ep::cuda
