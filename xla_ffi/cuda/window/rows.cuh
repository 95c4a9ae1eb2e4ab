// How rows pass through the stages of a warp on their way to windows and from windows to their
// places: whole messages, or in pieces where a message is too long for a stage. What both kinds of
// window dispatch share. Used by window/*dispatch*.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/bulk_stages.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/window/call.cuh"
#include "cuda/window/grid.h"

namespace jax_ep::cuda {

// Warps of a block. A block has as many stages as shared memory holds: three a warp for 14 KB rows.
inline constexpr uint32_t kRowWarps = 5;
inline constexpr uint32_t kRowThreads = kRowWarps * kWarpSize;
// Named barriers: among the placers; and for senders that wait until placers have their tables.
inline constexpr uint32_t kReceiversBarrier = 1;
inline constexpr uint32_t kTablesBarrier = 2;
// And of a block whose senders are done, above those of WindowCall.
inline constexpr uint32_t kSentBarrier = kCreditsBarrier + 1;

// A warp clears this much at a time.
inline constexpr int64_t kClearBytes = int64_t{64} << 10;

// Enough items for the chunks, and for clearing in case that is more.
inline uint32_t ReceiveItems(int64_t chunk_items, int64_t clear_bytes) {
  return static_cast<uint32_t>(
      std::max({int64_t{1}, chunk_items, DivideUp(clear_bytes, kClearBytes)}));
}

// Of a row, what its tables hold.
inline constexpr int64_t kTableBytes = 20;

// Blocks of long calls. Eight multiprocessors nearly fill the link; with many senders a chunk is
// whole later. Placing keeps up with the link; more blocks would only take multiprocessors from
// other work.
struct LongCallBlocks {
  uint32_t most;
  uint32_t senders;
};
inline constexpr LongCallBlocks kPlainBlocks{64, 24};
// Where senders encode, even with helpers (window/team.cuh) it takes more of them to fill the link.
inline constexpr LongCallBlocks kEncodingBlocks{132, 72};

// In a long call one block of `share` sends; where senders encode, six of eleven.
inline BlockRoles RowRoles(const WindowGroup& group, const WorkPlan& work, int64_t tokens,
                           uint32_t share, bool encodes) {
  constexpr int64_t kLongCall = 512, kLongerCall = 1024;  // tokens
  if (tokens < kLongCall) {
    // Two senders a block, but one where that gives most multiprocessors one each.
    const uint32_t limit = BlockLimit(group, UINT32_MAX);
    const uint32_t items = work.route_items + work.send_items;
    const uint32_t senders = items <= limit && items > limit / 2 ? 1 : 2;
    return BlockRoles::Alike(limit, kRowWarps, senders, work);
  }
  const LongCallBlocks& of = encodes ? kEncodingBlocks : kPlainBlocks;
  const uint32_t blocks = BlockLimit(group, tokens < kLongerCall ? UINT32_MAX : of.most);
  const uint32_t senders = std::min(of.senders, encodes ? blocks * 6 / 11 : blocks / share);
  return BlockRoles::ByArrival(blocks, kRowWarps, senders);
}

// Whole block.
__device__ inline void AwaitSent() {
  __syncwarp();
  NamedBarrierApart(kSentBarrier, blockDim.x);
}

// The warps of this block that place: those behind the senders, or all of them when the senders, if
// any, are done. False in a sender that stays one. `kHelpers`: there are warps behind these
// (window/team.cuh), which wait in AwaitSenders meanwhile.
template <bool kHelpers>
__device__ inline bool ReceivingTeam(const BlockRoles& roles, uint32_t senders, Team& team) {
  if (roles.ByBlock()) {
    if (senders != 0) AwaitSent();
    team = {threadIdx.x, kRowThreads, kHelpers ? kReceiversBarrier : 0};
    return true;
  }
  const uint32_t sending = senders * kWarpSize;
  team = {threadIdx.x - sending, kRowThreads - sending, kReceiversBarrier};
  return threadIdx.x >= sending;
}

__device__ inline void AwaitSenders(const BlockRoles& roles, uint32_t senders) {
  if (roles.ByBlock() && senders != 0) AwaitSent();
}

// What an sm_90 gives a block that asks for it.
inline constexpr int64_t kMaxSharedBytes = int64_t{227} << 10;

// A message is its payload and, from `side` on, its scales, if it has any, and what travels beside
// it. In a stage the side lies behind the piece, which for a whole payload is where it lies in the
// message.
struct RowPlan {
  StagePlan stages;
  Divisor pieces;
  uint32_t piece_bytes;
  uint32_t payload_bytes;
  uint32_t side;
  uint32_t side_bytes;
  uint32_t message_bytes;

