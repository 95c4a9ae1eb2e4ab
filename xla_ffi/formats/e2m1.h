// float4_e2m1fn: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. It has no NaN. The payload of "mxfp4" and
// "nvfp4".
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/numbers.h"

// The conversion instruction belongs to one architecture ("sm_100a") or family ("sm_100f") from
// 10.0 on; plain targets and PTX for later GPUs lack it. CUDA before 12.9 has macros of features
// instead.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define JAX_EP_HAS_E2M1
#endif
#elif defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define JAX_EP_HAS_E2M1
#endif

namespace jax_ep {

struct E2M1 {
  static constexpr int kBits = 4;

  static constexpr uint32_t kNan = 0;  // what a NaN becomes

  // Rounds to nearest even. Magnitudes above 6, infinity included, become 6; NaN becomes kNan.
  JAX_EP_HOST_DEVICE static uint32_t Encode(float value) {
    return value != value ? kNan : EncodeNumber(value);
  }

  // Like Encode, for values that are not NaN. Branch-free, so that loops vectorise.
  JAX_EP_HOST_DEVICE static uint32_t EncodeNumber(float value) {
    constexpr uint32_t kLargest = 0x40C00000;  // 6
    constexpr int kDropped = 22;               // mantissa bits
    const uint32_t bits = FloatBits(value);
    const uint32_t magnitude = Min(bits & 0x7FFFFFFFu, kLargest);
    const uint32_t rebased = magnitude - (126u << 23);  // exponent bias 127 -> 1
    const uint32_t normal = (rebased + 0x1FFFFFu + ((rebased >> kDropped) & 1u)) >> kDropped;
    // Below 1 adding 2^22 leaves 0.5 as the last place, so that the float adder rounds.
    const uint32_t denormal = FloatBits(Add(BitsFloat(magnitude), 0x1p22f)) - 0x4A800000u;
    const uint32_t code = magnitude < (127u << 23) ? denormal : normal;
    return code | ((bits >> 28) & 0x8u);
  }

  // Returns kLineBits + Encode of a magnitude that is not NaN, in few instructions of a GPU. Each
  // binade has two codes, so a code is the least of three lines and 7. The float adder rounds each
  // line to a whole number, and ties to the even one, whose code's last bit is zero as well.
  static constexpr uint32_t kLineBits = 0x4B000000;  // 2^23, whose last place is 1
  JAX_EP_HOST_DEVICE static uint32_t EncodeByLines(float magnitude) {
    const float zero = BitsFloat(kLineBits);
    const uint32_t to_two = FloatBits(FusedMultiplyAdd(magnitude, 2.0f, zero));
    const uint32_t to_four = FloatBits(Add(magnitude, zero + 2.0f));
    const uint32_t to_six = FloatBits(FusedMultiplyAdd(magnitude, 0.5f, zero + 4.0f));
    return Min(Min(Min(to_two, to_four), to_six), kLineBits + 7u);
  }

  // Exact.
  JAX_EP_HOST_DEVICE static float Decode(uint32_t code) {
    // Exponent bias 1 -> 127, right for normal and denormal codes alike.
    const uint32_t magnitude = FloatBits(BitsFloat((code & 0x7u) << 22) * 0x1p126f);
    return BitsFloat(magnitude | (code & 0x8u) << 28);
  }

#if defined(__CUDACC__)
  // Encodes kCount values, the first into the low bits. `numbers`: none of them is NaN.
  template <int kCount>
  __device__ __forceinline__ static uint32_t EncodeWord(const float* values, bool numbers) {
    static_assert(kCount <= 8);
    float of[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = values[i];
    if (!numbers) {
#pragma unroll
      for (float& value : of) value = value != value ? 0.0f : value;
    }
    uint32_t codes = 0;
#if defined(JAX_EP_HAS_E2M1)
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      uint32_t two;
      asm("{\n\t.reg .b8 pair;\n\t"
          "cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n\t"
          "cvt.u32.u8 %0, pair;\n\t}"
          : "=r"(two)
          : "f"(of[i + 1]), "f"(of[i]));
      codes |= two << i * kBits;
    }
    return codes;
#else
    uint32_t signs = 0;  // the four highest bits of each value, of which the sign is used
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) {
      codes = (codes << kBits) + EncodeByLines(fabsf(of[i]));
      signs = __funnelshift_l(FloatBits(of[i]), signs, kBits);
    }
    // A kLineBits that is shifted further leaves the word.
    constexpr uint32_t kLines = kLineBits + (kCount > 1 ? kLineBits << kBits : 0);
    return (codes - kLines) | (signs & 0x88888888u);
#endif
  }

  // Decodes two codes, the first from the low bits.
  __device__ __forceinline__ static void DecodeTwo(uint32_t codes, float& first, float& second) {
    first = Decode(codes & 0xFu);
    second = Decode(codes >> kBits & 0xFu);
  }
#endif
};

}  // namespace jax_ep
