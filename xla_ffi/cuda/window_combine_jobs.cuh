// How a window combine is cut into work, what its senders sum and send, and what its placers add
// up. Rows are cut into pieces, and a warp holds the float32 sums of one piece. Used by
// window_combine*.cu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window_call.cuh"
#include "cuda/window_sum.cuh"
#include "formats/combine_wire.h"
#include "formats/element_type.h"
#include "protocol/layout.h"
#include "protocol/routing.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// As many as 128 registers a thread allow.
inline constexpr uint32_t kSumWarps = 16;
inline constexpr uint32_t kSumThreads = kSumWarps * kWarpSize;

// Up to so many tokens a call is a matter of latency: all warps send, and then all place.
inline constexpr int64_t kShortCombine = 256;
// Tokens of a place item.
inline constexpr ChunkRule kPlaceTokens{kShortCombine, 8};

struct CombinePlan {
  CallPlan call;
  CombineMessage message;
  int64_t row_bytes;
  Divisor tokens;
  Divisor top_k;
  Divisor pieces;
  Divisor chunk_slots;
  int32_t place_tokens;
  int32_t batch;  // sums whose terms a warp looks up at a time
};

// All but the roles of the call.
inline CombinePlan MakeCombinePlan(const WindowCombineStep& step) {
  const EpShape& shape = step.shape;
  const int64_t chunks = kCombineChunks.Count(shape.tokens), pieces = Pieces(shape.hidden);
  CombinePlan plan{};
  plan.row_bytes = shape.row_bytes();
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.tokens = Divisor::Of(shape.tokens);
  plan.top_k = Divisor::Of(shape.top_k);
  plan.pieces = Divisor::Of(pieces);
  plan.chunk_slots = Divisor::Of(kCombineChunks.Tokens(shape.tokens));
  plan.place_tokens = static_cast<int32_t>(kPlaceTokens.Tokens(shape.tokens));
  plan.batch = static_cast<int32_t>(kWarpSize / shape.top_k);
  plan.message = CombineMessageOf(step);
  plan.call.work = {0, static_cast<uint32_t>(chunks * pieces * shape.ranks),
                    static_cast<uint32_t>(kPlaceTokens.Count(shape.tokens) * pieces)};
  plan.call.tag = CallTag(2, shape.tokens, plan.message.bytes, step.num_weights, step.site);
  return plan;
}

