// float8_e8m0fnu: a power of two, 2^(byte - 127); 0xFF is NaN. There is no zero. The scales of the
// mx formats and of "fp8_block128_e8m0".
#pragma once

#include <cstdint>

#include "formats/numbers.h"

namespace jax_ep {

struct E8M0 {
  static constexpr uint8_t kNan = 0xFF;
  static constexpr int32_t kLargest = 0xFE;

  // 2^(byte - 127).
  JAX_EP_HOST_DEVICE static float Decode(uint32_t byte) {
    const uint32_t denormal = 0x00400000u;  // 2^-127
    const uint32_t finite = byte == 0 ? denormal : byte << 23;
    return BitsFloat(byte == kNan ? 0x7FC00000u : finite);
  }

  // 2^(127 - byte): what a block is multiplied by.
  JAX_EP_HOST_DEVICE static float DecodeInverse(uint32_t byte) {
    return Decode(byte == kNan ? byte : static_cast<uint32_t>(kLargest) - byte);
  }

  // Clamps to the bytes that are not NaN.
  JAX_EP_HOST_DEVICE static uint8_t Clamp(int32_t byte) {
    return static_cast<uint8_t>(byte < 0 ? 0 : Min(byte, kLargest));
  }
};

}  // namespace jax_ep
