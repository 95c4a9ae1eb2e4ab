// Whole calls of the window kernels on emulated GPUs against the CPU steps
// (tests/cc/steps_world.h): every table and row byte for byte, in all formats, element types and
// types of the wire, with residuals and weight gradients, whole and in halves. Takes the seed of
// its draws as an argument.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../cc/check.h"
#include "../cc/steps_world.h"
#include "cuda/window_calls.h"
#include "cuda_runtime_api.h"
#include "ffi/window_sizes.h"

namespace jax_ep {
namespace {

constexpr uint64_t kTimeoutNs = 20'000'000'000;
constexpr CallSite kSite = 0x5171;

struct Draws {
  Options options;
  bool halves = false;
  bool one_region = false;  // in the windows, as for many tokens
  int64_t times = 1;        // that each call is made
};

std::string Text(const Draws& draws) {
  const Options& o = draws.options;
  const EpShape& s = o.shape;
  std::string text = o.format;
  const auto add = [&](const char* name, int64_t value) {
    text += std::string(" ") + name + " " + std::to_string(value);
  };
  add("R", s.ranks), add("L", s.local_experts), add("n", s.tokens), add("K", s.top_k);
  add("H", s.hidden), add("N", s.recv_rows), add("alignment", s.expert_alignment);
  add("element", int64_t(o.element)), add("wire", int64_t(o.wire)), add("tiled", o.tiled);
  add("zero_tail", o.zero_tail), add("weights", o.weights), add("residual", o.residual);
  add("quantized_sums", o.quantized_sums), add("halves", draws.halves),
      add("one_region", draws.one_region), add("times", draws.times);
  return text + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

Draws Draw(Random& random) {
  Draws draws;
  Options& options = draws.options;
  EpShape& shape = options.shape;
  options.element = static_cast<ElementType>(random.In(0, 2));
  options.wire = static_cast<ElementType>(random.In(0, 2));
  shape.element_bytes = ElementBytes(options.element);
  shape.hidden = random.In(1, 40) * kRowAlignBytes / shape.element_bytes;
  int64_t pick = random.In(0, 7);
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) {
      if (pick-- != 0) return;
      options.format = Format::kName;
      options.tiled = sizeof(typename Format::Scale) == 1 && random.OneIn(2);
      const int64_t unit =
          options.tiled ? 4 * Format::kBlock : std::max<int64_t>(Format::kBlock, 32);
      shape.hidden = random.In(1, 5) * unit;
      if (Format::kTakesInputScale && random.OneIn(2)) options.input_scale = 37.5f;
    }
  });
  options.quantized_sums = random.OneIn(4);
  if (options.quantized_sums) shape.hidden = RoundUp(shape.hidden, CombineFormat::kBlock);
  shape.ranks = random.In(1, emulator::GetSettings().gpus);
  shape.local_experts = random.In(1, 6);
  // Few tokens, of which calls go a way of their own, as often as more.
  shape.tokens = random.OneIn(15) ? 0 : random.OneIn(2) ? random.In(1, 8) : random.In(9, 40);
  shape.top_k = random.OneIn(15) ? kMaxTopK : random.In(1, 6);
  shape.expert_alignment = random.OneIn(2) ? 1 : random.In(2, 9);
  const int64_t worst = shape.slots() * shape.top_k + shape.local_experts * shape.expert_alignment;
  shape.recv_rows = random.OneIn(15) ? 0 : random.In(0, worst / (random.OneIn(3) ? 4 : 1));
  options.zero_tail = random.OneIn(2);
  options.weights = random.OneIn(2);
  options.residual = random.OneIn(2);
  draws.halves = random.OneIn(3);
  draws.one_region = random.OneIn(2);
  draws.times = random.OneIn(2) ? 1 : random.In(2, 4);
  return draws;
}

void DrawIds(World& world, Random& random) {
  const int64_t experts = world.shape().experts();
  for (Rank& rank : world.ranks) {
    const bool silent = random.OneIn(9);
    for (int64_t i = 0; i < world.shape().tokens * world.shape().top_k; ++i) {
      int64_t id = random.In(0, experts - 1);
      if (silent || random.OneIn(7)) id = -1;
      if (random.OneIn(40)) id = random.OneIn(2) ? experts : INT32_MIN;
      rank.ids.as<int32_t>()[i] = static_cast<int32_t>(id);
    }
  }
}

