// "mxfp8": e4m3 with a power of two per 32 elements, rounded up, so that no element saturates.
#pragma once

#include <cstdint>

#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/token_format.h"

namespace jax_ep {

struct MxFp8Format : BlockSizes<E4M3, uint8_t, 32> {
  using Code = E4M3;
  static constexpr const char* kName = "mxfp8";
  static constexpr const char* kPayloadDtype = "float8_e4m3fn";
  static constexpr const char* kScaleDtype = "float8_e8m0fnu";
  static constexpr bool kTakesInputScale = false;
  static constexpr bool kDivides = false;

  // 2^ceil(log2(amax / 448)): 448 is 1.75 * 2^8, so the power goes up by one if the mantissa of
  // amax is above 0.75.
  JAX_EP_HOST_DEVICE static uint8_t ScaleOf(uint32_t amax_bits, float) {
    const int32_t byte = static_cast<int32_t>((amax_bits + 0x1FFFFFu) >> 23) - 8;
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

static_assert(QuantizedFormat<MxFp8Format>);

}  // namespace jax_ep
