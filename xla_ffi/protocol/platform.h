// What headers need in order to serve both g++ and nvcc.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_EP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAX_EP_HOST_DEVICE inline
#endif

// Put it before a loop whose body should not be copied: in a short call a GPU must first fetch
// every instruction from memory.
#if defined(__CUDA_ARCH__)
#define JAX_EP_NO_UNROLL _Pragma("unroll 1")
#else
#define JAX_EP_NO_UNROLL
#endif

namespace jax_ep {

template <typename T>
JAX_EP_HOST_DEVICE constexpr T Min(T a, T b) {
  return a < b ? a : b;
}

// `by` and `align` must be positive; `align` need not be a power of two.
JAX_EP_HOST_DEVICE constexpr int64_t DivideUp(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}
JAX_EP_HOST_DEVICE constexpr int64_t RoundUp(int64_t value, int64_t align) {
  return DivideUp(value, align) * align;
}

}  // namespace jax_ep