// `preload(Element, Wire)` for all that a combine may have, until one fails.
template <typename Preload>
cudaError_t PreloadCombines(Preload preload) {
  cudaError_t error = cudaSuccess;
  const auto next = [&](auto element, auto wire) {
    if (error == cudaSuccess) error = preload(element, wire);
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

  // Whole warp: each lane with a slot waits for its chunk of a source.
  __device__ bool AwaitChunks(bool has_slot, uint32_t source, uint32_t slot, uint32_t piece) const {
    bool arrived = true;
    if (has_slot) {
      uint32_t rest;
      FlagCell flag;
      arrived = call.AwaitFlag(source, FlagOf(plan.chunk_slots.Divide(slot, rest), piece), flag);
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

// The sums of the rows of a chunk's slots, a piece of them, on their way to the slots' source.
template <typename Element, typename Wire>
class SendJob {
 public:
  static constexpr int kCount = kVectorElements<Element, Wire>;
  static constexpr int kWords = QuantizedFormat<Wire> ? kWordsWhileEncoding : kWordsInFlight;

  // Look-ups are under way once it exists.
  __device__ __forceinline__ SendJob(const Combine& c, uint32_t item) : c_(&c), lanes_(c.lanes) {
    const uint32_t part = c.plan.pieces.Divide(item, piece_);
    uint32_t turn;
    chunk_ = c.plan.call.ranks.Divide(part, turn);
    // Ranks start with different ones, and with themselves last.
    const uint32_t after = c.call.rank() + 1 + turn, ranks = c.plan.call.ranks.value;
    source_ = after < ranks ? after : after - ranks;
    // Rows do not wait for the count: entries of no slot are read, but not used.
    end_ = Min(First() + c.plan.chunk_slots.int_value(), c.plan.tokens.int_value());
    slot_ = First();
    next_row_ = LoadRow();
    // Comes back from the caller's program: below zero as well.
    const int32_t count = c.step.slot_counts[source_];
    end_ = count < slot_ ? slot_ : Min(end_, count);
  }

  __device__ __forceinline__ void Run() {
    if (piece_ == 0 && c_->step.num_weights != 0) SendWeightGrads();
    SumPiece<Element, kCount, true>(c_->step.shape.hidden, piece_, *this);
  }

  // After Run: one lane announces the stores of all.
  __device__ __forceinline__ void Publish() const {
    __syncwarp();
    // Nobody waits for a chunk without slots.
    if (Lane() == 0 && end_ > First()) {
      c_->call.Publish(source_, c_->FlagOf(chunk_, piece_), static_cast<uint32_t>(First()),
                       static_cast<uint32_t>(end_ - First()));
    }
  }

  __device__ __forceinline__ void Start(bool first) {
    if (!first) {
      slot_ = First();
      next_row_ = LoadRow();
    }
    from_ = static_cast<const uint8_t*>(c_->step.expert_out) + PieceBytes<Element>(piece_) +
            LaneBytes<Element, kCount>();
    to_ = Messages() + c_->plan.message.row + PieceBytes<Wire>(piece_) + LaneBytes<Wire, kCount>();
  }

  __device__ __forceinline__ bool Next(Term& term) {
    if (lanes_.empty()) {
      if (slot_ >= end_) return false;
      const int32_t count = end_ - slot_;
      row_ = lanes_.In(count) ? RowOrDropped(next_row_, c_->step.shape.recv_rows) : -1;
      lanes_.Start(count, row_ >= 0);
      slot_ += c_->plan.batch;
      next_row_ = LoadRow();
    }
    const int32_t row = __shfl_sync(kFullWarp, row_, lanes_.Pop(term.last));
    term.present = row >= 0;
    term.from = from_ + row * c_->plan.row_bytes;
    const bool weighted = term.present && c_->step.row_weights != nullptr;
    if (weighted) term.weight = LoadAroundL1(c_->step.row_weights + row);
    return true;
  }

  template <int kColumns>
  __device__ __forceinline__ void Store(const ColumnSums<kCount, kColumns>& sums, int column,
                                        bool in_row) {
    using Sums = Columns<Wire, kCount, kColumns>;
    if constexpr (QuantizedFormat<Wire>) {
      Sums::Store(sums, to_, ScaleFromCode<Wire, kCount>(c_->plan.message, piece_), column, in_row);
    } else if (in_row) {
      Sums::Store(sums, to_ + column * Sums::kColumnBytes);
    }
    to_ += c_->plan.message.bytes;
  }

 private:
  __device__ int32_t First() const {
    return static_cast<int32_t>(chunk_ * c_->plan.chunk_slots.value);
  }
  // R * n * K fits int32 (Validate).
  __device__ int32_t Entry(int32_t slot) const {
    const uint32_t first = source_ * c_->plan.tokens.value + static_cast<uint32_t>(slot);
    return static_cast<int32_t>(first * c_->plan.top_k.value);
  }
  __device__ int32_t LoadRow() const {
    return lanes_.In(end_ - slot_) ? c_->step.row_of[Entry(slot_) + Lane()] : -1;
  }
  // From the chunk's first slot on.
  __device__ uint8_t* Messages() const {
    return c_->call.Region(source_, c_->call.rank()) + First() * c_->plan.message.bytes;
  }

  __device__ void SendWeightGrads() const {
    const int32_t entries = (end_ - First()) * c_->plan.top_k.int_value();
#pragma unroll 1
    for (int32_t at = Lane(); at < entries; at += kWarpSize) {
      const int32_t row =
          RowOrDropped(c_->step.row_of[Entry(First()) + at], c_->step.shape.recv_rows);
      uint32_t k;
      const uint32_t slot = c_->plan.top_k.Divide(static_cast<uint32_t>(at), k);
      FloatAt(Messages() + slot * c_->plan.message.bytes, c_->plan.message.weight_grad)[k] =
          row < 0 ? 0.0f : c_->step.weight_grads[row];
    }
  }

  const Combine* c_;
  uint32_t piece_;
  uint32_t source_;
  uint32_t chunk_;
  TermLanes lanes_;
  int32_t end_;
  int32_t slot_;  // of the next batch
  int32_t next_row_;
  int32_t row_ = -1;
  const uint8_t* from_ = nullptr;
  uint8_t* to_ = nullptr;
};

// The sums of some tokens, a piece of them: what the ranks have sent, each rank's once, by rank.
template <typename Element, typename Wire>
class PlaceJob {
 public:
  static constexpr int kCount = kVectorElements<Element, Wire>;
  static constexpr int kWords = QuantizedFormat<Wire> ? kWordsWhileDecoding : kWordsInFlight;

  __device__ __forceinline__ PlaceJob(const Combine& c, uint32_t item) : c_(&c), lanes_(c.lanes) {
    token_ = static_cast<int32_t>(c.plan.pieces.Divide(item, piece_)) * c.plan.place_tokens;
    end_ = Min(token_ + c.plan.place_tokens, c.plan.tokens.int_value());
  }

  // False where a wait fails. Rows are not in flight across waits: too much would have to be kept.
  __device__ __forceinline__ bool Run() {
#pragma unroll 1
    for (int32_t next = LoadSlot(token_); token_ < end_; token_ += c_->plan.batch) {
      const int32_t slot = next;
      next = LoadSlot(token_ + c_->plan.batch);
      uint32_t at;
      const uint32_t source =
          c_->plan.tokens.Divide(slot < 0 ? 0 : static_cast<uint32_t>(slot), at);
      const uint8_t* message =
          c_->call.Region(c_->call.rank(), source) + at * c_->plan.message.bytes;
      // By rank: a token's slots at one rank are one slot.
      const int from = SortedDistinct(lanes_, c_->plan.top_k.int_value(), slot);
      if (!c_->AwaitChunks(slot >= 0, source, at, piece_)) return false;
      if (piece_ == 0 && c_->step.num_weights != 0) PlaceWeightGrad(slot >= 0, message);
      message_ = __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(message), from);
      message_ = from < 0 ? 0 : message_ + c_->plan.message.row + PieceBytes<Wire>(piece_);
      SumPiece<Wire, kCount, false>(c_->step.shape.hidden, piece_, *this);
    }
    return true;
  }

  __device__ __forceinline__ void Start(bool) {
    lanes_.Start(end_ - token_, message_ != 0);
    at_ = token_ * c_->plan.row_bytes + PieceBytes<Element>(piece_) + LaneBytes<Element, kCount>();
  }

  __device__ __forceinline__ bool Next(Term& term) {
    if (lanes_.empty()) return false;
    const uint64_t message = __shfl_sync(kFullWarp, message_, lanes_.Pop(term.last));
    term.present = message != 0;
    term.from = reinterpret_cast<const uint8_t*>(message + LaneBytes<Wire, kCount>());
    if constexpr (QuantizedFormat<Wire>) {
      term.to_scale = ScaleFromCode<Wire, kCount>(c_->plan.message, piece_);
    }
    return true;
  }

  template <int kColumns>
  __device__ __forceinline__ void Store(ColumnSums<kCount, kColumns>& sums, int column,
                                        bool in_row) {
    using Rows = Columns<Element, kCount, kColumns>;
    const int64_t at = at_ + column * Rows::kColumnBytes;
    at_ += c_->plan.row_bytes;
    if (!in_row) return;
    const auto* residual = static_cast<const uint8_t*>(c_->step.residual);
    Rows::AddAndStore(sums, residual == nullptr ? nullptr : residual + at,
                      static_cast<uint8_t*>(c_->step.output) + at);
  }

 private:
  // rank * n + slot of this lane's entry, or -1.
  __device__ int32_t LoadSlot(int32_t token) const {
    if (!lanes_.In(end_ - token)) return -1;
    const int32_t slot = c_->step.slot_of[token * c_->plan.top_k.int_value() + Lane()];
    const uint32_t slots = c_->plan.call.ranks.value * c_->plan.tokens.value;
    return static_cast<uint32_t>(slot) < slots ? slot : -1;
  }

  __device__ void PlaceWeightGrad(bool has_slot, const uint8_t* message) const {
    if (!lanes_.In(end_ - token_)) return;
    const float* grads = FloatAt(message, c_->plan.message.weight_grad);
    c_->step.output_weight_grads[token_ * c_->plan.top_k.int_value() + Lane()] =
        has_slot ? LoadAroundL1(grads + lanes_.place()) : 0.0f;
  }

  const Combine* c_;
  uint32_t piece_;
  TermLanes lanes_;
  int32_t token_;  // of the batch
  int32_t end_;
  uint64_t message_ = 0;  // where the piece of this lane's message starts; 0: none
  int64_t at_ = 0;        // of this lane's first vector in output and residual
};

// A sender, until there is nothing left to send. False where a wait fails.
template <typename Element, typename Wire>
__device__ bool SendSums(const Combine& c, WorkItem item) {
  if (item.phase == Phase::kNone) return c.call.AwaitCredits();
  SendJob<Element, Wire> job(c, item.index);
  if (!c.call.AwaitCredits()) return false;
  const bool ahead = c.call.DrawsAhead(Queue::kSend);
  for (;;) {
    // Where it is likely to be the last one the flag need not wait for the next ticket either.
    uint32_t ticket = ahead ? c.call.Draw(Queue::kSend) : 0;
    job.Run();
    // Before the fence, so that it and the next item's look-ups wait for memory together.
    if (!ahead) ticket = c.call.Draw(Queue::kSend);
    item = c.call.Resolve(Queue::kSend, ticket);
    if (item.phase == Phase::kNone) break;
    const SendJob<Element, Wire> next(c, item.index);
    job.Publish();
    job = next;
  }
  job.Publish();
  return true;
}

// A placer, until there is nothing left to place. False where a wait fails.
template <typename Element, typename Wire>
__device__ bool PlaceSums(const Combine& c) {
  bool ok = true;
  for (WorkItem item = c.call.First(Queue::kPlace); ok && item.phase != Phase::kNone;
       item = c.call.Take(Queue::kPlace)) {
    ok = PlaceJob<Element, Wire>(c, item.index).Run();
  }
  return ok;
}

// Whole block: what a call returns that did not end.
__device__ __noinline__ inline void FailCombine(const WindowCombineStep& step) {
  FillWords(static_cast<uint8_t*>(step.output), step.shape.tokens * step.shape.row_bytes(),
            kNoValue);
  FillWords(step.output_weight_grads, step.shape.tokens * step.num_weights, kNoValue);
}

#endif  // sm_90

}  // namespace jax_ep::cuda
