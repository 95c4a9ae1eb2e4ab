// The sending warps of a window dispatch: route, post the counts, encode and store messages into
// the destinations' windows. Used by window_dispatch.cu.
#pragma once

#include <cstdint>

#include "cuda/window_call.cuh"
#include "cuda/window_dispatch_plan.cuh"
#include "cuda/window_route.cuh"
#include "cuda/window_rows.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

class Sender {
 public:
  __device__ Sender(const WindowDispatchStep& step, const DispatchPlan& plan, WindowCall& call,
                    BulkStages& stages, int32_t* router_rows)
      : step_(step),
        plan_(plan),
        call_(call),
        stages_(stages),
        walk_(static_cast<int32_t>(step.shape.top_k)),
        router_(step.shape, step.ids, router_rows) {}

  // False where a wait failed.
  __device__ bool Run(WorkItem item) {
    for (; item.phase != Phase::kNone; item = call_.Take(plan_.work, Queue::kSend)) {
      if (!(item.phase == Phase::kRoute ? Route(item.index) : SendChunk(item.index))) return false;
    }
    return true;
  }

 private:
  // Counts a part of the tokens; whoever adds the last part posts the counts of all.
  __device__ bool Route(uint32_t item) {
    const EpShape& shape = step_.shape;
    const int32_t begin = static_cast<int32_t>(Min(item * kRouteTokens, shape.tokens));
    const int32_t end = static_cast<int32_t>(Min(begin + kRouteTokens, shape.tokens));
    const int32_t experts = static_cast<int32_t>(shape.experts());
    InvalidIds invalid;
    router_.Restart(begin);
    router_.CountTo(end, &invalid);
    if (plan_.work.route_items == 1) return PostCounts(invalid);
    const RouteTotals totals = call_.Totals(experts);
    for (int32_t expert = Lane(); expert < experts; expert += kWarpSize) {
      if (router_.rows(expert) != 0) atomicAdd(totals.rows + expert, router_.rows(expert));
    }
    if (Lane() < shape.ranks) atomicAdd(totals.slots + Lane(), router_.slots());
    if (Lane() == 0 && invalid.count != 0) {
      atomicAdd(totals.invalid, invalid.count);
      const int64_t entries = shape.tokens * shape.top_k;
      atomicMax(totals.invalid_from_end, static_cast<int32_t>(entries) - invalid.first_entry);
    }
    __syncwarp();
    bool last = false;
    if (Lane() == 0) {
      last = LastOf(DeviceSignalMemory{}, totals.finished, plan_.work.route_items);
    }
    // Passes the acquire in LastOf on to the warp.
    __syncwarp();
    if (__shfl_sync(kFullWarp, static_cast<int>(last), 0) == 0) {
      router_.Restart(0);
      return true;
    }
    // The scratch is left at zero for the next call.
    for (int32_t expert = Lane(); expert < experts; expert += kWarpSize) {
      router_.Set(expert, LoadAroundL1(totals.rows + expert));
      totals.rows[expert] = 0;
    }
    if (Lane() < shape.ranks) {
      router_.SetSlots(LoadAroundL1(totals.slots + Lane()));
      totals.slots[Lane()] = 0;
    }
    invalid.count = LoadAroundL1(totals.invalid);
    invalid.first_entry =
        static_cast<int32_t>(shape.tokens * shape.top_k) - LoadAroundL1(totals.invalid_from_end);
    __syncwarp();
    if (Lane() == 0) *totals.invalid = *totals.invalid_from_end = 0;
    return PostCounts(invalid);
  }