  __device__ uint32_t PieceBytes(uint32_t piece) const {
    return Min(piece_bytes, payload_bytes - piece * piece_bytes);
  }
};

// Fits at least two stages of so many bytes a warp into `budget` bytes; false where even that
// fails.
inline bool FitStages(int64_t stage_bytes, int64_t budget, StagePlan& plan) {
  const int64_t stage = RoundUp(stage_bytes, 128);
  const int64_t stages = budget / (kRowWarps * (stage + static_cast<int64_t>(sizeof(uint64_t))));
  if (stages < 2) return false;
  plan = {static_cast<uint32_t>(stage), static_cast<uint32_t>(Min<int64_t>(stages, kMaxStages))};
  return true;
}

// In as few pieces as fit, multiples of `align` bytes but for the last.
inline bool PlanRows(int64_t payload_bytes, int64_t side, int64_t message_bytes, int64_t budget,
                     RowPlan& plan, int64_t align = kRowAlignBytes) {
  constexpr int64_t kMinPieceBytes = 1024;
  if (message_bytes > INT32_MAX) return false;
  for (int64_t pieces = 1; pieces == 1 || payload_bytes / pieces >= kMinPieceBytes; ++pieces) {
    const int64_t piece = RoundUp(DivideUp(payload_bytes, pieces), align);
    if (!FitStages(piece + message_bytes - side, budget, plan.stages)) continue;
    plan.pieces = Divisor::Of(DivideUp(payload_bytes, piece));
    plan.piece_bytes = static_cast<uint32_t>(piece);
    plan.payload_bytes = static_cast<uint32_t>(payload_bytes);
    plan.side = static_cast<uint32_t>(side);
    plan.side_bytes = static_cast<uint32_t>(message_bytes - side);
    plan.message_bytes = static_cast<uint32_t>(message_bytes);
    return true;
  }
  return false;
}

// Whole warp: loads a piece of a payload, and with the first one what lies beside it unless
// `message` is nullptr.
__device__ inline void LoadPiece(BulkStages& stages, const RowPlan& plan, uint32_t piece,
                                 const uint8_t* payload, const uint8_t* message) {
  const uint32_t bytes = plan.PieceBytes(piece);
  const uint32_t side_bytes = piece == 0 && message != nullptr ? plan.side_bytes : 0;
  stages.Load(bytes + side_bytes, [&](uint8_t* stage, uint64_t* barrier) {
    const uint8_t* from = payload + static_cast<int64_t>(piece) * plan.piece_bytes;
    if (side_bytes != 0 && from == message && bytes == plan.side) {
      BulkLoad(stage, message, bytes + side_bytes, barrier);
      return;
    }
    BulkLoad(stage, from, bytes, barrier);
    if (side_bytes != 0) {
      BulkLoad(stage + plan.piece_bytes, message + plan.side, side_bytes, barrier);
    }
  });
}

// As LoadPiece, with the side of every piece: the scales of all are in it.
__device__ inline void LoadWithSide(BulkStages& stages, const RowPlan& plan, uint32_t piece,
                                    const uint8_t* message) {
  const uint32_t bytes = plan.PieceBytes(piece);
  stages.Load(bytes + plan.side_bytes, [&](uint8_t* stage, uint64_t* barrier) {
    if (bytes == plan.side) {
      BulkLoad(stage, message, plan.message_bytes, barrier);
      return;
    }
    BulkLoad(stage, message + static_cast<int64_t>(piece) * plan.piece_bytes, bytes, barrier);
    BulkLoad(stage + plan.piece_bytes, message + plan.side, plan.side_bytes, barrier);
  });
}

// One lane: stores a piece of a message, and with the first one its side.
__device__ inline void StorePiece(const RowPlan& plan, uint32_t piece, uint8_t* message,
                                  const uint8_t* stage) {
  const uint32_t bytes = plan.PieceBytes(piece);
  if (piece == 0 && bytes == plan.side) {
    BulkStore(message, stage, plan.message_bytes);
    return;
  }
  BulkStore(message + static_cast<int64_t>(piece) * plan.piece_bytes, stage, bytes);
  if (piece == 0 && plan.side_bytes != 0) {
    BulkStore(message + plan.side, stage + plan.piece_bytes, plan.side_bytes);
  }
}

// The slot of a token at this lane's `destination`, or -1; the token's entries are in the lanes
// from `base` on, which hold their ranks and slots.
__device__ inline int32_t SlotAt(uint32_t destination, uint32_t ranks, int32_t base, int32_t top_k,
                                 int32_t rank, int32_t slot) {
  const bool of_token = Lane() >= base && Lane() < base + top_k;
  unsigned lanes = 0;  // that hold this destination
  JAX_EP_NO_UNROLL
  for (uint32_t to = 0; to < ranks; ++to) {
    const unsigned there = __ballot_sync(kFullWarp, of_token && rank == static_cast<int32_t>(to));
    if (to == destination) lanes = there;
  }
  const int32_t found = __shfl_sync(kFullWarp, slot, __ffs(static_cast<int>(lanes)) - 1);
  return lanes == 0 ? -1 : found;
}

// WindowCall::AwaitCredits before bulk stores.
__device__ inline bool AwaitCredits(const WindowCall& call) {
  const bool free = call.AwaitCredits<true>();
  FenceProxyAsyncGlobal();
  return free;
}

// The rank that this lane stores a chunk to, or the number of ranks for none. Turned by rank and
// chunk: if all ranks began with the same destination its link would hold up the others'.
__device__ inline uint32_t DestinationOf(const WindowCall& call, uint32_t chunk) {
  const uint32_t lane = static_cast<uint32_t>(Lane()), ranks = call.ranks();
  return lane < ranks ? call.by_ranks().Rest(lane + call.rank() + 1 + chunk) : ranks;
}

// Whole warp: announces a chunk to every destination, after all its stores. `first_slot` and
// `count` are those at this lane's destination.
__device__ inline void PublishChunk(const WindowCall& call, uint32_t chunk, uint32_t first_slot,
                                    uint32_t count) {
  const uint32_t destination = DestinationOf(call, chunk);
  // Each lane for its own stores; a later lane's flag says nothing about them.
  BulkWait<0>();
  if (destination < call.ranks()) {
    call.Publish(destination, chunk, first_slot, count);
  }
}

// Whole warp, before EndRows: each lane adds to the sum of the call, of which its last block
// learns.
__device__ inline void AddToSum(CallBlock& block, uint32_t value) {
  value = __reduce_add_sync(kFullWarp, value);
  if (Lane() == 0 && value != 0) atomicAdd(&block.part, value);
}

// Whole block: leaves a call that stores rows, of which this thread's part was `ok`. `fail` writes
// what the call returns where any part was not, after all that it had stored; `finish` is for one
// thread of the call. `mend` is for the last block where the sum is not zero, before it gives
// the region back.
template <typename Call, typename Finish, typename FailCall, typename Mend>
__device__ void EndRows(Call& call, bool ok, Finish finish, FailCall fail, Mend mend) {
  if (!ok) BulkWait<0>();
  bool failed;
  if (call.Leave(ok, failed)) {
    if (!failed && call.Sum() != 0) mend();
    call.Commit(failed);
    if (threadIdx.x == 0) finish();
    if (failed) {
      BulkWait<0>();
      __syncthreads();
      fail();
    }
  }
  // The rows are complete when the kernel ends; the credits need not wait for that.
  BulkWait<0>();
}

template <typename Call, typename Finish, typename FailCall>
__device__ void EndRows(Call& call, bool ok, Finish finish, FailCall fail) {
  EndRows(call, ok, finish, fail, [] {});
}

// A chunk that has arrived.
struct Arrival {
  bool ok;
  uint32_t source;
  uint32_t first_slot;
  uint32_t count;
  uint32_t sent;  // along a route: which of them, a bit each
};

// Whole warp: waits for the chunk of place item `index`; its slots lie in [0, tokens).
__device__ inline Arrival AwaitChunk(const WindowCall& call, uint32_t index, int64_t tokens) {
  // Own tokens first: they come first.
  uint32_t turn;
  const uint32_t chunk = call.by_ranks().Divide(index, turn);
  const uint32_t after = call.rank() + turn;
  const uint32_t source = after < call.ranks() ? after : after - call.ranks();
  FlagCell flag{};
  bool ok = true;
  if (Lane() == 0) {
    ok = call.AwaitFlag(source, chunk, flag);
  }
  // From the acquire to the loads of every lane, bulk loads included.
  __syncwarp();
  FenceProxyAsyncGlobal();
  const uint32_t limit = static_cast<uint32_t>(tokens);
  const uint32_t first = Min(__shfl_sync(kFullWarp, flag.first_slot, 0), limit);
  const uint32_t count = __shfl_sync(kFullWarp, static_cast<uint32_t>(flag.count), 0);
  return {__shfl_sync(kFullWarp, static_cast<int>(ok), 0) != 0, source, first,
          Min(Min(count & kSlotCountMask, limit - first), static_cast<uint32_t>(kMaxChunkTokens)),
          count >> kSlotCountBits};
}

}  // namespace jax_ep::cuda
