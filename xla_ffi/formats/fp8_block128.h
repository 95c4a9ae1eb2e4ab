// "fp8_block128": e4m3 with a float32 scale per 128 elements, as in DeepSeek-V3's checkpoints.
#pragma once

#include <cstdint>

#include "formats/e4m3.h"
#include "formats/token_format.h"

namespace jax_ep {

struct Fp8Block128Format : BlockSizes<E4M3, float, 128> {
  using Code = E4M3;
  static constexpr const char* kName = "fp8_block128";
  static constexpr const char* kPayloadDtype = "float8_e4m3fn";
  static constexpr const char* kScaleDtype = "float32";
  static constexpr bool kTakesInputScale = false;
  static constexpr bool kDivides = true;
  // The least amax, as bits of a float: 1e-4, and 2^-80 for gradients, which are often far below
  // 1e-4 with a mean loss. They keep the scales of tiny blocks normal.
  static constexpr uint32_t kLeastAmax = 0x38D1B717;
  static constexpr uint32_t kLeastAmaxOfGradients = 0x17800000;

  // `input_scale` is kNoInputScale or kOfGradients.
  JAX_EP_HOST_DEVICE static float ScaleOf(uint32_t amax_bits, float input_scale) {
    const uint32_t least = input_scale == kOfGradients ? kLeastAmaxOfGradients : kLeastAmax;
    // Bits of positive floats are in the order of the floats.
    const float amax = BitsFloat(amax_bits < least ? least : amax_bits);
    return amax_bits >= 0x7F800000u ? BitsFloat(0x7FC00000u) : DivideBy<448>(amax);
  }
  JAX_EP_HOST_DEVICE static float FactorOf(float scale, float) { return scale; }
  JAX_EP_HOST_DEVICE static float ScaleValue(float scale) { return scale; }
  JAX_EP_HOST_DEVICE static float Restored(float value, float scale, float) {
    return Multiply(value, scale);
  }
};

static_assert(QuantizedFormat<Fp8Block128Format>);

}  // namespace jax_ep
