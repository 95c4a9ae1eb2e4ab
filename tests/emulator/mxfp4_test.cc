// Matmuls of few rows by matrices in mxfp4 (cuda/matmul/mxfp4) on emulated GPUs against sums in
// float64. Rows past the groups hold NaN and must not change. Takes the seed of its draws and their
// number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../cc/check.h"
#include "activations.h"
#include "asked.h"
#include "cuda/matmul/mxfp4.h"
#include "cuda_runtime.h"
#include "formats/e4m3.h"
#include "formats/numbers.h"

namespace jax_ep {
namespace {

constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

template <typename T>
T* Made(int64_t count) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)) == cudaSuccess);
  return data;
}

struct Draws {
  bool gate_up, fp8, as_float;
  int64_t rows, k, columns;
  std::vector<int32_t> sizes;
  bool bias;
  ActivationOptions activation;
  bool extremes;  // scales beyond a single bfloat16 factor, NaN among rows and scales

  int64_t sides() const { return gate_up ? 2 : 1; }
  int64_t groups() const { return static_cast<int64_t>(sizes.size()); }
};

Draws Draw(Random& random) {
  Draws draws{};
  draws.gate_up = random.OneIn(2), draws.fp8 = random.OneIn(2), draws.as_float = random.OneIn(2);
  draws.extremes = random.OneIn(3);
  // Fewer or more units than a block has warps.
  draws.k = 128 * (random.OneIn(4) ? random.In(7, 18) : random.In(1, 4));
  if (!draws.fp8 && random.OneIn(2)) draws.k += 32 * random.In(-3, 3);
  draws.columns = (draws.gate_up ? 64 : 128) * random.In(1, 2);
  if (!draws.fp8 && random.OneIn(2)) draws.columns = 8 * random.In(1, 33);
  const int64_t groups = random.OneIn(8) ? random.In(31, 40) : random.In(1, 5);
  // Each number of rows for which there is a kernel, and many rows.
  const bool many = random.OneIn(3);
  const int64_t most = many ? random.In(40, 200) : int64_t{4} << random.In(0, 3);
  int64_t rows = 0;
  for (int64_t i = 0; i < groups; ++i) {
    int32_t size = random.OneIn(3) ? 0 : static_cast<int32_t>(random.In(1, groups > 5 ? 3 : most));
    if (random.OneIn(20)) size = -size;
    draws.sizes.push_back(size);
    rows += std::max(size, 0);
  }
  draws.rows = rows + (random.OneIn(2) ? 0 : random.In(0, 20));
  // Room alone decides about the kernel.
  if (random.OneIn(6)) draws.rows = std::max(draws.rows, groups * 33);
  if (random.OneIn(6)) draws.rows = random.In(0, rows);
  draws.bias = random.OneIn(2);
  if (draws.gate_up) {
    const int64_t last = kWordsOf<Activation>.size() - 1;
    draws.activation = {static_cast<Activation>(random.In(0, last)), 1.702f, 3.0f};
  }
  return draws;
}

