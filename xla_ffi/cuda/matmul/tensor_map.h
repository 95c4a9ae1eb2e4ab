// Maps of tensors in global memory, from and to which tensor copies take boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_ep::cuda {

// Dimensions from the fastest to the slowest; unused ones have size 1.
struct MappedTensor {
  const void* base;       // aligned to 16 bytes
  int64_t element_bytes;  // 1, 2 or 4
  int64_t sizes[4];       // positive
  int64_t strides[3];     // of dimensions 1 to 3, bytes, multiples of 16
  uint32_t box[4];        // box[0] elements are 128 bytes
};

// Boxes lie in shared memory with the 128-byte swizzle; what is outside of the tensor is zero
// when it is loaded, and not stored.
// Returns cudaErrorNotSupported where the driver has no tensor maps, and cudaErrorInvalidValue for
// a tensor that has none.
cudaError_t MakeTensorMap(const MappedTensor& tensor, CUtensorMap* map);

}  // namespace jax_ep::cuda
