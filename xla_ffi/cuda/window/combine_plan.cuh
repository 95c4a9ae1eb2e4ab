// How a window combine is cut into work, and what its warps share. Rows are cut into pieces,
// because a warp keeps the float32 sums of a piece in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/window/call.cuh"
#include "cuda/window/sum.cuh"
#include "formats/combine_wire.h"
#include "formats/element_type.h"
#include "protocol/layout.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// As many warps as a limit of 128 registers per thread allows.
inline constexpr uint32_t kSumWarps = 16;
inline constexpr uint32_t kSumThreads = kSumWarps * kWarpSize;

// Up to this many tokens latency decides: all warps send and then all receive.
inline constexpr int64_t kShortCombine = 256;
// Tokens of a receive item.
inline constexpr ChunkRule kReceiveTokens{kShortCombine, 8};

struct CombinePlan {
  CallPlan call;
  CombineMessage message;
  int64_t row_bytes;
  Divisor tokens;
  Divisor messages;  // the most that one rank sends another
  Divisor top_k;
  Divisor pieces;
  Divisor chunk_slots;
  int32_t receive_tokens;
  int32_t batch;  // sums whose terms a warp looks up at a time
};

// Makes all of the plan except the roles.
inline CombinePlan MakeCombinePlan(const CombineStep& step) {
  const EpShape& shape = step.shape;
  const int64_t messages = step.messages();
  const int64_t chunks = kCombineChunks.Count(messages), pieces = Pieces(shape.hidden);
  CombinePlan plan{};
  plan.row_bytes = shape.row_bytes();
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.tokens = Divisor::Of(shape.tokens);
  plan.messages = Divisor::Of(messages);
  plan.top_k = Divisor::Of(shape.top_k);
  plan.pieces = Divisor::Of(pieces);
  plan.chunk_slots = Divisor::Of(kCombineChunks.Tokens(messages));
  plan.receive_tokens = static_cast<int32_t>(kReceiveTokens.Tokens(shape.tokens));
  plan.batch = static_cast<int32_t>(kWarpSize / shape.top_k);
  plan.message = CombineMessageOf(step);
  plan.call.work = {0, static_cast<uint32_t>(chunks * pieces * shape.ranks),
                    static_cast<uint32_t>(kReceiveTokens.Count(shape.tokens) * pieces)};
  plan.call.tag =
      CallTag(TagKind::kCombine, messages, plan.message.bytes, step.num_weights, step.site);
  return plan;
}

// Calls visit(Element, Wire, kOptions) with the types of the kernel that a step needs.
template <typename Visit>
cudaError_t VisitCombine(const CombineStep& step, Visit visit) {
  return VisitWire(step, [&](auto element, auto wire) {
    return step.has_options() ? visit(element, wire, std::true_type{})
                              : visit(element, wire, std::false_type{});
  });
}

// Calls preload(Element, Wire, kOptions) for all kernels of combines until one fails.
template <typename Preload>
cudaError_t PreloadCombines(Preload preload) {
  cudaError_t error = cudaSuccess;
  const auto next = [&](auto element, auto wire) {
    if (error == cudaSuccess) error = preload(element, wire, std::false_type{});
    if (error == cudaSuccess) error = preload(element, wire, std::true_type{});
  };
  for (const ElementType element : kElementTypes) {
    for (const ElementType wire : kElementTypes) VisitElements(element, wire, next);
    VisitElement(element,
                 [&](auto type) { ForEachWireFormat([&](auto format) { next(type, format); }); });
  }
  return error;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What all items of a warp share.
struct CombineContext {
  const CombineStep& step;
  const CombinePlan& plan;
  WindowCall& call;
  TermLanes lanes{plan.top_k, plan.batch};

  __device__ int64_t FlagOf(uint32_t chunk, uint32_t piece) const {
    return int64_t{chunk} * plan.pieces.value + piece;
  }

  // Called by the whole warp: each lane with a slot waits for its chunk from a source. Sets `sent`
  // to whether the chunk's flag announces the slot; where it does not, the slot still holds an
  // earlier call's data. Returns false in all lanes if any wait failed.
  __device__ bool AwaitChunks(bool by_entry, bool has_slot, uint32_t source, uint32_t slot,
                              uint32_t piece, bool& sent) const {
    bool arrived = true;
    if (has_slot) {
      uint32_t rest;
      FlagCell flag;
      arrived = call.AwaitFlag(source, FlagOf(plan.chunk_slots.Divide(slot, rest), piece), flag);
      sent = by_entry ? (flag.first_slot >> rest & 1) != 0 : rest < flag.count;
    }
    return AllSucceed(arrived);
  }

  __device__ static bool AllSucceed(bool succeeded) {
    const bool all = __all_sync(kFullWarp, succeeded) != 0;
    // From the acquires of single lanes to the accesses of all: a vote is not a barrier.
    __syncwarp();
    return all;
  }
};

#endif  // sm_90

}  // namespace jax_ep::cuda
