// Times CUTLASS's grouped matmuls on one Hopper GPU beside a batched cuBLAS matmul, at the sizes of
// expert matmuls. Prints one JSON object; cutlass_grouped.py builds and runs it.
//
// .ci/run does not compile it, since that takes one core almost three minutes, and 6 MB of headers.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cutlass_grouped/batched.cuh"
#include "cutlass_grouped/kernels.cuh"
#include "cutlass_grouped/operands.cuh"
#include "gpu_limits/report.cuh"
#include "grouped/cases.cuh"
#include "grouped/timing.cuh"

namespace jax_ep::cuda {
namespace {

// Relative to the largest element. A right result is off by the rounding to bfloat16: 2^-9 of it.
constexpr double kBound = 0.01;
constexpr int kSamples = 4096;

struct Options {
  double seconds = 1;  // for each time
  uint64_t seed = 0;
  std::string cublas;
  std::vector<std::string> cases;
  bool fp8 = true;
};

// Random elements, and one in the first and last row of each group.
std::vector<Sample> DrawnSamples(const Problem& problem, const std::vector<int32_t>& ends,
                                 std::mt19937_64& random) {
  std::uniform_int_distribution<int> row(0, problem.rows - 1);
  std::uniform_int_distribution<int> column(0, problem.n - 1);
  std::vector<Sample> samples;
  for (const int32_t end : ends) {
    for (const int at : {end - 1, end}) {
      if (at >= 0 && at < problem.rows) samples.push_back({at, column(random), 0, 0});
    }
  }
  while (samples.size() < kSamples) samples.push_back({row(random), column(random), 0, 0});
  return samples;
}

// Returns the largest difference over the largest element, or infinity if an element is missing.
double Difference(const Problem& problem, Way& way, const std::vector<Sample>& drawn,
                  cudaStream_t stream) {
  const uint64_t count = static_cast<uint64_t>(problem.rows) * static_cast<uint64_t>(problem.n);
  const Memory<Sample> samples(drawn);
  const Memory<unsigned long long> missing(std::vector<unsigned long long>{0});
  CHECK_CUDA(cudaMemsetAsync(problem.d, 0xff, count * sizeof *problem.d, stream));
  way.Run(stream);
  CountNan<<<1024, 256, 0, stream>>>(problem.d, count, missing.get());
  CHECK_CUDA(cudaGetLastError());
  const int32_t* ends = way.equal_groups ? problem.equal_ends : problem.ends;
  const int total = static_cast<int>(drawn.size());
  CheckSamples<<<static_cast<unsigned>(total + 7) / 8, 256, 0, stream>>>(problem, ends, way.fp8,
                                                                         samples.get(), total);
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaStreamSynchronize(stream));
  if (missing.Read()[0] != 0) return HUGE_VAL;
  double off = 0;
  double largest = 0;
  for (const Sample& sample : samples.Read()) {
    off = std::max(off, std::abs(sample.found - sample.wanted));
    largest = std::max(largest, std::abs(sample.wanted));
  }
  return off / largest;
}

// Takes the fastest order of tiles. Returns it, and how many calls make a burst.
std::pair<std::string, int> Chosen(Way& way, Timer& timer) {
  const auto run = [&](cudaStream_t stream) { way.Run(stream); };
  int best = 0;
  double best_ms = HUGE_VAL;
  for (int choice = 0; choice < way.orders(); ++choice) {
    way.Order(choice);
    const double first = timer.Burst(run, 2);
    const double ms = timer.Burst(run, std::max(2, CallsOf(first) / 2));
    if (ms < best_ms) std::tie(best, best_ms) = std::pair(choice, ms);
  }
  return {way.Order(best), CallsOf(best_ms)};
}

// Times all ways in turn, for `seconds` each.
void Measure(const Case& each, const char* matrix, const Problem& problem, Ways& ways,
             const std::vector<Sample>& samples, double seconds, Timer& timer,
             std::vector<JsonObject>& rows) {
  std::vector<std::pair<std::string, int>> chosen;
  std::vector<double> differences;
  for (const auto& way : ways) {
    differences.push_back(Difference(problem, *way, samples, timer.stream));
    chosen.push_back(Chosen(*way, timer));
  }
  const int rounds = std::max(3, static_cast<int>(std::ceil(seconds * 1e3 / kBurstMs)));
  std::vector<std::vector<double>> times(ways.size());
  std::vector<std::vector<double>> ratios(ways.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      times[i].push_back(timer.Burst([&](cudaStream_t s) { ways[i]->Run(s); }, chosen[i].second));
      ratios[i].push_back(times[i].back() / times[0].back());
    }
  }
  const double operations = 2.0 * problem.rows * problem.n * problem.k;
  for (size_t i = 0; i < ways.size(); ++i) {
    // Compared again, with the order of tiles that was timed.
    const double off =
        std::max(differences[i], Difference(problem, *ways[i], samples, timer.stream));
    const double ms = Median(times[i]);
    rows.push_back(JsonObject()
                       .Add("case", each.name)
                       .Add("matrix", matrix)
                       .Add("op", problem.transposed ? "to rows" : "forward")
                       .Add("way", ways[i]->name)
                       .Add("order", chosen[i].first)
                       .Add("us", ms * 1e3)
                       .Add("us_least", *std::ranges::min_element(times[i]) * 1e3)
                       .Add("tflops", operations / ms / 1e9)
                       .Add("ratio", Median(ratios[i]))
                       .Add("bursts", rounds)
                       .Add("calls", chosen[i].second)
                       // JSON has no infinity.
                       .Add("difference", std::isfinite(off) ? off : 1e9)
                       .Add("wrong", !(off < kBound)));
  }
}

