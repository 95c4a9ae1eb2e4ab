// The senders of a window combine: they sum a slot's rows and store the sum into the window of the
// slot's source. Where rows travel one by one each entry has its own slot, which has a row or, if
// it belongs to another rank, none; a chunk's flag says which slots have one.
#pragma once

#include <cstdint>

#include "cuda/window/combine_plan.cuh"
#include "protocol/routing.h"

namespace jax_ep::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What an item sends, and to which rank.
struct SendTarget {
  uint32_t piece;
  uint32_t chunk;
  uint32_t source;

  __device__ __forceinline__ static SendTarget Of(const CombineContext& c, uint32_t item) {
    SendTarget target;
    const uint32_t part = c.plan.pieces.Divide(item, target.piece);
    uint32_t turn;
    target.chunk = c.plan.call.ranks.Divide(part, turn);
    // Each rank starts with its successor and ends with itself, so that they start with different
    // ranks.
    const uint32_t after = c.call.rank() + 1 + turn, ranks = c.plan.call.ranks.value;
    target.source = after < ranks ? after : after - ranks;
    return target;
  }
};

// Sums a piece of the rows of a chunk's slots and stores the sums to the slots' source.
template <typename Element, typename Wire>
class SendJob {
 public:
  static constexpr int kCount = kVectorElements<Element, Wire>;
  static constexpr int kWords = QuantizedFormat<Wire> ? kWordsWhileEncoding : kWordsInFlight;

  // The constructor starts the look-ups.
  __device__ __forceinline__ SendJob(const CombineContext& c, uint32_t item)
      : c_(&c), lanes_(c.lanes) {
    const SendTarget target = SendTarget::Of(c, item);
    piece_ = target.piece;
    chunk_ = target.chunk;
    source_ = target.source;
    // Load rows before the number of slots is known: those of entries without a slot are not used.
    end_ = Min(First() + c.plan.chunk_slots.int_value(), c.plan.tokens.int_value());
    slot_ = First();
    next_row_ = LoadRow();
    // Has passed through the caller's program, so it may even be negative.
    const int32_t count = c.step.slot_counts[source_];
    end_ = count < slot_ ? slot_ : Min(end_, count);
  }

  __device__ __forceinline__ void Run() {
    if (piece_ == 0 && c_->step.num_weights != 0) SendWeightGrads();
    SumPiece<Element, kCount, true>(c_->step.shape.hidden, piece_, *this);
  }

  // After Run: one lane announces the stores of all lanes.
  __device__ __forceinline__ void Publish() const {
    __syncwarp();
    // Receivers do not wait for chunks without slots.
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
    const bool weighted = term.present && c_->step.router_weights != nullptr;
    if (weighted) term.weight = LoadAroundL1(c_->step.router_weights + row);
    return true;
  }

  template <int kColumns>
  __device__ __forceinline__ void Store(const ColumnSums<kCount, kColumns>& sums, int column,
                                        bool in_row) {
    using Sums = Columns<Wire, kCount, kColumns>;
    if constexpr (QuantizedFormat<Wire>) {
      const int32_t to_scale = ScaleFromCode<Wire, kCount>(c_->plan.message, piece_);
      Sums::Store(sums, c_->step.input_scale, to_, to_scale, column, in_row);
    } else if (in_row) {
      Sums::Store(sums, to_ + column * Sums::kColumnBytes);
    }
    to_ += c_->plan.message.bytes;
  }

