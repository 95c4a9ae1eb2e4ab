// Deterministic routing: which slot carries a token and which row receives it. The order of rows is
// a function of the ids alone; see docs/protocol.md.
#pragma once

#include <cstdint>

#include "protocol/platform.h"
#include "protocol/shape.h"

namespace jax_ep {

// Where an expert lives. `rank` is negative for the id -1 and for ids outside [-1, E).
struct ExpertPlace {
  int32_t rank;
  int32_t local_expert;
};

JAX_EP_HOST_DEVICE ExpertPlace PlaceOf(int32_t id, int32_t ranks, int32_t local_experts) {
  // The unsigned comparison rejects negative ids too.
  if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(ranks * local_experts)) return {-1, -1};
  return {id / local_experts, id % local_experts};
}

JAX_EP_HOST_DEVICE bool IsInvalidId(int32_t id, int32_t ranks, int32_t local_experts) {
  return id != -1 && static_cast<uint32_t>(id) >= static_cast<uint32_t>(ranks * local_experts);
}

// Computes id / local_experts by one multiplication, for ids in [0, kMaxExperts). Exact: both are
// below 2^11, and the quotient's error times local_experts is below 2^22 / 2^27.
class RankOfExpert {
 public:
  JAX_EP_HOST_DEVICE explicit RankOfExpert(int32_t local_experts)
      : factor_((uint32_t{1} << kShift) / static_cast<uint32_t>(local_experts) + 1) {}
  JAX_EP_HOST_DEVICE int32_t operator()(int32_t id) const {
    return static_cast<int32_t>((static_cast<uint64_t>(id) * factor_) >> kShift);
  }

 private:
  static constexpr int kShift = 27;
  uint32_t factor_;
};

// Whether entry k is the first of its token for `rank`: it opens the slot that later entries of the
// token share (dedup). `ids` are the token's K ids.
JAX_EP_HOST_DEVICE bool OpensSlot(const int32_t* ids, int32_t k, int32_t rank, int32_t ranks,
                                  int32_t local_experts) {
  for (int32_t earlier = 0; earlier < k; ++earlier) {
    if (PlaceOf(ids[earlier], ranks, local_experts).rank == rank) return false;
  }
  return true;
}

// Counters of a run of tokens: slots per rank [R] and rows per expert [E]. They start at the counts
// of earlier runs, so a call may be routed in one run or in several.
struct RouteCounters {
  int32_t* slots;
  int32_t* rows;
};

// The tables of a route that the source fills (docs/protocol.md).
struct SourceTables {
  int32_t* slot_of;   // [n, K] rank * n + slot, -1 where there is no row
  int32_t* position;  // [n, K] earlier rows of the same expert from this source
};

struct InvalidIds {
  int32_t count = 0;
  int32_t first_entry = -1;  // token * K + k
};

// Also keeps the first bad id's value. Whoever reports it must not read it again, because a table
// may have been written in its place.
struct KeptInvalidIds : InvalidIds {
  int32_t first_id = 0;
};

// Routes tokens [begin, end) in order. XLA may have given `ids` the memory of a table, so each
// token's ids are read before its entries are written.
JAX_EP_HOST_DEVICE void RouteTokens(const EpShape& shape, const int32_t* ids, int64_t begin,
                                    int64_t end, RouteCounters counters, SourceTables tables,
                                    KeptInvalidIds& invalid) {
  const int32_t ranks = static_cast<int32_t>(shape.ranks);
  const int32_t local_experts = static_cast<int32_t>(shape.local_experts);
  const int32_t top_k = static_cast<int32_t>(shape.top_k);
  for (int64_t token = begin; token < end; ++token) {
    int32_t token_ids[kMaxTopK];
    for (int32_t k = 0; k < top_k; ++k) token_ids[k] = ids[token * top_k + k];
    for (int32_t k = 0; k < top_k; ++k) {
      const int64_t entry = token * top_k + k;
      const ExpertPlace place = PlaceOf(token_ids[k], ranks, local_experts);
      if (place.rank < 0) {
        tables.slot_of[entry] = -1;
        tables.position[entry] = -1;
        if (token_ids[k] != -1) {
          if (invalid.count++ == 0) {
            invalid.first_entry = static_cast<int32_t>(entry);
            invalid.first_id = token_ids[k];
          }
        }
        continue;
      }
      if (OpensSlot(token_ids, k, place.rank, ranks, local_experts)) ++counters.slots[place.rank];
      tables.slot_of[entry] =
          static_cast<int32_t>(place.rank * shape.tokens + counters.slots[place.rank] - 1);
      tables.position[entry] = counters.rows[token_ids[k]]++;
    }
  }
}

// Returns where a group's rows start, not clamped to N, from the previous group's start and real
// rows.
JAX_EP_HOST_DEVICE int64_t NextGroupStart(int64_t start, int64_t rows, int64_t alignment) {
  // Avoids the 64-bit division, which is slow on a GPU.
  return start + (alignment == 1 ? rows : RoundUp(rows, alignment));
}

// Returns the output row at `index`, or -1 if it is dropped. This is the only guard between a
// message's contents and a write, so it accepts any index.
JAX_EP_HOST_DEVICE int32_t RowOrDropped(int64_t index, int64_t recv_rows) {
  return index >= 0 && index < recv_rows ? static_cast<int32_t>(index) : -1;
}

// Returns how many real rows of a group lie at or past N.
JAX_EP_HOST_DEVICE int64_t DroppedRows(int64_t start, int64_t rows, int64_t recv_rows) {
  const int64_t end = start + rows;
  if (end <= recv_rows) return 0;
  return start >= recv_rows ? rows : end - recv_rows;
}

}  // namespace jax_ep
