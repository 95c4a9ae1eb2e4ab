// The shared memory of a block. Window kernels reach it through these functions alone, which
// tests/emulator replaces.
#pragma once

#include <cstdint>

namespace jax_ep::cuda {

// As many bytes as the launch gives, at a multiple of 128.
__device__ __forceinline__ uint8_t* SharedBytes() {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  return shared_bytes;
}

// The block's one object of this type. Nobody constructs it.
template <typename T>
__device__ __forceinline__ T& SharedObject() {
  __shared__ T object;
  return object;
}

}  // namespace jax_ep::cuda
