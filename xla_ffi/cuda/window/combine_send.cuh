// The senders of a window combine: a slot's rows are summed and stored into the window of the
// slot's source. Where rows travel one by one a slot is that of an entry, which has one row or, at
// this rank, none; a chunk's flag says which have. Used by window/combine*.cu.
#pragma once

#include <cstdint>

#include "cuda/window/combine_plan.cuh"
#include "protocol/routing.h"

namespace jax_ep::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What an item sends to whom.
struct SendTarget {
  uint32_t piece;
  uint32_t chunk;
  uint32_t source;

  __device__ __forceinline__ static SendTarget Of(const Combine& c, uint32_t item) {
    SendTarget place;
    const uint32_t part = c.plan.pieces.Divide(item, place.piece);
    uint32_t turn;
    place.chunk = c.plan.call.ranks.Divide(part, turn);
    // Ranks start with different ones, and with themselves last.
    const uint32_t after = c.call.rank() + 1 + turn, ranks = c.plan.call.ranks.value;
    place.source = after < ranks ? after : after - ranks;
    return place;
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
    const SendTarget place = SendTarget::Of(c, item);
    piece_ = place.piece;
    chunk_ = place.chunk;
    source_ = place.source;
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

// As SendJob: each row of a chunk is a sum of its own, and only those that are there are stored.
template <typename Element, typename Wire>
class SendEntriesJob {
 public:
  static constexpr int kCount = kVectorElements<Element, Wire>;
  static constexpr int kWords = QuantizedFormat<Wire> ? kWordsWhileEncoding : kWordsInFlight;

  __device__ __forceinline__ SendEntriesJob(const Combine& c, uint32_t item)
      : c_(&c), place_(SendTarget::Of(c, item)) {
    // A lane has a slot.
    static_assert(kCombineChunks.most <= kWarpSize);
    const int32_t messages = c.plan.messages.int_value();
    const int32_t slot = First() + Lane();
    const int32_t end = Min(First() + c.plan.chunk_slots.int_value(), messages);
    const uint32_t flat = place_.source * c.plan.messages.value + static_cast<uint32_t>(slot);
    const int32_t row = slot < end ? c.step.row_of[flat] : -1;
    // Comes back from the caller's program: below zero as well.
    const int32_t slots = c.step.slot_counts[place_.source];
    row_ = slot < slots ? RowOrDropped(row, c.step.shape.recv_rows) : -1;
    count_ = slots <= First() ? 0 : Min(end, slots) - First();
    rows_ = __ballot_sync(kFullWarp, row_ >= 0);
  }

  __device__ __forceinline__ void Run() {
    SumPiece<Element, kCount, false>(c_->step.shape.hidden, place_.piece, *this);
  }

  // After Run: one lane announces the stores of all.
  __device__ __forceinline__ void Publish() const {
    __syncwarp();
    if (Lane() == 0 && count_ > 0) {
      c_->call.Publish(place_.source, c_->FlagOf(place_.chunk, place_.piece), rows_,
                       static_cast<uint32_t>(count_));
    }
  }

  __device__ __forceinline__ void Start(bool) {
    to_load_ = to_store_ = rows_;
    from_ = static_cast<const uint8_t*>(c_->step.expert_out) + PieceBytes<Element>(place_.piece) +
            LaneBytes<Element, kCount>();
    to_ = c_->call.Region(place_.source, c_->call.PartAt(place_.source)) +
          First() * c_->plan.message.bytes + c_->plan.message.row + PieceBytes<Wire>(place_.piece) +
          LaneBytes<Wire, kCount>();
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
      const int32_t to_scale = ScaleFromCode<Wire, kCount>(c_->plan.message, place_.piece);
      Sums::Store(sums, to, to_scale, column, in_row);
    } else if (in_row) {
      Sums::Store(sums, to + column * Sums::kColumnBytes);
    }
  }

 private:
  __device__ int32_t First() const {
    return static_cast<int32_t>(place_.chunk * c_->plan.chunk_slots.value);
  }
  __device__ static int Pop(unsigned& lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    lanes &= lanes - 1;
    return lane;
  }

  const Combine* c_;
  SendTarget place_;
  int32_t row_;    // of this lane's slot, or -1
  int32_t count_;  // slots
  unsigned rows_;  // lanes that have one
  unsigned to_load_ = 0;
  unsigned to_store_ = 0;
  const uint8_t* from_ = nullptr;
  uint8_t* to_ = nullptr;
};

// A sender, until there is nothing left to send. False where a wait fails.
template <typename Job>
__device__ bool SendAll(const Combine& c, WorkItem item) {
  if (item.phase == Phase::kNone) return c.call.AwaitCredits();
  Job job(c, item.index);
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
    const Job next(c, item.index);
    job.Publish();
    job = next;
  }
  job.Publish();
  return true;
}

// With options: rows one by one, or sums.
template <typename Element, typename Wire, bool kOptions>
__device__ bool SendSums(const Combine& c, WorkItem item) {
  if constexpr (kOptions) {
    if (c.step.by_entry) return SendAll<SendEntriesJob<Element, Wire>>(c, item);
  }
  return SendAll<SendJob<Element, Wire>>(c, item);
}

#endif  // sm_90

}  // namespace jax_ep::cuda
