// What a sending warp tells once it has counted all ids of a call. Used by
// window_dispatch_send.cuh and window_few_send.cuh.
#pragma once

#include <cstdint>

#include "cuda/window_call.cuh"
#include "cuda/window_route.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// One lane.
__device__ inline void ReportInvalid(const WindowDispatchStep& step, const InvalidIds& invalid) {
  *step.num_invalid = invalid.count;
  InvalidIdReport* report = step.report;
  // The host clears it between calls.
  if (invalid.count == 0 || report == nullptr ||
      *static_cast<const volatile int32_t*>(&report->state) != InvalidIdReport::kFree) {
    return;
  }
  const int32_t entry = invalid.first_entry, top_k = static_cast<int32_t>(step.shape.top_k);
  *reinterpret_cast<int4*>(report) =
      make_int4(entry / top_k, entry % top_k, step.ids[entry], InvalidIdReport::kSet);
}

// Any thread, after AwaitCredits: a cell of a destination's counts, of its slots and `rows` [E].
__device__ inline void PostCountCell(const WindowDispatchStep& step, const WindowCall& call,
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

// Whole warp, after AwaitCredits: every destination's counts, from the router.
__device__ inline void PostRouted(const WindowDispatchStep& step, const WindowCall& call,
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

}  // namespace jax_ep::cuda
