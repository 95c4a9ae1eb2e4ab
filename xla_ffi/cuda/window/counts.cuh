// How sending warps share their counts of the ids: those of each part with the other senders of the
// rank, and the totals with all ranks.
#pragma once

#include <cstdint>

#include "cuda/window/call.cuh"
#include "cuda/window/route.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// Called by one lane.
__device__ inline void ReportInvalid(const DispatchStep& step, const InvalidIds& invalid) {
  *step.num_invalid = invalid.count;
  InvalidIdReport* report = step.report;
  // Keep an earlier report: the host clears it between calls.
  if (invalid.count == 0 || report == nullptr ||
      *static_cast<const volatile int32_t*>(&report->state) != InvalidIdReport::kFree) {
    return;
  }
  const int32_t entry = invalid.first_entry, top_k = static_cast<int32_t>(step.shape.top_k);
  *reinterpret_cast<int4*>(report) =
      make_int4(entry / top_k, entry % top_k, step.ids[entry], InvalidIdReport::kSet);
}

// For any thread, after AwaitCredits: posts a cell of a destination's counts, from its slots and
// `rows` [E].
__device__ inline void PostCountCell(const DispatchStep& step, const WindowCall& call,
                                     uint32_t destination, uint32_t cell, int32_t slots,
                                     const int32_t* rows) {
  constexpr int32_t kPerCell = static_cast<int32_t>(kCountsPerCell);
  const int32_t local_experts = static_cast<int32_t>(step.shape.local_experts);
  int32_t counts[3] = {slots, call.tag(), 0};
  if (cell > 0) {
#pragma unroll
    for (int32_t j = 0; j < kPerCell; ++j) {
      const int32_t expert = (static_cast<int32_t>(cell) - 1) * kPerCell + j;
      const int32_t first = static_cast<int32_t>(destination) * local_experts;
      counts[j] = expert < local_experts ? rows[first + expert] : 0;
    }
  }
  call.PostCounts(destination, cell, counts);
}

// Called by the whole warp after AwaitCredits: posts every destination's counts from the router.
__device__ inline void PostRouted(const DispatchStep& step, const WindowCall& call,
                                  const WarpRouter& router, const InvalidIds& invalid) {
  const uint32_t cells = static_cast<uint32_t>(CountCells(step.shape.local_experts));
  JAX_EP_NO_UNROLL
  for (uint32_t rank = 0; rank < call.ranks(); ++rank) {
    const int32_t slots = __shfl_sync(kFullWarp, router.slots(), static_cast<int>(rank));
    JAX_EP_NO_UNROLL
    for (uint32_t cell = Lane(); cell < cells; cell += kWarpSize) {
      PostCountCell(step, call, rank, cell, slots, router.rows());
    }
  }
  if (Lane() == 0) ReportInvalid(step, invalid);
}

// ---- Among the senders of a rank ----
//
// The warp that counts a part posts its counts, adds up those of the parts before it, and posts
// that sum as well. Counting the tokens before a chunk takes two looks, however many there are.

// Rows of cells in the scratch.
__device__ inline uint32_t OfPart(uint32_t part) { return part; }
__device__ inline uint32_t BeforePart(uint32_t part) {
  return static_cast<uint32_t>(kRouteParts) + part;
}

// Called by the whole warp: posts what the router has counted.
__device__ inline void PostCounted(const WindowCall& call, const WarpRouter& router,
                                   int32_t experts, uint32_t row) {
  constexpr uint32_t kPerCell = static_cast<uint32_t>(kCountsPerCell);
  const uint32_t row_cells = static_cast<uint32_t>(RoutePart::RowCells(experts));
  CountCell* const cells = call.RouteCells(experts, row);
  JAX_EP_NO_UNROLL
  for (uint32_t cell = Lane(); cell < row_cells; cell += kWarpSize) {
    int32_t counts[3];
#pragma unroll
    for (uint32_t j = 0; j < kPerCell; ++j) {
      const int32_t expert = static_cast<int32_t>(cell * kPerCell + j);
      counts[j] = expert < experts ? router.rows(expert) : 0;
    }
    call.PostHere(cells + cell, counts);
  }
  const uint32_t rank = static_cast<uint32_t>(Lane());
  if (rank >= call.ranks()) return;
  call.PostHere(cells + row_cells + rank, {router.slots(), 0, 0});
}

