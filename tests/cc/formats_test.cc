// Tests of formats/: conversions of every bfloat16 and float16 pattern both ways, rounding at every
// boundary between neighbours against an independent reference, sums without fused multiply-add,
// the effect of the caller's flush-to-zero mode, and the registry.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cpu/denormals.h"
#include "cpu/rows.h"
#include "formats/numbers.h"
#include "formats/registry.h"

namespace jax_ep {
namespace {

template <typename T>
struct Layout;
template <>
struct Layout<BFloat16> {
  static constexpr int kMantissaBits = 7, kBias = 127;
  static constexpr uint16_t kInfinity = 0x7F80, kNan = 0x7FC0;
};
template <>
struct Layout<Float16> {
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr uint16_t kInfinity = 0x7C00, kNan = 0x7E00;
};

// The value of a non-negative pattern by the definition of the format. Infinity gets the value of
// the next exponent, which it stands for when values are rounded.
template <typename T>
double ValueOf(uint16_t bits) {
  const int mantissa = bits & ((1 << Layout<T>::kMantissaBits) - 1);
  const int exponent = bits >> Layout<T>::kMantissaBits;
  const int implicit = exponent == 0 ? 0 : 1 << Layout<T>::kMantissaBits;
  return std::ldexp(implicit + mantissa,
                    std::max(exponent, 1) - Layout<T>::kBias - Layout<T>::kMantissaBits);
}

template <typename T>
void TestEveryPattern() {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    CurrentCase() = "pattern " + std::to_string(pattern);
    const auto bits = static_cast<uint16_t>(pattern);
    const uint16_t magnitude = bits & 0x7FFF;
    const float value = ToFloat(T{bits});
    const uint16_t back = FromFloat<T>(value).bits;
    if (magnitude > Layout<T>::kInfinity) {
      CHECK(std::isnan(value) && back == Layout<T>::kNan);
      continue;
    }
    const double expected = magnitude == Layout<T>::kInfinity
                                ? std::numeric_limits<double>::infinity()
                                : ValueOf<T>(magnitude);
    CHECK(std::fabs(static_cast<double>(value)) == expected);
    CHECK(std::signbit(value) == (bits >> 15 != 0));
    CHECK(back == bits);
  }
}

// Finds the nearest pattern in the table of all values, and the even one of two at equal distance.
template <typename T>
class Rounder {
 public:
  Rounder() {
    for (uint32_t bits = 0; bits <= Layout<T>::kInfinity; ++bits) {
      values_.push_back(ValueOf<T>(static_cast<uint16_t>(bits)));
    }
  }

  uint16_t Round(float value) const {
    if (std::isnan(value)) return Layout<T>::kNan;
    const double magnitude = std::fabs(static_cast<double>(value));
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    auto bits = static_cast<uint16_t>(above - values_.begin());
    if (above == values_.end()) {
      bits = Layout<T>::kInfinity;
    } else if (bits > 0) {
      const double up = *above - magnitude, down = magnitude - *(above - 1);
      if (down < up || (down == up && bits % 2 != 0)) --bits;
    }
    return static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
  }
  double value(uint16_t bits) const { return values_[bits]; }

 private:
  std::vector<double> values_;
};

template <typename T>
void TestRounding() {
  const Rounder<T> rounder;
  const auto check = [&](float value) {
    CurrentCase() = "bits " + std::to_string(FloatBits(value));
    CHECK(FromFloat<T>(value).bits == rounder.Round(value));
    CHECK(FromFloat<T>(-value).bits == rounder.Round(-value));
  };
  // Each value, the middle between it and the next (exact in float32), and both's neighbours.
  for (uint16_t bits = 0; bits < Layout<T>::kInfinity; ++bits) {
    const double low = rounder.value(bits);
    const double high = rounder.value(static_cast<uint16_t>(bits + 1));
    for (const double exact : {low, (low + high) / 2}) {
      const auto value = static_cast<float>(exact);
      CHECK(static_cast<double>(value) == exact);
      for (const float toward : {-INFINITY, INFINITY}) {
        const float beside = std::nextafterf(value, toward);
        check(beside);
        check(std::nextafterf(beside, toward));
      }
      check(value);
    }
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {infinity, std::numeric_limits<float>::max(), 65504.0f, 65520.0f,
                            std::nextafterf(65520.0f, 0), std::numeric_limits<float>::min(),
                            std::numeric_limits<float>::denorm_min()}) {
    check(value);
  }
  Random random(3);
  for (int i = 0; i < 300000; ++i) {
    check(BitsFloat(static_cast<uint32_t>(random.Bits())));
    check(std::ldexp(BitsFloat(static_cast<uint32_t>(random.Bits()) & 0x3FFFFFFF), 20));
  }
}

// Quiet and signalling NaNs of any sign and payload all become the one canonical NaN.
template <typename T>
void TestNan(uint32_t canonical) {
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t payload = 1; payload < 0x00800000u; payload = payload * 5 / 3 + 1) {
      const T rounded = FromFloat<T>(BitsFloat(sign | 0x7F800000u | payload));
      if constexpr (std::is_same_v<T, float>) {
        CHECK(FloatBits(rounded) == canonical);
      } else {
        CHECK(rounded.bits == canonical);
      }
    }
  }
}

void TestFloat32IsKept() {
  Random random(4);
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<uint32_t>(random.Bits());
    if ((bits & 0x7FFFFFFF) > 0x7F800000) continue;
    CHECK(FloatBits(FromFloat<float>(BitsFloat(bits))) == bits);
    CHECK(FloatBits(ToFloat(BitsFloat(bits))) == bits);
  }
}

