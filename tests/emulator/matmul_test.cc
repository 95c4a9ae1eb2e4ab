// Grouped matmuls (cuda/matmul) on emulated GPUs against sums in float64: all kinds, with groups of
// any sizes. Rows past the groups hold NaN and must not change. Takes the seed of its draws and
// their number; a kind before them draws only that one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../cc/check.h"
#include "activations.h"
#include "asked.h"
#include "cuda/matmul/step.h"
#include "cuda/portable/portable.h"
#include "cuda_runtime.h"
#include "formats/element_type.h"
#include "formats/fp8_block128.h"

namespace jax_ep {
namespace {

using cuda::ExpertsStep;
using cuda::MatmulKind;
using cuda::MatmulStep;
using jax_ep::Activation;
using Format = Fp8Block128Format;

constexpr const char* kNames[] = {"fprop",
                                  "dgrad",
                                  "gate_up",
                                  "down_dgrad",
                                  "wgrad",
                                  "fp8_matmul",
                                  "fp8_gate_up",
                                  "fp8_down_dgrad",
                                  "fp8_wgrad",
                                  "experts",
                                  "portable_fprop",
                                  "portable_dgrad",
                                  "portable_gate_up",
                                  "portable_down_dgrad",
                                  "portable_wgrad"};
constexpr int64_t kExperts = 9;              // both matmuls; those before it are kinds
constexpr int64_t kPortable = kExperts + 1;  // the first of the portable ones
constexpr int64_t kBlock = Format::kBlock;

// ---- What is multiplied -------------------------------------------------------------------------

struct Draws {
  MatmulKind kind;
  bool portable, exact;
  ElementType element, out;
  int64_t m, k, n;
  std::vector<int32_t> sizes;
  bool keep;               // whether gate and up are kept
  bool in_place;           // whether their cotangents overwrite them
  bool scales_transposed;  // of B
  bool nans;               // also in groups
  float magnitude;         // of A
  // Gate and up as matrices of their own; of kWgrad and kFp8Wgrad, rows of B with two sides.
  bool pair;
  int64_t side;  // of kWgrad and kFp8Wgrad
  bool bias;
  ActivationOptions activation;

