// The portable matmuls that are compiled, each in one of the .cu files beside this header.
#pragma once

#include "cuda/portable/portable.h"
#include "formats/numbers.h"

namespace jax_ep::cuda::portable {

// float32 that is multiplied as three products of TF32.
struct ExactFloat {
  float value;
};

// `step` suits the kind and types, and all its sizes are positive. Out is Element's or float.
template <MatmulKind kKind, typename Element, typename Out>
cudaError_t MultiplyKind(const MatmulStep& step, cudaStream_t stream);

template <MatmulKind kKind, typename Element, typename Out>
cudaError_t PreloadKind();

// Calls `visit.template operator()<kKind, Element, Out>()` for each.
template <typename Visit>
void ForEach(Visit visit) {
  const auto in_all = [&]<MatmulKind kKind>() {
    visit.template operator()<kKind, BFloat16, BFloat16>();
    visit.template operator()<kKind, Float16, Float16>();
    visit.template operator()<kKind, float, float>();
    visit.template operator()<kKind, ExactFloat, float>();
  };
  in_all.template operator()<MatmulKind::kFprop>();
  in_all.template operator()<MatmulKind::kDgrad>();
  in_all.template operator()<MatmulKind::kGateUp>();
  in_all.template operator()<MatmulKind::kDownDgrad>();
  in_all.template operator()<MatmulKind::kWgrad>();
  const auto to_float = [&]<MatmulKind kKind>() {
    visit.template operator()<kKind, BFloat16, float>();
    visit.template operator()<kKind, Float16, float>();
  };
  to_float.template operator()<MatmulKind::kFprop>();
  to_float.template operator()<MatmulKind::kDgrad>();
  to_float.template operator()<MatmulKind::kWgrad>();
}

}  // namespace jax_ep::cuda::portable