// Measures both products with one matrix per expert, [groups, inputs, outputs] as layers have it.
void MeasureMatrix(const Case& each, const char* matrix, int inputs, int outputs,
                   const Options& options, const Cublas& cublas, Timer& timer,
                   std::mt19937_64& random, std::vector<JsonObject>& rows) {
  const std::vector<int32_t> drawn = DrawnSizes(each, random);
  const Memory<int32_t> sizes(drawn);
  const Memory<int32_t> ends(EndsOf(drawn));
  const Memory<int32_t> equal_ends(
      EndsOf(std::vector<int32_t>(drawn.size(), each.rows / each.groups)));
  const uint64_t count = static_cast<uint64_t>(each.rows);
  const uint64_t weights =
      static_cast<uint64_t>(each.groups) * static_cast<uint64_t>(inputs) * uint64_t(outputs);
  const uint64_t wider = static_cast<uint64_t>(std::max(inputs, outputs));
  const Memory<__nv_bfloat16> a(count * wider), b(weights), d(count * wider);
  Filled(FillNormal, a, random());
  Filled(FillNormal, b, random());
  const uint64_t some = options.fp8 ? 1 : 0;
  const Memory<__nv_fp8_storage_t> codes_a(some * count * wider + 1), codes_b(some * weights + 1);
  const Memory<float> scales_a(some * count * wider / kScaled + 1);
  const Memory<float> scales_b(some * weights / kScaled / kScaled + 1);
  Filled(FillCodes, codes_a, random());
  Filled(FillCodes, codes_b, random());
  Filled(FillScales, scales_a, random());
  Filled(FillScales, scales_b, random());
  CHECK_CUDA(cudaDeviceSynchronize());
  for (const bool transposed : {false, true}) {
    const Problem problem{.groups = each.groups,
                          .rows = each.rows,
                          .n = transposed ? inputs : outputs,
                          .k = transposed ? outputs : inputs,
                          .transposed = transposed,
                          .sizes = sizes.get(),
                          .ends = ends.get(),
                          .equal_ends = equal_ends.get(),
                          .a = a.get(),
                          .b = b.get(),
                          .codes_a = codes_a.get(),
                          .codes_b = codes_b.get(),
                          .scales_a = scales_a.get(),
                          .scales_b = scales_b.get(),
                          .d = d.get()};
    Ways ways;
    ways.push_back(std::make_unique<Batched>(cublas, problem));
    if (transposed) {
      AddBfloat16<cutlass::layout::ColumnMajor>(ways, problem);
    } else {
      AddBfloat16<cutlass::layout::RowMajor>(ways, problem);
    }
    if (options.fp8) AddFp8(ways, problem);
    const std::vector<Sample> samples = DrawnSamples(problem, EndsOf(drawn), random);
    Measure(each, matrix, problem, ways, samples, options.seconds, timer, rows);
  }
}

[[noreturn]] void Usage() {
  std::fprintf(stderr,
               "usage: cutlass_grouped [--quick] [--seconds S (of each time)] [--seed N]\n"
               "  [--cases mid,large-64,large-256,many,decode] [--no-fp8] [--cublas PATH]\n");
  std::exit(2);
}

Options Parsed(int argc, char** argv) {
  Options options;
  for (const Case& each : kCases) options.cases.push_back(each.name);
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--quick") {
      options.seconds = 0.2;
      options.cases = {"mid", "decode"};
    } else if (word == "--no-fp8") {
      options.fp8 = false;
    } else if (i + 1 == argc) {
      Usage();
    } else if (word == "--seconds") {
      options.seconds = std::atof(argv[++i]);
    } else if (word == "--seed") {
      options.seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--cublas") {
      options.cublas = argv[++i];
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
  CHECK_CUDA(cudaSetDevice(0));
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  if (properties.major != 9) Fail(std::string("needs a Hopper GPU, got ") + properties.name);
  const Cublas cublas(options.cublas);
  Report()
      .Add("device", properties.name)
      .Add("count", 1)
      .Add("cutlass", std::to_string(CUTLASS_MAJOR) + '.' + std::to_string(CUTLASS_MINOR) + '.' +
                          std::to_string(CUTLASS_PATCH))
      .Add("nvcc",
           std::to_string(__CUDACC_VER_MAJOR__) + '.' + std::to_string(__CUDACC_VER_MINOR__))
      .Add("cublas", cublas.version)
      .Add("seed", static_cast<double>(options.seed))
      .Add("seconds_each", options.seconds);
  std::mt19937_64 random(options.seed);
  Timer timer;
  std::vector<JsonObject> rows;
  for (const Case& each : kCases) {
    if (std::ranges::find(options.cases, each.name) == options.cases.end()) continue;
    std::fprintf(stderr, "%s, after %.0f s\n", each.name, Seconds() - start);
    MeasureMatrix(each, "gate and up", each.hidden, 2 * each.inner, options, cublas, timer, random,
                  rows);
    MeasureMatrix(each, "down", each.inner, each.hidden, options, cublas, timer, random, rows);
  }
  Report().Add("results", rows).Add("seconds", Seconds() - start);
  std::puts(Report().Text().c_str());
  return 0;
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
