// bfloat16, float16 and float32 as storage, and their conversions to and from float32. Host and
// device use integer code, so that they agree on every bit; it is branch-free, so that loops
// vectorise. Denormals are right only where the caller runs without flush-to-zero
// (cpu/denormals.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

JAX_EP_HOST_DEVICE uint32_t FloatBits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<uint32_t>(value);
#endif
}

JAX_EP_HOST_DEVICE float BitsFloat(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

JAX_EP_HOST_DEVICE float ToFloat(float value) { return value; }

JAX_EP_HOST_DEVICE float ToFloat(BFloat16 value) {
  return BitsFloat(static_cast<uint32_t>(value.bits) << 16);
}

JAX_EP_HOST_DEVICE float ToFloat(Float16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFF) << 13;
  // Exponent bias 15 -> 127: exact for normal and denormal halves alike.
  const uint32_t scaled = FloatBits(BitsFloat(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t finite_or_special = magnitude >= 0x0F800000u ? special : scaled;
  return BitsFloat(finite_or_special | static_cast<uint32_t>(value.bits & 0x8000) << 16);
}

// Rounds to nearest even. Every NaN becomes the one positive quiet NaN of the type: hardware
// differs in the sign and payload of a NaN it makes, and transports must agree on bits.
template <typename T>
JAX_EP_HOST_DEVICE T FromFloat(float value);

template <>
JAX_EP_HOST_DEVICE float FromFloat<float>(float value) {
  const uint32_t bits = FloatBits(value);
  return BitsFloat((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits);
}

template <>
JAX_EP_HOST_DEVICE BFloat16 FromFloat<BFloat16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded)};
}

template <>
JAX_EP_HOST_DEVICE Float16 FromFloat<Float16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal halves: rebias, then round the 13 dropped bits; a carry moves into the exponent.
  const uint32_t rebased = magnitude - (112u << 23);
  const uint32_t normal = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
  // Denormal halves: adding 0.5 aligns the value so that the float adder rounds it.
  const uint32_t denormal = FloatBits(BitsFloat(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t half = magnitude < (113u << 23) ? denormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // 65520 and above round to infinity
  half |= sign;
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  return {static_cast<uint16_t>(half)};
}

// One step of every sum on every transport: two roundings, never a fused multiply-add.
JAX_EP_HOST_DEVICE float MultiplyThenAdd(float sum, float weight, float value) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(sum, __fmul_rn(weight, value));
#else
  return sum + weight * value;  // built with -ffp-contract=off
#endif
}

JAX_EP_HOST_DEVICE float Add(float sum, float value) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(sum, value);
#else
  return sum + value;
#endif
}

JAX_EP_HOST_DEVICE float Multiply(float value, float by) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(value, by);
#else
  return value * by;
#endif
}

JAX_EP_HOST_DEVICE float Divide(float value, float by) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(value, by);
#else
  return value / by;
#endif
}

// value * a + b, rounded once. The sums of transports never use it.
JAX_EP_HOST_DEVICE float FusedMultiplyAdd(float value, float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(value, a, b);
#else
  return std::fma(value, a, b);
#endif
}

// 1 / number for NaN and numbers from 2^-30 to 2^120, rounded as by Divide. It has no branches for
// other numbers, which would keep a warp from working on several numbers at once.
JAX_EP_HOST_DEVICE float Reciprocal(float number) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(number));
  return FusedMultiplyAdd(FusedMultiplyAdd(-number, inverse, 1.0f), inverse, inverse);
#else
  return Divide(1.0f, number);
#endif
}

// Takes one step from a quotient to a nearer one, using the remainder.
JAX_EP_HOST_DEVICE float Correct(float quotient, float value, float number, float inverse) {
  return FusedMultiplyAdd(FusedMultiplyAdd(-number, quotient, value), inverse, quotient);
}
// Needed because remainders lose the sign of -0.
JAX_EP_HOST_DEVICE float WithSignOf(float value, float magnitude) {
  return BitsFloat((FloatBits(magnitude) & 0x7FFFFFFFu) | (FloatBits(value) & 0x80000000u));
}

// Divides many values by one number. Quotients that are zero or from 2^-76 to 2^100 equal those of
// Divide; smaller ones have the right sign and stay below 2^-70; NaN gives NaN. The number must be
// NaN or positive, from 2^-30 to 2^120. A GPU's ordinary division takes more than twice as many
// instructions. The first quotient is within two units of the last place, the next within one; then
// a correction with a correctly rounded inverse rounds correctly (Markstein). Remainders are exact.
// After a single correction a quotient may be one unit off, but only close to the middle of two
// floats.
template <int kCorrections = 2>
class DividerBy {
 public:
  JAX_EP_HOST_DEVICE explicit DividerBy(float number)
      : number_(number), inverse_(Reciprocal(number)) {}

  JAX_EP_HOST_DEVICE float operator()(float value) const {
    float quotient = Correct(Multiply(value, inverse_), value, number_, inverse_);
    if constexpr (kCorrections == 2) quotient = Correct(quotient, value, number_, inverse_);
    return WithSignOf(value, quotient);
  }

 private:
  float number_;
  float inverse_;
};

// Divides by one of the constants that formats divide by. Quotients from 2^-76 to 2^100 equal those
// of Divide, which quantized_test.cc checks with every mantissa; smaller ones have the right sign
// and stay below 2^-70.
template <int kNumber>
JAX_EP_HOST_DEVICE float DivideByConstant(float value) {
  static_assert(kNumber == 6 || kNumber == 448);
  constexpr float kInverse = 1.0f / static_cast<float>(kNumber);
  return WithSignOf(value, Correct(Multiply(value, kInverse), value, kNumber, kInverse));
}

// Divides by such a constant in the fastest way.
template <int kNumber>
JAX_EP_HOST_DEVICE float DivideBy(float value) {
#if defined(__CUDA_ARCH__)
  return DivideByConstant<kNumber>(value);
#else
  return value / static_cast<float>(kNumber);
#endif
}

}  // namespace jax_ep
