// The kinds of matmuls that are compiled, each in one of the .cu files beside this header.
#pragma once

#include "cuda/matmul/step.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

// How a matmul runs.
struct MatmulWay {
  bool early = false;     // B and sizes are read before the previous kernel has ended
  bool few_rows = false;  // by the kernel for few rows per group, in kinds that have one
};

template <MatmulKind kKind>
inline constexpr bool kHasFewRows =
    kKind == MatmulKind::kFprop || kKind == MatmulKind::kGateUp ||
    kKind == MatmulKind::kFp8Matmul || kKind == MatmulKind::kFp8GateUp;

// `step` suits the kind, and all its sizes are positive.
template <MatmulKind kKind, typename Element>
cudaError_t MultiplyKind(const MatmulStep& step, MatmulWay way, cudaStream_t stream);

template <MatmulKind kKind, typename Element>
cudaError_t PreloadKind();

// Calls `visit.template operator()<kKind, Element>()` for each; fp8 has no element type.
template <typename Visit>
void ForEachMatmul(Visit visit) {
  const auto in_16_bits = [&]<MatmulKind kKind>() {
    visit.template operator()<kKind, BFloat16>();
    visit.template operator()<kKind, Float16>();
  };
  in_16_bits.template operator()<MatmulKind::kFprop>();
  in_16_bits.template operator()<MatmulKind::kDgrad>();
  in_16_bits.template operator()<MatmulKind::kGateUp>();
  in_16_bits.template operator()<MatmulKind::kDownDgrad>();
  in_16_bits.template operator()<MatmulKind::kWgrad>();
  visit.template operator()<MatmulKind::kFp8Matmul, void>();
  visit.template operator()<MatmulKind::kFp8GateUp, void>();
  visit.template operator()<MatmulKind::kFp8DownDgrad, void>();
  visit.template operator()<MatmulKind::kFp8Wgrad, void>();
}

}  // namespace jax_ep::cuda
