// The receivers of a window combine: they add up what the ranks have sent for each token.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/window/combine_plan.cuh"
#include "cuda/window/items.cuh"

namespace jax_ep::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Sums a piece of some tokens: what the ranks have sent, one row per rank, in the order of ranks.
// With options, rows that travel one by one are weighted and added in the order of entries instead,
// and a shared expert's rows come last.
template <typename Element, typename Wire, bool kOptions>
class ReceiveJob {
 public:
  static constexpr int kCount = kVectorElements<Element, Wire>;
  // Options need registers of their own.
  static constexpr int kWords =
      (QuantizedFormat<Wire> ? kWordsWhileDecoding : kWordsInFlight) * (kOptions ? 2 : 3) / 3;

  __device__ __forceinline__ ReceiveJob(const CombineContext& c, uint32_t item)
      : c_(&c), lanes_(c.lanes) {
    token_ = static_cast<int32_t>(c.plan.pieces.Divide(item, piece_)) * c.plan.receive_tokens;
    end_ = Min(token_ + c.plan.receive_tokens, c.plan.tokens.int_value());
  }

  // Returns false if a wait fails. No rows are in flight across waits, because too many registers
  // would have to be kept.
  __device__ __forceinline__ bool Run() {
#pragma unroll 1
    for (int32_t next = LoadSlot(token_); token_ < end_; token_ += c_->plan.batch) {
      const int32_t slot = next;
      next = LoadSlot(token_ + c_->plan.batch);
      uint32_t at;
      const uint32_t source =
          c_->plan.messages.Divide(slot < 0 ? 0 : static_cast<uint32_t>(slot), at);
      const uint8_t* message =
          c_->call.Region(c_->call.rank(), source) + at * c_->plan.message.bytes;
      // A token's entries at one rank share a slot; each slot is added once, in the order of ranks.
      const bool by_entry = kOptions && c_->step.by_entry;
      int from = by_entry ? Lane() : SortedDistinct(lanes_, c_->plan.top_k.int_value(), slot);
      bool sent = false;
      if (!c_->AwaitChunks(by_entry, slot >= 0, source, at, piece_, sent)) return false;
      if constexpr (kOptions) from = Entry(slot >= 0, sent, from);
      if (piece_ == 0 && c_->step.num_weights != 0) PlaceWeightGrad(sent, message);
      // The address of this lane's own slot and, after the shuffle, of the slot whose turn this
      // lane has.
      message_ = sent ? reinterpret_cast<uint64_t>(message) : 0;
      message_ = __shfl_sync(kFullWarp, message_, from);
      if (from < 0) message_ = 0;
      if (message_ != 0) message_ += c_->plan.message.row + PieceBytes<Wire>(piece_);
      SumPiece<Wire, kCount, kOptions>(c_->step.shape.hidden, piece_, *this);
    }
    return true;
  }

  __device__ __forceinline__ void Start(bool) {
    bool present = message_ != 0;
    if constexpr (kOptions) {
      present |= options_.dropped;
      options_.token = token_;
    }
    lanes_.Start(end_ - token_, present);
    at_ = token_ * c_->plan.row_bytes + PieceBytes<Element>(piece_) + LaneBytes<Element, kCount>();
  }

  __device__ __forceinline__ bool Next(Term& term) {
    if (lanes_.empty()) return false;
    const int lane = lanes_.Pop(term.last);
    const uint64_t message = __shfl_sync(kFullWarp, message_, lane);
    if constexpr (kOptions) term.weight = __shfl_sync(kFullWarp, options_.weight, lane);
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
    if constexpr (kOptions) {
      const int64_t token = options_.token++, row = SharedRowOf(c_->step, token);
      if (in_row && row >= 0) {
        Rows::AddRow(sums, static_cast<const uint8_t*>(c_->step.shared_rows) + at +
                               (row - token) * c_->plan.row_bytes);
      }
    }
    if (!in_row) return;
    const auto* residual = static_cast<const uint8_t*>(c_->step.residual);
    Rows::AddAndStore(sums, residual == nullptr ? nullptr : residual + at,
                      static_cast<uint8_t*>(c_->step.output) + at);
  }

 private:
  // Returns rank * n + slot of this lane's entry, or -1.
  __device__ int32_t LoadSlot(int32_t token) const {
    if (!lanes_.In(end_ - token)) return -1;
    const int32_t slot = c_->step.slot_of[token * c_->plan.top_k.int_value() + Lane()];
    const uint32_t slots = c_->plan.call.ranks.value * c_->plan.messages.value;
    return static_cast<uint32_t>(slot) < slots ? slot : -1;
  }

  // For rows that travel one by one: sets this lane's weight and returns the lane that holds the
  // row's address, or -1. A row that its rank has dropped adds its weight times zero.
  __device__ int Entry(bool has_slot, bool sent, int from) {
    options_.weight = 1.0f;
    options_.dropped = c_->step.by_entry && has_slot && !sent;
    if (!c_->step.by_entry) return from;
    if (has_slot && c_->step.entry_weights != nullptr) {
      options_.weight = c_->step.entry_weights[token_ * c_->plan.top_k.int_value() + Lane()];
    }
    return has_slot && sent ? from : -1;
  }

  __device__ void PlaceWeightGrad(bool sent, const uint8_t* message) const {
    if (!lanes_.In(end_ - token_)) return;
    const float* grads = FloatAt(message, c_->plan.message.weight_grad);
    c_->step.output_weight_grads[token_ * c_->plan.top_k.int_value() + Lane()] =
        sent ? LoadAroundL1(grads + lanes_.place()) : 0.0f;
  }

  const CombineContext* c_;
  uint32_t piece_;
  TermLanes lanes_;
  int32_t token_;  // first token of the batch
  int32_t end_;
  uint64_t message_ = 0;  // where the piece of this lane's message starts, or 0
  int64_t at_ = 0;        // offset of this lane's first vector in output and residual
  struct Options {
    float weight;   // of this lane's entry
    bool dropped;   // whether this lane's row was dropped
    int32_t token;  // the next one to be stored
  };
  struct None {};
  std::conditional_t<kOptions, Options, None> options_{};
};

// A receiver: works until there is nothing left to receive. Returns false if a wait fails.
template <typename Element, typename Wire, bool kOptions>
__device__ bool ReceiveSums(const CombineContext& c) {
  const WorkItem first = c.call.First(Queue::kReceive);
  return ForEachItem(c.call, Queue::kReceive, first, [&](WorkItem item, NextTicket& next) {
    // In a whole call this is not the beginning: most warps have sent something before.
    next.DrawAhead();
    return ReceiveJob<Element, Wire, kOptions>(c, item.index).Run();
  });
}

// Called by the whole block: fills in the results of a failed call.
__device__ __noinline__ inline void FailCombine(const CombineStep& step) {
  FillWords(static_cast<uint8_t*>(step.output), step.shape.tokens * step.shape.row_bytes(),
            kNoValue);
  FillWords(step.output_weight_grads, step.shape.tokens * step.num_weights, kNoValue);
}

#endif  // sm_90

}  // namespace jax_ep::cuda
