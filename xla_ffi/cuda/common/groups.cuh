// Computes from the counts of all sources where each group of rows starts. In
// collective/dispatch_unpack.cu one block does this; in window/groups.cuh some warps of every block
// do.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "protocol/layout.h"
#include "protocol/routing.h"
#include "protocol/steps.h"

namespace jax_ep::cuda {

// Whole warps of a block that work together: the whole block, or the warps that meet at a named
// barrier.
struct Team {
  uint32_t thread;
  uint32_t threads;
  uint32_t barrier;  // 0 means the whole block, by __syncthreads

  __device__ void Sync() const {
    __syncwarp();  // barriers count whole warps
    if (barrier == 0) {
      __syncthreads();
    } else {
      NamedBarrier(barrier, threads);
    }
  }
};

// Returns the sum of the values of the team's lower threads. `totals` is scratch of one element per
// warp of the team.
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

// Called by the whole team. Calls visit(expert, start, rows) for this thread's experts, where
// count_of(source, expert) is the number of rows from a source; `start` is not yet clamped to N.
// Returns the end of this thread's last expert.
template <typename CountOf, typename Visit>
__device__ int64_t ForEachGroup(const Team& team, const EpShape& shape, int64_t* totals,
                                CountOf count_of, Visit visit) {
  const auto rows_of = [&](int64_t expert) {
    int64_t rows = 0;
#pragma unroll 4
    for (int64_t source = 0; source < shape.ranks; ++source) rows += count_of(source, expert);
    return rows;
  };
  // Each thread takes consecutive experts, so that summing by thread sums in the order of groups.
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

}  // namespace jax_ep::cuda