  bool fp8() const { return IsFp8(kind); }
  bool wgrad() const { return IsWgrad(kind); }
  bool fp8_wgrad() const { return kind == MatmulKind::kFp8Wgrad; }
  bool gate_up() const { return kind == MatmulKind::kGateUp || kind == MatmulKind::kFp8GateUp; }
  bool down_dgrad() const {
    return kind == MatmulKind::kDownDgrad || kind == MatmulKind::kFp8DownDgrad;
  }
  bool b_mn_major() const { return kind == MatmulKind::kFprop || kind == MatmulKind::kGateUp; }
  int64_t groups() const { return static_cast<int64_t>(sizes.size()); }
  int64_t sides() const { return gate_up() ? 2 : 1; }
  int64_t k_sides() const { return kind == MatmulKind::kDgrad && pair ? 2 : 1; }
  int64_t b_sides() const { return wgrad() && pair ? 2 : 1; }
  // Of a group's matrix or matrices in B.
  int64_t matrices() const { return sides() * k_sides(); }
  bool has_activation() const { return gate_up() || down_dgrad(); }
  bool may_have_bias() const {
    return gate_up() || kind == MatmulKind::kFprop || kind == MatmulKind::kFp8Matmul;
  }
  // Of an element of operands, and of results that have its type.
  int64_t bytes() const { return fp8() ? 1 : ElementBytes(element); }
  // How far off a product may be for the rounding of float32 factors.
  double product_error() const {
    if (element != ElementType::kFloat32) return 0;
    return exact ? 0x1p-20 : 0x1p-9;
  }
};

std::string Text(const Draws& draws) {
  std::string text = draws.portable ? "portable_" : "";
  text += kNames[static_cast<int>(draws.kind)];
  const auto add = [&](const char* name, auto value) {
    text += std::string(" ") + name + " " + std::to_string(value);
  };
  add("element", int64_t(draws.element)), add("out", int64_t(draws.out));
  add("M", draws.m), add("K", draws.k), add("N", draws.n);
  add("exact", draws.exact), add("keep", draws.keep), add("in_place", draws.in_place);
  add("transposed", draws.scales_transposed), add("nans", draws.nans);
  add("magnitude", std::log2(draws.magnitude));
  add("pair", draws.pair), add("side", draws.side), add("bias", draws.bias);
  text += " " + std::string(kWordsOf<Activation>[static_cast<size_t>(draws.activation.activation)]);
  add("alpha", draws.activation.alpha), add("limit", draws.activation.limit);
  text += " sizes";
  for (const int32_t size : draws.sizes) text += " " + std::to_string(size);
  return text + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

int32_t DrawSize(Random& random) {
  constexpr int32_t kEdges[] = {0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 200, 256, 257};
  switch (random.In(0, 7)) {
    case 0:
      return 0;
    case 1:
      return -static_cast<int32_t>(random.In(1, 300));
    case 2:
    case 3:
      return static_cast<int32_t>(random.In(1, 20));
    case 4:
      return static_cast<int32_t>(random.In(1, 200));
    default:
      return kEdges[random.In(0, std::size(kEdges) - 1)];
  }
}

// Groups of kFp8Wgrad are filled up to whole blocks.
template <typename Int>
Int Padded(Int rows) {
  return rows <= 0 ? rows : static_cast<Int>((rows + kBlock - 1) / kBlock * kBlock);
}

Draws Draw(Random& random, MatmulKind kind, bool portable = false) {
  Draws draws{};
  draws.kind = kind, draws.portable = portable;
  draws.element = random.OneIn(2) ? ElementType::kBFloat16 : ElementType::kFloat16;
  if (portable && random.OneIn(2)) draws.element = ElementType::kFloat32;
  draws.exact = portable && random.OneIn(2);
  const bool sums = kind == MatmulKind::kFprop || kind == MatmulKind::kDgrad;
  const bool may_be_float = draws.wgrad() || kind == MatmulKind::kFp8Matmul || (portable && sums);
  draws.out = random.OneIn(2) && may_be_float ? ElementType::kFloat32 : draws.element;
  const int64_t align = ColumnsAlign(kind);
  const auto draw_columns = [&]() -> int64_t {
    if (align == kBlock) return kBlock * random.In(1, 3);
    return random.OneIn(3) ? 64 * random.In(1, 5) : align * random.In(1, 42);
  };
  draws.k = draw_columns(), draws.n = draw_columns();
  // Several times more blocks of K than there are stages.
  if (random.OneIn(6)) draws.k += IsFp8(kind) ? kBlock * random.In(4, 8) : 64 * random.In(4, 12);
  int64_t groups = random.In(1, 5);
  // More than a warp has lanes.
  const bool many = random.OneIn(12);
  if (many) {
    groups = random.In(30, 70);
    draws.k = align * random.In(1, align == kBlock ? 1 : 9);
    draws.n = align * random.In(1, align == kBlock ? 1 : 9);
  }
  int64_t rows = 0;
  for (int64_t i = 0; i < groups; ++i) {
    int32_t size = many ? static_cast<int32_t>(random.In(-2, 4)) : DrawSize(random);
    if (many && random.OneIn(20)) size = static_cast<int32_t>(random.In(1, 140));
    if (draws.fp8_wgrad()) size = Padded(many ? size - 3 : size);
    draws.sizes.push_back(size);
    rows += std::max(size, 0);
  }
  draws.m = rows + (random.OneIn(2) ? 0 : random.In(0, 150));
  if (draws.fp8_wgrad()) draws.m = Padded(draws.m);
  if (random.OneIn(4)) {
    draws.m = draws.fp8_wgrad() ? Padded(random.In(0, rows)) : random.In(0, rows);
    if (random.OneIn(3)) draws.sizes[random.Bits() % draws.sizes.size()] = INT32_MAX;
  }
  draws.keep = random.OneIn(2);
  draws.in_place = random.OneIn(2);
  draws.scales_transposed = random.OneIn(2);
  draws.nans = random.OneIn(3);
  draws.magnitude = random.OneIn(3) ? 0x1p-10f : 1.0f;
  if (kind == MatmulKind::kFp8DownDgrad && random.OneIn(2)) draws.magnitude = 0x1p-40f;
  const bool may_be_pair = kind == MatmulKind::kGateUp || kind == MatmulKind::kDgrad;
  draws.pair = (may_be_pair || draws.wgrad()) && random.OneIn(2);
  draws.side = draws.pair && draws.wgrad() ? random.In(0, 1) : 0;
  draws.bias = draws.may_have_bias() && random.OneIn(2);
  if (draws.has_activation()) {
    draws.activation.activation = static_cast<Activation>(
        random.OneIn(3) ? 0 : random.In(0, kWordsOf<Activation>.size() - 1));
    draws.activation.alpha = random.OneIn(2) ? 1.702f : 1.0f;
    draws.activation.limit = random.OneIn(2) ? 0.5f : 3.0f;
  }
  return draws;
}

// Memory of the emulated GPU, and its initial contents.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t count) {
    CHECK(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)) == cudaSuccess);
    count_ = count;
    KeepAsFirst();
  }
  int64_t count() const { return count_; }
  void KeepAsFirst() { first_.assign(data_, data_ + count_); }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  bool unchanged(int64_t from, int64_t to) const {
    return from >= to || std::memcmp(data_ + from, first_.data() + from,
                                     static_cast<size_t>(to - from) * sizeof(T)) == 0;
  }
  bool unchanged() const { return unchanged(0, count_); }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
  std::vector<T> first_;
};

// The numbers that elements or codes stand for.
using Values = std::vector<double>;

