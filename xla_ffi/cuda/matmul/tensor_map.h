// Maps of tensors in global memory. Tensor copies move boxes from and to them.
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
  int64_t strides[3];     // of dimensions 1 to 3, in bytes, multiples of 16
  uint32_t box[4];        // box[0] elements are 128 bytes
};

// Makes a map whose boxes lie in shared memory with the 128-byte swizzle. Elements outside the
// tensor are loaded as zeros and not stored.
// Returns cudaErrorNotSupported if the driver has no tensor maps, and cudaErrorInvalidValue if this
// tensor cannot have one.
cudaError_t MakeTensorMap(const MappedTensor& tensor, CUtensorMap* map);

}  // namespace jax_ep::cuda
