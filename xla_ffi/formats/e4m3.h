// float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity, NaN 0x7F. Formats use it for
// payloads and scales.
#pragma once

#include <cstdint>

#include "formats/numbers.h"

namespace jax_ep {

struct E4M3 {
  static constexpr int kBits = 8;

  static constexpr uint32_t kNan = 0x7F;

  // Rounds to nearest even. Magnitudes above 448, infinity included, become 448; NaN becomes kNan.
  JAX_EP_HOST_DEVICE static uint32_t Encode(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return value != value ? kNan : EncodeNumbers(value, 0.0f);
#else
    return value != value ? kNan : EncodeNumber(value);
#endif
  }

  // Like Encode, for values that are not NaN. Branch-free, so that loops vectorise.
  JAX_EP_HOST_DEVICE static uint32_t EncodeNumber(float value) {
    constexpr uint32_t kLargest = 0x43E00000;  // 448
    constexpr int kDropped = 20;               // mantissa bits
    const uint32_t bits = FloatBits(value);
    const uint32_t magnitude = Min(bits & 0x7FFFFFFFu, kLargest);
    const uint32_t rebased = magnitude - (120u << 23);  // exponent bias 127 -> 7
    const uint32_t normal = (rebased + 0x7FFFFu + ((rebased >> kDropped) & 1u)) >> kDropped;
    // Below the least normal number, 2^-6, adding 2^14 leaves 2^-9 as the last place, so that the
    // float adder rounds.
    const uint32_t denormal = FloatBits(Add(BitsFloat(magnitude), 0x1p14f)) - 0x46800000u;
    const uint32_t code = magnitude < (121u << 23) ? denormal : normal;
    return code | ((bits >> 24) & 0x80u);
  }

  // Exact.
  JAX_EP_HOST_DEVICE static float Decode(uint32_t code) {
    const uint32_t magnitude = code & 0x7Fu;
    // Exponent bias 7 -> 127, right for normal and denormal codes alike.
    const uint32_t finite = FloatBits(BitsFloat(magnitude << 20) * 0x1p120f);
    const uint32_t bits = magnitude == 0x7Fu ? 0x7FC00000u : finite;
    return BitsFloat(bits | (code & 0x80u) << 24);
  }

#if defined(__CUDACC__)
  // Encodes kCount values, the first into the low bits. `numbers`: none of them is NaN.
  template <int kCount>
  __device__ __forceinline__ static uint32_t EncodeWord(const float* values, bool numbers) {
    static_assert(kCount == 2 || kCount == 4);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      codes |= EncodeNumbers(values[i], values[i + 1]) << i * kBits;
    }
    if (!numbers) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t code = 0xFFu << i * kBits;
        if (values[i] != values[i]) codes = (codes & ~code) | kNan << i * kBits;
      }
    }
    return codes;
  }

  // Encodes two values. For NaN the code may be wrong, because the instruction may keep its sign.
  __device__ __forceinline__ static uint32_t EncodeNumbers(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return EncodeNumber(first) | EncodeNumber(second) << kBits;
#endif
  }

  // Decodes two codes, the first from the low bits. Exact except for the bits of a NaN.
  __device__ __forceinline__ static void DecodeTwo(uint32_t codes, float& first, float& second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    // Every value is exact in float16.
    asm("{\n\t.reg .b32 pair;\n\t.reg .b16 low, high;\n\t"
        "cvt.rn.f16x2.e4m3x2 pair, %2;\n\t"
        "mov.b32 {low, high}, pair;\n\t"
        "cvt.f32.f16 %0, low;\n\t"
        "cvt.f32.f16 %1, high;\n\t}"
        : "=f"(first), "=f"(second)
        : "h"(static_cast<uint16_t>(codes)));
#else
    first = Decode(codes & 0xFFu);
    second = Decode(codes >> kBits & 0xFFu);
#endif
  }
#endif
};

}  // namespace jax_ep