  // What the router has counted is all of the call's.
  __device__ bool PostCounts(const InvalidIds& invalid) {
    if (!AwaitCredits(call_, Phase::kRoute)) return false;
    may_store_ = true;
    const EpShape& shape = step_.shape;
    const int32_t local_experts = static_cast<int32_t>(shape.local_experts);
    const int32_t cells = static_cast<int32_t>(CountCells(local_experts));
    constexpr int32_t kPerCell = static_cast<int32_t>(kCountsPerCell);
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      const int32_t slots = __shfl_sync(kFullWarp, router_.slots(), rank);
      for (int32_t cell = Lane(); cell < cells; cell += kWarpSize) {
        int32_t counts[3] = {slots, call_.tag(), 0};
        if (cell > 0) {
#pragma unroll
          for (int32_t j = 0; j < kPerCell; ++j) {
            const int32_t expert = (cell - 1) * kPerCell + j;
            counts[j] = expert < local_experts ? router_.rows(rank * local_experts + expert) : 0;
          }
        }
        call_.PostCounts(static_cast<uint32_t>(rank), cell, counts);
      }
    }
    if (Lane() == 0) Report(invalid);
    router_.Restart(0);
    return true;
  }

  __device__ void Report(const InvalidIds& invalid) {
    *step_.num_invalid = invalid.count;
    InvalidIdReport* report = step_.report;
    // The host clears it between calls.
    if (invalid.count == 0 || report == nullptr ||
        *static_cast<const volatile int32_t*>(&report->state) != InvalidIdReport::kFree) {
      return;
    }
    const int32_t entry = invalid.first_entry, top_k = walk_.top_k;
    *reinterpret_cast<int4*>(report) =
        make_int4(entry / top_k, entry % top_k, step_.ids[entry], InvalidIdReport::kSet);
  }

  __device__ bool SendChunk(uint32_t chunk) {
    const EpShape& shape = step_.shape;
    const RowPlan& rows = plan_.rows;
    const int32_t begin = static_cast<int32_t>(chunk) * plan_.chunk_tokens;
    const int32_t end =
        static_cast<int32_t>(Min<int64_t>(begin + plan_.chunk_tokens, shape.tokens));
    const auto load = [&](uint32_t unit) {
      const int64_t token = begin + unit / rows.pieces;
      LoadPiece(stages_, rows, unit % rows.pieces,
                static_cast<const uint8_t*>(step_.tokens) + token * rows.payload_bytes, nullptr);
    };
    const uint32_t units = static_cast<uint32_t>(end - begin) * rows.pieces;
    const uint32_t primed = stages_.Prime(units, load);
    float weight = LoadWeight(begin, end);
    int32_t id = router_.LoadId(walk_, begin, end);
    if (!may_store_ && !AwaitCredits(call_, Phase::kSend)) {
      stages_.Abandon(primed);
      return false;
    }
    may_store_ = true;
    router_.CountTo(begin);
    const int32_t first_slot = router_.slots();
    const uint32_t destination = DestinationOf(call_, chunk);
    RoutedEntry entry{};
    int32_t slot = -1;  // of the token at this lane's destination
    stages_.Pass(units, primed, load, [&](uint32_t unit, uint8_t* stage) {
      const int32_t token = begin + static_cast<int32_t>(unit / rows.pieces);
      const uint32_t piece = unit % rows.pieces;
      const int32_t in_step = (token - begin) % walk_.tokens;
      if (piece == 0) {
        if (in_step == 0) {
          if (token != begin) {
            weight = LoadWeight(token, end);
            id = router_.LoadId(walk_, token, end);
          }
          entry = router_.Assign(walk_, end, id);
        }
        Annotate(token, in_step * walk_.top_k, entry, weight, stage + rows.piece_bytes);
        slot = SlotAt(destination, in_step * walk_.top_k, walk_.top_k, entry.rank, entry.slot);
      }
      if (slot >= 0) Store(destination, piece, slot, stage);
      // After the stores: the fence before them would wait for this one.
      if (piece == 0 && in_step == 0) RecordSlots(token, end, entry);
    });
    // The router counts by rank, in the lane of its number.
    const int32_t at = static_cast<int32_t>(destination);
    const int32_t first = __shfl_sync(kFullWarp, first_slot, at);
    const int32_t count = __shfl_sync(kFullWarp, router_.slots() - first_slot, at);
    PublishChunk(call_, chunk, static_cast<uint32_t>(first), static_cast<uint32_t>(count));
    stages_.Drain();
    return true;
  }

  __device__ bool InStep(int32_t token, int32_t end) const {
    return walk_.used && token + Lane() / walk_.top_k < end;
  }
  __device__ float LoadWeight(int32_t token, int32_t end) const {
    return InStep(token, end) ? step_.weights[int64_t{token} * walk_.top_k + Lane()] : 0.0f;
  }
  __device__ void RecordSlots(int32_t token, int32_t end, const RoutedEntry& entry) const {
    if (!InStep(token, end)) return;
    const int32_t tokens = static_cast<int32_t>(step_.shape.tokens);
    step_.slot_of[int64_t{token} * walk_.top_k + Lane()] =
        entry.rank < 0 ? -1 : entry.rank * tokens + entry.slot;
  }

  // Writes what lies beside the payload of a token whose entries are in the lanes from `base` on.
  // The same for all destinations: experts are global.
  __device__ void Annotate(int32_t token, int32_t base, const RoutedEntry& entry, float weight,
                           uint8_t* side) {
    const auto message = MessageOf(step_.shape);
    uint8_t* stage = side - message.source_token;
    const int32_t k = Lane() - base;
    if (k >= 0 && k < walk_.top_k) {
      Int32At(stage, message.expert)[k] = entry.id;
      Int32At(stage, message.position)[k] = entry.position;
      FloatAt(stage, message.weight)[k] = weight;
      if (k == 0) *Int32At(stage, message.source_token) = token;
    }
    FenceProxyAsyncShared();
    __syncwarp();
  }

  __device__ void Store(uint32_t destination, uint32_t piece, int32_t slot, const uint8_t* stage) {
    const RowPlan& rows = plan_.rows;
    uint8_t* message = call_.Region(destination, call_.rank()) + int64_t{slot} * rows.message_bytes;
    if (destination != call_.rank()) {
      StorePiece(rows, piece, message, stage);
    } else if (piece == 0) {
      // Own rows come from the tokens themselves.
      BulkStore(message + rows.side, stage + rows.piece_bytes, rows.side_bytes);
    }
  }

  const WindowDispatchStep& step_;
  const DispatchPlan& plan_;
  WindowCall& call_;
  BulkStages& stages_;  // one for both roles: it knows the phases of the barriers
  TokenWalk walk_;
  WarpRouter router_;
  bool may_store_ = false;
};

}  // namespace jax_ep::cuda
