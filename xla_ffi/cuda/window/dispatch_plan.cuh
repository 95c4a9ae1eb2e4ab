// How a window dispatch is cut into work and what its blocks keep in shared memory.
#pragma once

#include <cstdint>

#include "cuda/window/coded.cuh"
#include "cuda/window/encode.cuh"
#include "cuda/window/groups.cuh"
#include "cuda/window/roles.cuh"
#include "cuda/window/rows.cuh"
#include "cuda/window/scales.cuh"
#include "cuda/window/team.cuh"

namespace jax_ep::cuda {

struct DispatchPlan {
  CallPlan call;
  RowPlan rows;
  EncodePlan encode;  // of senders that encode
  ScalePlan scales;   // of formats with scales
  Divisor count_cells;
  Divisor top_k;
  RankOfExpert rank_of{1};
  int32_t route_tokens;  // per part
  int32_t chunk_tokens;
  uint32_t chunk_items;  // receive items that have a chunk; the others only fill
};

// A block's shared memory: zeros, stages, the senders' counters, the receivers' group tables and,
// in formats with scales, the groups' first tiles.
template <typename Format>
struct DispatchShared {
  uint8_t* zeros;
  uint8_t* stages;
  int32_t* router_rows;  // [kRowWarps, E]
  CallBlock* call;
  TeamJob* jobs;  // [kRowWarps], of senders that encode
  uint8_t* groups;
  bool* counts_arrived;
  int32_t* first_tiles;  // [L + 1]

  static int64_t FixedBytes(const EpShape& shape) {
    return kZeroBytes + static_cast<int64_t>(sizeof(CallBlock)) + kTeamBytes<Format> +
           kRowWarps * shape.experts() * kIndexBytes + GroupTable::Bytes(shape, kRowWarps) + 16 +
           (kHasScales<Format> ? (shape.local_experts + 1) * kIndexBytes : 0);
  }
  __device__ DispatchShared(uint8_t* memory, const EpShape& shape, const RowPlan& plan) {
    zeros = memory;
    stages = zeros + kZeroBytes;
    call = reinterpret_cast<CallBlock*>(stages + plan.stages.bytes(kRowWarps));
    jobs = reinterpret_cast<TeamJob*>(call + 1);
    groups = reinterpret_cast<uint8_t*>(call + 1) + kTeamBytes<Format>;
    router_rows = reinterpret_cast<int32_t*>(groups + GroupTable::Bytes(shape, kRowWarps));
    counts_arrived = reinterpret_cast<bool*>(router_rows + kRowWarps * shape.experts());
    first_tiles = router_rows + kRowWarps * shape.experts() + 1;
  }
};

// Makes all of the plan except the roles, leaving `spare` bytes of shared memory for others.
// Returns false if it does not fit.
template <typename Format>
bool MakePlan(const DispatchStep& step, DispatchPlan& plan, int64_t spare = 0) {
  const EpShape& shape = step.shape;
  const auto message = MessageOf<Format>(step);
  const int64_t payload_bytes = PayloadBytesOf<Format>(step);
  const int64_t chunks = kDispatchChunks.Count(shape.tokens);
  plan.route_tokens = static_cast<int32_t>(RouteItemTokens(shape.tokens));
  plan.chunk_tokens = static_cast<int32_t>(kDispatchChunks.Tokens(shape.tokens));
  plan.chunk_items = static_cast<uint32_t>(chunks * shape.ranks);
  plan.count_cells = Divisor::Of(CountCells(shape.local_experts));
  plan.top_k = Divisor::Of(shape.top_k);
  plan.rank_of = RankOfExpert(static_cast<int32_t>(shape.local_experts));
  WorkPlan& work = plan.call.work;
  work.route_items = static_cast<uint32_t>(RouteItems(shape.tokens));
  work.send_items = static_cast<uint32_t>(chunks);
  int64_t clear_bytes = shape.recv_rows * (kTableBytes + (step.zero_tail ? payload_bytes : 0));
  if constexpr (kHasScales<Format>) {
    plan.scales = ScalePlan::Of<Format>(step);
    clear_bytes += plan.scales.tiles.tiles * plan.scales.TileBytes();
  }
  work.receive_items = ReceiveItems(plan.chunk_items, clear_bytes);
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag = CallTag(TagKind::kDispatch, shape.tokens, message.bytes, shape.top_k, step.site);
  const int64_t budget = kMaxSharedBytes - DispatchShared<Format>::FixedBytes(shape) - spare;
  if (!PlanRows(payload_bytes, message.scales, message.bytes, budget, plan.rows)) return false;
  if constexpr (QuantizedFormat<Format>) {
    return PlanEncoding<Format>(shape.hidden, step.element, message.scales, message.source_token,
                                message.bytes, budget, plan.encode, plan.rows.stages);
  }
  return true;
}

}  // namespace jax_ep::cuda
