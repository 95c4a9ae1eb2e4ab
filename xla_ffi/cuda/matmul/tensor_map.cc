#include "cuda/matmul/tensor_map.h"

#include "cuda/memory/driver.h"

namespace jax_ep::cuda {

cudaError_t MakeTensorMap(const MappedTensor& tensor, CUtensorMap* map) {
  const auto encode = Driver::Get().encode_tensor_map;
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto type = tensor.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : tensor.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  cuuint64_t sizes[4], strides[3];
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
  for (int i = 0; i < 3; ++i) strides[i] = static_cast<cuuint64_t>(tensor.strides[i]);
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(tensor.base), sizes, strides, tensor.box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_ep::cuda
