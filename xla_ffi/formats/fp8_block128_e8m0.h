// "fp8_block128_e8m0": e4m3 with a power of two per 128 elements, which matmuls with 128-element
// scales take without a float32 multiply. It applies the rule of "mxfp8" to longer blocks.
#pragma once

#include "formats/mxfp8.h"

namespace jax_ep {

struct Fp8Block128E8M0Format : BlockSizes<E4M3, uint8_t, 128> {
  using Code = E4M3;
  static constexpr const char* kName = "fp8_block128_e8m0";
  static constexpr const char* kPayloadDtype = MxFp8Format::kPayloadDtype;
  static constexpr const char* kScaleDtype = MxFp8Format::kScaleDtype;
  static constexpr bool kTakesInputScale = false;
  static constexpr bool kDivides = false;

  JAX_EP_HOST_DEVICE static uint8_t ScaleOf(uint32_t amax_bits, float input_scale) {
    return MxFp8Format::ScaleOf(amax_bits, input_scale);
  }
  JAX_EP_HOST_DEVICE static float FactorOf(uint8_t scale, float input_scale) {
    return MxFp8Format::FactorOf(scale, input_scale);
  }
  JAX_EP_HOST_DEVICE static float ScaleValue(uint8_t scale) {
    return MxFp8Format::ScaleValue(scale);
  }
  JAX_EP_HOST_DEVICE static float Restored(float value, float scale, float input_scale) {
    return MxFp8Format::Restored(value, scale, input_scale);
  }
};

static_assert(QuantizedFormat<Fp8Block128E8M0Format>);

}  // namespace jax_ep