 private:
  __device__ int32_t First() const {
    return static_cast<int32_t>(chunk_ * c_->plan.chunk_slots.value);
  }
  // R * n * K fits into int32 (Validate).
  __device__ int32_t Entry(int32_t slot) const {
    const uint32_t first = source_ * c_->plan.tokens.value + static_cast<uint32_t>(slot);
    return static_cast<int32_t>(first * c_->plan.top_k.value);
  }
  __device__ int32_t LoadRow() const {
    return lanes_.In(end_ - slot_) ? c_->step.row_of[Entry(slot_) + Lane()] : -1;
  }
  // Begins at the chunk's first slot.
  __device__ uint8_t* Messages() const {
    return c_->call.Region(source_, c_->call.PartAt(source_)) + First() * c_->plan.message.bytes;
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

  const CombineContext* c_;
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

// Like SendJob, but each row of a chunk is a sum of its own, and only rows that exist are stored.
template <typename Element, typename Wire>
class SendEntriesJob {
 public:
  static constexpr int kCount = kVectorElements<Element, Wire>;
  static constexpr int kWords = QuantizedFormat<Wire> ? kWordsWhileEncoding : kWordsInFlight;

  __device__ __forceinline__ SendEntriesJob(const CombineContext& c, uint32_t item)
      : c_(&c), target_(SendTarget::Of(c, item)) {
    // Each lane has one slot.
    static_assert(kCombineChunks.most <= kWarpSize);
    const int32_t messages = c.plan.messages.int_value();
    const int32_t slot = First() + Lane();
    const int32_t end = Min(First() + c.plan.chunk_slots.int_value(), messages);
    const uint32_t flat = target_.source * c.plan.messages.value + static_cast<uint32_t>(slot);
    const int32_t row = slot < end ? c.step.row_of[flat] : -1;
    // Has passed through the caller's program, so it may even be negative.
    const int32_t slots = c.step.slot_counts[target_.source];
    row_ = slot < slots ? RowOrDropped(row, c.step.shape.recv_rows) : -1;
    count_ = slots <= First() ? 0 : Min(end, slots) - First();
    rows_ = __ballot_sync(kFullWarp, row_ >= 0);
  }

  __device__ __forceinline__ void Run() {
    SumPiece<Element, kCount, false>(c_->step.shape.hidden, target_.piece, *this);
  }

  // After Run: one lane announces the stores of all lanes.
  __device__ __forceinline__ void Publish() const {
    __syncwarp();
    if (Lane() == 0 && count_ > 0) {
      c_->call.Publish(target_.source, c_->FlagOf(target_.chunk, target_.piece), rows_,
                       static_cast<uint32_t>(count_));
    }
  }

  __device__ __forceinline__ void Start(bool) {
    to_load_ = to_store_ = rows_;
    from_ = static_cast<const uint8_t*>(c_->step.expert_out) + PieceBytes<Element>(target_.piece) +
            LaneBytes<Element, kCount>();
    to_ = c_->call.Region(target_.source, c_->call.PartAt(target_.source)) +
          First() * c_->plan.message.bytes + c_->plan.message.row +
          PieceBytes<Wire>(target_.piece) + LaneBytes<Wire, kCount>();
  }

  __device__ __forceinline__ bool Next(Term& term) {
    if (to_load_ == 0) return false;
    term.last = term.present = true;
    term.from = from_ + __shfl_sync(kFullWarp, row_, Pop(to_load_)) * c_->plan.row_bytes;
    return true;
  }

  template <int kColumns>
  __device__ __forceinline__ void Store(const ColumnSums<kCount, kColumns>& sums, int column,
                                        bool in_row) {
    using Sums = Columns<Wire, kCount, kColumns>;
    uint8_t* to = to_ + Pop(to_store_) * c_->plan.message.bytes;
    if constexpr (QuantizedFormat<Wire>) {
      const int32_t to_scale = ScaleFromCode<Wire, kCount>(c_->plan.message, target_.piece);
      Sums::Store(sums, c_->step.input_scale, to, to_scale, column, in_row);
    } else if (in_row) {
      Sums::Store(sums, to + column * Sums::kColumnBytes);
    }
  }

 private:
  __device__ int32_t First() const {
    return static_cast<int32_t>(target_.chunk * c_->plan.chunk_slots.value);
  }
  __device__ static int Pop(unsigned& lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    lanes &= lanes - 1;
    return lane;
  }

  const CombineContext* c_;
  SendTarget target_;
  int32_t row_;    // of this lane's slot, or -1
  int32_t count_;  // number of slots
  unsigned rows_;  // bit of each lane that has a row
  unsigned to_load_ = 0;
  unsigned to_store_ = 0;
  const uint8_t* from_ = nullptr;
  uint8_t* to_ = nullptr;
};

// A sender: works until there is nothing left to send. Returns false if a wait fails.
template <typename Job>
__device__ bool SendAll(const CombineContext& c, WorkItem item) {
  if (item.phase == Phase::kNone) return c.call.AwaitCredits();
  Job job(c, item.index);
  if (!c.call.AwaitCredits()) return false;
  const bool ahead = c.call.DrawsAhead(Queue::kSend);
  for (;;) {
    // When the queue is nearly empty, draw before the work: this item is probably the last one,
    // whose flag then need not wait for the ticket.
    uint32_t ticket = ahead ? c.call.Draw(Queue::kSend) : 0;
    job.Run();
    // Otherwise draw before Publish, so that its fence and the next item's look-ups wait for memory
    // at the same time.
    if (!ahead) ticket = c.call.Draw(Queue::kSend);
    item = c.call.Resolve(Queue::kSend, ticket);
    if (item.phase == Phase::kNone) break;
    const Job next(c, item.index);
    job.Publish();
    job = next;
  }
  job.Publish();
  return true;
}

// With options, sends rows one by one or as sums.
template <typename Element, typename Wire, bool kOptions>
__device__ bool SendSums(const CombineContext& c, WorkItem item) {
  if constexpr (kOptions) {
    if (c.step.by_entry) return SendAll<SendEntriesJob<Element, Wire>>(c, item);
  }
  return SendAll<SendJob<Element, Wire>>(c, item);
}

#endif  // sm_90

}  // namespace jax_ep::cuda
