// Times both products of a decode step's experts by the kernels for few rows and by those for any
// number of rows, in turns, and compares their results. Prints one JSON object; few_rows.py builds
// and runs it.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cuda/matmul/kinds.h"
#include "grouped/cases.cuh"
#include "grouped/random.cuh"
#include "grouped/report.cuh"
#include "grouped/start.cuh"
#include "grouped/timing.cuh"

namespace jax_ep::cuda {
namespace {

// As in benchmarks/layers/decode.py.
constexpr uint64_t kHidden = 7168, kInner = 2048, kGroups = 64, kTopK = 8;
constexpr uint64_t kDraws = 8;  // of groups' sizes, which calls take by turns
constexpr uint64_t kBlock = 128;

struct Options {
  double seconds = 0.3;  // for each time
  uint64_t seed = 0;
  std::vector<int> rows;
};

// Sizes of groups, `kDraws` times: every token has distinct groups.
std::vector<int32_t> DrawnTokens(uint64_t rows, std::mt19937_64& random) {
  std::vector<int32_t> sizes(kDraws * kGroups);
  std::vector<uint64_t> groups(kGroups);
  std::iota(groups.begin(), groups.end(), uint64_t{0});
  for (uint64_t draw = 0; draw < kDraws; ++draw) {
    for (uint64_t token = 0; token < rows / kTopK; ++token) {
      std::ranges::shuffle(groups, random);
      for (uint64_t i = 0; i < kTopK; ++i) ++sizes[draw * kGroups + groups[i]];
    }
  }
  return sizes;
}

// Weights of all groups and room for `most` rows, in bfloat16 (Stored) or fp8.
template <typename Stored>
class Experts {
 public:
  static constexpr bool kFp8 = sizeof(Stored) == 1;

  Experts(uint64_t most, std::mt19937_64& random)
      : gate_up_(kGroups * kHidden * 2 * kInner),
        down_(kGroups * kInner * kHidden),
        rows_(most * kHidden),
        h_(most * kInner),
        gate_up_scales_(kGroups * kHidden * 2 * kInner / kBlock / kBlock),
        down_scales_(kGroups * kInner * kHidden / kBlock / kBlock),
        row_scales_(most * kHidden / kBlock),
        h_scales_(most * kInner / kBlock) {
    for (const auto* each : {&gate_up_, &down_, &rows_}) {
      if constexpr (kFp8) {
        Filled(FillCodes, *each, random());
      } else {
        Filled(FillNormal, *each, random());
      }
    }
    for (const auto* each : {&gate_up_scales_, &down_scales_, &row_scales_}) {
      Filled(FillScales, *each, random());
    }
  }

  void Run(bool few_rows, uint64_t rows, const int32_t* sizes, __nv_bfloat16* out,
           cudaStream_t stream) const {
    ExpertsStep step{};
    step.fp8 = kFp8;
    step.element = step.out_element = ElementType::kBFloat16;
    step.m = static_cast<int64_t>(rows), step.groups = kGroups;
    step.hidden = kHidden, step.inner = kInner, step.sizes = sizes;
    step.a = rows_.get(), step.a_scales = kFp8 ? row_scales_.get() : nullptr;
    step.gate_up = gate_up_.get(), step.gate_up_scales = gate_up_scales_.get();
    step.down = down_.get(), step.down_scales = down_scales_.get();
    step.h = h_.get(), step.h_scales = h_scales_.get(), step.d = out;
    constexpr auto kGateUp = kFp8 ? MatmulKind::kFp8GateUp : MatmulKind::kGateUp;
    constexpr auto kDown = kFp8 ? MatmulKind::kFp8Matmul : MatmulKind::kFprop;
    using Element = std::conditional_t<kFp8, void, BFloat16>;
    const MatmulWay gate_up{.few_rows = few_rows}, down{.early = true, .few_rows = few_rows};
    CHECK_CUDA((MultiplyKind<kGateUp, Element>(step.GateUp(), gate_up, stream)));
    CHECK_CUDA((MultiplyKind<kDown, Element>(step.Down(), down, stream)));
  }

