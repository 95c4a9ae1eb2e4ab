// From a MatmulStep to the launch of its kernel.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/matmul/kernel.cuh"
#include "cuda/matmul/kinds.h"
#include "cuda/matmul/tensor_map.h"

namespace jax_ep::cuda {

inline cudaError_t MapLeft(const MatmulStep& step, CUtensorMap* map) {
  const int64_t bytes = OfCodes(step.kind) ? 1 : 2;
  const int64_t row = step.left_columns * bytes, all = step.rows * row;
  const MappedTensor tensor{step.left,
                            bytes,
                            {step.left_columns, step.rows, 1, 1},
                            {row, all, all},
                            {static_cast<uint32_t>(kStepBytes / bytes), 64, 1, 1}};
  return MakeTensorMap(tensor, map);
}

// Dimensions are in the order of LoadRight.
template <typename Traits>
cudaError_t MapRight(const MatmulStep& step, CUtensorMap* map) {
  MappedTensor tensor{};
  tensor.base = step.right;
  tensor.element_bytes = Traits::kCodes ? 1 : 2;
  constexpr int64_t kSides = Traits::kGateUp ? 2 : 1;
  const int64_t columns = step.columns * tensor.element_bytes;
  const int64_t k = step.left_columns * tensor.element_bytes;
  if constexpr (Traits::kRightAcross) {
    const int64_t steps = Traits::kOuter ? step.rows : step.left_columns;
    const int64_t matrices = Traits::kOuter ? 1 : step.groups;
    tensor = {step.right,
              tensor.element_bytes,
              {step.columns, kSides, steps, matrices},
              {columns, kSides * columns, steps * kSides * columns},
              {64, 1, 64, 1}};
  } else {
    tensor = {step.right,
              tensor.element_bytes,
              {step.left_columns, step.columns, kSides, step.groups},
              {k, step.columns * k, kSides * step.columns * k},
              {static_cast<uint32_t>(kStepBytes / tensor.element_bytes), 64, 1, 1}};
  }
  return MakeTensorMap(tensor, map);
}

// Maps results [rows, sides, B] as warps store them.
template <typename Traits>
cudaError_t MapResult(const MatmulStep& step, const void* base, int64_t element_bytes,
                      int64_t sides, CUtensorMap* map) {
  const int64_t side = step.columns * element_bytes;
  const int64_t rows = Traits::kOuter ? step.groups * step.left_columns : step.rows;
  const MappedTensor tensor{base,
                            element_bytes,
                            {step.columns, sides, rows, 1},
                            {side, sides * side, rows * sides * side},
                            {static_cast<uint32_t>(kLineBytes / element_bytes), 1, kWarpRows, 1}};
  return MakeTensorMap(tensor, map);
}

// If there is only one result, both maps are of it, and nobody uses the second.
template <typename Traits>
cudaError_t MapResults(const MatmulStep& step, MatmulMaps* maps) {
  const void* both = Traits::kDownBack ? step.to_both : step.both;
  if (step.out != nullptr) {
    const cudaError_t error = MapResult<Traits>(step, step.out, Traits::OutBytes(step.out_element),
                                                Traits::kOutSides, &maps->out);
    if (error != cudaSuccess) return error;
    maps->both = maps->out;
  }
  if (both == nullptr) return cudaSuccess;
  const cudaError_t error = MapResult<Traits>(step, both, 2, 2, &maps->both);
  if (step.out == nullptr) maps->out = maps->both;
  return error;
}

template <typename Traits>
cudaError_t AllowShared() {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(MatmulKernel<Traits>),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kMatmulSharedBytes<Traits::kCodes>));
}