std::string Text(const Draws& draws) {
  std::string text = draws.gate_up ? "gate_up" : "fprop";
  text += draws.fp8 ? " fp8" : " bf16";
  text += draws.as_float ? " float32" : "";
  text += draws.extremes ? " extremes" : "";
  text += draws.bias ? " bias " : " ";
  text += kWordsOf<Activation>[static_cast<size_t>(draws.activation.activation)];
  for (const int64_t size : {draws.rows, draws.k, draws.columns})
    text += ' ' + std::to_string(size);
  text += " sizes";
  for (const int32_t size : draws.sizes) text += ' ' + std::to_string(size);
  return text + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

struct Weights {
  uint8_t* laid;
  std::vector<double> values;  // [L, K, sides, N]
};

// Random codes and scales, as protocol/matmul_steps.h lays them out.
Weights MadeWeights(Random& random, const Draws& draws) {
  const int64_t sides = draws.sides(), n = draws.columns, k = draws.k;
  const int64_t tiles = (sides * n + kMxfp4BlockN - 1) / kMxfp4BlockN, atoms = Mxfp4Atoms(k);
  const int64_t bytes = draws.groups() * tiles * atoms * kMxfp4AtomBytes;
  Weights weights{Made<uint8_t>(bytes), {}};
  weights.values.resize(static_cast<size_t>(draws.groups() * k * sides * n));
  std::memset(weights.laid, 0, static_cast<size_t>(bytes));
  for (int64_t at = 0; at < draws.groups() * tiles * atoms; ++at) {
    uint8_t* atom = weights.laid + at * kMxfp4AtomBytes;
    const int64_t group = at / (tiles * atoms), tile = at / atoms % tiles;
    for (int64_t c = 0; c < kMxfp4BlockN; ++c) {
      const int64_t m = c / 16, h = c / 8 % 2, r = c % 8;
      uint32_t scale = static_cast<uint32_t>(random.In(115, 128));
      if (draws.extremes && random.OneIn(8)) scale = static_cast<uint32_t>(random.In(100, 140));
      if (draws.extremes && random.OneIn(4000)) scale = 255;
      atom[2048 + 16 * r + 2 * m + h] = static_cast<uint8_t>(scale);
      const int64_t run = c / kMxfp4Run, side = run % sides;
      const int64_t column =
          tile * (kMxfp4BlockN / sides) + run / sides * kMxfp4Run + c % kMxfp4Run;
      // Codes past the matrix are zeros.
      const int64_t steps = Min(k - at % atoms * kMxfp4AtomK, column < n ? kMxfp4AtomK : 0);
      if (steps <= 0) atom[2048 + 16 * r + 2 * m + h] = 127;
      for (int64_t i = 0; i < steps; ++i) {
        const uint32_t code = static_cast<uint32_t>(random.In(0, 15));
        constexpr int kPlaces[][4] = {{6, 7, 8, 15}, {3, 4, 5, 12}, {0, 1, 2, 9}, {14, 10, 11, 13}};
        const int64_t q = i % 8 / 2, place = i / 8;
        uint8_t* word = atom + 512 * (m / 2) + 16 * (4 * r + q) + 8 * (m % 2) + 4 * h;
        uint32_t bits = 0;
        for (int bit = 0; bit < 4; ++bit) bits |= (code >> bit & 1) << kPlaces[place][bit];
        const bool is_upper = (i % 2 == 1) != (place == 3);
        if (is_upper) bits <<= 16;
        for (int byte = 0; byte < 4; ++byte) {
          word[byte] = static_cast<uint8_t>(word[byte] | bits >> 8 * byte);
        }
        const double value = (code & 8 ? -1.0 : 1.0) * double{kMagnitudes[code & 7]};
        const int64_t step = at % atoms * kMxfp4AtomK + i;
        weights.values[static_cast<size_t>(((group * k + step) * sides + side) * n + column)] =
            scale == 255 ? std::nan("") : std::ldexp(value, static_cast<int>(scale) - 127);
      }
    }
  }
  return weights;
}

About Sum(const Draws& draws, const std::vector<double>& row, const Weights& weights,
          const float* bias, int64_t group, int64_t side, int64_t column) {
  double sum = 0, absolute = 0;
  for (int64_t k = 0; k < draws.k; ++k) {
    const double weight = weights.values[static_cast<size_t>(
        ((group * draws.k + k) * draws.sides() + side) * draws.columns + column)];
    sum += row[static_cast<size_t>(k)] * weight;
    absolute += std::fabs(row[static_cast<size_t>(k)] * weight);
  }
  if (bias != nullptr) {
    const double added = double{bias[(group * draws.sides() + side) * draws.columns + column]};
    sum += added, absolute += std::fabs(added);
  }
  return {sum, absolute * static_cast<double>(draws.k + 64) * kUlp + 0x1p-110};
}

void Run(const Draws& draws, Random& random) {
  CurrentCase() = Text(draws);
  const int64_t m = draws.rows, k = draws.k, n = draws.columns;
  Mxfp4Step step{};
  static_cast<ActivationOptions&>(step) = draws.activation;
  step.gate_up = draws.gate_up;
  float* bias = nullptr;
  if (draws.bias) {
    const int64_t count = draws.groups() * draws.sides() * n;
    bias = Made<float>(count);
    for (int64_t i = 0; i < count; ++i) {
      bias[i] = static_cast<float>(random.In(-1000, 1000)) / 100;
    }
  }
  step.bias = bias;
  step.out_element = draws.as_float ? ElementType::kFloat32 : ElementType::kBFloat16;
  step.m = m, step.groups = draws.groups(), step.k = k, step.n = n;
  int32_t* sizes = Made<int32_t>(draws.groups());
  std::copy(draws.sizes.begin(), draws.sizes.end(), sizes);
  step.sizes = sizes;
  std::vector<int64_t> starts = {0};
  for (const int32_t size : draws.sizes) {
    starts.push_back(std::min(m, starts.back() + std::max(size, 0)));
  }
  const Weights weights = MadeWeights(random, draws);
  step.b = weights.laid;
  uint8_t* a = Made<uint8_t>(m * k * 2);
  float* scales = draws.fp8 ? Made<float>(m * k / 128) : nullptr;
  std::vector<std::vector<double>> rows(static_cast<size_t>(m));
  for (int64_t row = 0; row < m; ++row) {
    const bool nan = row >= starts.back() || (draws.extremes && random.OneIn(20));
    for (int64_t block = 0; draws.fp8 && block < k / 128; ++block) {
      const float scale = std::ldexp(1.0f + static_cast<float>(random.In(0, 99)) / 100,
                                     static_cast<int>(random.In(-12, 0)));
      scales[row * (k / 128) + block] = nan ? std::nanf("") : scale;
    }
    for (int64_t i = 0; i < k; ++i) {
      double value;
      if (draws.fp8) {
        const uint8_t code =
            static_cast<uint8_t>(random.In(0, 0x7E) | (random.OneIn(2) ? 0x80 : 0));
        const BFloat16 element = FromFloat<BFloat16>(E4M3::Decode(code));  // exact
        std::memcpy(a + (row * k + i) * 2, &element, 2);
        value = double{E4M3::Decode(code)} * scales[row * (k / 128) + i / 128];
      } else {
        const float drawn = static_cast<float>(random.In(-1000, 1000)) / 256;
        const BFloat16 element = nan ? BFloat16{0x7FC0} : FromFloat<BFloat16>(drawn);
        std::memcpy(a + (row * k + i) * 2, &element, 2);
        value = double{ToFloat(element)};
      }
      rows[static_cast<size_t>(row)].push_back(value);
    }
  }
  step.a = a, step.a_scales = scales;
  const int64_t bytes = draws.as_float ? 4 : 2;
  uint8_t* d = Made<uint8_t>(m * n * bytes);
  const std::vector<uint8_t> before(d, d + m * n * bytes);
  step.d = d;
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(cuda::MultiplyMxfp4(step, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  const int64_t grouped_rows = starts.back();
  CHECK(std::equal(before.begin() + grouped_rows * n * bytes, before.end(),
                   d + grouped_rows * n * bytes));
  for (int64_t group = 0; group < draws.groups(); ++group) {
    for (int64_t row = starts[static_cast<size_t>(group)];
         row < starts[static_cast<size_t>(group) + 1]; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        const auto& values = rows[static_cast<size_t>(row)];
        About want = Sum(draws, values, weights, bias, group, 0, column);
        if (draws.gate_up) {
          const About up = Sum(draws, values, weights, bias, group, 1, column);
          want = Activated(draws.activation, want, up);
        }
        double got;
        if (draws.as_float) {
          float value;
          std::memcpy(&value, d + (row * n + column) * 4, 4);
          got = value;
        } else {
          BFloat16 value;
          std::memcpy(&value, d + (row * n + column) * 2, 2);
          got = ToFloat(value);
        }
        const double rounding = std::fabs(want.value) * (draws.as_float ? kUlp : 0x1p-8);
        const bool right = std::isnan(want.value) ? std::isnan(got)
                                                  : std::fabs(got - want.value) <=
                                                        (want.error + rounding) * 1.01 + 0x1p-100;
        if (!right) {
          std::fprintf(stderr, "group %lld, row %lld, column %lld: %.9g, not %.9g (by %.3g)\n",
                       static_cast<long long>(group), static_cast<long long>(row),
                       static_cast<long long>(column), got, want.value, want.error);
          CHECK(!"as in float64");
        }
      }
    }
  }
  emulator::Reset();
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 16);
  Random random(seed);
  CHECK(cuda::PreloadMxfp4Kernels() == cudaSuccess);
  for (int64_t i = 0; i < draws; ++i) Run(Draw(random), random);
  std::printf("%lld matmuls in mxfp4: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
