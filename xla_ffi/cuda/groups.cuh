// From the counts of all sources to where each group and each (source, expert) starts, by one
// block. Used by dispatch.cu.
#pragma once

#include <cstdint>

#include "cuda/primitives.cuh"
#include "protocol/layout.h"
#include "protocol/routing.h"
#include "protocol/steps.h"

namespace jax_ep::cuda {

// The sum of the values of lower threads of the block.
__device__ inline int64_t BlockExclusiveSum(int64_t value) {
  __shared__ int64_t totals[kWarpsPerBlock];
  int64_t sum = value;
#pragma unroll
  for (int by = 1; by < kWarpSize; by *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, sum, static_cast<unsigned>(by));
    if (Lane() >= by) sum += before;
  }
  if (Lane() == kWarpSize - 1) totals[Warp()] = sum;
  __syncthreads();
  sum -= value;
  for (int warp = 0; warp < Warp(); ++warp) sum += totals[warp];
  return sum;
}

// One block: with the counts of all sources every row's place is known.
__device__ inline void PlaceGroups(const UnpackStep& step, const RegionHeader& header,
                                   int64_t region_bytes) {
  __shared__ unsigned long long all_dropped;  // zeroed before the barrier of BlockExclusiveSum
  if (threadIdx.x == 0) all_dropped = 0;
  const EpShape& shape = step.shape;
  // No source has more rows than entries; no count may move a group out of [0, N].
  const int64_t entries = shape.tokens * shape.top_k;
  const auto count_of = [&](int64_t source, int64_t expert) -> int64_t {
    const int64_t count = Int32At(step.recv + source * region_bytes, header.expert_counts)[expert];
    return count < 0 ? 0 : Min(count, entries);
  };
  // Each thread has a run of experts, so that the order of the sums is the order of the groups.
  const int64_t length = CeilDiv(shape.local_experts, kBlockThreads);
  const int64_t begin = Min(threadIdx.x * length, shape.local_experts);
  const int64_t end = Min(begin + length, shape.local_experts);
  int64_t padded = 0;
  for (int64_t expert = begin; expert < end; ++expert) {
    int64_t rows = 0;
#pragma unroll 8
    for (int64_t source = 0; source < shape.ranks; ++source) rows += count_of(source, expert);
    padded = NextGroupStart(padded, rows, shape.expert_alignment);
  }
  int64_t start = BlockExclusiveSum(padded);
  int64_t dropped = 0;
  for (int64_t expert = begin; expert < end; ++expert) {
    int64_t rows = 0;
#pragma unroll 8
    for (int64_t source = 0; source < shape.ranks; ++source) {
      step.row_base[source * shape.local_experts + expert] =
          static_cast<int32_t>(Min(start + rows, kMaxIndex));
      rows += count_of(source, expert);
    }
    const int32_t offset = static_cast<int32_t>(Min(start, shape.recv_rows));
    dropped += DroppedRows(start, rows, shape.recv_rows);
    start = NextGroupStart(start, rows, shape.expert_alignment);
    const int32_t next_offset = static_cast<int32_t>(Min(start, shape.recv_rows));
    step.expert_counts[expert] = static_cast<int32_t>(rows);
    step.expert_ids[expert] = static_cast<int32_t>(expert);
    step.row_offsets[expert + 1] = next_offset;
    step.group_sizes[expert] = next_offset - offset;
  }
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
}

}  // namespace jax_ep::cuda
