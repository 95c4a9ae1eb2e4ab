// Measures the limits of all GPUs of one host from which the window transports are designed, and
// runs the litmus test of their memory order. Prints one JSON object; gpu_limits.py builds and runs
// it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "gpu_limits/host.cuh"
#include "gpu_limits/latency.cuh"
#include "gpu_limits/litmus.cuh"
#include "gpu_limits/stream.cuh"

namespace jax_ep::cuda {
namespace {

static_assert(kLitmusBytes + uint64_t{kMaxGpus} * kLoadRows * kRowBytes <= kWindowBytes);

constexpr uint32_t kBlockCounts[] = {1, 4, 8, 16, 24, 32, 48, 64, 132};
constexpr uint32_t kPeakBlockCounts[] = {64, 132};
constexpr uint32_t kRowSizes[] = {2048, 4096, 7168, 14336, 28672};
constexpr uint32_t kStageCounts[] = {2, 4, 8, 15};
constexpr uint32_t kWarpCounts[] = {1, 2, 4};
constexpr uint32_t kTokens = 4096;  // per rank, in MeasureSendAndPlace
constexpr uint32_t kTopK = 8;

using StreamFunction = void (*)(Group, StreamStep);

// How a row crosses an SM: one kernel for each of kStageCounts.
struct Pattern {
  const char* name;
  StreamFunction kernels[std::size(kStageCounts)];
  uint32_t passes;  // how often each row is read or written
};

template <bool kLoad, uint32_t kStores>
Pattern PatternOf(const char* name) {
  return {name,
          {StreamKernel<2, kLoad, kStores>, StreamKernel<4, kLoad, kStores>,
           StreamKernel<8, kLoad, kStores>, StreamKernel<15, kLoad, kStores>},
          kLoad + kStores};
}

const Pattern kStore = PatternOf<false, 1>("bulk_store");
const Pattern kLoad = PatternOf<true, 0>("bulk_load");
const Pattern kCopy = PatternOf<true, 1>("bulk_copy");
const Pattern kPlace = PatternOf<true, 2>("bulk_place");

std::vector<const void*> AllKernels() {
  std::vector<const void*> kernels = {Entry(FillKernel), Entry(EmptyKernel), Entry(VectorKernel),
                                      Entry(SendAndPlaceKernel<8>)};
  for (const Pattern* pattern : {&kStore, &kLoad, &kCopy, &kPlace}) {
    for (const StreamFunction kernel : pattern->kernels) kernels.push_back(Entry(kernel));
  }
  AddLatencyKernels(kernels);
  AddLitmusKernels(kernels);
  return kernels;
}

// ---- Bandwidth ----------------------------------------------------------------------------------

uint32_t PowerOfTwoRows(uint64_t bytes, uint32_t row_bytes) {
  uint32_t rows = 1;
  while (uint64_t{rows} * 2 * row_bytes <= bytes) rows *= 2;
  return rows;
}

StreamStep LocalStep(const Gpu& gpu, uint32_t row_bytes) {
  StreamStep step{};
  step.source = gpu.source;
  step.destinations[0] = gpu.group.windows[gpu.group.rank];
  step.num_destinations = 1;
  step.source_rows = PowerOfTwoRows(kSourceBytes, row_bytes);
  step.destination_rows = PowerOfTwoRows(kWindowBytes, row_bytes);
  step.row_bytes = row_bytes;
  step.items = step.source_rows;
  step.scatter = true;
  return step;
}

// Writes to every peer in turn, several times over each region, so that the start hardly counts.
StreamStep PeerStep(const Gpu& gpu, uint32_t row_bytes) {
  StreamStep step = LocalStep(gpu, row_bytes);
  const Group& group = gpu.group;
  step.num_destinations = group.ranks - 1;
  for (uint32_t i = 0; i < step.num_destinations; ++i) {
    const uint32_t peer = (group.rank + 1 + i) % group.ranks;
    step.destinations[i] = group.windows[peer] + group.rank * kRegionBytes;
  }
  step.destination_rows = PowerOfTwoRows(kRegionBytes, row_bytes);
  step.items = step.num_destinations * step.destination_rows * 4;
  step.scatter = false;
  return step;
}

struct StreamShape {
  uint32_t blocks;
  uint32_t row_bytes = kRowBytes;
  uint32_t stages = 8;
  uint32_t warps = 1;

