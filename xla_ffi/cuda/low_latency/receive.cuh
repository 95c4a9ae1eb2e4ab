// What the placers of a dispatch of few tokens do. Used by low_latency/dispatch.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/primitives.cuh"
#include "cuda/low_latency/crew.cuh"
#include "cuda/low_latency/send.cuh"
#include "cuda/window/call.cuh"
#include "cuda/window/groups.cuh"
#include "cuda/window/scales.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The workers as placers.
template <typename Format>
class LowLatencyReceiver {
 public:
  using Range = LowLatencyDispatchPlan::Range;

  // In shared memory: `tables` of the GroupTable and, of formats with scales, `first_tiles` [L + 1]
  // and `zeros` [kZeroBytes].
  __device__ LowLatencyReceiver(const WindowDispatchStep& step, const LowLatencyDispatchPlan& plan,
                                WindowCall& call, const LowLatencyCrew& crew,
                                LowLatencyShared<Format>& shared, uint8_t* tables,
                                int32_t* first_tiles, const uint8_t* zeros)
      : step_(step),
        plan_(plan),
        call_(call),
        crew_(crew),
        shared_(shared),
        groups_(step.shape, kLowLatencyWarps, tables),
        scales_(step, plan.scales, groups_, first_tiles, zeros) {}

  // Looks for all that comes at once: each look takes half a microsecond.
  __device__ void Place(uint32_t item) {
    const bool has_message = item < plan_.message_items;
    const Message message = MessageOf(has_message ? item : 0);
    const CountCell* from[kSeen] = {};
    uint32_t sources[kSeen];
#pragma unroll
    for (uint32_t i = 0; i < kSeen; ++i) sources[i] = message.source;
    if (has_message) {
      from[kHead] = message.cells;
      if (HasEntry()) from[kEntry] = message.cells + 1 + Lane();
      PayloadCells(message, message.payload.begin, from + kPayload);
    }
    uint32_t cell = 0;
    if (!built_ && threadIdx.x < plan_.count_cells.value * call_.ranks()) {
      sources[kCounts] = plan_.count_cells.Divide(threadIdx.x, cell);
      from[kCounts] = call_.Counts(call_.rank(), sources[kCounts]) + cell;
    }
    CountCell seen[kSeen] = {};
    bool ok = call_.AwaitCells(from, sources, seen, [&](const CountCell(&cells)[kSeen]) {
      return cells[kHead].counts[0] < 0 ? kPayload : kSeen;
    });
    // Another call's: this says so.
    if (ok && from[kCounts] != nullptr && !call_.HasCounts(cell, seen[kCounts])) {
      ok = call_.AwaitCounts(sources[kCounts], cell, seen[kCounts]);
    }
    if (!ok) Fail();
    if (plan_.reads_at_once) crew_.ReadsOver();
    if (built_) {
      crew_.Sync();
    } else {
      groups_.Build(call_, plan_.count_cells, crew_.team(), shared_.counts_arrived, &seen[kCounts]);
      if constexpr (kEncodes) {
        if (shared_.counts_arrived) scales_.Build(crew_.team());
      }
      built_ = true;
    }
    if (shared_.counts_arrived) {
      if (has_message && !PlaceMessage(message, seen)) Fail();
      if (item == 0 && Warp() == 1) {
        groups_.Write(step_);
        if constexpr (kEncodes) scales_.WriteOffsets();
      }
      FillShare(item);
    } else if (threadIdx.x == 0 && !plan_.reads_at_once) {
      Fail();  // where it was Build that waited in vain
    }
    if (!plan_.reads_at_once) crew_.ReadsOver();
  }

 private:
  static constexpr bool kEncodes = QuantizedFormat<Format>;
  static constexpr int kScalesWarp = 2;  // clears them

  // What a worker sees of a message, and of the counts before the first.
  static constexpr uint32_t kHead = 0, kEntry = 1, kCounts = 2, kPayload = 3;
  static constexpr uint32_t kSeen = kPayload + kCellsAtOnce;