float FloatAt(const Array<uint8_t>& array, ElementType element, int64_t at) {
  return VisitElement(element, [&]<typename Element>(Element) {
    Element value;
    std::memcpy(&value, array.data() + at * static_cast<int64_t>(sizeof value), sizeof value);
    return ToFloat(value);
  });
}

float Uniform(Random& random) {
  return static_cast<float>(static_cast<double>(random.In(-1000, 1000)) / 1000);
}

// Fills `count` elements with numbers up to `magnitude`, and returns them.
Values FillElements(Random& random, const Array<uint8_t>& to, ElementType element, int64_t count,
                    float magnitude) {
  Values values(static_cast<size_t>(count));
  VisitElement(element, [&]<typename Element>(Element) {
    for (int64_t i = 0; i < count; ++i) {
      const Element value = FromFloat<Element>(Uniform(random) * magnitude);
      std::memcpy(to.data() + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
      values[static_cast<size_t>(i)] = ToFloat(value);
    }
  });
  return values;
}

constexpr uint16_t kNanBits = 0x7FFF;  // NaN in either 16-bit type
constexpr uint32_t kFloatNanBits = 0x7FFFFFFF;

// A draw's operands and results in memory, and the operands as numbers.
struct Case {
  Draws draws;
  std::vector<int64_t> starts;  // of groups, then the end of the last one
  Array<int32_t> sizes;
  Array<uint8_t> a, b, gate_up_rows, to_gate_up_rows, d;
  Array<float> a_scales, b_scales, d_scales, bias;
  Values a_values, b_values, gate_up_values;
  MatmulStep step{};

  Case(const Draws& of, Random& random) : draws(of) {
    const int64_t m = of.m, k = of.k, n = of.n;
    starts = {0};
    sizes = Array<int32_t>(of.groups());
    for (int64_t i = 0; i < of.groups(); ++i) {
      sizes[i] = of.sizes[static_cast<size_t>(i)];
      starts.push_back(std::min(m, starts.back() + std::max(sizes[i], 0)));
    }
    const int64_t b_count = of.wgrad() ? m * of.b_sides() * n : of.groups() * of.matrices() * n * k;
    const int64_t bytes = of.bytes(), a_count = m * of.k_sides() * k;
    a = Array<uint8_t>(a_count * bytes), b = Array<uint8_t>(b_count * bytes);
    if (of.fp8_wgrad()) {
      FillFp8Wgrad(random);
    } else if (of.fp8()) {
      FillFp8(random, b_count);
    } else {
      a_values = FillElements(random, a, of.element, a_count, of.magnitude);
      b_values = FillElements(random, b, of.element, b_count, 1.0f);
    }
    DrawNans(random);
    step.kind = of.kind, step.element = of.element;
    step.portable = of.portable, step.exact = of.exact;
    // Other kinds leave it at its default.
    if (of.wgrad() || of.kind == MatmulKind::kFp8Matmul || of.portable) step.out_element = of.out;
    step.m = m, step.groups = of.groups(), step.k = k, step.n = n;
    step.sizes = sizes.data(), step.a = a.data(), step.b = b.data();
    static_cast<ActivationOptions&>(step) = of.activation;
    if (of.pair && !of.wgrad()) step.b_up = b.data() + of.groups() * n * k * bytes;
    step.b_sides = of.b_sides();
    if (of.wgrad()) step.b = b.data() + of.side * n * (of.fp8() ? m : bytes);
    if (of.bias) {
      bias = Array<float>(of.groups() * of.sides() * n);
      for (int64_t i = 0; i < bias.count(); ++i) bias[i] = Uniform(random);
      step.bias = bias.data();
    }
    if (of.down_dgrad() || (of.gate_up() && of.keep)) {
      gate_up_rows = Array<uint8_t>(m * 2 * n * (of.fp8() ? 2 : bytes));
      step.gate_up_rows = gate_up_rows.data();
    }
    if (of.down_dgrad()) {
      gate_up_values = FillElements(random, gate_up_rows, of.element, m * 2 * n, 6.0f);
      gate_up_rows.KeepAsFirst();
      if (!of.in_place) to_gate_up_rows = Array<uint8_t>(m * 2 * n * (of.fp8() ? 2 : bytes));
      step.to_gate_up_rows = of.in_place ? gate_up_rows.data() : to_gate_up_rows.data();
    }
    MakeOut();
  }

  // Sets element `at` of an operand to NaN.
  void SetNan(bool of_a, int64_t at) {
    const Array<uint8_t>& array = of_a ? a : b;
    uint8_t* to = array.data() + Place(of_a, at) * draws.bytes();
    std::memcpy(to, &kNanBits, draws.fp8() ? 1 : 2);
    if (draws.bytes() == 4) std::memcpy(to, &kFloatNanBits, 4);
    if (draws.fp8()) *to = static_cast<uint8_t>(E4M3::kNan);
    (of_a ? a_values : b_values)[static_cast<size_t>(at)] =
        std::numeric_limits<double>::quiet_NaN();
  }

  // Where element `at` of an operand's values lies: rows of kFp8Wgrad are transposed.
  int64_t Place(bool of_a, int64_t at) const {
    if (!draws.fp8_wgrad()) return at;
    const int64_t width = of_a ? draws.k : draws.b_sides() * draws.n;
    return at % width * draws.m + at / width;
  }

  // The index of element k of column c, side s, of a group's matrix in B.
  int64_t BAt(int64_t group, int64_t k, int64_t s, int64_t c) const {
    const int64_t n = draws.n, all = draws.k, sides = draws.pair ? 1 : draws.sides();
    // The matrices of up lie behind all those of gate.
    if (draws.pair) group += std::exchange(s, 0) * draws.groups();
    return draws.b_mn_major() ? ((group * all + k) * sides + s) * n + c
                              : ((group * sides + s) * n + c) * all + k;
  }

 private:
  void FillFp8(Random& random, int64_t b_count) {
    const int64_t m = draws.m, k = draws.k, n = draws.n;
    const int64_t k_blocks = k / kBlock, n_blocks = n / kBlock, sides = draws.sides();
    a_scales = Array<float>(m * k_blocks);
    b_scales = Array<float>(draws.groups() * k_blocks * sides * n_blocks);
    const auto draw_scale = [&] { return (1.5f + Uniform(random)) / 448; };
    for (int64_t i = 0; i < m * k_blocks; ++i) a_scales[i] = draw_scale() * draws.magnitude;
    for (int64_t i = 0; i < draws.groups() * k_blocks * sides * n_blocks; ++i) {
      b_scales[i] = draw_scale();
    }
    step.a_scales = a_scales.data(), step.b_scales = b_scales.data();
    step.scales_per_group = k_blocks * sides * n_blocks;
    if (draws.scales_transposed) {
      step.scales_per_k = sides * n_blocks, step.scales_per_side = n_blocks, step.scales_per_n = 1;
    } else {
      step.scales_per_k = 1, step.scales_per_n = k_blocks;
      step.scales_per_side = n_blocks * k_blocks;
    }
    const auto draw_code = [&] {
      return static_cast<uint8_t>(random.In(0, 0x7E) | (random.OneIn(2) ? 0x80 : 0));
    };
    for (int64_t i = 0; i < m * k; ++i) {
      a[i] = draw_code();
      a_values.push_back(double{E4M3::Decode(a[i])} * a_scales[i / kBlock]);
    }
    for (int64_t i = 0; i < b_count; ++i) {
      b[i] = draw_code();
      const int64_t line = i / k, group = line / (sides * n), side = line / n % sides;
      const float scale =
          b_scales[group * step.scales_per_group + i % k / kBlock * step.scales_per_k +
                   side * step.scales_per_side + line % n / kBlock * step.scales_per_n];
      b_values.push_back(double{E4M3::Decode(b[i])} * scale);
    }
  }

  void FillFp8Wgrad(Random& random) {
    const int64_t k_blocks = draws.k / kBlock, n_blocks = draws.b_sides() * draws.n / kBlock;
    const auto fill = [&](bool of_a, int64_t blocks, float magnitude) {
      Array<float>& scales = of_a ? a_scales : b_scales;
      scales = Array<float>(draws.m / kBlock * blocks);
      for (int64_t i = 0; i < scales.count(); ++i) {
        scales[i] = std::ldexp(magnitude, static_cast<int>(random.In(-12, -7)));
      }
      const int64_t width = blocks * kBlock;
      for (int64_t i = 0; i < draws.m * width; ++i) {
        const auto code = static_cast<uint8_t>(random.In(0, 0x7E) | (random.OneIn(2) ? 0x80 : 0));
        (of_a ? a : b)[Place(of_a, i)] = code;
        const float scale = scales[i / width / kBlock * blocks + i % width / kBlock];
        (of_a ? a_values : b_values).push_back(double{E4M3::Decode(code)} * scale);
      }
    };
    fill(true, k_blocks, draws.magnitude);
    fill(false, n_blocks, 1.0f);
    step.a_scales = a_scales.data();
    step.b_scales = b_scales.data() + draws.side * draws.n / kBlock;
    step.scales_per_k = n_blocks, step.scales_per_n = 1;
  }

  // Rows past the groups are NaN; sometimes elements of other rows and of matrices are, too.
  void DrawNans(Random& random) {
    const int64_t k = draws.k, n = draws.n;
    const auto row = [&](int64_t of) {
      const int64_t of_a = draws.k_sides() * k, of_b = draws.b_sides() * n;
      for (int64_t i = 0; i < of_a; ++i) SetNan(true, of * of_a + i);
      for (int64_t i = 0; draws.wgrad() && i < of_b; ++i) SetNan(false, of * of_b + i);
    };
    for (int64_t i = starts.back(); i < draws.m; ++i) row(i);
    for (int64_t i = 0; draws.nans && i < 3 && draws.m > 0; ++i) {
      const int64_t at = random.In(0, draws.m - 1);
      random.OneIn(2) ? row(at) : SetNan(true, at * draws.k_sides() * k + random.In(0, k - 1));
      if (random.OneIn(2) && !b_values.empty()) {
        SetNan(false, random.In(0, static_cast<int64_t>(b_values.size()) - 1));
      }
    }
  }

  void MakeOut() {
    const int64_t m = draws.m, k = draws.k, n = draws.n;
    const int64_t bytes = ElementBytes(draws.out);
    switch (draws.kind) {
      case MatmulKind::kWgrad:
      case MatmulKind::kFp8Wgrad:
        d = Array<uint8_t>(draws.groups() * k * n * bytes);
        break;
      case MatmulKind::kFprop:
      case MatmulKind::kDgrad:
      case MatmulKind::kFp8Matmul:
        d = Array<uint8_t>(m * n * bytes);
        break;
      case MatmulKind::kGateUp:
        d = Array<uint8_t>(m * n * draws.bytes());
        break;
      case MatmulKind::kDownDgrad:
        break;
      case MatmulKind::kFp8GateUp:
        d = Array<uint8_t>(m * n), d_scales = Array<float>(m * n / kBlock);
        break;
      case MatmulKind::kFp8DownDgrad:
        d = Array<uint8_t>(m * 2 * n), d_scales = Array<float>(m * 2 * n / kBlock);
        break;
    }
    step.d = d.data(), step.d_scales = d_scales.data();
  }
};

// ---- What must come out -------------------------------------------------------------------------

About Sum(double value, double absolute, int64_t count) {
  return {value, static_cast<double>(count + 8) * kUlp * absolute + kTiny};
}

About BackToUp(const ActivationOptions& options, const About& cotangent, double gate, double up) {
  const double by = UpDerivative(options, up);
  About back = Product(cotangent, GateOf(options, {gate, 0}).value);
  back.value *= by, back.error *= by;
  // In 16 bits a bounded one is rounded twice.
  if (by == 0.5) back.error += std::fabs(back.value) * 0x1p-8;
  return back;
}

About BackToGate(const ActivationOptions& options, const About& cotangent, double gate, double up) {
  return Product(Product(cotangent, GateOf(options, {gate, 0}).derivative), UpOf(options, {up, 0}));
}

// How far off `value` may be after rounding to `element`.
double RoundingOf(ElementType element, double value) {
  if (element == ElementType::kBFloat16) return std::fabs(value) * 0x1p-8;
  if (element == ElementType::kFloat16) return std::fabs(value) * 0x1p-11 + 0x1p-25;
  return std::fabs(value) * kUlp;
}

void CheckElement(const Array<uint8_t>& array, ElementType element, int64_t at, const About& want,
                  const char* what, int64_t row, int64_t column) {
  const double got = FloatAt(array, element, at);
  if (want.nan()
          ? std::isnan(got)
          : std::fabs(got - want.value) <= (want.error + RoundingOf(element, want.value)) * 1.01) {
    return;
  }
  std::fprintf(stderr, "%s at row %lld, column %lld: %.9g, not %.9g (by %.3g)\n", what,
               static_cast<long long>(row), static_cast<long long>(column), got, want.value,
               want.error);
  CHECK(!"as in float64");
}

// Checks a block of codes and their scale.
void CheckCodes(const Case& c, int64_t block, const About* want, float least, int64_t row) {
  const float scale = c.d_scales[block];
  bool nan = false;
  double amax = 0, error = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    nan |= want[i].nan();
    if (std::fabs(want[i].value) > amax) amax = std::fabs(want[i].value);
    error = std::max(error, want[i].error);
  }
  const auto fails = [&](int64_t i, double by) {
    std::fprintf(
        stderr,
        "block %lld of row %lld: scale %.9g, largest %.9g; code %lld %d, not %.9g by %.3g\n",
        static_cast<long long>(block), static_cast<long long>(row), scale, amax,
        static_cast<long long>(i), c.d[block * kBlock + i], want[i].value, by);
    CHECK(!"codes and scales as in float64");
  };
  if (nan) {
    if (FloatBits(scale) != 0x7FC00000u) fails(0, 0);
    for (int64_t i = 0; i < kBlock; ++i) {
      if (c.d[block * kBlock + i] != E4M3::kNan) fails(i, 0);
    }
    return;
  }
  const double at_least = std::max(amax - error, double{least}) / 448;
  const double at_most = std::max(amax + error, double{least}) / 448;
  if (!(scale >= at_least * (1 - kFewUlps) && scale <= at_most * (1 + kFewUlps))) fails(0, error);
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint8_t code = c.d[block * kBlock + i];
    const double half_step = std::max(std::fabs(want[i].value) * 0x1p-4, scale * 0x1p-10);
    const double by = (half_step + want[i].error) * 1.01;
    const double got = double{E4M3::Decode(code)} * scale;
    if ((code & 0x7F) == E4M3::kNan || !(std::fabs(got - want[i].value) <= by)) fails(i, by);
  }
}

