// Ranks on emulated GPUs, for calls_world.h: their windows, on one node or on several, and launches
// of calls as the handlers of ffi/cuda_handlers.cc make them. Compiled like the kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "calls_draws.h"
#include "cuda/internode/calls.h"
#include "cuda/window/calls.h"
#include "cuda_runtime_api.h"
#include "ffi/window_sizes.h"

namespace jax_ep {

inline constexpr int64_t kPendingCalls = 2;

inline void Must(cudaError_t error) { CHECK(error == cudaSuccess); }

struct OnGpu {
  WindowGroup group;
  std::optional<cuda::InternodeRank> internode;  // if some ranks are on other nodes
  PendingCall* pending;
  cudaStream_t stream;
  std::vector<DispatchStep> dispatches;
  std::vector<DispatchCachedStep> cached;
  std::vector<CombineStep> combines;
};

// ---- Windows ------------------------------------------------------------------------------------

// The kernels of shmem/internode.cu if internode_kernels.cc is linked.
cuda::InternodeKernels EmulatedInternodeKernels();

class Windows {
 public:
  Windows(const World& world, const Draws& draws) : draws_(draws), sizes_(SizesOf(world, draws)) {
    if (draws.node == 0) return;
    int32_t numbers[kMaxWindowRanks];
    for (uint32_t rank = 0; rank < ranks(); ++rank) numbers[rank] = 9 - NodeOf(rank);
    if (draws.bundles) map_ = NodeMap::Of(numbers, ranks());
    bundles_ = BundleLayout::Of(internode_, layout_, sizes_, map_.nodes, map_.size);
  }

  std::vector<OnGpu> Open(uint64_t timeout_ns) {
    std::vector<OnGpu> opened(ranks());
    std::vector<emulator::HeapBlock> heap(ranks());
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      const size_t bytes = static_cast<size_t>(draws_.node == 0 ? layout_.bytes : bundles_.bytes);
      blocks.push_back(static_cast<uint8_t*>(emulator::Allocate(bytes)));
      std::memset(blocks.back(), 0, bytes);
      heap[static_cast<size_t>(Pe(rank))] = {blocks.back(), bytes, static_cast<int>(rank)};
    }
    if (draws_.node != 0) emulator::SetHeap(heap);
    WindowControl control{};
    for (CallState& calls : control.calls) calls = StartState(kFirstEpoch);
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      OnGpu& gpu = opened[rank];
      gpu.group = GroupOf(rank);
      gpu.group.timeout_ns = timeout_ns;
      Must(cudaMalloc(&gpu.group.control, sizeof control));
      *gpu.group.control = control;
      Must(cudaMalloc(&gpu.group.host_report, sizeof(WaitReport)));
      *gpu.group.host_report = WaitReport{};
      Must(cudaMalloc(&gpu.pending, (kPendingCalls + 1) * sizeof(PendingCall)));
      Must(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
      if (gpu.group.internode == 0) continue;
      cuda::InternodeGroup internode{gpu.group, internode_, bundles_, map_, {}};
      for (uint32_t other = 0; other < ranks(); ++other) internode.pes[other] = Pe(other);
      gpu.internode.emplace(internode, EmulatedInternodeKernels());
    }
    return opened;
  }

  const BundleLayout& bundles() const { return bundles_; }

  std::vector<uint8_t*> blocks;  // by rank: a window, followed by the parts for other nodes

 private:
  static WindowSizes SizesOf(const World& world, const Draws& draws) {
    const EpShape& shape = world.shape();
    const auto or_else = [](int64_t given, int64_t own) { return given != 0 ? given : own; };
    const int64_t tokens = or_else(draws.window_tokens, shape.tokens);
    const int64_t bytes = draws.window_element_bytes;
    WindowSizes sizes{};
    CHECK(ffi_layer::SizesOf(
        {.format = draws.window_format.empty() ? world.options.format : draws.window_format,
         .hidden = shape.hidden * draws.window_widths,
         .element_bytes = or_else(bytes, shape.element_bytes),
         .wire_element_bytes = or_else(bytes, ElementBytes(world.options.wire)),
         .tokens = draws.one_region ? ffi_layer::kMaxTokensOfTwoRegions + 1 : tokens,
         .dispatch_tokens = tokens,
         .combine_tokens = tokens,
         .top_k = shape.top_k,
         .ranks = shape.ranks,
         .local_experts = shape.local_experts,
         .pending_calls = kPendingCalls},
        sizes));
    return sizes;
  }

  uint32_t ranks() const { return static_cast<uint32_t>(sizes_.ranks); }
  int32_t NodeOf(uint32_t rank) const {
    return draws_.node == 0 ? 0 : static_cast<int32_t>(rank / draws_.node);
  }
  // NVSHMEM may number PEs in any order.
  int32_t Pe(uint32_t rank) const { return static_cast<int32_t>(ranks() - 1 - rank); }

  WindowGroup GroupOf(uint32_t rank) const {
    WindowGroup group{};
    group.layout = layout_;
    group.rank = rank;
    group.ranks = ranks();
    group.turns = static_cast<uint32_t>(sizes_.turns);
    group.depth = static_cast<uint32_t>(sizes_.depth);
    for (uint32_t other = 0; other < ranks(); ++other) {
      const bool is_internode = NodeOf(other) != NodeOf(rank);
      group.windows[other] = is_internode ? blocks[rank] + internode_.staged : blocks[other];
      group.internode |= uint32_t{is_internode} << other;
    }
    return group;
  }

