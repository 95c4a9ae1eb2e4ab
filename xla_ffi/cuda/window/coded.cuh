// Tokens of a dispatch that come as codes and scales and travel as they are. No kernel looks into
// the codes, so one kernel serves all formats whose scales are of one size; each call says how many
// bytes its tokens have.
#pragma once

#include <cstdint>

#include "cuda/common/quantize.cuh"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// Takes the place of a format.
template <typename ScaleType>
struct Coded {
  using Scale = ScaleType;
};

template <typename Format>
inline constexpr bool kIsCoded = false;
template <typename ScaleType>
inline constexpr bool kIsCoded<Coded<ScaleType>> = true;
// Whether scales travel beside a token.
template <typename Format>
inline constexpr bool kHasScales = QuantizedFormat<Format> || kIsCoded<Format>;

template <typename Format>
JAX_EP_HOST_DEVICE int64_t PayloadBytesOf(const DispatchStep& step) {
  if constexpr (kIsCoded<Format>) {
    return step.code_bytes;
  } else {
    return Format::PayloadBytes(step.shape.hidden, step.shape.element_bytes);
  }
}
template <typename Format>
JAX_EP_HOST_DEVICE int64_t ScaleBytesOf(const DispatchStep& step) {
  if constexpr (kIsCoded<Format>) {
    return step.scale_bytes;
  } else {
    return Format::ScaleBytes(step.shape.hidden);
  }
}
template <typename Format>
JAX_EP_HOST_DEVICE DispatchMessage MessageOf(const DispatchStep& step) {
  return DispatchMessage::Of(PayloadBytesOf<Format>(step), ScaleBytesOf<Format>(step),
                             step.shape.top_k);
}

// Calls visit(TypeTag<Sent>{}) with the type for what the tokens of a call in `Format` come as.
template <typename Format, typename Visit>
auto VisitSentTokens(const DispatchStep& step, Visit&& visit) {
  if constexpr (QuantizedFormat<Format>) {
    if (step.token_scales != nullptr) return visit(TypeTag<Coded<typename Format::Scale>>{});
  }
  return visit(TypeTag<Format>{});
}
// The same for everything that tokens may come as.
template <typename Visit>
void ForEachSentTokens(Visit&& visit) {
  ForEachFormat([&]<typename Format>(Format) { visit(TypeTag<Format>{}); });
  visit(TypeTag<Coded<float>>{});
  visit(TypeTag<Coded<uint8_t>>{});
}

}  // namespace jax_ep::cuda