// NaN wherever combine must not look.
void FillExpertOutputs(World& world, Random& random) {
  const EpShape& shape = world.shape();
  for (Rank& rank : world.ranks) {
    std::memset(rank.expert_out.data(), 0xFF, static_cast<size_t>(rank.expert_out.bytes()));
    std::memset(rank.row_grads.data(), 0xFF, static_cast<size_t>(rank.row_grads.bytes()));
    for (int64_t row = 0; row < shape.recv_rows; ++row) {
      if (rank.row_slot.as<int32_t>()[row] < 0) continue;
      FillElements(random, rank.expert_out.data() + row * shape.row_bytes(), world.options.element,
                   shape.hidden);
      FillElements(random, rank.row_grads.data() + row * kWeightBytes, ElementType::kFloat32, 1);
    }
  }
}

// ---- On emulated GPUs ---------------------------------------------------------------------------

// Not written yet.
template <typename T>
T* Blank(const Buffer& like) {
  return static_cast<T*>(emulator::Allocate(static_cast<size_t>(like.bytes())));
}
template <typename T>
T* Upload(const Buffer& from) {
  T* memory = Blank<T>(from);
  std::memcpy(memory, from.data(), static_cast<size_t>(from.bytes()));
  return memory;
}

void ExpectSame(const char* what, const void* got, const Buffer& expected, int64_t bytes = -1) {
  if (bytes < 0) bytes = expected.bytes();
  const auto* at = static_cast<const uint8_t*>(got);
  for (int64_t i = 0; i < bytes; ++i) {
    if (at[i] == expected.data()[i]) continue;
    CurrentCase() += std::string("; ") + what + ", byte " + std::to_string(i) + " is " +
                     std::to_string(at[i]) + ", not " + std::to_string(expected.data()[i]);
    CHECK(at[i] == expected.data()[i]);
  }
}

