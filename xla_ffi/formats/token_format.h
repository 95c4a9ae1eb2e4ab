// What a token format is: how a token becomes the payload and the scales of a message. Each format
// has a header of its own, and registry.h lists them. A format provides pure functions for host and
// device; whoever walks over a row (a CPU loop, the lanes of a warp) puts them together.
#pragma once

#include <concepts>
#include <cstdint>

#include "formats/numbers.h"
#include "protocol/platform.h"
#include "protocol/shape.h"

namespace jax_ep {

template <typename F>
concept TokenFormat = requires(int64_t hidden, int64_t element_bytes) {
  // The name in docs/formats.md.
  { F::kName } -> std::convertible_to<const char*>;
  // Elements that share a scale; hidden_size must be a multiple of it. 1 without scales.
  { F::kBlock } -> std::convertible_to<int64_t>;
  // dtype names of `tokens` and `scales`; nullptr: the token's own dtype, and no scales.
  { F::kPayloadDtype } -> std::convertible_to<const char*>;
  { F::kScaleDtype } -> std::convertible_to<const char*>;
  // Whether the format uses input_scale.
  { F::kTakesInputScale } -> std::convertible_to<bool>;
  { F::PayloadBytes(hidden, element_bytes) } -> std::same_as<int64_t>;
  { F::ScaleBytes(hidden) } -> std::same_as<int64_t>;
};

template <TokenFormat Format>
int64_t PayloadBytes(const EpShape& shape) {
  return Format::PayloadBytes(shape.hidden, shape.element_bytes);
}

// The input_scale of what travels along a known route and has none of its own.
inline constexpr float kNoInputScale = 1.0f;
// Takes its place where gradients travel. Wire formats then use the amax of a block as it is down
// to 2^-80, because the gradients of a mean over many tokens are often below 1e-8.
inline constexpr float kOfGradients = 0x1p-80f;
// The input_scale that a format takes along a known route, where only gradients travel quantised.
template <typename Format>
inline constexpr float kRouteInputScale = Format::kTakesInputScale ? kNoInputScale : kOfGradients;

// A format that makes codes and scales of blocks. A value x of a block is
//   Code::Encode(Scaled<F>(x, F::FactorOf(scale, input_scale))),
// with scale = F::ScaleOf(amax_bits, input_scale), and comes back as Restored(Code::Decode(code),
// ScaleValue(scale), input_scale). `amax_bits` is the largest of the elements' float32 bits without
// the sign, so it is at least 0x7F800000 in a block with NaN or Inf. The factor is NaN where all
// codes of a block are those of a NaN.
template <typename F>
concept QuantizedFormat =
    TokenFormat<F> && F::kBlock >= 16 && F::kBlock <= 128 && (F::kBlock & (F::kBlock - 1)) == 0 &&
    requires(uint32_t bits, float value, typename F::Scale scale) {
      // The code of an element: kBits, Encode, Decode and, on the device, EncodeWord and DecodeTwo.
      typename F::Code;
      // What `scales` holds for a block.
      typename F::Scale;
      { F::ScaleOf(bits, value) } -> std::same_as<typename F::Scale>;
      { F::FactorOf(scale, value) } -> std::same_as<float>;
      // Whether x is divided by the factor or multiplied by it. GPUs divide correctly by the
      // numbers that DividerBy takes.
      { F::kDivides } -> std::convertible_to<bool>;
      { F::ScaleValue(scale) } -> std::same_as<float>;
      { F::Restored(value, value, value) } -> std::same_as<float>;
    };

// Whether block-scaled matmuls take the format's scales in tiles. They take scales that are bytes,
// of 16 or 32 elements.
template <TokenFormat F>
inline constexpr bool kTilesScales = false;
template <QuantizedFormat F>
inline constexpr bool kTilesScales<F> = sizeof(typename F::Scale) == 1 && F::kBlock <= 32;

// Whether matmuls take the format's scales in columns. They take scales that are floats.
template <TokenFormat F>
inline constexpr bool kColumnsOfScales = false;
template <QuantizedFormat F>
inline constexpr bool kColumnsOfScales<F> = sizeof(typename F::Scale) == 4;

template <QuantizedFormat Format>
JAX_EP_HOST_DEVICE float Scaled(float x, float factor) {
  return Format::kDivides ? Divide(x, factor) : Multiply(x, factor);
}

// Derives the bytes of a payload and of its scales from the code, the scale and the block.
template <typename Code, typename ScaleType, int64_t kElements>
struct BlockSizes {
  static constexpr int64_t kBlock = kElements;
  using Scale = ScaleType;

  JAX_EP_HOST_DEVICE static constexpr int64_t PayloadBytes(int64_t hidden, int64_t) {
    return hidden * Code::kBits / 8;
  }
  JAX_EP_HOST_DEVICE static constexpr int64_t ScaleBytes(int64_t hidden) {
    return hidden / kBlock * static_cast<int64_t>(sizeof(Scale));
  }
};

}  // namespace jax_ep