  const Draws draws_;
  const WindowSizes sizes_;
  const WindowLayout layout_ = WindowLayout::Of(sizes_);
  const InternodeLayout internode_ = InternodeLayout::Of(layout_, sizes_);
  NodeMap map_{};
  BundleLayout bundles_{};
};

// ---- Launches -----------------------------------------------------------------------------------

enum class Part { kWhole, kSend, kReceive };

template <typename Format, typename Step>
cuda::InternodeCall InternodeCallOf(const Step& step, const PendingCall* pending) {
  const EpShape& shape = step.shape;
  cuda::InternodeCall internode{};
  internode.pending = pending;
  if constexpr (std::is_same_v<Step, CombineStep>) {
    internode.kind = CallKind::kCombine;
    internode.shape =
        InternodeShape::OfCombine(step.messages(), CombineMessageOf(step).bytes, shape.hidden);
  } else {
    constexpr bool kRouted = std::is_same_v<Step, DispatchStep>;
    const int64_t payload = Format::PayloadBytes(shape.hidden, shape.element_bytes);
    const int64_t scales = Format::ScaleBytes(shape.hidden);
    int64_t bytes = 0;
    if constexpr (kRouted) {
      bytes = DispatchMessage::Of(payload, scales, shape.top_k).bytes;
    } else {
      bytes = DispatchCachedMessage::Of(payload, scales, step.num_weights).bytes;
    }
    internode.kind = CallKind::kDispatch;
    internode.shape = InternodeShape::OfDispatch(shape.tokens, bytes,
                                                 kRouted ? CountCells(shape.local_experts) : 0);
    internode.slots = {step.slot_of, shape.tokens, shape.top_k};
  }
  return internode;
}

// `whole()`, `send(pending, of_whole_call)` and `receive(pending)` launch the call and its halves.
template <typename Format, typename Step, typename Whole, typename Send, typename Receive>
cudaError_t LaunchPart(Part part, const Step& step, PendingCall* pending, const OnGpu& gpu,
                       Whole whole, Send send, Receive receive) {
  if (!gpu.internode) {
    return part == Part::kWhole  ? whole()
           : part == Part::kSend ? send(pending, false)
                                 : receive(pending);
  }
  const cuda::InternodeCall internode = InternodeCallOf<Format>(step, pending);
  if (part == Part::kSend) {
    return gpu.internode->SendHalf(internode, gpu.stream, [&] { return send(pending, false); });
  }
  if (part == Part::kReceive) {
    return gpu.internode->RecvHalf(internode, gpu.stream, [&] { return receive(pending); });
  }
  return gpu.internode->Whole(
      internode, gpu.stream, [&](auto* to) { return send(to, true); }, receive);
}

template <typename Format>
cudaError_t Launch(Part part, const DispatchStep& step, PendingCall* pending, const OnGpu& gpu) {
  return LaunchPart<Format>(
      part, step, pending, gpu, [&] { return cuda::Dispatch<Format>(step, gpu.group, gpu.stream); },
      [&](auto* to, bool of_whole_call) {
        return cuda::DispatchSend<Format>(step, to, gpu.group, gpu.stream, of_whole_call);
      },
      [&](auto* from) { return cuda::DispatchRecv<Format>(step, from, gpu.group, gpu.stream); });
}

template <typename Format>
cudaError_t Launch(Part part, const DispatchCachedStep& step, PendingCall* pending,
                   const OnGpu& gpu) {
  return LaunchPart<Format>(
      part, step, pending, gpu,
      [&] { return cuda::DispatchCached<Format>(step, gpu.group, gpu.stream); },
      [&](auto* to, bool) {
        return cuda::DispatchCachedSend<Format>(step, to, gpu.group, gpu.stream);
      },
      [&](auto* from) {
        return cuda::DispatchCachedRecv<Format>(step, from, gpu.group, gpu.stream);
      });
}

// The part of a call that the part's handler has. The send half of rows that are sent one by one
// sees them as tokens of one row each.
inline CombineStep PartOf(Part part, CombineStep step) {
  if (part == Part::kSend) {
    step.shape.tokens = step.messages();
    if (step.by_entry) step.shape.top_k = 1;
    step.slot_of = nullptr, step.entry_weights = nullptr;
    step.residual = step.shared_rows = step.output = nullptr;
    step.shared_part = nullptr;
  } else if (part == Part::kReceive) {
    step.row_of = step.slot_counts = nullptr;
    step.expert_out = nullptr, step.router_weights = nullptr;
  }
  return step;
}

template <typename Format>
cudaError_t Launch(Part part, const CombineStep& whole, PendingCall* pending, const OnGpu& gpu) {
  const CombineStep step = PartOf(part, whole);
  return LaunchPart<Format>(
      part, step, pending, gpu, [&] { return cuda::Combine(step, gpu.group, gpu.stream); },
      [&](auto* to, bool of_whole_call) {
        return cuda::CombineSend(step, to, gpu.group, gpu.stream, of_whole_call);
      },
      [&](auto* from) { return cuda::CombineRecv(step, from, gpu.group, gpu.stream); });
}

}  // namespace jax_ep
