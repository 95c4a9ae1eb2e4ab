// Routing inside a sending warp. The warp counts the tokens before its chunk and assigns slots and
// positions to those of the chunk, so it never waits for another warp's tables. The results equal
// those of RouteTokens (protocol/routing.h).
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/token_walk.cuh"
#include "protocol/routing.h"

namespace jax_ep::cuda {

// A lane's entry of a step of tokens.
struct RoutedEntry {
  int32_t id;        // -1 where there is no row
  int32_t rank;      // -1 likewise
  int32_t slot;      // at that rank
  int32_t position;  // within its expert
};

class WarpRouter {
 public:
  // `rows` [E] belongs to this warp alone. Call Restart before anything else.
  __device__ WarpRouter(const EpShape& shape, const RankOfExpert& rank_of, const int32_t* ids,
                        int32_t* rows)
      : ids_(ids),
        rows_(rows),
        top_k_(static_cast<int32_t>(shape.top_k)),
        ranks_(static_cast<int32_t>(shape.ranks)),
        experts_(static_cast<int32_t>(shape.experts())),
        rank_of_(rank_of) {}

  // Starts counting from zero at token `begin`.
  __device__ void Restart(int32_t begin) {
    JAX_EP_NO_UNROLL
    for (int32_t expert = Lane(); expert < experts_; expert += kWarpSize) rows_[expert] = 0;
    slots_ = 0;
    counted_ = begin;
    __syncwarp();
  }

  // Lane r has the number of slots counted so far for rank r.
  __device__ int32_t slots() const { return slots_; }
  __device__ int32_t rows(int32_t expert) const { return rows_[expert]; }
  __device__ const int32_t* rows() const { return rows_; }
  __device__ void Set(int32_t expert, int32_t rows) { rows_[expert] = rows; }
  __device__ void SetSlots(int32_t slots) { slots_ = slots; }
  __device__ int32_t counted() const { return counted_; }
  // Declares that what was set covers all tokens before `end`.
  __device__ void SetCounted(int32_t end) {
    counted_ = end;
    __syncwarp();
  }

  // Counts the tokens before `end`, in any order, one token per lane. The next tokens' first ids
  // are loaded meanwhile, because under load a load takes microseconds.
  __device__ void CountTo(int32_t end, InvalidIds& invalid) {
    int32_t ahead[kAhead];
    LoadIds(counted_ + Lane(), end, ahead);
    JAX_EP_NO_UNROLL
    for (int32_t first = counted_; first < end; first += kWarpSize) {
      const int32_t token = first + Lane();
      int32_t ids[kAhead];
#pragma unroll
      for (int32_t k = 0; k < kAhead; ++k) ids[k] = ahead[k];
      LoadIds(token + kWarpSize, end, ahead);
      CountStep(token, end, ids, invalid);
    }
    counted_ = end;
    __syncwarp();
  }

  // Returns the id of this lane's entry in the step that begins with `token`, or -1 from token
  // `end` on.
  __device__ int32_t LoadId(const TokenWalk& walk, int32_t token, int32_t end) const {
    const bool active = walk.used && token + walk.in_step < end;
    return active ? ids_[int64_t{token} * top_k_ + Lane()] : -1;
  }

  // Counts the next step's tokens, those before `end`, and assigns their places.
  __device__ RoutedEntry Assign(const TokenWalk& walk, int32_t end, int32_t id) {
    const bool valid = static_cast<uint32_t>(id) < static_cast<uint32_t>(experts_);
    RoutedEntry entry{valid ? id : -1, valid ? rank_of_(id) : -1, -1, -1};
    const unsigned below = LanesBelow(Lane());
    // Lanes with the same expert, and lanes with the same rank. The first lane of a token for a
    // rank opens the slot.
    const unsigned same_expert = __match_any_sync(kFullWarp, entry.id);
    const unsigned same_rank = __match_any_sync(kFullWarp, entry.rank);
    const bool opens = valid && (same_rank & walk.earlier) == 0;
    const int32_t before = valid ? rows_[id] : 0;
    __syncwarp();
    if (valid) {
      entry.position = before + __popc(same_expert & below);
      if ((same_expert & below) == 0) rows_[id] = before + __popc(same_expert);
    }
    JAX_EP_NO_UNROLL
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const unsigned opened = __ballot_sync(kFullWarp, opens && entry.rank == rank);
      const int32_t first = __shfl_sync(kFullWarp, slots_, rank);
      // This lane's token has the last slot that was opened up to this lane.
      if (entry.rank == rank) entry.slot = first + __popc(opened & (below | 1u << Lane())) - 1;
      if (Lane() == rank) slots_ += __popc(opened);
    }
    counted_ = Min(counted_ + walk.tokens, end);
    __syncwarp();
    return entry;
  }

 private:
  static constexpr int32_t kAhead = 8;

  // Counts this lane's token, whose first ids are given.
  __device__ void CountStep(int32_t token, int32_t end, const int32_t (&ids)[kAhead],
                            InvalidIds& invalid) {
    uint32_t goes_to = 0;
    bool odd = false;
    const auto count = [&](int32_t id) {
      const bool valid = static_cast<uint32_t>(id) < static_cast<uint32_t>(experts_);
      if (valid) atomicAdd(rows_ + id, 1);
      goes_to |= valid ? 1u << rank_of_(id) : 0;
      odd |= !valid && id != -1;
    };
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) count(ids[k]);
    if (token < end) {
      JAX_EP_NO_UNROLL
      for (int32_t k = kAhead; k < top_k_; ++k) count(IdOf(token, k));
    }
    JAX_EP_NO_UNROLL
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const int32_t more = __popc(__ballot_sync(kFullWarp, (goes_to >> rank) & 1));
      if (Lane() == rank) slots_ += more;
    }
    if (__any_sync(kFullWarp, odd)) CountInvalid(token, end, invalid);
  }

  __device__ int32_t IdOf(int32_t token, int32_t k) const {
    return ids_[static_cast<int64_t>(token) * top_k_ + k];
  }

  // Called by the whole warp, one token per lane. Out of line because it is cold.
  __device__ __noinline__ void CountInvalid(int32_t token, int32_t end, InvalidIds& invalid) const {
    int32_t bad = 0, first_bad = -1;
    for (int32_t k = 0; k < top_k_ && token < end; ++k) {
      const int32_t id = IdOf(token, k);
      if ((id >= experts_ || id < -1) && bad++ == 0) first_bad = token * top_k_ + k;
    }
    Add(invalid, bad, first_bad);
  }

  // Loads the first ids of a token; -1 for those that do not exist.
  __device__ void LoadIds(int32_t token, int32_t end, int32_t (&ids)[kAhead]) const {
    const int32_t* from = ids_ + static_cast<int64_t>(token) * top_k_;
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) ids[k] = token < end && k < top_k_ ? from[k] : -1;
  }

  // Called by the whole warp, whose lanes hold entries in the order of tokens.
  __device__ static void Add(InvalidIds& invalid, int32_t bad, int32_t first_bad) {
    const unsigned lanes = __ballot_sync(kFullWarp, bad > 0);
    if (lanes == 0) return;
    const int32_t first = FromLowest(lanes, first_bad);
    if (invalid.count == 0) invalid.first_entry = first;
    invalid.count += static_cast<int32_t>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(bad)));
  }

  const int32_t* ids_;
  int32_t* rows_;
  int32_t top_k_;
  int32_t ranks_;
  int32_t experts_;
  RankOfExpert rank_of_;
  int32_t slots_ = 0;
  int32_t counted_ = 0;
};

}  // namespace jax_ep::cuda
