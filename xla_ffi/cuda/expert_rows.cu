// Gradients pass over row buffers with room for more rows than arrive, often several times as many.
// These kernels move only the bytes of the rows that are there.
#include "cuda/expert_rows.h"

#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/quantize.cuh"
#include "formats/element_type.h"
#include "formats/fp8_block128.h"

namespace jax_ep::cuda {
namespace {

// A warp takes a whole row, so that the order of a sum depends only on the row's length: lane i
// adds the products of vectors i, i + 32, ..., and then lanes are added in pairs.
template <typename Element>
__global__ void __launch_bounds__(kBlockThreads)
    CombineBackKernel(const __grid_constant__ CombineBackStep step) {
  constexpr int kCount = kLaneElements<Element>;
  using Vector = Elements<Element, kCount>;
  const int64_t row_bytes = step.hidden * static_cast<int64_t>(sizeof(Element));
  const int64_t vectors = row_bytes / kVectorBytes;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + Warp(); row < step.rows;
       row += stride) {
    const bool there = step.row_slot[row] >= 0;
    float sum = 0.0f;
    if (there) {
      const float weight = step.router_weights[row];
      uint8_t* own = static_cast<uint8_t*>(step.to_rows) + row * row_bytes;
      const uint8_t* other = static_cast<const uint8_t*>(step.expert_out) + row * row_bytes;
      for (int64_t part = Lane(); part < vectors; part += kPartVectors) {
        // Loads come first: the compiler cannot move them ahead of a store that might be to the
        // same place.
        Vector cotangents[kVectorsPerLane], outs[kVectorsPerLane];
#pragma unroll
        for (int i = 0; i < kVectorsPerLane; ++i) {
          const int64_t vector = part + i * kWarpSize;
          if (vector >= vectors) continue;
          cotangents[i].Load(own + vector * kVectorBytes);
          outs[i].Load(other + vector * kVectorBytes);
        }
#pragma unroll
        for (int i = 0; i < kVectorsPerLane; ++i) {
          const int64_t vector = part + i * kWarpSize;
          if (vector >= vectors) continue;
          float weighted[kCount];
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            const float value = cotangents[i].Get(j);
            sum = Add(sum, Multiply(value, outs[i].Get(j)));
            weighted[j] = Multiply(weight, value);
          }
          Vector::Round(weighted).Store(own + vector * kVectorBytes);
        }
      }
#pragma unroll
      for (int by = 1; by < kWarpSize; by *= 2) {
        sum = Add(sum, __shfl_xor_sync(kFullWarp, sum, by));
      }
    }
    if (Lane() == 0) step.to_weights[row] = sum;
  }
}

// Returns how many rows lie in groups. Called by a whole warp.
__device__ int64_t RowsInGroups(const GroupedRows& grouped) {
  int64_t count = 0;
  for (int64_t i = Lane(); i < grouped.groups; i += kWarpSize) {
    count += max(grouped.sizes[i], 0);
  }
#pragma unroll
  for (int by = 1; by < kWarpSize; by *= 2) count += __shfl_xor_sync(kFullWarp, count, by);
  return Min(count, grouped.rows);
}

template <typename Element>
__global__ void __launch_bounds__(kBlockThreads)
    QuantizeCotangentsKernel(const __grid_constant__ QuantizeCotangentsStep step) {
  const int64_t row_bytes = step.columns * static_cast<int64_t>(sizeof(Element));
  ForEachPart(RowsInGroups(step), row_bytes, [&](int64_t row, int64_t part) {
    EncodedPart<Fp8Block128Format, Element> encoded(part, row_bytes);
    encoded.Load(static_cast<const uint8_t*>(step.values) + row * row_bytes, kOfGradients);
    encoded.Store(step.codes + row * step.columns,
                  reinterpret_cast<uint8_t*>(step.scales) +
                      row * Fp8Block128Format::ScaleBytes(step.columns));
  });
}

template <typename Element>
__global__ void __launch_bounds__(kBlockThreads)
    DequantizeRowsKernel(const __grid_constant__ DequantizeRowsStep step) {
  const int64_t row_bytes = step.columns * static_cast<int64_t>(sizeof(Element));
  ForEachPart(RowsInGroups(step), row_bytes, [&](int64_t row, int64_t part) {
    DecodedPart<Fp8Block128Format, Element> decoded(part, row_bytes);
    decoded.Load(step.codes + row * step.columns,
                 step.scales + row * Fp8Block128Format::ScaleBytes(step.columns), kNoInputScale);
    decoded.Store(static_cast<uint8_t*>(step.out) + row * row_bytes);
  });
}

}  // namespace

cudaError_t CombineBack(const CombineBackStep& step, cudaStream_t stream) {
  if (step.rows == 0) return cudaSuccess;
  return VisitElement(step.element, [&]<typename Element>(Element) {
    // One part per row.
    return Launch(CombineBackKernel<Element>, RowGrid(step.rows, kVectorBytes), kBlockThreads, 0,
                  stream, step);
  });
}

cudaError_t QuantizeCotangents(const QuantizeCotangentsStep& step, cudaStream_t stream) {
  if (step.rows == 0) return cudaSuccess;
  return VisitElement(step.element, [&]<typename Element>(Element) {
    const dim3 grid = RowGrid(step.rows, step.columns * ElementBytes(step.element));
    return Launch(QuantizeCotangentsKernel<Element>, grid, kBlockThreads, 0, stream, step);
  });
}

cudaError_t DequantizeRows(const DequantizeRowsStep& step, cudaStream_t stream) {
  if (step.rows == 0) return cudaSuccess;
  return VisitElement(step.out_element, [&]<typename Element>(Element) {
    const dim3 grid = RowGrid(step.rows, step.columns * ElementBytes(step.out_element));
    return Launch(DequantizeRowsKernel<Element>, grid, kBlockThreads, 0, stream, step);
  });
}

cudaError_t PreloadExpertRowKernels() {
  cudaError_t error = cudaSuccess;
  for (const ElementType element : kElementTypes) {
    VisitElement(element, [&]<typename Element>(Element) {
      if (error == cudaSuccess) error = Preload(CombineBackKernel<Element>);
      if (error == cudaSuccess) error = Preload(QuantizeCotangentsKernel<Element>);
      if (error == cudaSuccess) error = Preload(DequantizeRowsKernel<Element>);
    });
  }
  return error;
}

}  // namespace jax_ep::cuda
