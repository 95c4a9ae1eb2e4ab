// How a window dispatch is cut into work and what its blocks keep in shared memory. Used by
// window_dispatch*.
#pragma once

#include <cstdint>

#include "cuda/window_groups.cuh"
#include "cuda/window_roles.cuh"
#include "cuda/window_rows.cuh"

namespace jax_ep::cuda {

// Tokens that one route item counts.
inline constexpr int64_t kRouteTokens = 256;

struct DispatchPlan {
  RowPlan rows;
  WorkPlan work;
  int32_t chunk_tokens;
  uint32_t chunk_items;  // place items that have a chunk; the others only fill
  BlockRoles roles;
  uint16_t tag;
};

// The block's shared memory: zeros, stages, counters of senders, groups of placers.
struct DispatchShared {
  uint8_t* zeros;
  uint8_t* stages;
  int32_t* router_rows;  // [kRowWarps, E]
  uint8_t* groups;
  uint32_t* entered;
  bool* last;
  bool* counts_arrived;

  static int64_t FixedBytes(const EpShape& shape) {
    return kZeroBytes + kRowWarps * shape.experts() * kIndexBytes + 16 +
           GroupTable::Bytes(shape, kRowWarps) + 16;
  }
  __device__ DispatchShared(uint8_t* memory, const EpShape& shape, const RowPlan& plan) {
    zeros = memory;
    stages = zeros + kZeroBytes;
    groups = stages + plan.stages.bytes(kRowWarps);
    router_rows = reinterpret_cast<int32_t*>(groups + GroupTable::Bytes(shape, kRowWarps));
    entered = reinterpret_cast<uint32_t*>(router_rows + kRowWarps * shape.experts());
    last = reinterpret_cast<bool*>(entered + 1);
    counts_arrived = last + 1;
  }
};

__device__ inline DispatchMessage MessageOf(const EpShape& shape) {
  return DispatchMessage::Of(shape.row_bytes(), 0, shape.top_k);
}

}  // namespace jax_ep::cuda
