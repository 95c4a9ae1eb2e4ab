// float4_e2m1fn: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. It has no NaN. Used by the formats whose
// payload it is.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/numbers.h"

// Instructions of one architecture ("sm_100a") or family ("sm_100f") from 10.0 on, which plain
// targets and PTX for later GPUs lack. CUDA before 12.9 names features instead.
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

  // Rounds to nearest even; what is larger than 6, infinity too, becomes 6; NaN becomes kNan.
  JAX_EP_HOST_DEVICE static uint32_t Encode(float value) {
    return value != value ? kNan : EncodeNumber(value);
  }

  // As Encode, of what is no NaN. Branch-free, so that loops vectorise.
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

  // As Encode but for the sign of a NaN, in fewer instructions of a GPU.
  JAX_EP_HOST_DEVICE static uint32_t EncodeByAdder(float value) {
    // Of a NaN fmaxf takes the other.
    const float magnitude = fminf(fmaxf(fabsf(value), 0.0f), 6.0f);
    // 1, 2 or 4: half of it is the last place, to which the float adder rounds.
    const uint32_t binade = FloatBits(fmaxf(magnitude, 1.0f)) & 0x7F800000u;
    const uint32_t sum = FloatBits(FusedMultiplyAdd(BitsFloat(binade), 0x1p22f, magnitude));
    const uint32_t places = sum - binade - (22u << 23);
    const uint32_t code = places + (binade >> 22) - 254u;  // two codes a binade
    return code | ((FloatBits(value) >> 28) & 0x8u);
  }

  // Exact.
  JAX_EP_HOST_DEVICE static float Decode(uint32_t code) {
    // Exponent bias 1 -> 127, right for normal and denormal codes alike.
    const uint32_t magnitude = FloatBits(BitsFloat((code & 0x7u) << 22) * 0x1p126f);
    return BitsFloat(magnitude | (code & 0x8u) << 28);
  }

#if defined(__CUDACC__)
  // Two at once, the first in the low bits.
  __device__ __forceinline__ static uint32_t EncodeTwo(float first, float second) {
#if defined(JAX_EP_HAS_E2M1)
    uint32_t codes;
    asm("{\n\t.reg .b8 pair;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n\t"
        "cvt.u32.u8 %0, pair;\n\t}"
        : "=r"(codes)
        : "f"(second), "f"(first));
    // The instruction makes 6 of a NaN.
    codes = first != first ? codes & 0xF0u : codes;
    return second != second ? codes & 0x0Fu : codes;
#else
    return EncodeByAdder(first) | EncodeByAdder(second) << kBits;
#endif
  }

  // Likewise.
  __device__ __forceinline__ static void DecodeTwo(uint32_t codes, float& first, float& second) {
    first = Decode(codes & 0xFu);
    second = Decode(codes >> kBits & 0xFu);
  }
#endif
};

}  // namespace jax_ep
