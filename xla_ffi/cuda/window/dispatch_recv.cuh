// The receivers of a window dispatch: they build the tables of the groups from the counts of all
// sources, and move arrived messages to rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/window/call.cuh"
#include "cuda/window/dispatch_plan.cuh"
#include "cuda/window/groups.cuh"
#include "cuda/window/items.cuh"
#include "cuda/window/rows.cuh"
#include "cuda/window/scales.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

template <typename Format>
class Receiver {
  static constexpr bool kEncoded = kHasScales<Format>;

 public:
  __device__ Receiver(const DispatchStep& step, const DispatchPlan& plan, WindowCall& call,
                      BulkStages& stages, const DispatchShared<Format>& memory)
      : step_(step),
        plan_(plan),
        call_(call),
        stages_(stages),
        groups_(step.shape, kRowWarps, memory.groups),
        scales_(step, plan.scales, groups_, memory.first_tiles, memory.zeros),
        memory_(memory) {}

  // Called by the whole team: builds the tables. Returns false if a wait failed.
  __device__ bool Build(const Team& team) {
    groups_.Build(call_, plan_.count_cells, team, *memory_.counts_arrived);
    if constexpr (kEncoded) {
      if (*memory_.counts_arrived) scales_.Build(team);
    }
    // Releases the senders in AwaitTables.
    if (team.threads < kRowThreads) ArriveAtBarrier(kTablesBarrier, kRowThreads);
    return *memory_.counts_arrived;
  }

  // For senders beside a receiving team, after sending.
  __device__ bool AwaitTables() {
    __syncwarp();
    NamedBarrier(kTablesBarrier, kRowThreads);
    return *memory_.counts_arrived;
  }

  __device__ bool Run(WorkItem item) {
    return ForEachItem(call_, Queue::kReceive, item, [&](WorkItem current, NextTicket& next) {
      next.DrawAhead();
      if (current.index == 0) {
        groups_.Write(step_);
        if constexpr (kEncoded) scales_.WriteOnce();
      }
      FillShare(current.index);
      return current.index >= plan_.chunk_items || PlaceChunk(current.index);
    });
  }

 private:
  // Fills this item's equal share of whatever no message fills: padding, the tail, and slots
  // without a token.
  __device__ void FillShare(uint32_t item) {
    const EpShape& shape = step_.shape;
    const int64_t items = plan_.call.work.receive_items;
    bool by_group = shape.expert_alignment > 1;
    if constexpr (kEncoded) by_group |= plan_.scales.tiled();
    if (by_group) {
      JAX_EP_NO_UNROLL
      for (int64_t expert = item; expert < shape.local_experts; expert += items) {
        Clear(groups_.PaddingOf(expert), true);
        if constexpr (kEncoded) scales_.ClearTilesOf(expert);
      }
    }
    const int64_t end = groups_.End(), share = DivideUp(shape.recv_rows - end, items);
    const int64_t begin = Min(end + item * share, shape.recv_rows);
    Clear({begin, Min(begin + share, shape.recv_rows)}, step_.zero_tail);
    if constexpr (kEncoded) scales_.ClearTailTiles(item, items);
    if (item >= plan_.chunk_items) return;
    uint32_t source;
    const uint32_t chunk = call_.by_ranks().Divide(item, source);
    const int32_t first = static_cast<int32_t>(chunk) * plan_.chunk_tokens;
    const int32_t last = Min(first + plan_.chunk_tokens, static_cast<int32_t>(shape.tokens));
    const int32_t absent = groups_.Slots(source) > first ? groups_.Slots(source) : first;
    int32_t* row_of = step_.row_of + source * shape.tokens * shape.top_k;
    JAX_EP_NO_UNROLL
    for (int64_t entry = absent * shape.top_k + Lane(); entry < last * shape.top_k;
         entry += kWarpSize) {
      row_of[entry] = -1;
    }
  }