// (1 + 2^-12)^2 rounds to 1 + 2^-11; a fused multiply-add would keep the 2^-24.
void TestNoFusedMultiplyAdd() {
  volatile uint32_t weight_bits = FloatBits(1.0f + 0x1p-12f);  // not folded by the compiler
  const float weight = BitsFloat(weight_bits), sum = -(1.0f + 0x1p-11f);
  CHECK(std::fmaf(weight, weight, sum) == 0x1p-24f);
  CHECK(FloatBits(MultiplyThenAdd(sum, weight, weight)) == 0);
  CHECK(FloatBits(Add(-0.0f, 0.0f)) == 0 && FloatBits(Add(0.0f, -0.0f)) == 0);
  for (int64_t count = 0; count < 40; ++count) {  // SIMD bodies and their remainders
    std::vector<float> sums(static_cast<size_t>(count) + 1, sum);
    const std::vector<float> row(static_cast<size_t>(count), weight);
    cpu::Accumulate(sums.data(), row.data(), weight, count);
    for (int64_t i = 0; i < count; ++i) CHECK(FloatBits(sums[static_cast<size_t>(i)]) == 0);
    CHECK(sums.back() == sum);
  }
}

// The loops over rows give the same as the conversions one by one, for every element.
template <typename T>
void TestRowLoops() {
  std::vector<T> patterns;
  std::vector<float> expected_sum;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    patterns.push_back({static_cast<uint16_t>(bits)});
    expected_sum.push_back(MultiplyThenAdd(0.75f, 3.0f, ToFloat(patterns.back())));
  }
  std::vector<float> sum(patterns.size(), 0.75f);
  const auto count = static_cast<int64_t>(sum.size());
  cpu::Accumulate(sum.data(), patterns.data(), 3.0f, count);
  std::vector<T> rounded(sum.size());
  cpu::Round(rounded.data(), sum.data(), count);
  for (size_t i = 0; i < sum.size(); ++i) {
    CurrentCase() = "pattern " + std::to_string(i);
    // The hardware chooses the sign and payload of a NaN that comes from a sum.
    CHECK(FloatBits(FromFloat<float>(sum[i])) == FloatBits(FromFloat<float>(expected_sum[i])));
    CHECK(rounded[i].bits == FromFloat<T>(expected_sum[i]).bits);
  }
}

#if defined(__SSE2__)
constexpr uint32_t kFlushToZero = 0x8040;
uint32_t FloatMode() { return _mm_getcsr() & ~0x3Fu; }  // without the exception flags
void SetFlushToZero() { _mm_setcsr(_mm_getcsr() | kFlushToZero); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushToZero = 1u << 24;
uint64_t FloatMode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void SetFlushToZero() { asm volatile("msr fpcr, %0" ::"r"(FloatMode() | kFlushToZero)); }
#endif

// With the mode of XLA:CPU's threads: without the guard denormals are lost, so the guard keeps
// them. Afterwards the caller's mode is restored.
void TestScopedDenormals() {
  const auto plain = FloatMode();
  const volatile uint16_t smallest_half = 1;
  const volatile uint32_t small_float = 0x00000003, half_float = 0x33800000;  // 2^-24 as float32
  const auto half = [&] { return FloatBits(ToFloat(Float16{smallest_half})); };
  const auto sum = [&] {
    return FloatBits(MultiplyThenAdd(BitsFloat(small_float), 1.0f, BitsFloat(small_float)));
  };
  CHECK(half() == 0x33800000 && sum() == 6);
  SetFlushToZero();
  const auto flushing = FloatMode();
  CHECK(half() == 0 && sum() == 0);
  {
    const cpu::ScopedDenormals guard;
    CHECK(half() == 0x33800000 && sum() == 6);
    CHECK(FromFloat<Float16>(BitsFloat(half_float)).bits == 1);
    {
      const cpu::ScopedDenormals inner;
      CHECK(sum() == 6);
    }
    CHECK(sum() == 6 && (FloatMode() & kFlushToZero) == 0);
    TestRowLoops<Float16>();
    TestRowLoops<BFloat16>();
  }
  CHECK(FloatMode() == flushing && half() == 0 && sum() == 0);
#if defined(__SSE2__)
  _mm_setcsr(plain);
#else
  asm volatile("msr fpcr, %0" ::"r"(plain));
#endif
  const cpu::ScopedDenormals guard;
  CHECK(FloatMode() == plain && sum() == 6);
}

void TestRegistry() {
  std::set<std::string> names;
  ForEachFormat([&](auto format) {
    using Format = decltype(format);
    CHECK(names.insert(Format::kName).second);
    int visits = 0;
    CHECK(VisitFormat(Format::kName,
                      [&](auto found) { visits += std::is_same_v<decltype(found), Format>; }));
    CHECK(visits == 1);
  });
  CHECK(names.contains("bf16"));
  for (const char* name : {"", "bf1", "bf166", "BF16", "float32"}) {
    CHECK(!VisitFormat(name, [](auto) { CHECK(false); }));
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
  TestEveryPattern<BFloat16>();
  TestEveryPattern<Float16>();
  TestRounding<BFloat16>();
  TestRounding<Float16>();
  TestNan<float>(0x7FC00000);
  TestNan<BFloat16>(0x7FC0);
  TestNan<Float16>(0x7E00);
  TestFloat32IsKept();
  TestNoFusedMultiplyAdd();
  TestRowLoops<BFloat16>();
  TestRowLoops<Float16>();
  TestScopedDenormals();
  TestRegistry();
  std::printf("formats_test: ok\n");
  return 0;
}
