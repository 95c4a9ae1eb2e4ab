// The ranks of a world on emulated GPUs, for calls_test.cc, internode_test.cc and
// options_test.cc: calls and comparisons. Compiled like the kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "calls_draws.h"
#include "calls_ranks.h"
#include "cuda/window/calls.h"
#include "cuda_runtime_api.h"

namespace jax_ep {

inline constexpr uint64_t kTimeoutNs = 20'000'000'000;
inline constexpr CallSite kSite = 0x5171, kOtherSite = 0x5172;
inline constexpr int kLeft = 0x5B;  // what earlier calls have left in regions

// Memory of the same size that has not been written.
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

inline void ExpectSame(const char* what, const void* got, const Buffer& expected,
                       int64_t bytes = -1) {
  if (bytes < 0) bytes = expected.bytes();
  const auto* at = static_cast<const uint8_t*>(got);
  for (int64_t i = 0; i < bytes; ++i) {
    if (at[i] == expected.data()[i]) continue;
    CurrentCase() += std::string("; ") + what + ", byte " + std::to_string(i) + " is " +
                     std::to_string(at[i]) + ", not " + std::to_string(expected.data()[i]);
    CHECK(at[i] == expected.data()[i]);
  }
}

// The ranks of a world, with windows, and successive calls for which the host does not wait.
class Gpus {
 public:
  Gpus(const World& world, const Draws& draws, uint64_t timeout_ns = kTimeoutNs)
      : world_(world),
        halves_(draws.halves),
        drops_(draws.halves && draws.drops),
        coded_(draws.coded),
        windows_(world, draws),
        ranks_(windows_.Open(timeout_ns)) {}
  ~Gpus() {
    emulator::SetHeap({});
    emulator::Reset();
  }
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;

  void FillRegions() {
    const WindowGroup& group = ranks_[0].group;
    for (uint8_t* window : windows_.blocks) {
      for (const BufferGroupLayout& calls : group.layout.groups) {
        std::memset(window + calls.regions, kLeft,
                    static_cast<size_t>(calls.region_bytes * group.depth * group.ranks));
      }
    }
  }

  // A dispatch along any routes; results must be right, bit for bit.
  void DispatchCached() {
    RunCached();
    CHECK(AllArrived());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      CheckCached(ranks_[i].cached.back(), world_.ranks[i]);
    }
  }

