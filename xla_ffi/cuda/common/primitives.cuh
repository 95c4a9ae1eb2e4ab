// Lanes and warps, and what a warp does to rows: read a part once and write it to several places,
// or walk over the parts of all rows. Nothing here knows about experts.
#pragma once

#include <cstdint>

#include "cuda/common/launch.h"

namespace jax_ep::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ int Warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ __forceinline__ unsigned LanesBelow(int lane) { return (1u << lane) - 1; }

// Returns the value of the lowest lane in `lanes`.
template <typename T>
__device__ __forceinline__ T FromLowest(unsigned lanes, T value) {
  return __shfl_sync(kFullWarp, value, __ffs(static_cast<int>(lanes)) - 1);
}

__device__ __forceinline__ int32_t* Int32At(uint8_t* base, int64_t offset) {
  return reinterpret_cast<int32_t*>(base + offset);
}
__device__ __forceinline__ const int32_t* Int32At(const uint8_t* base, int64_t offset) {
  return reinterpret_cast<const int32_t*>(base + offset);
}
__device__ __forceinline__ float* FloatAt(uint8_t* base, int64_t offset) {
  return reinterpret_cast<float*>(base + offset);
}
__device__ __forceinline__ const float* FloatAt(const uint8_t* base, int64_t offset) {
  return reinterpret_cast<const float*>(base + offset);
}

// The part of a row that a warp holds in registers. Rows are aligned to 16 bytes and consist of
// whole vectors.
class RowPart {
 public:
  __device__ RowPart(int64_t part, int64_t row_bytes)
      : first_(part * kPartVectors + Lane()), end_(row_bytes / kVectorBytes) {}

  __device__ void Load(const uint8_t* row) {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (Index(i) < end_) vectors_[i] = reinterpret_cast<const uint4*>(row)[Index(i)];
    }
  }
  __device__ void Store(uint8_t* row) const {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (Index(i) < end_) reinterpret_cast<uint4*>(row)[Index(i)] = vectors_[i];
    }
  }
  __device__ void StoreZeros(uint8_t* row) const {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (Index(i) < end_) reinterpret_cast<uint4*>(row)[Index(i)] = make_uint4(0, 0, 0, 0);
    }
  }

 private:
  __device__ int64_t Index(int i) const { return first_ + i * kWarpSize; }

  int64_t first_;
  int64_t end_;
  uint4 vectors_[kVectorsPerLane];
};

// Calls visit(row, part) for this warp's share of a RowGrid. All lanes of a warp make the same
// calls, so `visit` may use warp collectives.
template <typename Visit>
__device__ void ForEachPart(int64_t rows, int64_t row_bytes, Visit visit) {
  const int64_t parts = DivideUp(row_bytes, kPartVectors * kVectorBytes);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  for (int64_t part = blockIdx.y; part < parts; part += gridDim.y) {
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + Warp(); row < rows;
         row += stride) {
      visit(row, part);
    }
  }
}

// Calls visit(item) for this thread's share of the items.
template <typename Visit>
__device__ void ForEachItem(int64_t thread, int64_t threads, int64_t items, Visit visit) {
  for (int64_t item = thread; item < items; item += threads) visit(item);
}

// What a failed call returns everywhere: all ones, which is NaN in every float type and -1 in every
// integer type. FillWords is for a whole block.
inline constexpr uint32_t kNoValue = 0xFFFFFFFFu;

template <typename T>
__device__ void FillWords(T* to, int64_t count, uint32_t word) {
  auto* words = reinterpret_cast<uint32_t*>(to);
  const int64_t end = count * static_cast<int64_t>(sizeof(T)) / 4;
  JAX_EP_NO_UNROLL
  for (int64_t i = threadIdx.x; i < end; i += blockDim.x) words[i] = word;
}

}  // namespace jax_ep::cuda
