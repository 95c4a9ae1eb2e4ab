// How a window dispatch is cut into work and what its blocks keep in shared memory. Used by
// window_dispatch*.
#pragma once

#include <cstdint>

#include "cuda/window_encode.cuh"
#include "cuda/window_groups.cuh"
#include "cuda/window_roles.cuh"
#include "cuda/window_rows.cuh"
#include "cuda/window_scales.cuh"

namespace jax_ep::cuda {

// Tokens that one route item counts.
inline constexpr int64_t kRouteTokens = 256;

struct DispatchPlan {
  CallPlan call;
  RowPlan rows;
  EncodePlan encode;  // of quantised formats
  ScalePlan scales;   // likewise
  Divisor count_cells;
  Divisor top_k;
  RankOfExpert rank_of{1};
  int32_t chunk_tokens;
  uint32_t chunk_items;  // place items that have a chunk; the others only fill
};

// The block's shared memory: zeros, stages, counters of senders, groups of placers and, of formats
// with scales, the groups' tiles.
template <typename Format>
struct DispatchShared {
  uint8_t* zeros;
  uint8_t* stages;
  int32_t* router_rows;  // [kRowWarps, E]
  CallBlock* call;
  uint8_t* groups;
  bool* counts_arrived;
  int32_t* first_tiles;  // [L + 1]

  static int64_t FixedBytes(const EpShape& shape) {
    return kZeroBytes + static_cast<int64_t>(sizeof(CallBlock)) +
           kRowWarps * shape.experts() * kIndexBytes + GroupTable::Bytes(shape, kRowWarps) + 16 +
           (QuantizedFormat<Format> ? (shape.local_experts + 1) * kIndexBytes : 0);
  }
  __device__ DispatchShared(uint8_t* memory, const EpShape& shape, const RowPlan& plan) {
    zeros = memory;
    stages = zeros + kZeroBytes;
    call = reinterpret_cast<CallBlock*>(stages + plan.stages.bytes(kRowWarps));
    groups = reinterpret_cast<uint8_t*>(call + 1);
    router_rows = reinterpret_cast<int32_t*>(groups + GroupTable::Bytes(shape, kRowWarps));
    counts_arrived = reinterpret_cast<bool*>(router_rows + kRowWarps * shape.experts());
    first_tiles = router_rows + kRowWarps * shape.experts() + 1;
  }
};

template <typename Format>
JAX_EP_HOST_DEVICE DispatchMessage MessageOf(const EpShape& shape) {
  return DispatchMessage::Of(Format::PayloadBytes(shape.hidden, shape.element_bytes),
                             Format::ScaleBytes(shape.hidden), shape.top_k);
}

}  // namespace jax_ep::cuda
