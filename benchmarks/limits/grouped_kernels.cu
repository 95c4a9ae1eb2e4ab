// Checks the matmul kernels of xla_ffi/cuda/matmul on one Hopper GPU, without JAX, and times them
// beside batched cuBLAS matmuls of the same arithmetic. Prints one JSON object; grouped_kernels.py
// builds and runs it.
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/matmul/step.h"
#include "grouped/cases.cuh"
#include "grouped/cublas.cuh"
#include "grouped/report.cuh"
#include "grouped/start.cuh"
#include "grouped/timing.cuh"
#include "grouped_kernels/products.cuh"

namespace jax_ep::cuda {
namespace {

// Relative to the largest element. Rounding to 16 bits is 2^-9 of an element, to codes 2^-4.
constexpr double kBound = 0.01;
constexpr double kFp8Bound = 0.07;
constexpr int kSamples = 4096;

// Awkward groups: empty ones, ones around the sizes of tiles, and rows after the last group.
struct Shape {
  const char* name;
  int hidden;
  int inner;
  std::vector<int32_t> sizes;
  int rows;
};
const std::vector<Shape> kShapes = {
    {"tiny", 128, 128, {5, 0, 70}, 80},
    {"edges",
     256,
     384,
     {0, 1, 63, 64, 65, 127, 128, 129, 0, 192, 193, 255, 256, 257, 300, 0},
     2100},
    {"odd columns", 200, 72, {100, 3, 0, 250, 17}, 400},
    {"many groups", 384, 128, std::vector<int32_t>(100, 37), 3700},
    {"one group", 512, 640, {1000}, 1000},
};

struct Options {
  double seconds = 1;  // for each time; 0: only checks
  uint64_t seed = 0;
  std::string cublas;
  std::vector<std::string> cases;
  std::string only;
  bool check = true;
  bool once = false;  // runs each product and cuBLAS's once, between a profiler's start and stop
};

std::vector<int32_t> FirstsOf(const std::vector<int32_t>& sizes) {
  std::vector<int32_t> firsts(1, 0);
  for (const int32_t size : sizes) firsts.push_back(firsts.back() + size);
  return firsts;
}

std::vector<Sample> DrawnSamples(const MatmulStep& step, const std::vector<int32_t>& firsts,
                                 std::mt19937_64& random) {
  const auto below = [&](int64_t end) { return static_cast<int32_t>(random() % end); };
  std::vector<Sample> samples;
  const int32_t grouped_rows = firsts.back();
  while (grouped_rows > 0 && samples.size() < kSamples) {
    Sample sample{};
    sample.column = below(step.n);
    sample.side = below(2);
    sample.of_gate_up_rows = (HasSides(step.kind) || IsDownDgrad(step.kind)) && below(2) == 1;
    // This kind only writes `to_gate_up_rows`.
    if (step.kind == MatmulKind::kDownDgrad) sample.of_gate_up_rows = true;
    if (step.kind == MatmulKind::kWgrad) {
      sample.group = below(step.groups);
      sample.row = below(step.k);
    } else {
      sample.row = below(grouped_rows);
      const auto after = std::ranges::upper_bound(firsts, sample.row);
      sample.group = static_cast<int32_t>(after - firsts.begin()) - 1;
    }
    samples.push_back(sample);
  }
  return samples;
}

// The largest difference over the largest element, and whether rows past all groups were written.
struct Outcome {
  double difference = 0;
  bool wrote_past = false;
};

Outcome Compare(Made& made, const std::vector<int32_t>& sizes, std::mt19937_64& random,
                cudaStream_t stream) {
  const std::vector<int32_t> firsts = FirstsOf(sizes);
  const std::vector<Sample> drawn = DrawnSamples(made.step, firsts, random);
  made.Poison(stream);
  CHECK_CUDA(GroupedMatmul(made.step, stream));
  const Memory<int32_t> first(firsts);
  const Memory<Sample> samples(drawn);
  const Memory<unsigned long long> written(std::vector<unsigned long long>{0});
  const int count = static_cast<int>(drawn.size());
  CheckSamples<<<static_cast<unsigned>(count + 7) / 8, 256, 0, stream>>>(made.step, first.get(),
                                                                         samples.get(), count);
  CHECK_CUDA(cudaGetLastError());
  if (made.step.kind != MatmulKind::kWgrad) {
    const uint64_t row_bytes = made.d_bytes / static_cast<uint64_t>(made.step.m);
    CountOthers<<<256, 256, 0, stream>>>(static_cast<const uint8_t*>(made.step.d),
                                         static_cast<uint64_t>(firsts.back()) * row_bytes,
                                         made.d_bytes, 0xFF, written.get());
    CHECK_CUDA(cudaGetLastError());
  }
  CHECK_CUDA(cudaStreamSynchronize(stream));
  Outcome outcome;
  double largest = 0;
  for (const Sample& sample : samples.Read()) {
    const double off = std::abs(sample.found - sample.wanted);
    // Keeps a NaN.
    if (!std::isnan(outcome.difference) && !(off <= outcome.difference)) outcome.difference = off;
    largest = std::max(largest, std::abs(sample.wanted));
  }
  // All samples are zero if all are of empty groups.
  outcome.difference /= largest > 0 ? largest : 1;
  outcome.wrote_past = written.Read()[0] != 0;
  return outcome;
}

bool Wrong(const Outcome& outcome, const Product& product) {
  const bool fp8 = IsFp8(product.kind) && product.kind != MatmulKind::kFp8Matmul;
  return !(outcome.difference < (fp8 ? kFp8Bound : kBound)) || outcome.wrote_past;
}

void CheckShapes(const Options& options, std::mt19937_64& random, Timer& timer,
                 std::vector<JsonObject>& rows) {
  for (const Shape& shape : kShapes) {
    const int grouped_rows = FirstsOf(shape.sizes).back();
    for (const Product& product : kProducts) {
      const bool fp8 = IsFp8(product.kind);
      if (fp8 && (shape.hidden % 128 != 0 || shape.inner % 128 != 0)) continue;
      if (std::string_view(product.name).find(options.only) == std::string_view::npos) continue;
      for (const ElementType element : {ElementType::kBFloat16, ElementType::kFloat16}) {
        Made made(product, element, shape.hidden, shape.inner, shape.rows, shape.sizes,
                  grouped_rows, random());
        const Outcome outcome = Compare(made, shape.sizes, random, timer.stream);
        const bool wrong = Wrong(outcome, product);
        std::fprintf(stderr, "%-12s %-26s %s %.5f%s%s\n", shape.name, product.name,
                     element == ElementType::kFloat16 ? "f16 " : "bf16", outcome.difference,
                     outcome.wrote_past ? " WROTE PAST" : "", wrong ? " WRONG" : "");
        rows.push_back(
            JsonObject()
                .Add("shape", shape.name)
                .Add("product", product.name)
                .Add("element", element == ElementType::kFloat16 ? "f16" : "bf16")
                .Add("difference", std::isfinite(outcome.difference) ? outcome.difference : 1e9)
                .Add("wrote_past", outcome.wrote_past)
                .Add("wrong", wrong));
      }
    }
  }
}

// Multiplies codes that all have the same sign, so that what the tensor cores round off adds up,
// and checks |sum(found) / sum(wanted) - 1| over all samples.
void CheckSums(std::mt19937_64& random, Timer& timer, std::vector<JsonObject>& rows) {
  constexpr int kInner = 256, kHidden = 7168, kRows = 128;
  const std::vector<int32_t> sizes = {kRows};
  const Product product{"fp8 gate_up to rows", MatmulKind::kFp8Matmul, true};
  // The product sums over 2 * F.
  Made made(product, ElementType::kBFloat16, kInner, kHidden / 2, kRows, sizes, kRows, random());
  const auto positive = [&](const void* from, int64_t bytes) {
    std::vector<uint8_t> codes(static_cast<size_t>(bytes));
    // From 1 to 1.875.
    for (uint8_t& code : codes) code = static_cast<uint8_t>(0x38 + random() % 8);
    CHECK_CUDA(
        cudaMemcpy(const_cast<void*>(from), codes.data(), codes.size(), cudaMemcpyHostToDevice));
  };
  positive(made.step.a, int64_t{kRows} * kHidden);
  positive(made.step.b, int64_t{kInner} * kHidden);
  made.step.out_element = ElementType::kFloat32;
  const Memory<float> out(uint64_t{kRows} * kInner);
  made.step.d = out.get();
  const std::vector<Sample> drawn = DrawnSamples(made.step, FirstsOf(sizes), random);
  CHECK_CUDA(GroupedMatmul(made.step, timer.stream));
  const Memory<int32_t> first(FirstsOf(sizes));
  const Memory<Sample> samples(drawn);
  CheckSamples<<<kSamples / 8, 256, 0, timer.stream>>>(made.step, first.get(), samples.get(),
                                                       kSamples);
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaStreamSynchronize(timer.stream));
  double found = 0, wanted = 0;
  for (const Sample& sample : samples.Read()) found += sample.found, wanted += sample.wanted;
  const double off = std::abs(found / wanted - 1);
  std::fprintf(stderr, "same sign, K 7168: %.2e\n", off);
  rows.push_back(JsonObject()
                     .Add("shape", "same sign, K 7168")
                     .Add("product", "fp8")
                     .Add("difference", off)
                     .Add("wrong", !(off < 5e-4)));
}

// The same product by cuBLAS, in bfloat16 and with equally many rows for each group.
struct Yardstick {
  const Cublas& cublas;
  const MatmulStep& step;
  int each;  // rows of a group
  void* a;
  void* b;
  void* d;

