// Checks and times the fused window calls on all GPUs of this machine, without JAX: for tuning and
// for profilers. window_kernels.py builds and runs it; --help lists the options.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "window_kernels/check.cuh"
#include "window_kernels/options.cuh"
#include "window_kernels/ranks.cuh"

namespace jax_ep::window_kernels {
namespace {

constexpr int kRepeats = 7;
// On 4 H200s, see docs/gpu_limits.md.
constexpr double kPeerWriteBytesPerUs = 354e3;

void SetBlocks(World& world, int64_t sms) {
  for (Rank& rank : world.ranks) rank.group.num_sms = static_cast<uint32_t>(sms);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// ---- Times --------------------------------------------------------------------------------------

// The calls of a rank as a CUDA graph: kernels follow each other as in a model's program, without
// launches by the host between them.
struct Recording {
  cudaGraphExec_t graph;
  cudaEvent_t begin;
  cudaEvent_t end;
};

Recording Record(const World& world, const Rank& rank, Call call, int64_t tokens) {
  const EpShape shape = world.Shape(tokens);
  Recording recording{};
  CHECK_CUDA(cudaSetDevice(static_cast<int>(rank.group.rank)));
  CHECK_CUDA(cudaEventCreate(&recording.begin));
  CHECK_CUDA(cudaEventCreate(&recording.end));
  CHECK_CUDA(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < world.options.calls; ++i) {
    Enqueue(shape, {.call = call, .tokens = tokens, .routing = i % kDraws}, rank);
  }
  cudaGraph_t graph;
  CHECK_CUDA(cudaStreamEndCapture(rank.stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&recording.graph, graph, 0));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaGraphUpload(recording.graph, rank.stream));
  CHECK_CUDA(cudaStreamSynchronize(rank.stream));
  return recording;
}

void Release(const Recording& recording) {
  CHECK_CUDA(cudaGraphExecDestroy(recording.graph));
  CHECK_CUDA(cudaEventDestroy(recording.begin));
  CHECK_CUDA(cudaEventDestroy(recording.end));
}

double Microseconds(const World& world, Call call, int64_t tokens) {
  std::vector<Recording> recordings;
  for (const Rank& rank : world.ranks) recordings.push_back(Record(world, rank, call, tokens));
  std::vector<double> times;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (const Rank& rank : world.ranks) {
      const Recording& recording = recordings[rank.group.rank];
      CHECK_CUDA(cudaSetDevice(static_cast<int>(rank.group.rank)));
      // Untimed: here the ranks wait for each other, whichever was launched first.
      CHECK_CUDA(cudaGraphLaunch(recording.graph, rank.stream));
      CHECK_CUDA(cudaEventRecord(recording.begin, rank.stream));
      CHECK_CUDA(cudaGraphLaunch(recording.graph, rank.stream));
      CHECK_CUDA(cudaEventRecord(recording.end, rank.stream));
    }
    Wait(world);
    float slowest = 0;
    for (const Recording& recording : recordings) {
      float milliseconds = 0;
      CHECK_CUDA(cudaEventElapsedTime(&milliseconds, recording.begin, recording.end));
      slowest = std::max(slowest, milliseconds);
    }
    times.push_back(slowest * 1e3 / static_cast<double>(world.options.calls));
  }
  for (const Recording& recording : recordings) Release(recording);
  return Median(times);
}

// Bytes of a token's elements and scales as a call sends them, without what travels beside them.
int64_t TokenBytes(const World& world, const EpShape& shape, Call call) {
  const std::string name = call == Call::kDispatch   ? world.options.format
                           : world.options.quantized ? CombineFormat::kName
                                                     : Bf16Format::kName;
  int64_t bytes = 0;
  VisitFormat(name, [&]<typename Format>(Format) {
    bytes =
        Format::PayloadBytes(shape.hidden, shape.element_bytes) + Format::ScaleBytes(shape.hidden);
  });
  return bytes;
}

// Bytes that the busiest rank sends to other ranks, or receives from them, with the first draw.
double BusiestBytes(const World& world, Call call, int64_t tokens) {
  const EpShape shape = world.Shape(tokens);
  std::vector<int64_t> sent(shape.ranks), received(shape.ranks);
  for (const Rank& rank : world.ranks) {
    for (int64_t token = 0; token < tokens; ++token) {
      uint32_t ranks = 0;
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int32_t id = rank.host_ids[0][token * shape.top_k + k];
        ranks |= 1u << PlaceOf(id, static_cast<int32_t>(shape.ranks),
                               static_cast<int32_t>(shape.local_experts))
                           .rank;
      }
      ranks &= ~(1u << rank.group.rank);
      sent[rank.group.rank] += std::popcount(ranks);
      for (; ranks != 0; ranks &= ranks - 1) ++received[std::countr_zero(ranks)];
    }
  }
  const int64_t slots = std::max(*std::max_element(sent.begin(), sent.end()),
                                 *std::max_element(received.begin(), received.end()));
  return static_cast<double>(slots * TokenBytes(world, shape, call));
}

void TimeAll(World& world) {
  if (world.options.kinds.empty()) return;
  std::printf("%-15s %6s %4s %10s %8s %8s\n", "call", "T", "sms", "us", "GB/s", "floor us");
  for (const Call call : world.options.kinds) {
    for (const int64_t tokens : world.options.tokens) {
      const double bytes = BusiestBytes(world, call, tokens);
      for (const int64_t sms : world.options.sms) {
        SetBlocks(world, sms);
        // Cached dispatch and combine need a route for this number of tokens.
        Run(world, {.call = Call::kDispatch, .tokens = tokens});
        const double us = Microseconds(world, call, tokens);
        std::printf("%-15s %6lld %4lld %10.2f %8.1f %8.1f\n", NameOf(call),
                    static_cast<long long>(tokens), static_cast<long long>(sms), us,
                    bytes / us / 1e3, bytes / kPeerWriteBytesPerUs);
      }
    }
  }
}

// ---- Checks -------------------------------------------------------------------------------------

void CheckAll(World& world) {
  // Two draws, so that it shows if the second call uses what the first left in the windows.
  constexpr int kChecked[] = {0, 1, kRagged, kCrowded, kEmpty};
  for (const int64_t tokens : world.options.tokens) {
    for (const int64_t sms : world.options.sms) {
      SetBlocks(world, sms);
      for (const int routing : kChecked) {
        Mismatches wrong;
        CheckRouting(world, tokens, routing, wrong);
        if (wrong.count() == 0) continue;
        End(kWrongResult, std::to_string(wrong.count()) + " wrong values, T " +
                              std::to_string(tokens) + ", sms " + std::to_string(sms) +
                              ", routing " + std::to_string(routing));
      }
      std::printf("checked T %lld, sms %lld: right\n", static_cast<long long>(tokens),
                  static_cast<long long>(sms));
    }
  }
}

int Main(int argc, char** argv) {
  // Line by line, so that no output is lost if the program ends at once.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  World world = Open(ParseOptions(argc, argv));
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("%zu x %s, seed %lld\n", world.ranks.size(), properties.name,
              static_cast<long long>(world.options.seed));
  if (!world.options.no_check) CheckAll(world);
  TimeAll(world);
  return 0;
}

}  // namespace
}  // namespace jax_ep::window_kernels

int main(int argc, char** argv) { return jax_ep::window_kernels::Main(argc, argv); }
