// Routing by warps, for pack.cu. Each block routes for one destination rank, and each of its warps
// routes a run of tokens: the warps count, sum up the warps before them, and assign. The tables
// equal those of RouteTokens (protocol/routing.h) for any number of warps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/token_walk.cuh"
#include "protocol/routing.h"

namespace jax_ep::cuda {

inline constexpr int64_t kMaxRouteWarps = 32;
inline constexpr int64_t kMinRouteWarps = 4;
// The shared memory that every GPU gives a block without an opt-in.
inline constexpr int64_t kRouteSharedBytes = int64_t{48} << 10;

// A block's counters in shared memory: while counting, those of each warp; afterwards the sums over
// all warps before it.
struct RouteShared {
  int32_t* rows;        // [warps, L] by local expert
  int32_t* slots;       // [warps]
  InvalidIds* invalid;  // [warps], found by each warp alone

  static constexpr int64_t BytesPerWarp(int64_t local_experts) {
    return (local_experts + 1) * static_cast<int64_t>(sizeof(int32_t)) +
           static_cast<int64_t>(sizeof(InvalidIds));
  }
  __device__ RouteShared(int32_t* memory, int64_t warps, int64_t local_experts)
      : rows(memory),
        slots(rows + warps * local_experts),
        invalid(reinterpret_cast<InvalidIds*>(slots + warps)) {}
};
static_assert(RouteShared::BytesPerWarp(kMaxExperts) * kMinRouteWarps <= kRouteSharedBytes);
static_assert(alignof(InvalidIds) == alignof(int32_t));

// As many warps as have work, and as there is room for their counters.
inline int64_t RouteWarps(const EpShape& shape) {
  const int64_t steps = DivideUp(shape.tokens, kWarpSize / shape.top_k);
  const int64_t fitting = kRouteSharedBytes / RouteShared::BytesPerWarp(shape.local_experts);
  return std::clamp(Min(steps, fitting), kMinRouteWarps, kMaxRouteWarps);
}

struct TokenRun {
  int64_t begin;
  int64_t end;
};

__device__ inline TokenRun RunOf(const TokenWalk& walk, int64_t tokens, int64_t warp,
                                 int64_t warps) {
  const int64_t length = RoundUp(DivideUp(tokens, warps), walk.tokens);
  return {Min(warp * length, tokens), Min((warp + 1) * length, tokens)};
}

// Calls visit(entry, id, active) in all lanes for every step of a run; the id is -1 where the lane
// is inactive. Ids are loaded one step ahead.
template <typename Visit>
__device__ void ForEachStep(const TokenWalk& walk, const int32_t* ids, const TokenRun& run,
                            Visit visit) {
  const int64_t end = walk.used ? run.end * walk.top_k : 0;
  const int64_t stride = walk.tokens * walk.top_k;
  int64_t entry = run.begin * walk.top_k + Lane();
  int32_t next = entry < end ? ids[entry] : -1;
  for (int64_t token = run.begin; token < run.end; token += walk.tokens, entry += stride) {
    const int32_t id = next;
    next = entry + stride < end ? ids[entry + stride] : -1;
    visit(entry, id, entry < end);
  }
}

// What the entries of a step mean for one rank.
struct RankLanes {
  int32_t expert;  // local expert of this lane's row, or -1 if it goes to another rank
  unsigned opens;  // lanes that open a slot: the first entry of their token for this rank
};

__device__ inline RankLanes LanesOf(const TokenWalk& walk, int32_t id, int32_t rank,
                                    int32_t local_experts) {
  // The unsigned difference also rejects negative ids and those of lower ranks.
  const uint32_t expert = static_cast<uint32_t>(id) - static_cast<uint32_t>(rank * local_experts);
  const bool here = expert < static_cast<uint32_t>(local_experts);
  const unsigned all = __ballot_sync(kFullWarp, here);
  return {here ? static_cast<int32_t>(expert) : -1,
          __ballot_sync(kFullWarp, here && (all & walk.earlier) == 0)};
}

struct RankCounts {
  int32_t slots = 0;
  InvalidIds invalid;
};

// Counts a run's slots and rows for one rank and its invalid ids. `rows` [L] must be zero before.
__device__ inline RankCounts CountRank(const EpShape& shape, const TokenWalk& walk,
                                       const int32_t* ids, const TokenRun& run, int32_t rank,
                                       int32_t* rows) {
  const int32_t ranks = static_cast<int32_t>(shape.ranks);
  const int32_t local_experts = static_cast<int32_t>(shape.local_experts);
  RankCounts counts;
  ForEachStep(walk, ids, run, [&](int64_t entry, int32_t id, bool) {
    const RankLanes lanes = LanesOf(walk, id, rank, local_experts);
    counts.slots += __popc(lanes.opens);
    if (lanes.expert >= 0) atomicAdd(rows + lanes.expert, 1);
    const unsigned invalid = __ballot_sync(kFullWarp, IsInvalidId(id, ranks, local_experts));
    if (invalid == 0) return;
    if (counts.invalid.count == 0) {
      counts.invalid.first_entry =
          static_cast<int32_t>(entry - Lane()) + __ffs(static_cast<int>(invalid)) - 1;
    }
    counts.invalid.count += __popc(invalid);
  });
  return counts;
}

// Fills the table entries of the run that go to `rank` and, if `absent` is set, those that go
// nowhere. `slots` and `rows` hold the counts of earlier runs.
__device__ inline void AssignRank(const EpShape& shape, const TokenWalk& walk, const int32_t* ids,
                                  const TokenRun& run, int32_t rank, bool absent, int32_t slots,
                                  int32_t* rows, const SourceTables& tables) {
  const int32_t experts = static_cast<int32_t>(shape.experts());
  const int32_t local_experts = static_cast<int32_t>(shape.local_experts);
  const int32_t first_slot = static_cast<int32_t>(rank * shape.tokens);
  const unsigned below = LanesBelow(Lane());
  const unsigned self = 1u << Lane();
  ForEachStep(walk, ids, run, [&](int64_t entry, int32_t id, bool active) {
    const RankLanes lanes = LanesOf(walk, id, rank, local_experts);
    const unsigned peers = __match_any_sync(kFullWarp, lanes.expert);
    const int32_t base = lanes.expert >= 0 ? rows[lanes.expert] : 0;
    // All lanes must read their counter before one of its users advances it.
    __syncwarp();
    if (lanes.expert >= 0) {
      // This lane's token has the last slot that was opened up to this lane.
      tables.slot_of[entry] = first_slot + slots + __popc(lanes.opens & (below | self)) - 1;
      tables.position[entry] = base + __popc(peers & below);
      if ((peers & below) == 0) rows[lanes.expert] = base + __popc(peers);
    } else if (absent && active && static_cast<uint32_t>(id) >= static_cast<uint32_t>(experts)) {
      tables.slot_of[entry] = -1;
      tables.position[entry] = -1;
    }
    slots += __popc(lanes.opens);
    __syncwarp();
  });
}

// Replaces each value by the sum of those before it; returns the total.
__device__ inline int32_t ExclusiveSum(int32_t* values, int64_t stride, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t value = values[i * stride];
    values[i * stride] = sum;
    sum += value;
  }
  return sum;
}

}  // namespace jax_ep::cuda
