// "nvfp4": e2m1 with an e4m3 scale per 16 elements, under one float32 scale of the whole tensor.
#pragma once

#include <cstdint>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/token_format.h"

namespace jax_ep {

struct NvFp4Format : BlockSizes<E2M1, uint8_t, 16> {
  using Code = E2M1;
  static constexpr const char* kName = "nvfp4";
  static constexpr const char* kPayloadDtype = "uint8";
  static constexpr const char* kScaleDtype = "float8_e4m3fn";
  static constexpr bool kTakesInputScale = true;
  static constexpr bool kDivides = false;

  JAX_EP_HOST_DEVICE static uint8_t ScaleOf(uint32_t amax_bits, float input_scale) {
    constexpr float kBound = 0x1p20f;  // above it the scale is the largest one in any case
    float product = Multiply(input_scale, BitsFloat(amax_bits));
    product = product > kBound ? kBound : product;
    product = product < -kBound ? -kBound : product;
    const uint32_t scale = E4M3::Encode(DivideBy<6>(product));
    return static_cast<uint8_t>(amax_bits >= 0x7F800000u ? 0x7Fu : scale);
  }
  // Where the scale is zero, the codes are those of a NaN, which are zero.
  JAX_EP_HOST_DEVICE static float FactorOf(uint8_t scale, float input_scale) {
    const float factor = Divide(input_scale, E4M3::Decode(scale));
    return (scale & 0x7Fu) == 0 ? BitsFloat(0x7FC00000u) : factor;
  }
  JAX_EP_HOST_DEVICE static float ScaleValue(uint8_t scale) { return E4M3::Decode(scale); }
  // The product of the two codes is exact.
  JAX_EP_HOST_DEVICE static float Restored(float value, float scale, float input_scale) {
    return Divide(Multiply(value, scale), input_scale);
  }
};

static_assert(QuantizedFormat<NvFp4Format>);

}  // namespace jax_ep