 private:
  Memory<Stored> gate_up_, down_, rows_, h_;
  Memory<float> gate_up_scales_, down_scales_, row_scales_, h_scales_;
};

// How many elements differ by their bits; results are poisoned with different bytes before.
template <typename Stored>
uint64_t Differences(const Experts<Stored>& experts, uint64_t rows, const int32_t* sizes,
                     const Memory<__nv_bfloat16> (&out)[2], cudaStream_t stream) {
  std::vector<__nv_bfloat16> found[2];
  for (const bool few_rows : {false, true}) {
    const Memory<__nv_bfloat16>& to = out[few_rows];
    CHECK_CUDA(cudaMemsetAsync(to.get(), few_rows ? 0xFF : 0xEE, to.size() * 2, stream));
    experts.Run(few_rows, rows, sizes, to.get(), stream);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    found[few_rows] = to.Read();
  }
  uint64_t different = 0;
  for (uint64_t i = 0; i < rows * kHidden; ++i) {
    different += __bfloat16_as_ushort(found[0][i]) != __bfloat16_as_ushort(found[1][i]);
  }
  return different;
}

template <typename Stored>
void TimeAll(const char* name, const Options& options, Timer& timer, std::mt19937_64& random,
             std::vector<JsonObject>& results) {
  const auto most = static_cast<uint64_t>(std::ranges::max(options.rows));
  const Experts<Stored> experts(most, random);
  const Memory<__nv_bfloat16> out[] = {Memory<__nv_bfloat16>(most * kHidden),
                                       Memory<__nv_bfloat16>(most * kHidden)};
  CHECK_CUDA(cudaDeviceSynchronize());
  for (const int each : options.rows) {
    const auto rows = static_cast<uint64_t>(each);
    const Memory<int32_t> sizes(DrawnTokens(rows, random));
    const uint64_t different = Differences(experts, rows, sizes.get(), out, timer.stream);
    uint64_t draw = 0;
    const auto way = [&](bool few_rows) {
      return [&, few_rows](cudaStream_t stream) {
        const int32_t* drawn = sizes.get() + draw++ % kDraws * kGroups;
        experts.Run(few_rows, rows, drawn, out[few_rows].get(), stream);
      };
    };
    timer.Burst(way(false), 2);
    // Whole turns of the draws, so that both ways have the same.
    const int turns = CallsOf(timer.Burst(way(false), kDraws) * kDraws);
    const int calls = turns * static_cast<int>(kDraws);
    const int rounds = std::max(3, static_cast<int>(std::ceil(options.seconds * 1e3 / kBurstMs)));
    std::vector<double> us[2], ratios;
    for (int round = 0; round < rounds; ++round) {
      for (const bool few_rows : {round % 2 == 1, round % 2 == 0}) {
        us[few_rows].push_back(timer.Burst(way(few_rows), calls) * 1e3);
      }
      ratios.push_back(us[true].back() / us[false].back());
    }
    results.push_back(JsonObject()
                          .Add("weights", name)
                          .Add("rows", each)
                          .Add("any_us", Median(us[false]))
                          .Add("few_us", Median(us[true]))
                          .Add("ratio", Median(ratios))
                          .Add("different", static_cast<double>(different)));
  }
}

Options Parsed(int argc, char** argv) {
  Options options;
  bool good = argc % 2 == 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view word = argv[i];
    if (word == "--seconds") {
      options.seconds = std::atof(argv[i + 1]);
    } else if (word == "--seed") {
      options.seed = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (word == "--rows") {
      for (const std::string& each : Split(argv[i + 1])) options.rows.push_back(std::stoi(each));
    } else {
      good = false;
    }
  }
  for (const int each : options.rows) good = good && each > 0 && each % int{kTopK} == 0;
  if (!good || options.rows.empty()) {
    std::fprintf(stderr,
                 "usage: few_rows --rows N,... (multiples of 8) [--seconds S (of each "
                 "time)] [--seed N]\n");
    std::exit(2);
  }
  return options;
}

int Main(int argc, char** argv) {
  const Options options = Parsed(argc, argv);
  StartMatmuls(options.seed, options.seconds);
  Report()
      .Add("groups", double{kGroups})
      .Add("hidden", double{kHidden})
      .Add("inner", double{kInner})
      .Add("top_k", double{kTopK});
  std::mt19937_64 random(options.seed);
  Timer timer;
  std::vector<JsonObject> results;
  TimeAll<__nv_bfloat16>("bf16", options, timer, random, results);
  TimeAll<__nv_fp8_storage_t>("fp8", options, timer, random, results);
  Report().Add("results", results);
  std::puts(Report().Text().c_str());
  return 0;
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
