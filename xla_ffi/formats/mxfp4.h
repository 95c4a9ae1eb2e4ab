// "mxfp4": e2m1 with a power of two per 32 elements, rounded to the nearer one in the bits of amax.
#pragma once

#include <cstdint>

#include "formats/e2m1.h"
#include "formats/e8m0.h"
#include "formats/token_format.h"

namespace jax_ep {

struct MxFp4Format : BlockSizes<E2M1, uint8_t, 32> {
  using Code = E2M1;
  static constexpr const char* kName = "mxfp4";
  static constexpr const char* kPayloadDtype = "uint8";
  static constexpr const char* kScaleDtype = "float8_e8m0fnu";
  static constexpr bool kTakesInputScale = false;
  static constexpr bool kDivides = false;

  // 6 is 1.5 * 2^2; amax up to 1.75 * 2^2 saturates, from there on the scale is the next power.
  JAX_EP_HOST_DEVICE static uint8_t ScaleOf(uint32_t amax_bits, float) {
    const int32_t byte = static_cast<int32_t>((amax_bits + 0x200000u) >> 23) - 2;
    return amax_bits >= 0x7F800000u ? E8M0::kNan : E8M0::Clamp(byte);
  }
  JAX_EP_HOST_DEVICE static float FactorOf(uint8_t scale, float) {
    return E8M0::DecodeInverse(scale);
  }
  JAX_EP_HOST_DEVICE static float ScaleValue(uint8_t scale) { return E8M0::Decode(scale); }
  JAX_EP_HOST_DEVICE static float Restored(float value, float scale, float) {
    return Multiply(value, scale);
  }
};

static_assert(QuantizedFormat<MxFp4Format>);

}  // namespace jax_ep
