// From a MatmulStep to the launch of its kernel.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/matmul/kernel.cuh"
#include "cuda/matmul/kinds.h"
#include "cuda/matmul/tensor_map.h"

namespace jax_ep::cuda {

// Dimensions are in the order of LoadA.
template <typename Traits>
cudaError_t MapA(const MatmulStep& step, CUtensorMap* map) {
  const int64_t bytes = Traits::kFp8 ? 1 : 2;
  const int64_t sides = Traits::kKind == MatmulKind::kDgrad && step.b_up != nullptr ? 2 : 1;
  // A line of boxes that lie K-major holds what is contracted.
  constexpr bool kSwapped = Traits::kWgrad && !Traits::kAMnMajor;
  const int64_t columns = kSwapped ? step.m : step.k, rows = kSwapped ? step.k : step.m;
  const int64_t side = columns * bytes, row = sides * side;
  const auto box = static_cast<uint32_t>(kBlockKBytes / bytes);
  const MappedTensor tensor{
      step.a, bytes, {columns, sides, rows, 1}, {side, row, rows * row}, {box, 1, 64, 1}};
  return MakeTensorMap(tensor, map);
}

// Dimensions are in the order of LoadB.
template <typename Traits>
cudaError_t MapB(const MatmulStep& step, MatmulMaps* maps) {
  const int64_t bytes = Traits::kFp8 ? 1 : 2;
  // Of gate and up in one array, each kind takes both by one map or by two.
  const bool joined = Traits::kGateUp && step.b_up == nullptr;
  const int64_t in_map = joined && !Traits::kHasUpMap ? 2 : 1;
  const int64_t in_row = joined ? 2 : Traits::kWgrad ? step.b_sides : 1;
  const auto map_of = [&](const void* base, CUtensorMap* map) {
    MappedTensor tensor{};
    const int64_t contracted = Traits::kWgrad ? step.m : step.k;
    const int64_t matrices = Traits::kWgrad ? 1 : step.groups;
    if constexpr (Traits::kBMnMajor) {
      const int64_t side = step.n * bytes, row = in_row * side;
      tensor = {base,
                bytes,
                {step.n, in_map, contracted, matrices},
                {side, row, contracted * row},
                {64, 1, 64, 1}};
    } else {
      const int64_t column = contracted * bytes, side = step.n * column;
      tensor = {base,
                bytes,
                {contracted, step.n, in_map, matrices},
                {column, side, in_map * side},
                {static_cast<uint32_t>(kBlockKBytes / bytes), 64, 1, 1}};
    }
    return MakeTensorMap(tensor, map);
  };
  const cudaError_t error = map_of(step.b, &maps->b);
  if (!Traits::kHasUpMap || error != cudaSuccess) return error;
  // Nobody uses it where there is no up.
  const void* up = step.b_up;
  if (up == nullptr) up = static_cast<const uint8_t*>(step.b) + (joined ? step.n * bytes : 0);
  return map_of(up, &maps->b_up);
}

// Maps results [rows, sides, N] as warps store them.
template <typename Traits>
cudaError_t MapResult(const MatmulStep& step, const void* base, int64_t element_bytes,
                      int64_t sides, CUtensorMap* map) {
  const int64_t side = step.n * element_bytes;
  const int64_t rows = Traits::kWgrad ? step.groups * step.k : step.m;
  const MappedTensor tensor{base,
                            element_bytes,
                            {step.n, sides, rows, 1},
                            {side, sides * side, rows * sides * side},
                            {static_cast<uint32_t>(kLineBytes / element_bytes), 1, kWarpRows, 1}};
  return MakeTensorMap(tensor, map);
}

// If there is only one result, both maps are of it, and nobody uses the second.
template <typename Traits>
cudaError_t MapResults(const MatmulStep& step, MatmulMaps* maps) {
  const void* gate_up_rows = Traits::kDownDgrad ? step.to_gate_up_rows : step.gate_up_rows;
  if (step.d != nullptr) {
    const cudaError_t error = MapResult<Traits>(step, step.d, Traits::DBytes(step.out_element),
                                                Traits::kDSides, &maps->d);
    if (error != cudaSuccess) return error;
    maps->gate_up_rows = maps->d;
  }
  if (gate_up_rows == nullptr) return cudaSuccess;
  const cudaError_t error = MapResult<Traits>(step, gate_up_rows, 2, 2, &maps->gate_up_rows);
  if (step.d == nullptr) maps->d = maps->gate_up_rows;
  return error;
}

template <typename Traits>
cudaError_t AllowShared() {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(MatmulKernel<Traits>),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kMatmulSharedBytes<Traits::kFp8>));
}

