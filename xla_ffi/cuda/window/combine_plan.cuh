// How a window combine is cut into work, and what its warps share. Rows are cut into pieces, and a
// warp holds the float32 sums of one piece. Used by window/combine*.
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

// As many as 128 registers a thread allow.
inline constexpr uint32_t kSumWarps = 16;
inline constexpr uint32_t kSumThreads = kSumWarps * kWarpSize;

// Up to so many tokens a call is a matter of latency: all warps send, and then all place.
inline constexpr int64_t kShortCombine = 256;
// Tokens of a place item.
inline constexpr ChunkRule kReceiveTokens{kShortCombine, 8};

struct CombinePlan {
  CallPlan call;
  CombineMessage message;
  int64_t row_bytes;
  Divisor tokens;
  Divisor messages;  // of one rank for another, at most
  Divisor top_k;
  Divisor pieces;
  Divisor chunk_slots;
  int32_t receive_tokens;
  int32_t batch;  // sums whose terms a warp looks up at a time
};

// All but the roles of the call.
inline CombinePlan MakeCombinePlan(const WindowCombineStep& step) {
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

// `visit(Element, Wire, kOptions)`: which kernel a step takes.
template <typename Visit>
cudaError_t VisitCombine(const WindowCombineStep& step, Visit visit) {
  return VisitWire(step, [&](auto element, auto wire) {
    return step.has_options() ? visit(element, wire, std::true_type{})
                              : visit(element, wire, std::false_type{});
  });
}

// As it, for all that a combine may have, until one fails.
template <typename Preload>
cudaError_t PreloadCombines(Preload preload) {
  cudaError_t error = cudaSuccess;
  const auto next = [&](auto element, auto wire) {
    if (error == cudaSuccess) error = preload(element, wire, std::false_type{});
    if (error == cudaSuccess) error = preload(element, wire, std::true_type{});
  };
  for (const ElementType element : kElementTypes) {
    for (const ElementType wire : kElementTypes) VisitElements(element, wire, next);
    VisitElement(element, [&](auto type) { next(type, CombineFormat{}); });
  }
  return error;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What all items of a warp share.
struct Combine {
  const WindowCombineStep& step;
  const CombinePlan& plan;
  WindowCall& call;
  TermLanes lanes{plan.top_k, plan.batch};

  __device__ int64_t FlagOf(uint32_t chunk, uint32_t piece) const {
    return int64_t{chunk} * plan.pieces.value + piece;
  }

  // Whole warp: each lane with a slot waits for its chunk of a source. `sent` is then what the
  // chunk's flag says of the slot: what was not sent is what an earlier call has left there.
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
    // From the acquires of the lanes to the accesses of every lane; a vote is no barrier.
    __syncwarp();
    return all;
  }
};

#endif  // sm_90

}  // namespace jax_ep::cuda