  struct Message {
    const CountCell* cells;
    uint32_t source;
    uint32_t token;
    Range payload;
    bool first_piece;
  };

  __device__ void Fail() const {
    StoreSame(&shared_.counts_arrived, false);
    StoreSame(&shared_.block.failed, true);
  }

  __device__ bool HasEntry() const { return Lane() < step_.shape.top_k; }
  __device__ Message MessageOf(uint32_t item) const {
    uint32_t piece, turn;
    const uint32_t part = plan_.pieces.Divide(item, piece);
    const uint32_t token = call_.by_ranks().Divide(part, turn);
    const uint32_t source = call_.by_ranks().Rest(call_.rank() + turn);
    return {call_.Cells(call_.rank(), source, token), source, token, plan_.Piece(piece),
            piece == 0};
  }
  // This worker's cells of a message's payload from cell `first` on.
  __device__ void PayloadCells(const Message& message, uint32_t first,
                               const CountCell** from) const {
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      const uint32_t cell = first + threadIdx.x + i * kLowLatencyWorkers;
      from[i] = cell < message.payload.end ? message.cells + plan_.payload_begin() + cell : nullptr;
    }
  }

  // False in workers of which a wait failed.
  __device__ bool PlaceMessage(const Message& message, const CountCell (&seen)[kSeen]) const {
    const EpShape& shape = step_.shape;
    const int32_t slot = seen[kHead].counts[0];
    if (slot < 0 || slot >= shape.tokens) return true;
    int32_t row = -1, expert = 0;
    if (HasEntry()) {
      const CountCell& entry = seen[kEntry];
      // Without a sign, so that whatever a peer has stored wraps.
      const auto first = static_cast<uint32_t>(call_.rank() * shape.local_experts);
      expert = static_cast<int32_t>(static_cast<uint32_t>(entry.counts[0]) - first);
      row = groups_.RowOf(message.source, expert, entry.counts[1]);
      if (message.first_piece && Warp() == 0) Record(message, slot, row, entry);
    }
    const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
    if (lanes == 0) return true;
    uint8_t* scales = nullptr;  // of this lane's row
    if constexpr (kEncodes) scales = row < 0 ? nullptr : scales_.At(row, expert);
    CountCell cells[kCellsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) cells[i] = seen[kPayload + i];
    bool ok = true;
    JAX_EP_NO_UNROLL
    for (uint32_t first = message.payload.begin; ok;) {
      StoreCells(first, message.payload.end, cells, lanes, row, scales);
      first += kCellsAtOnce * kLowLatencyWorkers;
      if (first >= message.payload.end) break;
      const CountCell* from[kCellsAtOnce];
      uint32_t sources[kCellsAtOnce];
      PayloadCells(message, first, from);
#pragma unroll
      for (uint32_t i = 0; i < kCellsAtOnce; ++i) sources[i] = message.source;
      ok = __all_sync(kFullWarp, call_.AwaitCells(from, sources, cells)) != 0;
    }
    return ok;
  }

  __device__ void Record(const Message& message, int32_t slot, int32_t row,
                         const CountCell& entry) const {
    const EpShape& shape = step_.shape;
    const int64_t flat = message.source * shape.tokens + slot;
    step_.row_of[flat * shape.top_k + Lane()] = row;
    if (row < 0) return;
    step_.row_slot[row] = static_cast<int32_t>(flat);
    int32_t* info = step_.src_info + int64_t{row} * 3;
    info[0] = static_cast<int32_t>(message.source);
    info[1] = static_cast<int32_t>(message.token);
    info[2] = Lane();
    step_.row_weights[row] = __int_as_float(entry.counts[2]);
  }

  // Whole warp: cells of a message from `first` on, to the rows of its lanes and their scales.
  __device__ void StoreCells(uint32_t first, uint32_t end, const CountCell (&cells)[kCellsAtOnce],
                             unsigned lanes, int32_t row, uint8_t* scales) const {
    const int64_t row_bytes = Format::PayloadBytes(step_.shape.hidden, step_.shape.element_bytes);
    JAX_EP_NO_UNROLL
    for (; lanes != 0; lanes &= lanes - 1) {
      auto* words = reinterpret_cast<int32_t*>(step_.rows + FromLowest(lanes, row) * row_bytes);
      const uint64_t scale_words = FromLowest(lanes, reinterpret_cast<uint64_t>(scales));
#pragma unroll
      for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
        const uint32_t at = first + threadIdx.x + i * kLowLatencyWorkers;
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
          const uint32_t word = at * 3 + j;
          if (at >= end) continue;
          if (word < plan_.payload_words) {
            words[word] = cells[i].counts[j];
          } else if constexpr (kEncodes) {
            if (word >= plan_.scales_word && word < plan_.message_words) {
              scales_.StoreWord(reinterpret_cast<uint8_t*>(scale_words), word - plan_.scales_word,
                                static_cast<uint32_t>(cells[i].counts[j]));
            }
          }
        }
      }
    }
  }

  // An equal share of everything that no message fills: padding, the tail, slots without a token.
  __device__ void FillShare(uint32_t item) const {
    const EpShape& shape = step_.shape;
    const int64_t items = plan_.call.work.receive_items;
    bool by_group = shape.expert_alignment > 1;
    if constexpr (kEncodes) by_group |= plan_.scales.tiled();
    if (by_group) {
      JAX_EP_NO_UNROLL
      for (int64_t expert = item; expert < shape.local_experts; expert += items) {
        Clear(groups_.PaddingOf(expert), true);
        if constexpr (kEncodes) {
          if (Warp() == kScalesWarp) scales_.ClearTilesOf(expert);
        }
      }
    }
    const int64_t end = groups_.End(), share = DivideUp(shape.recv_rows - end, items);
    const int64_t begin = Min(end + item * share, shape.recv_rows);
    Clear({begin, Min(begin + share, shape.recv_rows)}, step_.zero_tail);
    if constexpr (kEncodes) {
      if (Warp() == kScalesWarp) {
        scales_.ClearTailTiles(item, items);
        // The kernel may end and its zeros with it.
        BulkWaitRead<0>();
      }
    }
    if (item >= plan_.messages || Warp() != 0 || Lane() >= shape.top_k) return;
    uint32_t source;
    const int32_t slot = static_cast<int32_t>(call_.by_ranks().Divide(item, source));
    if (slot < groups_.Slots(source)) return;
    step_.row_of[(source * shape.tokens + slot) * shape.top_k + Lane()] = -1;
  }

  __device__ void Clear(const GroupTable::Range& range, bool payload) const {
    JAX_EP_NO_UNROLL
    for (int64_t row = range.begin + threadIdx.x; row < range.end; row += kLowLatencyWorkers) {
      step_.row_slot[row] = -1;
      step_.row_weights[row] = 0.0f;
    }
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * 3 + threadIdx.x; i < range.end * 3; i += kLowLatencyWorkers) {
      step_.src_info[i] = -1;
    }
    if (!payload) return;
    if constexpr (kEncodes) {
      if (Warp() == kScalesWarp) scales_.Clear(range);
    }
    const int64_t vectors =
        Format::PayloadBytes(step_.shape.hidden, step_.shape.element_bytes) / kVectorBytes;
    auto* rows = reinterpret_cast<uint4*>(step_.rows);
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * vectors + threadIdx.x; i < range.end * vectors;
         i += kLowLatencyWorkers) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }

  const WindowDispatchStep& step_;
  const LowLatencyDispatchPlan& plan_;
  WindowCall& call_;
  const LowLatencyCrew& crew_;
  LowLatencyShared<Format>& shared_;
  GroupTable groups_;
  std::conditional_t<kEncodes, ScaleWriter<Format>, NoScales> scales_;
  bool built_ = false;
};

#endif  // sm_90

}  // namespace jax_ep::cuda
