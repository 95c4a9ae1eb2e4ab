// The kinds of matmuls that are compiled, each in one of the .cu files beside this header.
#pragma once

#include "cuda/matmul/step.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

// How a product runs.
struct MatmulWay {
  bool early = false;  // its right operand and sizes are read before the previous kernel has ended
  bool few_rows = false;  // by the kernel for few rows per group, in kinds that have one
};

template <MatmulKind kKind>
inline constexpr bool kHasFewRows =
    kKind == MatmulKind::kRows || kKind == MatmulKind::kGateUp || kKind == MatmulKind::kCodeRows ||
    kKind == MatmulKind::kCodeGateUp;

// `step` suits the kind, and all its sizes are positive.
template <MatmulKind kKind, typename Element>
cudaError_t MultiplyKind(const MatmulStep& step, MatmulWay way, cudaStream_t stream);

template <MatmulKind kKind, typename Element>
cudaError_t PreloadKind();

// Calls `visit.template operator()<kKind, Element>()` for each; codes have no element type.
template <typename Visit>
void ForEachMatmul(Visit visit) {
  const auto both = [&]<MatmulKind kKind>() {
    visit.template operator()<kKind, BFloat16>();
    visit.template operator()<kKind, Float16>();
  };
  both.template operator()<MatmulKind::kRows>();
  both.template operator()<MatmulKind::kRowsTransposed>();
  both.template operator()<MatmulKind::kGateUp>();
  both.template operator()<MatmulKind::kDownBack>();
  both.template operator()<MatmulKind::kOuter>();
  visit.template operator()<MatmulKind::kCodeRows, void>();
  visit.template operator()<MatmulKind::kCodeGateUp, void>();
  visit.template operator()<MatmulKind::kCodeDownBack, void>();
}

}  // namespace jax_ep::cuda