  __device__ void Clear(const GroupTable::Range& range, bool payload) {
    JAX_EP_NO_UNROLL
    for (int64_t row = range.begin + Lane(); row < range.end; row += kWarpSize) {
      step_.row_slot[row] = -1;
      step_.router_weights[row] = 0.0f;
    }
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * 3 + Lane(); i < range.end * 3; i += kWarpSize) {
      step_.src_info[i] = -1;
    }
    const int64_t bytes = plan_.rows.payload_bytes;
    if (payload) {
      StoreZeros(step_.rows + range.begin * bytes, step_.rows + range.end * bytes, memory_.zeros);
      if constexpr (kEncoded) scales_.Clear(range);
    }
  }

  __device__ bool PlaceChunk(uint32_t item) {
    const EpShape& shape = step_.shape;
    const RowPlan& rows = plan_.rows;
    const Arrival chunk = AwaitChunk(call_, item, shape.tokens);
    if (!chunk.ok) return false;
    const auto message = MessageOf<Format>(step_);
    // Own tokens that travel unchanged do not pass through the window.
    const bool own = !kEncoded && chunk.source == call_.rank();
    const uint8_t* messages =
        call_.Region(call_.rank(), chunk.source) + int64_t{chunk.first_slot} * rows.message_bytes;
    uint32_t token = 0;  // of message i, in lane i
    if (own && static_cast<uint32_t>(Lane()) < chunk.count) {
      const uint8_t* from = messages + Lane() * int64_t{rows.message_bytes};
      token = Min(static_cast<uint32_t>(LoadAroundL1(Int32At(from, message.source_token))),
                  static_cast<uint32_t>(shape.tokens) - 1);
    }
    const auto load = [&](uint32_t unit) {
      uint32_t piece;
      const uint32_t index = rows.pieces.Divide(unit, piece);
      const uint8_t* from = messages + int64_t{index} * rows.message_bytes;
      const int64_t of_token = __shfl_sync(kFullWarp, token, static_cast<int>(index));
      const uint8_t* payload =
          own ? static_cast<const uint8_t*>(step_.tokens) + of_token * rows.payload_bytes : from;
      LoadPiece(stages_, rows, piece, payload, from);
    };
    const uint32_t units = chunk.count * rows.pieces.value;
    const uint32_t primed = stages_.Prime(units, load);
    Place place{-1, 0};  // of entry k, in lane k
    stages_.Pass(units, primed, load, [&](uint32_t unit, const uint8_t* stage) {
      uint32_t piece;
      const uint32_t index = rows.pieces.Divide(unit, piece);
      if (piece == 0) {
        place = Record(chunk.source, chunk.first_slot + index,
                       stage + rows.piece_bytes - message.scales);
        if constexpr (kEncoded) scales_.Place(place.row, place.group, stage + rows.piece_bytes);
      }
      if (place.row < 0) return;
      BulkStore(step_.rows + int64_t{place.row} * rows.payload_bytes +
                    static_cast<int64_t>(piece) * rows.piece_bytes,
                stage, rows.PieceBytes(piece));
    });
    return true;
  }

  // An entry's row, or -1, and its group.
  struct Place {
    int32_t row;
    int32_t group;
  };

  // Called by the whole warp: writes a slot's tables. Returns in lane k the place of entry k.
  __device__ Place Record(uint32_t source, uint32_t slot, const uint8_t* stage) {
    const EpShape& shape = step_.shape;
    const auto message = MessageOf<Format>(step_);
    const int k = Lane();
    if (k >= shape.top_k) return {-1, 0};
    const int64_t flat = source * shape.tokens + slot;
    // Unsigned, so that whatever a peer has stored wraps around instead of overflowing.
    const auto first = static_cast<uint32_t>(call_.rank() * shape.local_experts);
    const auto stored = static_cast<uint32_t>(Int32At(stage, message.expert)[k]);
    const auto expert = static_cast<int32_t>(stored - first);
    const int32_t row = groups_.RowOf(source, expert, Int32At(stage, message.position)[k]);
    step_.row_of[flat * shape.top_k + k] = row;
    if (row < 0) return {-1, 0};
    step_.row_slot[row] = static_cast<int32_t>(flat);
    int32_t* info = step_.src_info + int64_t{row} * 3;
    info[0] = static_cast<int32_t>(source);
    info[1] = *Int32At(stage, message.source_token);
    info[2] = k;
    step_.router_weights[row] = FloatAt(stage, message.weight)[k];
    return {row, expert};
  }

  const DispatchStep& step_;
  const DispatchPlan& plan_;
  WindowCall& call_;
  BulkStages& stages_;  // shared by both roles, because it tracks the phases of the barriers
  GroupTable groups_;
  std::conditional_t<kEncoded, ScaleWriter<Format>, NoScales> scales_;
  const DispatchShared<Format>& memory_;
};

// Called by the whole block: fills memory with all ones, the bytes of kNoValue.
__device__ inline void FillBytes(uint8_t* to, int64_t count) {
  JAX_EP_NO_UNROLL
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = 0xFF;
}

// Called by the whole block: fills in the results of a failed call or receive half.
template <typename Format>
__device__ __noinline__ void Fail(const DispatchStep& step, const ScalePlan& scales) {
  const EpShape& shape = step.shape;
  const int64_t experts = shape.local_experts, entries = shape.tokens * shape.top_k;
  FillWords(step.rows, shape.recv_rows * PayloadBytesOf<Format>(step), kNoValue);
  if constexpr (kHasScales<Format>) {
    const bool tiled = scales.tiled();
    const int64_t line = scales.Line<typename Format::Scale>(shape.recv_rows);
    FillBytes(step.scales,
              tiled ? scales.tiles.tiles * scales.TileBytes() : line * scales.row_bytes);
    if (tiled) FillWords(step.scales_offsets, experts, 0);
  }
  FillWords(step.router_weights, shape.recv_rows, kNoValue);
  FillWords(step.row_slot, shape.recv_rows, kNoValue);
  FillWords(step.src_info, shape.recv_rows * 3, kNoValue);
  FillWords(step.expert_ids, experts, kNoValue);
  FillWords(step.row_of, shape.ranks * entries, kNoValue);
  FillWords(step.row_offsets, experts + 1, 0);
  FillWords(step.group_sizes, experts, 0);
  FillWords(step.expert_counts, experts, 0);
  FillWords(step.slot_counts, shape.ranks, 0);
  FillWords(step.num_dropped, 1, 0);
  // The results of a send half belong to that.
  if (step.slot_of == nullptr) return;
  FillWords(step.slot_of, entries, kNoValue);
  FillWords(step.num_invalid, 1, 0);
}

}  // namespace jax_ep::cuda