  uint64_t shared_bytes() const { return uint64_t{row_bytes} * stages * warps; }
};

// `passes` says how often a row's bytes are counted.
template <typename StepOf>
JsonObject MeasureStream(Gpus gpus, const Pattern& pattern, const StreamShape& shape,
                         StepOf step_of, uint32_t passes) {
  const size_t index = static_cast<size_t>(
      std::find(std::begin(kStageCounts), std::end(kStageCounts), shape.stages) - kStageCounts);
  const double ms = MedianMs(gpus, [&](const Gpu& gpu) {
    Start(pattern.kernels[index], gpu, shape.blocks, shape.warps * kWarpSize, shape.shared_bytes(),
          gpu.group, step_of(gpu, shape.row_bytes));
  });
  const StreamStep step = step_of(gpus.front(), shape.row_bytes);
  const double bytes = static_cast<double>(step.items) * shape.row_bytes * passes;
  return JsonObject()
      .Add("pattern", pattern.name)
      .Add("blocks", shape.blocks)
      .Add("row_bytes", shape.row_bytes)
      .Add("stages", shape.stages)
      .Add("warps", shape.warps)
      .Add("gb_s", bytes / ms / 1e6);
}

// Calls visit(shape) for all shapes that fit, at one number of blocks.
template <typename Visit>
void ForEachShape(const Gpu& gpu, uint32_t blocks, Visit visit) {
  // The rest is for the kernels' barriers.
  const uint64_t limit = static_cast<uint64_t>(gpu.max_shared) - 1024;
  for (const uint32_t row_bytes : kRowSizes) {
    for (const uint32_t stages : kStageCounts) {
      for (const uint32_t warps : kWarpCounts) {
        const StreamShape shape{blocks, row_bytes, stages, warps};
        if (shape.shared_bytes() <= limit) visit(shape);
      }
    }
  }
}

void MeasureLocal(Gpus all) {
  const Gpus gpu = all.first(1);
  const double ms = MedianMs(gpu, [](const Gpu& one) {
    CHECK_CUDA(cudaMemcpyAsync(one.group.windows[0], one.source, kSourceBytes,
                               cudaMemcpyDeviceToDevice, one.stream));
  });
  Report().Add("local_memcpy_gb_s", 2.0 * kSourceBytes / ms / 1e6);
  std::vector<JsonObject> rows;
  for (const Pattern* pattern : {&kStore, &kLoad, &kCopy, &kPlace}) {
    for (const uint32_t blocks : kBlockCounts) {
      rows.push_back(MeasureStream(gpu, *pattern, {blocks}, LocalStep, pattern->passes));
    }
  }
  std::vector<JsonObject> shapes;
  for (const Pattern* pattern : {&kStore, &kLoad, &kPlace}) {
    ForEachShape(gpu[0], 24, [&](const StreamShape& shape) {
      shapes.push_back(MeasureStream(gpu, *pattern, shape, LocalStep, pattern->passes));
    });
  }
  Report().Add("local", rows).Add("local_shapes", shapes);
}

void MeasurePeers(Gpus gpus, std::span<const uint32_t> block_counts) {
  std::vector<JsonObject> rows;
  for (const uint32_t blocks : block_counts) {
    for (const Pattern* pattern : {&kStore, &kCopy}) {
      rows.push_back(MeasureStream(gpus, *pattern, {blocks}, PeerStep, 1));
    }
    const double ms = MedianMs(gpus, [&](const Gpu& gpu) {
      Start(VectorKernel, gpu, blocks, 1024, 0, PeerStep(gpu, kRowBytes));
    });
    const double bytes = static_cast<double>(PeerStep(gpus[0], kRowBytes).items) * kRowBytes;
    rows.push_back(JsonObject()
                       .Add("pattern", "vector_copy")
                       .Add("blocks", blocks)
                       .Add("gb_s", bytes / ms / 1e6));
  }
  Report().Add("peer_write", rows);
}

void MeasurePeerShapes(Gpus gpus) {
  std::vector<JsonObject> shapes;
  ForEachShape(gpus[0], 16, [&](const StreamShape& shape) {
    shapes.push_back(MeasureStream(gpus, kCopy, shape, PeerStep, 1));
  });
  Report().Add("peer_write_shapes", shapes);
}

// A call's bulk traffic without its synchronisation: some blocks send each token to its ranks while
// others place as many rows as arrive.
void MeasureSendAndPlace(Gpus gpus) {
  const uint32_t ranks = static_cast<uint32_t>(gpus.size());
  const double reached = 1 - std::pow(1 - 1.0 / ranks, kTopK);
  const uint32_t sends = static_cast<uint32_t>(kTokens * (ranks - 1) * reached);
  constexpr uint32_t kSplits[][2] = {{8, 8},   {8, 16},  {12, 12}, {16, 16},
                                     {16, 32}, {24, 24}, {32, 32}, {44, 88}};
  std::vector<JsonObject> rows;
  for (const auto [senders, placers] : kSplits) {
    const double ms = MedianMs(gpus, [&](const Gpu& gpu) {
      StreamStep send = PeerStep(gpu, kRowBytes);
      send.items = sends;
      StreamStep place = LocalStep(gpu, kRowBytes);
      place.items = kTokens * kTopK / 2;
      Start(SendAndPlaceKernel<8>, gpu, senders + placers, kWarpSize, StreamShape{1}.shared_bytes(),
            gpu.group, send, place, senders);
    });
    rows.push_back(
        JsonObject().Add("senders", senders).Add("placers", placers).Add("us", ms * 1e3));
  }
  Report().Add(
      "send_and_place",
      JsonObject().Add("rows_sent", sends).Add("rows_placed", kTokens * kTopK).Add("splits", rows));
}

// Measures what a launch costs without any work: empty kernels in CUDA graphs and on a stream.
void MeasureLaunches(Gpus all) {
  const Gpus gpu = all.first(1);
  constexpr int kLaunches = 200;
  CHECK_CUDA(cudaSetDevice(gpu[0].device));
  const auto graph_of = [&](int nodes) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK_CUDA(cudaStreamBeginCapture(gpu[0].stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < nodes; ++i) Start(EmptyKernel, gpu[0], 1, kWarpSize, 0);
    CHECK_CUDA(cudaStreamEndCapture(gpu[0].stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CHECK_CUDA(cudaGraphUpload(executable, gpu[0].stream));
    return executable;
  };
  const cudaGraphExec_t one = graph_of(1);
  const cudaGraphExec_t many = graph_of(kLaunches);
  const auto launch = [](cudaGraphExec_t graph) {
    return [graph](const Gpu& g) { CHECK_CUDA(cudaGraphLaunch(graph, g.stream)); };
  };
  const double one_us = MedianMs(gpu, launch(one)) * 1e3;
  const double many_us = MedianMs(gpu, launch(many)) * 1e3;
  const auto launches = [&](const Gpu& g) {
    for (int i = 0; i < kLaunches; ++i) launch(one)(g);
  };
  const auto kernels = [&](const Gpu& g) {
    for (int i = 0; i < kLaunches; ++i) Start(EmptyKernel, g, 1, kWarpSize, 0);
  };
  const double launches_us = MedianMs(gpu, launches) * 1e3;
  const double kernels_us = MedianMs(gpu, kernels) * 1e3;
  Report().Add("launch", JsonObject()
                             .Add("graph_of_one_us", one_us)
                             .Add("graph_node_us", (many_us - one_us) / (kLaunches - 1))
                             .Add("graph_launch_us", launches_us / kLaunches)
                             .Add("kernel_launch_us", kernels_us / kLaunches));
}

int Main(int argc, char** argv) {
  double seconds = 20;
  bool peak_only = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--peak") == 0) {
      peak_only = true;
    } else if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: gpu_limits [--seconds S (of the litmus test) | --peak]\n");
      return 2;
    }
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  const double start = Seconds();
  std::vector<Gpu> gpus = OpenGpus(AllKernels());
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  Report()
      .Add("device", properties.name)
      .Add("count", static_cast<double>(gpus.size()))
      .Add("processors", gpus[0].processors);
  if (peak_only) {
    if (gpus.size() > 1) MeasurePeers(gpus, kPeakBlockCounts);
    std::puts(Report().Text().c_str());
    return 0;
  }
  MeasureLocal(gpus);
  MeasureLaunches(gpus);
  if (gpus.size() > 1) {
    MeasurePeers(gpus, kBlockCounts);
    MeasurePeerShapes(gpus);
    MeasureSendAndPlace(gpus);
    MeasureSignals(gpus);
  }
  Report().Add("litmus", RunLitmus(gpus, kRecipe, seconds));
  JsonObject mutants;
  for (const LitmusVariant& mutant : kMutants) {
    mutants.Add(mutant.name, RunLitmus(gpus, mutant.kernel, std::min(1.0, seconds)));
  }
  Report().Add("litmus_mutants", mutants).Add("seconds", Seconds() - start);
  std::puts(Report().Text().c_str());
  return 0;
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