  void Run(cudaStream_t stream) const {
    const float one = 1, zero = 0;
    const int k = static_cast<int>(step.k);
    const int n = static_cast<int>(step.n) * (HasSides(step.kind) ? 2 : 1);
    const int groups = static_cast<int>(step.groups);
    using Long = long long;
    Cublas::Check(cublas.set_stream(cublas.handle, stream), "cublasSetStream");
    // cuBLAS's matrices are column-major, so to it everything is transposed.
    if (step.kind == MatmulKind::kWgrad) {
      Cublas::Check(cublas.multiply(cublas.handle, Cublas::kNone, Cublas::kTransposed, n, k, each,
                                    &one, b, CUDA_R_16BF, n, Long{each} * n, a, CUDA_R_16BF, k,
                                    Long{each} * k, &zero, d, CUDA_R_16BF, n, Long{n} * k, groups,
                                    Cublas::kCompute32F, Cublas::kDefault),
                    "cublasGemmStridedBatchedEx");
      return;
    }
    const bool b_is_mn_major = step.kind == MatmulKind::kFprop || step.kind == MatmulKind::kGateUp;
    Cublas::Check(
        cublas.multiply(cublas.handle, b_is_mn_major ? Cublas::kNone : Cublas::kTransposed,
                        Cublas::kNone, n, each, k, &one, b, CUDA_R_16BF, b_is_mn_major ? n : k,
                        Long{n} * k, a, CUDA_R_16BF, k, Long{each} * k, &zero, d, CUDA_R_16BF, n,
                        Long{each} * n, groups, Cublas::kCompute32F, Cublas::kDefault),
        "cublasGemmStridedBatchedEx");
  }
};

void TimeCase(const Case& each, const Options& options, const Cublas& cublas, Timer& timer,
              std::mt19937_64& random, std::vector<JsonObject>& rows) {
  const std::vector<int32_t> sizes = DrawnSizes(each, random);
  for (const Product& product : kProducts) {
    if (std::string_view(product.name).find(options.only) == std::string_view::npos) continue;
    Made made(product, ElementType::kBFloat16, each.hidden, each.inner, each.rows, sizes, each.rows,
              random());
    const Outcome outcome = Compare(made, sizes, random, timer.stream);
    const MatmulStep& step = made.step;
    const uint64_t sides = HasSides(step.kind) ? 2 : 1;
    const uint64_t k = static_cast<uint64_t>(step.k), n = step.n * sides;
    const uint64_t count = static_cast<uint64_t>(each.rows), groups = step.groups;
    const bool wgrad = step.kind == MatmulKind::kWgrad;
    const Memory<__nv_bfloat16> a(count * k), b(wgrad ? count * n : groups * k * n);
    const Memory<__nv_bfloat16> d(wgrad ? groups * k * n : count * n);
    Filled(FillNormal, a, random());
    Filled(FillNormal, b, random());
    CHECK_CUDA(cudaDeviceSynchronize());
    const Yardstick yardstick{cublas, step, each.rows / each.groups, a.get(), b.get(), d.get()};
    const auto ours = [&](cudaStream_t stream) { CHECK_CUDA(GroupedMatmul(step, stream)); };
    const auto theirs = [&](cudaStream_t stream) { yardstick.Run(stream); };
    timer.Burst(ours, 2), timer.Burst(theirs, 2);
    if (options.once) {
      CHECK_CUDA(cudaProfilerStart());
      timer.Burst(ours, 1), timer.Burst(theirs, 1);
      CHECK_CUDA(cudaProfilerStop());
      rows.push_back(JsonObject().Add("case", each.name).Add("product", product.name));
      continue;
    }
    const int our_calls = CallsOf(timer.Burst(ours, 2));
    const int their_calls = CallsOf(timer.Burst(theirs, 2));
    const int rounds = std::max(3, static_cast<int>(std::ceil(options.seconds * 1e3 / kBurstMs)));
    std::vector<double> times, yardsticks, ratios;
    for (int round = 0; round < rounds; ++round) {
      yardsticks.push_back(timer.Burst(theirs, their_calls));
      times.push_back(timer.Burst(ours, our_calls));
      ratios.push_back(times.back() / yardsticks.back());
    }
    const double ms = Median(times);
    const bool wrong = Wrong(outcome, product);
    std::fprintf(stderr, "%-10s %-26s %8.1f us %6.0f TFLOP/s, of cuBLAS %.3f, off %.5f%s\n",
                 each.name, product.name, ms * 1e3, made.operations(each.rows) / ms / 1e9,
                 Median(ratios), outcome.difference, wrong ? " WRONG" : "");
    rows.push_back(
        JsonObject()
            .Add("case", each.name)
            .Add("product", product.name)
            .Add("us", ms * 1e3)
            .Add("cublas_us", Median(yardsticks) * 1e3)
            .Add("ratio", Median(ratios))
            .Add("tflops", made.operations(each.rows) / ms / 1e9)
            .Add("bursts", rounds)
            .Add("difference", std::isfinite(outcome.difference) ? outcome.difference : 1e9)
            .Add("wrong", wrong));
  }
}

[[noreturn]] void Usage() {
  std::fprintf(stderr,
               "usage: grouped_kernels [--seconds S (of each time; 0: only checks)] [--seed N]\n"
               "  [--cases mid,large-64,large-256,many,decode] [--only PART OF A PRODUCT'S NAME]\n"
               "  [--no-check] [--once] [--cublas PATH]\n");
  std::exit(2);
}

Options Parsed(int argc, char** argv) {
  Options options;
  for (const Case& each : kCases) options.cases.push_back(each.name);
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--no-check") {
      options.check = false;
    } else if (word == "--once") {
      options.once = true;
    } else if (i + 1 == argc) {
      Usage();
    } else if (word == "--seconds") {
      options.seconds = std::atof(argv[++i]);
    } else if (word == "--seed") {
      options.seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--cublas") {
      options.cublas = argv[++i];
    } else if (word == "--only") {
      options.only = argv[++i];
    } else if (word == "--cases") {
      options.cases = Split(argv[++i]);
    } else {
      Usage();
    }
  }
  for (const std::string& name : options.cases) {
    const auto same = [&](const Case& each) { return name == each.name; };
    if (std::ranges::none_of(kCases, same)) Usage();
  }
  return options;
}

int Main(int argc, char** argv) {
  const Options options = Parsed(argc, argv);
  const double start = Seconds();
  StartMatmuls(options.seed, options.seconds);
  std::mt19937_64 random(options.seed);
  Timer timer;
  std::vector<JsonObject> checks, times;
  if (options.check) {
    CheckShapes(options, random, timer, checks);
    CheckSums(random, timer, checks);
  }
  if (options.seconds > 0) {
    const Cublas cublas(options.cublas);
    Report().Add("cublas", cublas.version);
    for (const Case& each : kCases) {
      if (std::ranges::find(options.cases, each.name) == options.cases.end()) continue;
      TimeCase(each, options, cublas, timer, random, times);
    }
  }
  Report().Add("checks", checks).Add("results", times).Add("seconds", Seconds() - start);
  std::puts(Report().Text().c_str());
  return 0;
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
