// From the counts of all sources to where each group and each (source, expert) starts. Used by
// collective/unpack.cu, by one block, and by window/groups.cuh, by some warps of each block.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "protocol/layout.h"
#include "protocol/routing.h"
#include "protocol/steps.h"

namespace jax_ep::cuda {

// Whole warps of a block that work together: all of them, or those that meet at a named barrier.
struct Team {
  uint32_t thread;
  uint32_t threads;
  uint32_t barrier;  // 0: the whole block

  __device__ void Sync() const {
    __syncwarp();  // barriers want whole warps
    if (barrier == 0) {
      __syncthreads();
    } else {
      NamedBarrier(barrier, threads);
    }
  }
};

// The sum of the values of lower threads of the team. `totals` [warps of the team] is scratch.
__device__ inline int64_t ExclusiveSum(const Team& team, int64_t value, int64_t* totals) {
  const uint32_t team_warp = team.thread / kWarpSize;
  int64_t sum = value;
#pragma unroll
  for (int by = 1; by < kWarpSize; by *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, sum, static_cast<unsigned>(by));
    if (Lane() >= by) sum += before;
  }
  if (Lane() == kWarpSize - 1) totals[team_warp] = sum;
  team.Sync();
  sum -= value;
  JAX_EP_NO_UNROLL
  for (uint32_t warp = 0; warp < team_warp; ++warp) sum += totals[warp];
  return sum;
}

// Whole team: calls visit(expert, start, rows) for the experts of this thread, with
// count_of(source, expert) rows from each source; `start` is not yet cut by N. Returns the end of
// the last of them.
template <typename CountOf, typename Visit>
__device__ int64_t ForEachGroup(const Team& team, const EpShape& shape, int64_t* totals,
                                CountOf count_of, Visit visit) {
  const auto rows_of = [&](int64_t expert) {
    int64_t rows = 0;
#pragma unroll 4
    for (int64_t source = 0; source < shape.ranks; ++source) rows += count_of(source, expert);
    return rows;
  };
  // Each thread has a run of experts, so that the order of the sums is the order of the groups.
  const int64_t length =
      shape.local_experts <= team.threads ? 1 : DivideUp(shape.local_experts, team.threads);
  const int64_t begin = Min(team.thread * length, shape.local_experts);
  const int64_t end = Min(begin + length, shape.local_experts);
  int64_t padded = 0;
  JAX_EP_NO_UNROLL
  for (int64_t expert = begin; expert < end; ++expert) {
    padded = NextGroupStart(padded, rows_of(expert), shape.expert_alignment);
  }
  int64_t start = ExclusiveSum(team, padded, totals);
  JAX_EP_NO_UNROLL
  for (int64_t expert = begin; expert < end; ++expert) {
    const int64_t rows = rows_of(expert);
    visit(expert, start, rows);
    start = NextGroupStart(start, rows, shape.expert_alignment);
  }
  return start;
}

// Whole team, after a barrier behind row_offsets and group_sizes: where the scales of each group
// start.
__device__ inline void PlaceTilesOfGroups(const Team& team, const UnpackStep& step,
                                          int64_t* totals) {
  const int64_t groups = step.shape.local_experts;
  const int64_t length = DivideUp(groups, team.threads);
  const int64_t begin = Min(team.thread * length, groups);
  const int64_t end = Min(begin + length, groups);
  int64_t tiles = 0;
  for (int64_t group = begin; group < end; ++group) tiles += TilesOfGroup(step.group_sizes[group]);
  int64_t first_tile = ExclusiveSum(team, tiles, totals);
  for (int64_t group = begin; group < end; ++group) {
    // The first of row_offsets is written by another thread without a barrier behind it.
    const int32_t offset = group == 0 ? 0 : step.row_offsets[group];
    step.scales_offsets[group] = ScalesOffset(static_cast<int32_t>(first_tile), offset);
    first_tile += TilesOfGroup(step.group_sizes[group]);
  }
}

// One block: with the counts of all sources every row's place is known.
__device__ inline void PlaceGroups(const UnpackStep& step, const RegionHeader& header,
                                   int64_t region_bytes) {
  __shared__ unsigned long long all_dropped;  // zeroed before the barrier of ExclusiveSum
  __shared__ int64_t totals[kWarpsPerBlock];
  if (threadIdx.x == 0) all_dropped = 0;
  const EpShape& shape = step.shape;
  // No source has more rows than entries; no count may move a group out of [0, N].
  const int64_t entries = shape.tokens * shape.top_k;
  const auto count_of = [&](int64_t source, int64_t expert) -> int64_t {
    const int64_t count = Int32At(step.recv + source * region_bytes, header.expert_counts)[expert];
    return count < 0 ? 0 : Min(count, entries);
  };
  int64_t dropped = 0;
  const Team block{threadIdx.x, blockDim.x, 0};
  ForEachGroup(block, shape, totals, count_of, [&](int64_t expert, int64_t start, int64_t rows) {
    int64_t base = start;
    for (int64_t source = 0; source < shape.ranks; ++source) {
      step.row_base[source * shape.local_experts + expert] =
          static_cast<int32_t>(Min(base, kMaxIndex));
      base += count_of(source, expert);
    }
    const int64_t next = NextGroupStart(start, rows, shape.expert_alignment);
    const int32_t offset = static_cast<int32_t>(Min(start, shape.recv_rows));
    const int32_t next_offset = static_cast<int32_t>(Min(next, shape.recv_rows));
    dropped += DroppedRows(start, rows, shape.recv_rows);
    step.expert_counts[expert] = static_cast<int32_t>(rows);
    step.expert_ids[expert] = static_cast<int32_t>(expert);
    step.row_offsets[expert + 1] = next_offset;
    step.group_sizes[expert] = next_offset - offset;
  });
  // A sum of integers: the same in any order.
  atomicAdd(&all_dropped, static_cast<unsigned long long>(dropped));
  for (int64_t source = threadIdx.x; source < shape.ranks; source += kBlockThreads) {
    const int32_t num_slots = *Int32At(step.recv + source * region_bytes, header.num_slots);
    const int32_t tokens = static_cast<int32_t>(shape.tokens);
    step.slot_counts[source] = num_slots < 0 ? 0 : Min(num_slots, tokens);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    step.row_offsets[0] = 0;
    *step.num_dropped = static_cast<int32_t>(all_dropped);
  }
  if (step.scale_layout == ScaleLayout::kTiled128x4) PlaceTilesOfGroups(block, step, totals);
}

}  // namespace jax_ep::cuda