  // A combine with any tables; results must be right, bit for bit, unless a wait fails.
  bool Combine() {
    Step(Part::kWhole, &OnGpu::combines, [&](const Rank& rank) { return CombineOf(rank); });
    if (!AllArrived()) return false;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      CheckCombined(ranks_[i].combines.back(), world_.ranks[i]);
    }
    return true;
  }

  // Every call once; waits may fail. `spoil(window, group)` runs between the halves of a call, or
  // before a whole call, which rank `silent` does not make, so that what is there in its name
  // stays.
  template <typename Spoil>
  void RunSpoiled(int64_t silent, Spoil spoil) {
    const auto spoil_all = [&] {
      for (uint8_t* window : windows_.blocks) spoil(window, ranks_[0].group);
    };
    const auto run = [&]<typename Format>(Format, auto steps, auto make) {
      if (halves_) Step<Format>(Part::kSend, steps, make);
      spoil_all();
      Step<Format>(halves_ ? Part::kReceive : Part::kWhole, steps, make, silent);
    };
    world_.OfFormat([&]<typename Format>(Format format) {
      run(format, &OnGpu::dispatches, [&](const Rank& rank) { return DispatchOf(rank); });
      if constexpr (cuda::kDispatchCachedFormat<Format>) {
        spoil_all();
        RunCached();
        for (const OnGpu& gpu : ranks_) CheckWritten(gpu.cached.back());
      }
    });
    run(Bf16Format{}, &OnGpu::combines, [&](const Rank& rank) { return CombineOf(rank); });
    for (const OnGpu& gpu : ranks_) {
      if (!gpu.combines.empty()) CheckWritten(gpu.combines.back());
    }
  }

  // A dispatch, or a first half, at each rank except `silent`; at `mixed` it is from another line.
  // Returns the ranks' reports.
  std::vector<WaitReport> DispatchWithout(int64_t silent, int64_t mixed = -1, bool half = false) {
    world_.OfFormat([&]<typename Format>(Format) {
      const auto make = [&](const Rank& rank) {
        return DispatchOf(rank, &rank - &world_.ranks[0] == mixed ? kOtherSite : kSite);
      };
      Step<Format>(half ? Part::kSend : Part::kWhole, &OnGpu::dispatches, make, silent);
    });
    std::vector<WaitReport> reports;
    for (const OnGpu& gpu : ranks_) reports.push_back(*gpu.group.host_report);
    return reports;
  }

  const BundleLayout& bundles() const { return windows_.bundles(); }

  // Makes each call `times` times.
  void Run(int64_t times) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Must(cudaSetDevice(static_cast<int>(i)));
      Enqueue(world_.ranks[i], ranks_[i], times);
    }
    Finish();
    for (size_t i = 0; i < ranks_.size(); ++i) {
      for (const auto& step : ranks_[i].dispatches) CheckDispatched(step, world_.ranks[i]);
      for (const auto& step : ranks_[i].cached) CheckCached(step, world_.ranks[i]);
      for (const auto& step : ranks_[i].combines) CheckCombined(step, world_.ranks[i]);
    }
  }

  // Makes only combines, `times` of them, after `amend(rank, step)`.
  template <typename Amend>
  void RunCombines(int64_t times, Amend amend) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Must(cudaSetDevice(static_cast<int>(i)));
      for (int64_t call = 0; call < times; ++call) {
        ranks_[i].combines.push_back(CombineOf(world_.ranks[i]));
        amend(i, ranks_[i].combines.back());
      }
      EnqueueEach<Bf16Format>(ranks_[i], ranks_[i].combines);
    }
    Finish();
    for (size_t i = 0; i < ranks_.size(); ++i) {
      for (const auto& step : ranks_[i].combines) CheckCombined(step, world_.ranks[i]);
    }
  }

 private:
  // Waits for everything under way, none of whose waits may fail.
  void Finish() {
    Must(cudaDeviceSynchronize());
    for (const OnGpu& gpu : ranks_) {
      const WaitReport& report = *gpu.group.host_report;
      if (report.status != WaitStatus::kArrived) {
        CurrentCase() += "; rank " + std::to_string(report.waiting_rank) + " waited for rank " +
                         std::to_string(report.awaited_rank) + ", epoch " +
                         std::to_string(report.epoch) + ", phase " +
                         std::to_string(static_cast<int>(report.phase)) + ", status " +
                         std::to_string(static_cast<int>(report.status));
      }
      CHECK(report.status == WaitStatus::kArrived);
    }
  }

  void Enqueue(const Rank& rank, OnGpu& gpu, int64_t times) {
    for (int64_t i = 0; i < times; ++i) gpu.dispatches.push_back(DispatchOf(rank));
    world_.OfFormat([&]<typename Format>(Format) {
      EnqueueEach<Format>(gpu, gpu.dispatches);
      if constexpr (cuda::kDispatchCachedFormat<Format>) {
        for (int64_t i = 0; i < times; ++i) {
          gpu.cached.push_back(CachedOf(rank));
          LaunchCached<Format>(gpu.cached.back(), gpu);
        }
      }
    });
    for (int64_t i = 0; i < times; ++i) gpu.combines.push_back(CombineOf(rank));
    EnqueueEach<Bf16Format>(gpu, gpu.combines);
  }

  // Runs a part of a call at every rank; the first part makes the call's step.
  template <typename Format = Bf16Format, typename Steps, typename Make>
  void Step(Part part, Steps OnGpu::* steps, Make make, int64_t without = -1) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (static_cast<int64_t>(i) == without) continue;
      Must(cudaSetDevice(static_cast<int>(i)));
      Steps& made = ranks_[i].*steps;
      if (part != Part::kReceive) made.push_back(make(world_.ranks[i]));
      Must(Launch<Format>(part, made.back(), ranks_[i].pending, ranks_[i]));
    }
    Must(cudaDeviceSynchronize());
  }

  bool AllArrived() const {
    bool all = true;
    for (const OnGpu& gpu : ranks_) all &= gpu.group.host_report->status == WaitStatus::kArrived;
    return all;
  }

  // In halves if other calls are, with nothing in between.
  template <typename Format>
  void LaunchCached(const DispatchCachedStep& step, const OnGpu& gpu) const {
    if (!halves_) return Must(Launch<Format>(Part::kWhole, step, nullptr, gpu));
    for (const Part part : {Part::kSend, Part::kReceive}) {
      Must(Launch<Format>(part, step, gpu.pending, gpu));
    }
  }

  void RunCached() {
    world_.OfFormat([&]<typename Format>(Format) {
      if constexpr (cuda::kDispatchCachedFormat<Format>) {
        for (size_t i = 0; i < ranks_.size(); ++i) {
          ranks_[i].cached.push_back(CachedOf(world_.ranks[i]));
          Must(cudaSetDevice(static_cast<int>(i)));
          LaunchCached<Format>(ranks_[i].cached.back(), ranks_[i]);
        }
        Must(cudaDeviceSynchronize());
      }
    });
  }

  // Whole calls, or as many first halves as may be pending and then their second ones.
  template <typename Format, typename Step>
  void EnqueueEach(const OnGpu& gpu, const std::vector<Step>& steps) const {
    const auto count = static_cast<int64_t>(steps.size());
    const int64_t at_once = kPendingCalls - drops_;
    for (int64_t first = 0; first < count; first += at_once) {
      const int64_t calls = std::min(at_once, count - first);
      // Not one of the others'; the next dropped call overwrites it.
      PendingCall* dropped = gpu.pending + kPendingCalls;
      const Step& any = steps[static_cast<size_t>(first)];
      if (drops_) Must(Launch<Format>(Part::kSend, any, dropped, gpu));
      for (int64_t i = 0; i < calls; ++i) {
        const Step& step = steps[static_cast<size_t>(first + i)];
        Must(Launch<Format>(halves_ ? Part::kSend : Part::kWhole, step, gpu.pending + i, gpu));
      }
      for (int64_t i = 0; halves_ && i < calls; ++i) {
        const Step& step = steps[static_cast<size_t>(first + i)];
        Must(Launch<Format>(Part::kReceive, step, gpu.pending + i, gpu));
      }
    }
  }

  DispatchStep DispatchOf(const Rank& rank, CallSite site = kSite) const {
    DispatchStep step{};
    step.shape = world_.shape();
    step.zero_tail = world_.options.zero_tail;
    step.element = world_.options.element;
    step.scale_layout = world_.layout();
    step.site = site;
    if (coded_) {
      const World::Codes codes = world_.CodesOf(rank);
      step.tokens = Upload<void>(codes.codes);
      step.token_scales = Upload<uint8_t>(codes.scales);
      step.code_bytes = world_.payload_bytes, step.scale_bytes = world_.scale_bytes;
    } else {
      step.tokens = Upload<void>(rank.tokens);
    }
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
    step.router_weights = Blank<float>(rank.router_weights);
    step.num_dropped = Blank<int32_t>(rank.num_dropped);
    step.num_invalid = Blank<int32_t>(rank.num_invalid);
    step.slot_of = Blank<int32_t>(rank.slot_of);
    step.row_of = Blank<int32_t>(rank.row_of);
    step.row_slot = Blank<int32_t>(rank.row_slot);
    step.slot_counts = Blank<int32_t>(rank.slot_counts);
    return step;
  }

  DispatchCachedStep CachedOf(const Rank& rank) const {
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
            .router_weights = Blank<float>(rank.cached_router_weights),
            .done = Blank<int32_t>(rank.num_dropped),
            .zero_tail = world_.options.zero_tail};
  }

  CombineStep CombineOf(const Rank& rank) const {
    const bool weights = world_.options.weights;
    CombineStep step{};
    step.shape = world_.shape();
    step.site = kSite;
    step.element = world_.options.element;
    step.wire = world_.options.wire;
    step.quantized = world_.options.quantized_sums;
    step.num_weights = world_.num_weights();
    step.expert_out = Upload<void>(rank.expert_out);
    step.router_weights = weights ? Upload<float>(rank.router_weights) : nullptr;
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

  void CheckDispatched(const DispatchStep& step, const Rank& rank) const {
    const EpShape& shape = world_.shape();
    ExpectSame("row_offsets", step.row_offsets, rank.row_offsets);
    ExpectSame("group_sizes", step.group_sizes, rank.group_sizes);
    ExpectSame("expert_counts", step.expert_counts, rank.expert_counts);
    ExpectSame("expert_ids", step.expert_ids, rank.expert_ids);
    ExpectSame("scales_offsets", step.scales_offsets, rank.scales_offsets);
    ExpectSame("src_info", step.src_info, rank.src_info);
    ExpectSame("router_weights", step.router_weights, rank.router_weights);
    ExpectSame("num_dropped", step.num_dropped, rank.num_dropped);
    ExpectSame("num_invalid", step.num_invalid, rank.num_invalid);
    ExpectSame("slot_of", step.slot_of, rank.slot_of);
    ExpectSame("row_of", step.row_of, rank.row_of);
    ExpectSame("row_slot", step.row_slot, rank.row_slot);
    ExpectSame("slot_counts", step.slot_counts, rank.slot_counts);
    // Without zero_tail it is unspecified what follows the groups.
    const int64_t rows = world_.options.zero_tail
                             ? shape.recv_rows
                             : rank.row_offsets.as<int32_t>()[shape.local_experts];
    ExpectSame("rows", step.rows, rank.rows, rows * world_.payload_bytes);
    if (!world_.options.columns) {
      ExpectSame("scales", step.scales, rank.scales,
                 world_.options.tiled ? -1 : rows * world_.scale_bytes);
      return;
    }
    const int64_t line = ScaleLine(shape.recv_rows);
    for (int64_t at = 0; at < rank.scales.bytes(); at += 4) {
      const int64_t row = at / 4 % line;
      if (row >= rows && row < shape.recv_rows) continue;
      CHECK(std::memcmp(step.scales + at, rank.scales.data() + at, 4) == 0);
    }
  }

  void CheckCached(const DispatchCachedStep& step, const Rank& rank) const {
    if (step.zero_tail) {
      ExpectSame("cached rows", step.rows, rank.cached_rows);
    } else {
      CheckLeft(step, rank);
    }
    if (step.num_weights == 0) return;
    ExpectSame("cached weights", step.router_weights, rank.cached_router_weights);
  }
  // Rows without a token have not changed.
  void CheckLeft(const DispatchCachedStep& step, const Rank& rank) const {
    const int64_t bytes = step.shape.row_bytes();
    for (int64_t row = 0; row < step.shape.recv_rows; ++row) {
      const uint8_t* found = step.rows + row * bytes;
      if (rank.row_slot.as<int32_t>()[row] >= 0) {
        CHECK(std::memcmp(found, rank.cached_rows.data() + row * bytes,
                          static_cast<size_t>(bytes)) == 0);
      } else {
        CHECK(std::all_of(found, found + bytes,
                          [](uint8_t value) { return value == emulator::kUnwritten; }));
      }
    }
  }
  // All memory was written: no data has `unit` bytes in a row of the initial contents.
  static void CheckWritten(const void* result, int64_t bytes, int64_t unit) {
    const auto* byte = static_cast<const uint8_t*>(result);
    for (const uint8_t* at = byte; at < byte + bytes; at += unit) {
      const bool is_written =
          std::any_of(at, at + unit, [](uint8_t value) { return value != emulator::kUnwritten; });
      CHECK(is_written);
    }
  }
  static void CheckWritten(const DispatchCachedStep& step) {
    const EpShape& shape = step.shape;
    if (step.zero_tail) {
      CheckWritten(step.rows, shape.recv_rows * shape.row_bytes(), kRowAlignBytes);
    }
    if (step.num_weights == 0) return;
    CheckWritten(step.router_weights, shape.recv_rows * kWeightBytes, kWeightBytes);
  }
  static void CheckWritten(const CombineStep& step) {
    const EpShape& shape = step.shape;
    CheckWritten(step.output, shape.tokens * shape.row_bytes(), kRowAlignBytes);
    CheckWritten(step.output_weight_grads, shape.tokens * step.num_weights * kWeightBytes,
                 kWeightBytes);
  }
  void CheckCombined(const CombineStep& step, const Rank& rank) const {
    ExpectSame("output", step.output, rank.output);
    if (step.num_weights == 0) return;
    ExpectSame("weight gradients", step.output_weight_grads, rank.weight_grads);
  }

  const World& world_;
  bool halves_, drops_, coded_;
  Windows windows_;
  std::vector<OnGpu> ranks_;
};

inline void RunWholeLayer(const Draws& draws, Random& random) {
  CurrentCase() = Text(draws);
  CHECK(Validate(draws.options.shape) == nullptr);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  world.DispatchCached();
  FillExpertOutputs(world, random);
  world.Combine();
  Gpus(world, draws).Run(draws.times);
}

}  // namespace jax_ep