// The ranks of a world, with windows, and calls that follow each other without the host's waiting.
class Gpus {
 public:
  Gpus(const World& world, const Draws& draws) : world_(world), halves_(draws.halves) {
    const EpShape& shape = world.shape();
    WindowSizes sizes{};
    CHECK(ffi_layer::SizesOf(
        {.format = world.options.format,
         .hidden = shape.hidden,
         .element_bytes = shape.element_bytes,
         .wire_element_bytes = ElementBytes(world.options.wire),
         .tokens = draws.one_region ? ffi_layer::kMaxTokensOfTwoRegions + 1 : shape.tokens,
         .dispatch_tokens = shape.tokens,
         .combine_tokens = shape.tokens,
         .top_k = shape.top_k,
         .ranks = shape.ranks,
         .local_experts = shape.local_experts,
         .pending_calls = kPendingCalls},
        sizes));
    WindowGroup group{};
    group.layout = WindowLayout::Of(sizes);
    group.timeout_ns = kTimeoutNs;
    group.ranks = static_cast<uint32_t>(shape.ranks);
    group.turns = static_cast<uint32_t>(sizes.turns);
    group.depth = static_cast<uint32_t>(sizes.depth);
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      const Buffer zeros(group.layout.bytes);
      std::memset(zeros.data(), 0, static_cast<size_t>(zeros.bytes()));
      group.windows[rank] = Upload<uint8_t>(zeros);
    }
    WindowControl control{};
    for (CallState& calls : control.calls) calls = StartState(kFirstEpoch);
    ranks_.resize(world.ranks.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      group.rank = static_cast<uint32_t>(i);
      Must(cudaMalloc(&group.control, sizeof control));
      *group.control = control;
      Must(cudaMalloc(&group.host_report, sizeof(WaitReport)));
      *group.host_report = WaitReport{};
      ranks_[i].group = group;
      Must(cudaMalloc(&ranks_[i].pending, kPendingCalls * sizeof(PendingCall)));
      Must(cudaStreamCreateWithFlags(&ranks_[i].stream, cudaStreamNonBlocking));
    }
  }

  // Each call `times` times.
  void Run(int64_t times) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Must(cudaSetDevice(static_cast<int>(i)));
      Enqueue(world_.ranks[i], ranks_[i], times);
    }
    Must(cudaDeviceSynchronize());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      CHECK(ranks_[i].group.host_report->status == WaitStatus::kArrived);
      for (const auto& step : ranks_[i].dispatches) CheckDispatched(step, world_.ranks[i]);
      for (const auto& step : ranks_[i].cached) CheckCached(step, world_.ranks[i]);
      for (const auto& step : ranks_[i].combines) CheckCombined(step, world_.ranks[i]);
    }
  }

 private:
  static constexpr int64_t kPendingCalls = 2;

  struct OnGpu {
    WindowGroup group;
    PendingCall* pending;
    cudaStream_t stream;
    std::vector<WindowDispatchStep> dispatches;
    std::vector<WindowCachedDispatchStep> cached;
    std::vector<WindowCombineStep> combines;
  };

  static void Must(cudaError_t error) { CHECK(error == cudaSuccess); }

  void Enqueue(const Rank& rank, OnGpu& gpu, int64_t times) {
    for (int64_t i = 0; i < times; ++i) gpu.dispatches.push_back(DispatchStep(rank));
    world_.OfFormat([&]<typename Format>(Format) {
      EnqueueEach(
          gpu, gpu.dispatches,
          [&](const auto& step) {
            return cuda::WindowDispatch<Format>(step, gpu.group, gpu.stream);
          },
          [&](const auto& step, PendingCall* pending) {
            return cuda::WindowDispatchSend<Format>(step, pending, gpu.group, gpu.stream);
          },
          [&](const auto& step, PendingCall* pending) {
            return cuda::WindowDispatchPlace<Format>(step, pending, gpu.group, gpu.stream);
          });
      if constexpr (cuda::kAlongRoutes<Format>) {
        for (int64_t i = 0; i < times; ++i) {
          gpu.cached.push_back(CachedStep(rank));
          Must(cuda::WindowCachedDispatch<Format>(gpu.cached.back(), gpu.group, gpu.stream));
        }
      }
    });
    for (int64_t i = 0; i < times; ++i) gpu.combines.push_back(CombineStep(rank));
    EnqueueEach(
        gpu, gpu.combines,
        [&](const auto& step) { return cuda::WindowCombine(step, gpu.group, gpu.stream); },
        [&](const auto& step, PendingCall* pending) {
          return cuda::WindowCombineSend(step, pending, gpu.group, gpu.stream);
        },
        [&](const auto& step, PendingCall* pending) {
          return cuda::WindowCombinePlace(step, pending, gpu.group, gpu.stream);
        });
  }

  // Whole calls, or as many first halves as may be pending and then their second ones.
  template <typename Step, typename Whole, typename Send, typename Place>
  void EnqueueEach(const OnGpu& gpu, const std::vector<Step>& steps, Whole whole, Send send,
                   Place place) {
    const auto count = static_cast<int64_t>(steps.size());
    for (int64_t first = 0; first < count; first += kPendingCalls) {
      const int64_t calls = std::min(kPendingCalls, count - first);
      for (int64_t i = 0; i < calls; ++i) {
        const Step& step = steps[static_cast<size_t>(first + i)];
        Must(halves_ ? send(step, gpu.pending + i) : whole(step));
      }
      for (int64_t i = 0; halves_ && i < calls; ++i) {
        Must(place(steps[static_cast<size_t>(first + i)], gpu.pending + i));
      }
    }
  }

  WindowDispatchStep DispatchStep(const Rank& rank) const {
    WindowDispatchStep step{};
    step.shape = world_.shape();
    step.zero_tail = world_.options.zero_tail;
    step.element = world_.options.element;
    step.scale_layout = world_.options.tiled ? ScaleLayout::kTiled128x4 : ScaleLayout::kRows;
    step.site = kSite;
    step.tokens = Upload<void>(rank.tokens);
    step.ids = Upload<int32_t>(rank.ids);
    step.weights = Upload<float>(rank.weights);
    Buffer input_scale(sizeof(float));
    *input_scale.as<float>() = world_.options.input_scale;
    step.input_scale = Upload<float>(input_scale);
    step.rows = Blank<uint8_t>(rank.rows);
    step.scales = Blank<uint8_t>(rank.scales);
    step.row_offsets = Blank<int32_t>(rank.row_offsets);
    step.group_sizes = Blank<int32_t>(rank.group_sizes);
    step.expert_counts = Blank<int32_t>(rank.expert_counts);
    step.expert_ids = Blank<int32_t>(rank.expert_ids);
    step.scales_offsets = Blank<int32_t>(rank.scales_offsets);
    step.src_info = Blank<int32_t>(rank.src_info);
    step.row_weights = Blank<float>(rank.row_weights);
    step.num_dropped = Blank<int32_t>(rank.num_dropped);
    step.num_invalid = Blank<int32_t>(rank.num_invalid);
    step.slot_of = Blank<int32_t>(rank.slot_of);
    step.row_of = Blank<int32_t>(rank.row_of);
    step.row_slot = Blank<int32_t>(rank.row_slot);
    step.slot_counts = Blank<int32_t>(rank.slot_counts);
    return step;
  }

  WindowCachedDispatchStep CachedStep(const Rank& rank) const {
    return {.shape = world_.shape(),
            .element = world_.options.element,
            .site = kSite,
            .num_weights = world_.num_weights(),
            .tokens = Upload<void>(rank.tokens),
            .weights = Upload<float>(rank.weights),
            .slot_of = Upload<int32_t>(rank.slot_of),
            .row_of = Upload<int32_t>(rank.row_of),
            .row_slot = Upload<int32_t>(rank.row_slot),
            .rows = Blank<uint8_t>(rank.cached_rows),
            .row_weights = Blank<float>(rank.cached_row_weights),
            .done = Blank<int32_t>(rank.num_dropped)};
  }

  WindowCombineStep CombineStep(const Rank& rank) const {
    const bool weights = world_.options.weights;
    WindowCombineStep step{};
    step.shape = world_.shape();
    step.site = kSite;
    step.element = world_.options.element;
    step.wire = world_.options.wire;
    step.quantized = world_.options.quantized_sums;
    step.num_weights = world_.num_weights();
    step.expert_out = Upload<void>(rank.expert_out);
    step.row_weights = weights ? Upload<float>(rank.row_weights) : nullptr;
    step.weight_grads = weights ? Upload<float>(rank.row_grads) : nullptr;
    step.row_of = Upload<int32_t>(rank.row_of);
    step.slot_counts = Upload<int32_t>(rank.slot_counts);
    step.slot_of = Upload<int32_t>(rank.slot_of);
    step.residual = world_.options.residual ? Upload<void>(rank.residual) : nullptr;
    step.output = Blank<void>(rank.output);
    step.output_weight_grads = weights ? Blank<float>(rank.weight_grads) : nullptr;
    step.done = Blank<int32_t>(rank.num_dropped);
    return step;
  }

  void CheckDispatched(const WindowDispatchStep& step, const Rank& rank) const {
    const EpShape& shape = world_.shape();
    ExpectSame("row_offsets", step.row_offsets, rank.row_offsets);
    ExpectSame("group_sizes", step.group_sizes, rank.group_sizes);
    ExpectSame("expert_counts", step.expert_counts, rank.expert_counts);
    ExpectSame("expert_ids", step.expert_ids, rank.expert_ids);
    ExpectSame("scales_offsets", step.scales_offsets, rank.scales_offsets);
    ExpectSame("src_info", step.src_info, rank.src_info);
    ExpectSame("row_weights", step.row_weights, rank.row_weights);
    ExpectSame("num_dropped", step.num_dropped, rank.num_dropped);
    ExpectSame("num_invalid", step.num_invalid, rank.num_invalid);
    ExpectSame("slot_of", step.slot_of, rank.slot_of);
    ExpectSame("row_of", step.row_of, rank.row_of);
    ExpectSame("row_slot", step.row_slot, rank.row_slot);
    ExpectSame("slot_counts", step.slot_counts, rank.slot_counts);
    // Without zero_tail nobody says what lies behind the groups.
    const int64_t rows = world_.options.zero_tail
                             ? shape.recv_rows
                             : rank.row_offsets.as<int32_t>()[shape.local_experts];
    ExpectSame("rows", step.rows, rank.rows, rows * world_.payload_bytes);
    ExpectSame("scales", step.scales, rank.scales,
               world_.options.tiled ? -1 : rows * world_.scale_bytes);
  }

  void CheckCached(const WindowCachedDispatchStep& step, const Rank& rank) const {
    ExpectSame("cached rows", step.rows, rank.cached_rows);
    if (step.num_weights == 0) return;
    ExpectSame("cached weights", step.row_weights, rank.cached_row_weights);
  }
  void CheckCombined(const WindowCombineStep& step, const Rank& rank) const {
    ExpectSame("output", step.output, rank.output);
    if (step.num_weights == 0) return;
    ExpectSame("weight gradients", step.output_weight_grads, rank.weight_grads);
  }

  const World& world_;
  bool halves_;
  std::vector<OnGpu> ranks_;
};

void RunWholeLayer(const Draws& draws, Random& random) {
  CurrentCase() = Text(draws);
  CHECK(Validate(draws.options.shape) == nullptr);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  world.CachedDispatch();
  FillExpertOutputs(world, random);
  world.Combine();
  Gpus(world, draws).Run(draws.times);
}

int Main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const int64_t draws = argc > 2 ? std::atoll(argv[2]) : 60;
  std::printf("seed %llu, EMULATED_SEED=%llu\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(emulator::GetSettings().seed));
  Random random(seed);
  for (int64_t i = 0; i < draws; ++i) RunWholeLayer(Draw(random), random);
  std::printf("%lld layers: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
