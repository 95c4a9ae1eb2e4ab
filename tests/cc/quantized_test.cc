// Tests of the quantised formats: every code of their element types against the definition of the
// type, and the loops over rows in cpu/quantize.h against the formats' own functions.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cpu/quantize.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/registry.h"

namespace jax_ep {
namespace {

// The values of all magnitudes by the definition of the type; E4M3's last one is NaN.
template <typename Code>
std::vector<double> Magnitudes() {
  constexpr bool kE4M3 = std::is_same_v<Code, E4M3>;
  constexpr int kMantissaBits = kE4M3 ? 3 : 1, kBias = kE4M3 ? 7 : 1;
  std::vector<double> values;
  for (int bits = 0; bits < (kE4M3 ? 0x7F : 8); ++bits) {
    const int exponent = bits >> kMantissaBits, mantissa = bits & ((1 << kMantissaBits) - 1);
    const int implicit = exponent == 0 ? 0 : 1 << kMantissaBits;
    values.push_back(
        std::ldexp(implicit + mantissa, std::max(exponent, 1) - kBias - kMantissaBits));
  }
  return values;
}

// Every code both ways, and rounding of the middles, of their neighbours and of values beyond.
template <typename Code>
void TestCode() {
  const std::vector<double> values = Magnitudes<Code>();
  constexpr uint32_t kSign = 1u << (Code::kBits - 1);
  const auto round = [&](float value) {
    const double magnitude = std::min(std::fabs(static_cast<double>(value)), values.back());
    size_t best = 0;
    for (size_t i = 1; i < values.size(); ++i) {
      const double better = std::fabs(magnitude - values[i]) - std::fabs(magnitude - values[best]);
      if (better < 0 || (better == 0 && i % 2 == 0)) best = i;
    }
    return static_cast<uint32_t>(best) | (std::signbit(value) ? kSign : 0);
  };
  const auto check = [&](float value) {
    CurrentCase() = "bits " + std::to_string(FloatBits(value));
    CHECK(Code::Encode(value) == round(value));
    CHECK(Code::Encode(-value) == round(-value));
  };
  for (size_t i = 0; i < values.size(); ++i) {
    for (const uint32_t sign : {0u, kSign}) {
      const float value = Code::Decode(static_cast<uint32_t>(i) | sign);
      CHECK(static_cast<double>(std::fabs(value)) == values[i]);
      CHECK(std::signbit(value) == (sign != 0));
    }
    const double next = i + 1 < values.size() ? values[i + 1] : values[i] * 1.25;
    for (const double exact : {values[i], (values[i] + next) / 2}) {
      const auto value = static_cast<float>(exact);
      CHECK(static_cast<double>(value) == exact);
      for (const float to : {-INFINITY, INFINITY}) check(std::nextafterf(value, to));
      check(value);
    }
  }
  Random random(21);
  for (int i = 0; i < 300000; ++i) {
    const float value = BitsFloat(static_cast<uint32_t>(random.Bits()));
    if (!std::isnan(value)) check(value);
    check(std::ldexp(static_cast<float>(random.Bits()), -64 - static_cast<int>(i % 16) + 10));
  }
  check(INFINITY);
  check(std::numeric_limits<float>::denorm_min());
  const uint32_t nan = std::is_same_v<Code, E4M3> ? 0x7F : 0;
  for (const uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
    CHECK(Code::Encode(BitsFloat(bits)) == nan);
  }
  if (std::is_same_v<Code, E4M3>) {
    CHECK(std::isnan(E4M3::Decode(0x7F)) && std::isnan(E4M3::Decode(0xFF)));
  }
}

void TestE8M0() {
  for (uint32_t byte = 0; byte < 255; ++byte) {
    CHECK(static_cast<double>(E8M0::Decode(byte)) == std::ldexp(1.0, static_cast<int>(byte) - 127));
    CHECK(static_cast<double>(E8M0::DecodeInverse(byte)) ==
          std::ldexp(1.0, 127 - static_cast<int>(byte)));
  }
  CHECK(std::isnan(E8M0::Decode(255)) && std::isnan(E8M0::DecodeInverse(255)));
}

template <typename Element>
Element AnyElement(Random& random, int kind) {
  auto bits = static_cast<uint32_t>(random.Bits());
  if (kind == 0) return FromFloat<Element>(static_cast<float>(random.In(-999, 999)) * 0.01f);
  if constexpr (std::is_same_v<Element, float>) {
    if (kind == 1) bits &= 0x80FFFFFF;  // denormal or nearly
    return BitsFloat(bits);
  } else {
    if (kind == 1) bits &= 0x83FF;
    return {static_cast<uint16_t>(bits)};
  }
}

// The loops over rows, whatever instructions they use, give the same as the format's functions one
// by one, for every length and whatever the blocks hold.
template <typename Format, typename Element>
void TestQuantizedRows() {
  using Code = typename Format::Code;
  constexpr auto kBlock = static_cast<size_t>(Format::kBlock);
  Random random(22);
  for (int round = 0; round < 400; ++round) {
    CurrentCase() = std::string(Format::kName) + " round " + std::to_string(round);
    const auto count = kBlock * static_cast<size_t>(random.In(1, round % 9 == 0 ? 90 : 9));
    float input_scale = random.OneIn(2) ? 1.0f : std::ldexp(3.3f, int(random.In(-150, 130)));
    if (round % 5 == 0) input_scale = kRouteInputScale<Format>;
    std::vector<Element> from(count), back(count);
    for (size_t i = 0, kind = 0; i < count; ++i) {
      if (i % kBlock == 0) kind = static_cast<size_t>(random.In(0, 3));
      from[i] = kind == 3 ? Element{} : AnyElement<Element>(random, static_cast<int>(kind));
    }
    const auto hidden = static_cast<int64_t>(count);
    std::vector<uint8_t> payload(static_cast<size_t>(Format::PayloadBytes(hidden, 0)));
    std::vector<uint8_t> scales(static_cast<size_t>(Format::ScaleBytes(hidden)));
    cpu::QuantizeRow(Format{}, from.data(), hidden, input_scale, payload.data(), scales.data());
    cpu::DequantizeRow(Format{}, payload.data(), scales.data(), hidden, input_scale, back.data());
    for (size_t block = 0; block < count / kBlock; ++block) {
      uint32_t amax_bits = 0;
      for (size_t i = 0; i < kBlock; ++i) {
        const uint32_t bits = FloatBits(ToFloat(from[block * kBlock + i])) & 0x7FFFFFFF;
        amax_bits = std::max(amax_bits, bits);
      }
      const auto scale = Format::ScaleOf(amax_bits, input_scale);
      CHECK(std::memcmp(&scale, scales.data() + block * sizeof scale, sizeof scale) == 0);
      const float factor = Format::FactorOf(scale, input_scale);
      for (size_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        const size_t bit = i * Code::kBits;
        const uint32_t code = (payload[bit / 8] >> (bit % 8)) & ((1u << Code::kBits) - 1);
        CHECK(code == Code::Encode(Scaled<Format>(ToFloat(from[i]), factor)));
        const Element want = FromFloat<Element>(
            Format::Restored(Code::Decode(code), Format::ScaleValue(scale), input_scale));
        CHECK(std::memcmp(&want, &back[i], sizeof want) == 0);
      }
    }
  }
}

// DividerBy, with which GPUs divide: numbers are possible scales, values are below their amax.
void TestDivider() {
  Random random(23);
  const auto below = [&](float amax) {
    const float fraction = std::ldexp(static_cast<float>(random.Bits() >> 40), -24);
    switch (random.In(0, 3)) {
      case 0:
        return ToFloat(FromFloat<BFloat16>(amax * fraction));
      case 1:
        return amax * std::ldexp(fraction, -static_cast<int>(random.In(0, 140)));
      case 2:
        return std::nextafterf(amax * static_cast<float>(random.In(0, 448)) / 448.0f, 0.0f);
      default:
        return amax * static_cast<float>(random.In(0, 448 * 16)) / (448.0f * 16.0f);
    }
  };
  for (int i = 0; i < 1000000; ++i) {
    float amax =
        BitsFloat(static_cast<uint32_t>(random.In(Fp8Block128Format::kLeastAmax, 0x7F7FFFFF)));
    if (random.OneIn(3)) amax = ToFloat(FromFloat<BFloat16>(amax));
    if (FloatBits(amax) >= 0x7F800000) continue;
    float number = Fp8Block128Format::ScaleOf(FloatBits(amax), 1.0f);
    if (random.OneIn(9)) number = BitsFloat(FloatBits(number) | 0x7FFFFF);  // the worst inverse
    const DividerBy divided(number);
    const float magnitude = std::min(below(amax), amax);
    const float value = random.OneIn(2) ? magnitude : -magnitude;
    const float got = divided(value), want = value / number;
    CurrentCase() = std::to_string(FloatBits(value)) + " / " + std::to_string(FloatBits(number));
    CHECK(std::signbit(got) == std::signbit(want));
    if (std::fabs(want) >= 0x1p-76f) {
      CHECK(FloatBits(got) == FloatBits(want));
    } else {
      CHECK(std::fabs(got) < 0x1p-70f);
    }
  }
  for (const float zero : {0.0f, -0.0f}) {
    CHECK(FloatBits(DividerBy(0.3f)(zero)) == FloatBits(zero / 0.3f));
  }
  CHECK(std::isnan(DividerBy(NAN)(1.0f)) && std::isnan(DividerBy(0.3f)(NAN)));
}

// 16-bit elements: every mantissa of the largest and of the others, down to quotients whose code is
// zero. Codes are right even if a GPU's reciprocal is a unit off.
template <int kMantissaBits>
void TestOneCorrection() {
  constexpr uint32_t kMantissas = 1u << kMantissaBits;
  const auto value_of = [](int exponent, uint32_t mantissa) {
    return BitsFloat(static_cast<uint32_t>(127 + exponent) << 23 | mantissa
                                                                       << (23 - kMantissaBits));
  };
  const auto check = [&](float amax, float number) {
    const DividerBy<1> divided(number);
    const float inverse = 1.0f / number;
    const float units_off[] = {std::nextafterf(inverse, 0.0f), std::nextafterf(inverse, INFINITY)};
    const int top = std::ilogb(amax);
    for (int exponent = top; exponent >= top - 20; --exponent) {
      for (uint32_t mantissa = 0; mantissa < kMantissas; ++mantissa) {
        const float value = value_of(exponent, mantissa);
        if (value > amax) break;
        const float quotient = value / number;
        CHECK(FloatBits(divided(value)) == FloatBits(quotient));
        for (const float other : units_off) {
          const float near = Correct(Multiply(value, other), value, number, other);
          CHECK(E4M3::Encode(near) == E4M3::Encode(quotient));
        }
      }
    }
  };
  for (uint32_t mantissa = 0; mantissa < kMantissas; ++mantissa) {
    CurrentCase() = std::to_string(kMantissaBits) + " bits, mantissa " + std::to_string(mantissa);
    const float amax = value_of(0, mantissa);
    check(amax, Fp8Block128Format::ScaleOf(FloatBits(amax), 1.0f));
  }
  CurrentCase() = std::to_string(kMantissaBits) + " bits, the least scale";
  check(1e-4f, Fp8Block128Format::ScaleOf(0, 1.0f));
  CHECK(FloatBits(DividerBy<1>(0.3f)(-0.0f)) == 0x80000000u);
}

template <int kNumber>
void TestConstantDivisor() {
  constexpr float kBy = kNumber;
  CurrentCase() = "by " + std::to_string(kNumber);
  for (uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
    const float value = BitsFloat(127u << 23 | mantissa);
    CHECK(FloatBits(DivideByConstant<kNumber>(value)) == FloatBits(value / kBy));
  }
  for (const float value : {0.0f, -0.0f, -1.0f, 0x1p100f, 0x1p-70f}) {
    CHECK(FloatBits(DivideByConstant<kNumber>(value)) == FloatBits(value / kBy));
  }
  CHECK(std::isnan(DivideByConstant<kNumber>(NAN)));
}

// The two encoders of e2m1 agree around every value between codes, and in all binades.
void TestE2M1ByLines() {
  const auto check = [](uint32_t bits) {
    CurrentCase() = "bits " + std::to_string(bits);
    const float value = BitsFloat(bits);
    CHECK(E2M1::EncodeByLines(value) - E2M1::kLineBits == E2M1::Encode(value));
  };
  for (int quarter = 0; quarter <= 32; ++quarter) {
    const uint32_t middle = FloatBits(static_cast<float>(quarter) / 4);
    for (uint32_t bits = middle - std::min(middle, 1000u); bits <= middle + 1000; ++bits) {
      check(bits);
    }
  }
  for (uint32_t bits = 0; bits < 0x7F800000u; bits += 997) check(bits);
  check(0x7F800000u);
}

void TestQuantizedFormats() {
  ForEachFormat([]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) {
      TestQuantizedRows<Format, float>();
      TestQuantizedRows<Format, BFloat16>();
      TestQuantizedRows<Format, Float16>();
    }
  });
}

}  // namespace
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
  TestCode<E4M3>();
  TestCode<E2M1>();
  TestE8M0();
  TestDivider();
  TestOneCorrection<7>();
  TestOneCorrection<10>();
  TestConstantDivisor<6>();
  TestConstantDivisor<448>();
  TestE2M1ByLines();
  TestQuantizedFormats();
  std::printf("quantized_test: ok\n");
  return 0;
}