template <typename Traits>
cudaError_t LaunchMatmul(const MatmulStep& step, bool early, cudaStream_t stream) {
  MatmulMaps maps;
  cudaError_t error = MapA<Traits>(step, &maps.a);
  if (error == cudaSuccess) error = MapB<Traits>(step, &maps);
  if (error == cudaSuccess) error = MapResults<Traits>(step, &maps);
  int device = 0, processors = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = AllowShared<Traits>();
  if (error != cudaSuccess) return error;
  MatmulArguments arguments{};
  SchedulerArguments& scheduler = arguments.scheduler;
  scheduler.sizes = step.sizes;
  scheduler.groups = static_cast<int32_t>(step.groups);
  scheduler.m = static_cast<int32_t>(step.m);
  scheduler.d_rows = static_cast<int32_t>(step.k);
  scheduler.block_n = Traits::kSideN;
  scheduler.n_tiles = static_cast<int32_t>(DivideUp(step.n, Traits::kSideN));
  arguments.side_blocks = static_cast<int32_t>(DivideUp(step.k, Traits::kBlockK));
  const bool both = Traits::kKind == MatmulKind::kDgrad && step.b_up != nullptr;
  scheduler.k_blocks = both ? 2 * arguments.side_blocks : arguments.side_blocks;
  arguments.result = {step,
                      static_cast<uint8_t*>(step.d),
                      step.d_scales,
                      static_cast<uint8_t*>(step.gate_up_rows),
                      static_cast<uint8_t*>(step.to_gate_up_rows),
                      step.bias,
                      static_cast<int32_t>(step.n),
                      Traits::kDSides,
                      step.element,
                      step.out_element};
  arguments.scales = {step.a_scales,     static_cast<uint32_t>(step.k / 128),
                      step.b_scales,     step.scales_per_group,
                      step.scales_per_k, step.scales_per_side,
                      step.scales_per_n};
  const dim3 grid(static_cast<unsigned>(processors > 1 ? processors / 2 * 2 : 2));
  return LaunchInPairs(MatmulKernel<Traits>, grid, kMatmulThreads, kMatmulSharedBytes<Traits::kFp8>,
                       early, stream, maps, arguments);
}

// Calls `run(Traits)` for the kernels of a kind until one fails, those for few rows last.
// `element_d` says for which type of D, or for all of them if it is kEither. kWgrad has a kernel
// for each type, because one for both would spill registers.
template <MatmulKind kKind, typename Element, typename Run>
cudaError_t ForElementD(ElementD element_d, Run run) {
  if constexpr (kKind == MatmulKind::kWgrad) {
    cudaError_t error = cudaSuccess;
    if (element_d != ElementD::kFloat32)
      error = run(MatmulTraits<kKind, Element, ElementD::kElement>{});
    if (element_d == ElementD::kElement || error != cudaSuccess) return error;
    return run(MatmulTraits<kKind, Element, ElementD::kFloat32>{});
  } else {
    constexpr ElementD kElementD = kKind == MatmulKind::kFp8Matmul || kKind == MatmulKind::kFp8Wgrad
                                       ? ElementD::kEither
                                       : ElementD::kElement;
    cudaError_t error = run(MatmulTraits<kKind, Element, kElementD>{});
    if constexpr (kHasFewRows<kKind>) {
      if (error == cudaSuccess) error = run(MatmulTraits<kKind, Element, kElementD, true>{});
    }
    return error;
  }
}

template <MatmulKind kKind, typename Element>
cudaError_t MultiplyKind(const MatmulStep& step, MatmulWay way, cudaStream_t stream) {
  const bool is_float = step.out_element == ElementType::kFloat32;
  return ForElementD<kKind, Element>(
      is_float ? ElementD::kFloat32 : ElementD::kElement, [&]<typename Traits>(Traits) {
        const bool is_this = Traits::kFew == (way.few_rows && kHasFewRows<kKind>);
        return is_this ? LaunchMatmul<Traits>(step, way.early, stream) : cudaSuccess;
      });
}

template <MatmulKind kKind, typename Element>
cudaError_t PreloadKind() {
  return ForElementD<kKind, Element>(ElementD::kEither, []<typename Traits>(Traits) {
    const cudaError_t error = Preload(MatmulKernel<Traits>);
    return error == cudaSuccess ? AllowShared<Traits>() : error;
  });
}

#define JAX_EP_MATMUL(kKind, Element)                                                         \
  template cudaError_t MultiplyKind<MatmulKind::kKind, Element>(const MatmulStep&, MatmulWay, \
                                                                cudaStream_t);                \
  template cudaError_t PreloadKind<MatmulKind::kKind, Element>();

}  // namespace jax_ep::cuda