// For any lanes, each for its own `count` cells from `first` on: returns whether they arrive soon.
template <uint32_t kCells>
__device__ inline bool LookForCells(const WindowCall& call, const CountCell* first, uint32_t count,
                                    uint32_t stride, CountCell (&cells)[kCells]) {
  // A look takes most of a microsecond, and counting a part a few microseconds.
  constexpr int kLooks = 64;
  bool there = false;
  JAX_EP_NO_UNROLL
  for (int look = 0; look < kLooks && !there; ++look) {
    // All loads are in flight before the first result is used.
    bool arrived[kCells];
#pragma unroll
    for (uint32_t i = 0; i < kCells; ++i) {
      arrived[i] = i >= count || call.LookAt(first + i * stride, cells[i]);
    }
    there = true;
#pragma unroll
    for (uint32_t i = 0; i < kCells; ++i) there &= arrived[i];
  }
  return there;
}

// Called by the whole warp: fills the router with counts. `counts_of(cell, count, counts)` gives
// this lane the counts of cells `cell`, `cell` + 32, ... and returns whether they are there. If all
// were, the router has counted the tokens up to `end`; if the result is false, the router's counts
// are meaningless.
template <uint32_t kCells, typename CountsOf>
__device__ inline bool FillRouter(const WindowCall& call, WarpRouter& router, int32_t experts,
                                  int32_t end, CountsOf counts_of) {
  constexpr uint32_t kPerCell = static_cast<uint32_t>(kCountsPerCell);
  const uint32_t row_cells = static_cast<uint32_t>(RoutePart::RowCells(experts));
  const uint32_t all_cells = static_cast<uint32_t>(RoutePart::Cells(experts, call.ranks()));
  __syncwarp();  // lanes may still be reading rows to post them
  bool there = true;
  int32_t slots = 0;  // of the rank of this lane's last cell
  JAX_EP_NO_UNROLL
  for (uint32_t first = Lane(); first < all_cells && there; first += kCells * kWarpSize) {
    CountCell cells[kCells]{};
    const uint32_t count = (all_cells - first + kWarpSize - 1) / kWarpSize;
    there = counts_of(first, count, cells);
#pragma unroll
    for (uint32_t i = 0; i < kCells; ++i) {
      const uint32_t cell = first + i * kWarpSize;
      if (cell < all_cells) slots = cells[i].counts[0];
#pragma unroll
      for (uint32_t j = 0; j < kPerCell; ++j) {
        const int32_t expert = static_cast<int32_t>(cell * kPerCell + j);
        if (expert < experts) router.Set(expert, cells[i].counts[j]);
      }
    }
  }
  // The ranks' cells come last and are at most as many as lanes, so each is the last cell of one
  // lane.
  const uint32_t lane = (row_cells + static_cast<uint32_t>(Lane())) % kWarpSize;
  router.SetSlots(__shfl_sync(kFullWarp, slots, static_cast<int>(lane)));
  router.SetCounted(end);
  return __all_sync(kFullWarp, there) != 0;
}

// Called by the whole warp: posts the counts before part `part`, which begins with token `begin`,
// unless the earlier parts' counts do not arrive soon. Overwrites the router.
__device__ inline void PostBefore(const WindowCall& call, WarpRouter& router, int32_t experts,
                                  uint32_t part, int32_t begin) {
  constexpr uint32_t kAtOnce = 8;
  const uint32_t row = static_cast<uint32_t>(RoutePart::Cells(experts, call.ranks()));
  const CountCell* const cells = call.RouteCells(experts, OfPart(0));
  const auto sum = [&](uint32_t cell, uint32_t, CountCell(&total)[1]) {
    bool there = true;
    JAX_EP_NO_UNROLL
    for (uint32_t first = 0; first < part && there; first += kAtOnce) {
      CountCell counts[kAtOnce]{};
      there = LookForCells(call, cells + first * row + cell, part - first, row, counts);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < 3; ++j) total[0].counts[j] += counts[i].counts[j];
      }
    }
    return there;
  };
  if (FillRouter<1>(call, router, experts, begin, sum)) {
    PostCounted(call, router, experts, BeforePart(part));
  }
}

// Called by the whole warp: fills the router with the counts before part `part`, which begins with
// token `begin`. Returns false if they do not arrive soon; the router's counts are then
// meaningless.
__device__ inline bool CountBefore(const WindowCall& call, WarpRouter& router, int32_t experts,
                                   uint32_t part, int32_t begin) {
  const CountCell* const cells = call.RouteCells(experts, BeforePart(part));
  return FillRouter<4>(call, router, experts, begin,
                       [&](uint32_t cell, uint32_t count, CountCell(&counts)[4]) {
                         return LookForCells(call, cells + cell, count, kWarpSize, counts);
                       });
}

}  // namespace jax_ep::cuda