// Products of a row of a group with its matrix's columns, as [side][column].
std::vector<About> RowSums(const Case& c, int64_t group, int64_t row) {
  const int64_t k = c.draws.k, n = c.draws.n, sides = c.draws.sides();
  std::vector<About> sums;
  const int64_t step = c.BAt(0, 1, 0, 0), k_sides = c.draws.k_sides();
  for (int64_t at = 0; at < sides * n; ++at) {
    double sum = 0, absolute = 0;
    for (int64_t side = 0; side < k_sides; ++side) {
      const double* b = c.b_values.data() + c.BAt(group, 0, at / n + side, at % n);
      const double* a = c.a_values.data() + (row * k_sides + side) * k;
      for (int64_t i = 0; i < k; ++i) {
        const double product = a[i] * b[i * step];
        sum += product, absolute += std::fabs(product);
      }
    }
    double bias_error = 0;
    if (c.draws.bias) {
      const double bias = double{c.bias[group * sides * n + at]};
      sum += bias, bias_error = std::fabs(bias) * kUlp;
    }
    sums.push_back(Sum(sum, absolute, k * k_sides));
    sums.back().error += c.draws.product_error() * absolute + bias_error;
  }
  return sums;
}

void CheckRow(const Case& c, int64_t group, int64_t row) {
  const Draws& draws = c.draws;
  const int64_t n = draws.n;
  const std::vector<About> sums = RowSums(c, group, row);
  if (draws.gate_up()) {
    std::vector<About> h;
    for (int64_t i = 0; i < n; ++i) {
      h.push_back(Activated(draws.activation, sums[static_cast<size_t>(i)],
                            sums[static_cast<size_t>(n + i)]));
    }
    for (int64_t i = 0; draws.keep && i < 2 * n; ++i) {
      CheckElement(c.gate_up_rows, draws.element, row * 2 * n + i, sums[static_cast<size_t>(i)],
                   "gate and up", row, i);
    }
    for (int64_t i = 0; !draws.fp8() && i < n; ++i) {
      CheckElement(c.d, draws.element, row * n + i, h[static_cast<size_t>(i)], "h", row, i);
    }
    for (int64_t i = 0; draws.fp8() && i < n; i += kBlock) {
      CheckCodes(c, (row * n + i) / kBlock, h.data() + i, 1e-4f, row);
    }
    return;
  }
  if (draws.down_dgrad()) {
    std::vector<About> back(static_cast<size_t>(2 * n));
    for (int64_t i = 0; i < n; ++i) {
      const double gate = c.gate_up_values[static_cast<size_t>(row * 2 * n + i)];
      const double up = c.gate_up_values[static_cast<size_t>((row * 2 + 1) * n + i)];
      const About& sum = sums[static_cast<size_t>(i)];
      back[static_cast<size_t>(i)] = BackToGate(draws.activation, sum, gate, up);
      back[static_cast<size_t>(n + i)] = BackToUp(draws.activation, sum, gate, up);
    }
    const Array<uint8_t>& to = draws.in_place ? c.gate_up_rows : c.to_gate_up_rows;
    for (int64_t i = 0; i < 2 * n; ++i) {
      CheckElement(to, draws.element, row * 2 * n + i, back[static_cast<size_t>(i)],
                   "cotangents of gate and up", row, i);
    }
    for (int64_t i = 0; draws.fp8() && i < 2 * n; i += kBlock) {
      CheckCodes(c, (row * 2 * n + i) / kBlock, back.data() + i, kOfGradients, row);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    CheckElement(c.d, draws.out, row * n + i, sums[static_cast<size_t>(i)], "out", row, i);
  }
}

void CheckWgrad(const Case& c, int64_t group) {
  const int64_t k = c.draws.k, n = c.draws.n;
  const int64_t begin = c.starts[static_cast<size_t>(group)];
  const int64_t end = c.starts[static_cast<size_t>(group + 1)];
  std::vector<double> sums(static_cast<size_t>(n)), absolute(static_cast<size_t>(n));
  for (int64_t i = 0; i < k; ++i) {
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(absolute.begin(), absolute.end(), 0.0);
    for (int64_t row = begin; row < end; ++row) {
      const double a = c.a_values[static_cast<size_t>(row * k + i)];
      for (int64_t j = 0; j < n; ++j) {
        const int64_t line = row * c.draws.b_sides() + c.draws.side;
        const double product = a * c.b_values[static_cast<size_t>(line * n + j)];
        sums[static_cast<size_t>(j)] += product;
        absolute[static_cast<size_t>(j)] += std::fabs(product);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      About want = Sum(sums[static_cast<size_t>(j)], absolute[static_cast<size_t>(j)], end - begin);
      want.error += c.draws.product_error() * absolute[static_cast<size_t>(j)];
      if (begin == end) want = {};
      CheckElement(c.d, c.draws.out, (group * k + i) * n + j, want, "out", group * k + i, j);
    }
  }
}

// Rows past the groups have not changed.
void CheckRest(const Case& c) {
  if (c.draws.wgrad()) return;
  const int64_t m = c.draws.m, n = c.draws.n, first = c.starts.back();
  const auto check = [&](const auto& array, int64_t row) {
    if (array.data() != nullptr) CHECK(array.unchanged(first * row, m * row));
  };
  const int64_t bytes = c.draws.fp8() && c.draws.kind != MatmulKind::kFp8Matmul ? 1
                        : c.draws.gate_up() ? c.draws.bytes()
                                            : ElementBytes(c.draws.out);
  const int64_t sides = c.draws.kind == MatmulKind::kFp8DownDgrad ? 2 : 1;
  check(c.d, sides * n * bytes);
  check(c.d_scales, sides * n / kBlock);
  const int64_t of_gate_up = c.draws.fp8() ? 2 : c.draws.bytes();
  check(c.to_gate_up_rows, 2 * n * of_gate_up);
  check(c.gate_up_rows, 2 * n * of_gate_up);
  if (c.draws.down_dgrad() && !c.draws.in_place) CHECK(c.gate_up_rows.unchanged());
}

void Run(const Draws& draws, Random& random) {
  CurrentCase() = Text(draws);
  const Case c(draws, random);
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const auto multiply = draws.portable ? cuda::PortableMatmul : cuda::GroupedMatmul;
  CHECK(multiply(c.step, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  for (int64_t group = 0; group < draws.groups(); ++group) {
    if (draws.wgrad()) {
      CheckWgrad(c, group);
      continue;
    }
    for (int64_t row = c.starts[static_cast<size_t>(group)];
         row < c.starts[static_cast<size_t>(group + 1)]; ++row) {
      CheckRow(c, group, row);
    }
  }
  CheckRest(c);
  emulator::Reset();
}

// Both products of experts give, bit for bit, what each gives when it is called alone.
void RunExperts(Random& random) {
  const bool fp8 = random.OneIn(2);
  Draws up = Draw(random, fp8 ? MatmulKind::kFp8GateUp : MatmulKind::kGateUp);
  up.keep = false, up.scales_transposed = true;
  Draws down = up;
  down.kind = fp8 ? MatmulKind::kFp8Matmul : MatmulKind::kFprop;
  down.pair = false, down.bias = random.OneIn(2);
  std::swap(down.k, down.n);
  if (fp8 && random.OneIn(2)) down.out = ElementType::kFloat32;
  CurrentCase() = "experts: " + Text(up);
  const Case first(up, random), second(down, random);
  MatmulStep alone = second.step;
  alone.a = first.step.d, alone.a_scales = first.step.d_scales;
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(cuda::GroupedMatmul(first.step, stream) == cudaSuccess);
  CHECK(cuda::GroupedMatmul(alone, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  const int64_t m = up.m, hidden = up.k, inner = up.n;
  const int64_t out_bytes = hidden * ElementBytes(down.out), h_bytes = inner * (fp8 ? 1 : 2);
  const Array<uint8_t> h(m * h_bytes), out(m * out_bytes);
  const Array<float> h_scales(fp8 ? m * inner / kBlock : 0);
  ExpertsStep step{};
  static_cast<ActivationOptions&>(step) = up.activation;
  step.fp8 = fp8, step.element = up.element, step.out_element = down.out;
  step.m = m, step.groups = up.groups(), step.hidden = hidden, step.inner = inner;
  step.sizes = first.step.sizes, step.a = first.step.a, step.a_scales = first.step.a_scales;
  step.gate_up = first.step.b, step.up = first.step.b_up;
  step.gate_up_scales = first.step.b_scales, step.gate_up_bias = first.step.bias;
  step.down = second.step.b, step.down_scales = second.step.b_scales;
  step.down_bias = second.step.bias;
  step.h = h.data(), step.h_scales = h_scales.data(), step.d = out.data();
  CHECK(cuda::ApplyExperts(step, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  const int64_t grouped_rows = first.starts.back();
  const auto same = [&](const void* one, const void* other, int64_t row_bytes) {
    return grouped_rows == 0 ||
           std::memcmp(one, other, static_cast<size_t>(grouped_rows * row_bytes)) == 0;
  };
  CHECK(same(h.data(), first.d.data(), h_bytes));
  CHECK(!fp8 || same(h_scales.data(), first.d_scales.data(), inner / kBlock * 4));
  CHECK(same(out.data(), second.d.data(), out_bytes));
  CHECK(out.unchanged(grouped_rows * out_bytes, m * out_bytes));
  emulator::Reset();
}

// Steps that do not fit are refused.
void CheckRefusals(Random& random) {
  Draws draws = Draw(random, MatmulKind::kFprop);
  draws.sizes = {5, 3};
  draws.m = 8, draws.k = 64, draws.n = 64;
  CurrentCase() = "refusals";
  const Case c(draws, random);
  const auto refused = [&](auto change) {
    MatmulStep step = c.step;
    change(step);
    return cuda::GroupedMatmul(step, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](MatmulStep& step) { step.n = 60; }));
  CHECK(refused([](MatmulStep& step) { step.k = 0; }));
  CHECK(refused([](MatmulStep& step) { step.m = -1; }));
  CHECK(refused([](MatmulStep& step) { step.element = ElementType::kFloat32; }));
  CHECK(refused([](MatmulStep& step) { step.a = static_cast<const uint8_t*>(step.a) + 2; }));
  CHECK(refused([](MatmulStep& step) { step.d = static_cast<uint8_t*>(step.d) + 8; }));
  CHECK(refused([](MatmulStep& step) { step.kind = MatmulKind::kFp8Matmul; }));
  // More row scales than 32 bits count.
  CHECK(refused([](MatmulStep& step) {
    step.kind = MatmulKind::kFp8Matmul;
    step.m = (int64_t{1} << 26) + 1, step.k = 8192, step.n = 128;
  }));
  const auto portably_refused = [&](auto change) {
    MatmulStep step = c.step;
    step.portable = true, step.out_element = step.element;
    change(step);
    return cuda::PortableMatmul(step, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(portably_refused([](MatmulStep& step) { step.n = 60; }));
  CHECK(portably_refused([](MatmulStep& step) { step.k = 0; }));
  CHECK(portably_refused([](MatmulStep& step) { step.m = -1; }));
  CHECK(portably_refused([](MatmulStep& step) { step.d = static_cast<uint8_t*>(step.d) + 8; }));
  CHECK(portably_refused([](MatmulStep& step) { step.kind = MatmulKind::kFp8Matmul; }));
  CHECK(portably_refused([](MatmulStep& step) { step.element = ElementType::kFloat32; }));
  MatmulStep none = c.step;
  none.groups = 0;
  CHECK(cuda::GroupedMatmul(none, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);
  CHECK(c.d.unchanged());
  emulator::Reset();
}

// Long sums of float32 in exact products are as float32 sums them, not as tensor cores do, which
// round every partial sum towards zero.
void CheckLongSums(Random& random) {
  Draws draws = Draw(random, MatmulKind::kDgrad, true);
  draws.element = draws.out = ElementType::kFloat32;
  draws.exact = true, draws.nans = draws.pair = draws.bias = false;
  draws.sizes = {4};
  draws.m = 4, draws.k = 2048, draws.n = 8;
  CurrentCase() = "long sums";
  Case c(draws, random);
  const auto positive = [](const Array<uint8_t>& array, int64_t at) {
    float value;
    std::memcpy(&value, array.data() + 4 * at, 4);
    value = std::fabs(value);
    std::memcpy(array.data() + 4 * at, &value, 4);
    return double{value};
  };
  for (int64_t i = 0; i < draws.m * draws.k; ++i) positive(c.a, i);
  for (int64_t i = 0; i < draws.n * draws.k; ++i) positive(c.b, i);
  CHECK(cuda::PortableMatmul(c.step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);
  for (int64_t row = 0; row < draws.m; ++row) {
    for (int64_t column = 0; column < draws.n; ++column) {
      double sum = 0;
      for (int64_t k = 0; k < draws.k; ++k) {
        sum += positive(c.a, row * draws.k + k) * positive(c.b, column * draws.k + k);
      }
      const double error = positive(c.d, row * draws.n + column) / sum - 1;
      CHECK(std::fabs(error) < 0x1p-19);
    }
  }
  emulator::Reset();
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 42);
  Random random(seed);
  CHECK(cuda::MatmulSupported() && cuda::PreloadMatmulKernels() == cudaSuccess);
  CHECK(cuda::PortableSupported() && cuda::PreloadPortableKernels() == cudaSuccess);
  constexpr int64_t kKinds = std::size(kNames);
  int64_t kind = std::find(std::begin(kNames), std::end(kNames), only) - std::begin(kNames);
  if (kind == kKinds) CheckRefusals(random);
  if (kind == kKinds) CheckLongSums(random);
  for (int64_t i = 0; i < draws; ++i) {
    const int64_t of = kind < kKinds ? kind : i % kKinds;
    if (of == kExperts) {
      RunExperts(random);
    } else if (of < kExperts) {
      Run(Draw(random, static_cast<MatmulKind>(of)), random);
    } else {
      Run(Draw(random, static_cast<MatmulKind>(of - kPortable), true), random);
    }
  }
  std::printf("%lld matmuls: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
