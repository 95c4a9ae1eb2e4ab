// A block's shared memory. Window kernels use it through these functions only, because
// tests/emulator replaces them.
#pragma once

#include <cstdint>

namespace jax_ep::cuda {

// The launch's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ uint8_t* SharedBytes() {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  return shared_bytes;
}

// The same, aligned to 1024 bytes.
__device__ __forceinline__ uint8_t* SharedAtoms() {
  extern __shared__ __align__(1024) uint8_t shared_atoms[];
  return shared_atoms;
}

// The block's single object of this type. It is never constructed.
template <typename T>
__device__ __forceinline__ T& SharedObject() {
  __shared__ T object;
  return object;
}

}  // namespace jax_ep::cuda