template <typename Traits>
cudaError_t LaunchMatmul(const MatmulStep& step, bool early, cudaStream_t stream) {
  MatmulMaps maps;
  cudaError_t error = MapLeft(step, &maps.left);
  if (error == cudaSuccess) error = MapRight<Traits>(step, &maps.right);
  if (error == cudaSuccess) error = MapResults<Traits>(step, &maps);
  int device = 0, processors = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = AllowShared<Traits>();
  if (error != cudaSuccess) return error;
  MatmulArguments arguments{};
  UnitPlan& plan = arguments.plan;
  plan.sizes = step.sizes;
  plan.groups = static_cast<int32_t>(step.groups);
  plan.rows = static_cast<int32_t>(step.rows);
  plan.outer_rows = static_cast<int32_t>(step.left_columns);
  plan.tile_columns = Traits::kSideColumns;
  plan.column_tiles = static_cast<int32_t>(DivideUp(step.columns, Traits::kSideColumns));
  plan.steps = static_cast<int32_t>(DivideUp(step.left_columns, Traits::kStep));
  arguments.result = {static_cast<uint8_t*>(step.out),
                      step.out_scales,
                      static_cast<uint8_t*>(step.both),
                      static_cast<uint8_t*>(step.to_both),
                      static_cast<int32_t>(step.columns),
                      Traits::kOutSides,
                      step.element,
                      step.out_element};
  arguments.scales = {step.left_scales,  static_cast<uint32_t>(step.left_columns / 128),
                      step.right_scales, step.scales_per_group,
                      step.scales_per_k, step.scales_per_side,
                      step.scales_per_b};
  const dim3 grid(static_cast<unsigned>(processors > 1 ? processors / 2 * 2 : 2));
  return LaunchInPairs(MatmulKernel<Traits>, grid, kMatmulThreads,
                       kMatmulSharedBytes<Traits::kCodes>, early, stream, maps, arguments);
}

// Calls `run(Traits)` for the kernels of a kind until one fails, those for few rows last. `out`
// says for which result type, or for all of them if it is kEither. Outer products have a kernel for
// each result type, because one for both would spill registers.
template <MatmulKind kKind, typename Element, typename Run>
cudaError_t ForOut(Out out, Run run) {
  if constexpr (kKind == MatmulKind::kOuter) {
    cudaError_t error = cudaSuccess;
    if (out != Out::kFloat32) error = run(MatmulTraits<kKind, Element, Out::kElement>{});
    if (out == Out::kElement || error != cudaSuccess) return error;
    return run(MatmulTraits<kKind, Element, Out::kFloat32>{});
  } else {
    constexpr Out kOut = kKind == MatmulKind::kCodeRows ? Out::kEither : Out::kElement;
    cudaError_t error = run(MatmulTraits<kKind, Element, kOut>{});
    if constexpr (kHasFewRows<kKind>) {
      if (error == cudaSuccess) error = run(MatmulTraits<kKind, Element, kOut, true>{});
    }
    return error;
  }
}

template <MatmulKind kKind, typename Element>
cudaError_t MultiplyKind(const MatmulStep& step, MatmulWay way, cudaStream_t stream) {
  const bool is_float = step.out_element == ElementType::kFloat32;
  return ForOut<kKind, Element>(
      is_float ? Out::kFloat32 : Out::kElement, [&]<typename Traits>(Traits) {
        const bool is_this = Traits::kFew == (way.few_rows && kHasFewRows<kKind>);
        return is_this ? LaunchMatmul<Traits>(step, way.early, stream) : cudaSuccess;
      });
}

template <MatmulKind kKind, typename Element>
cudaError_t PreloadKind() {
  return ForOut<kKind, Element>(Out::kEither, []<typename Traits>(Traits) {
    const cudaError_t error = Preload(MatmulKernel<Traits>);
    return error == cudaSuccess ? AllowShared<Traits>() : error;
  });
}

#define JAX_EP_MATMUL(kKind, Element)                                                         \
  template cudaError_t MultiplyKind<MatmulKind::kKind, Element>(const MatmulStep&, MatmulWay, \
                                                                cudaStream_t);                \
  template cudaError_t PreloadKind<MatmulKind::kKind, Element>();

}  // namespace jax_ep::cuda
