// Stands in for CUDA's header of this name, as far as cuda/matmul uses it: tensor maps, of the one
// kind that is emulated.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator.h"

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

struct alignas(64) CUtensorMap {
  cuuint64_t opaque[16];
};
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1,
  CU_TENSOR_MAP_DATA_TYPE_UINT16 = 2,
  CU_TENSOR_MAP_DATA_TYPE_UINT32 = 4,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_NONE,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type,
                                       cuuint32_t dimensions, void* base, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  using jax_ep::emulator::TensorMap;
  static_assert(sizeof(TensorMap) <= sizeof map->opaque);
  if (dimensions != 4) return CUDA_ERROR_INVALID_VALUE;
  TensorMap tensor{.base = static_cast<const uint8_t*>(base),
                   .element_bytes = static_cast<uint32_t>(type),
                   .box = {},
                   .sizes = {},
                   .strides = {}};
  for (int i = 0; i < 4; ++i) {
    if (steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    tensor.box[i] = box[i];
    tensor.sizes[i] = static_cast<int64_t>(sizes[i]);
    if (i < 3) tensor.strides[i] = static_cast<int64_t>(strides[i]);
  }
  if (!jax_ep::emulator::IsTensorMap(tensor)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map->opaque, &tensor, sizeof tensor);
  return CUDA_SUCCESS;
}
