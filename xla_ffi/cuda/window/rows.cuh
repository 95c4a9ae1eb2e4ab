// How rows pass through a warp's stages to the windows and from the windows to their destination:
// as whole messages or, if a message is too long for a stage, in pieces. Shared by both kinds of
// window dispatch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/bulk_stages.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/window/call.cuh"
#include "cuda/window/grid.h"

namespace jax_ep::cuda {

// Row warps per block. A block has as many stages as fit into shared memory, three per warp for
// rows of 14 KB.
inline constexpr uint32_t kRowWarps = 5;
inline constexpr uint32_t kRowThreads = kRowWarps * kWarpSize;
// Named barriers: among receivers, and for senders that wait for the receivers' tables.
inline constexpr uint32_t kReceiversBarrier = 1;
inline constexpr uint32_t kTablesBarrier = 2;
// And one where a block's senders meet after sending, above those of WindowCall.
inline constexpr uint32_t kSentBarrier = kCreditsBarrier + 1;

// Bytes that a warp clears per item.
inline constexpr int64_t kClearBytes = int64_t{64} << 10;

// At least one item per chunk, or more if there is much to clear.
inline uint32_t ReceiveItems(int64_t chunk_items, int64_t clear_bytes) {
  return static_cast<uint32_t>(
      std::max({int64_t{1}, chunk_items, DivideUp(clear_bytes, kClearBytes)}));
}

// Bytes of all tables per row.
inline constexpr int64_t kTableBytes = 20;

// Numbers of blocks for long calls. Eight multiprocessors nearly saturate the link; with more
// senders each chunk is complete later. Receivers keep up with the link, so more blocks would only
// take multiprocessors away from other work.
struct LongCallBlocks {
  uint32_t most;
  uint32_t senders;
};
inline constexpr LongCallBlocks kPlainBlocks{64, 24};
// Encoding senders need more multiprocessors to saturate the link, even with helpers (team.cuh).
inline constexpr LongCallBlocks kEncodingBlocks{132, 72};

// In a long call one block out of `share` sends; if senders encode, six out of eleven.
inline BlockRoles RowRoles(const WindowGroup& group, const WorkPlan& work, int64_t tokens,
                           uint32_t share, bool encodes) {
  constexpr int64_t kLongCall = 512, kLongerCall = 1024;  // tokens
  if (tokens < kLongCall) {
    // Two senders per block, or one if that occupies most multiprocessors with one sender each.
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

// Called by the whole block.
__device__ inline void AwaitSent() {
  __syncwarp();
  NamedBarrierApart(kSentBarrier, blockDim.x);
}

// Forms the team that builds the tables from the warps of this block that receive: those behind the
// senders or, in blocks whose warps all send first, all of them after sending. Returns false in a
// warp that remains a sender. `kHelpers`: the block has helper warps as well (team.cuh), which wait
// in AwaitSenders meanwhile.
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

// The most shared memory that a block can get on sm_90.
inline constexpr int64_t kMaxSharedBytes = int64_t{227} << 10;

// A message is its payload and, from `side` on, whatever travels beside it: scales, if it has any,
// and indices. In a stage the side lies behind the piece; if the piece is the whole payload, that
// is also its place in the message.
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

// Fits stages of `stage_bytes` into `budget` bytes; returns false if there is no room for two per
// warp.
inline bool FitStages(int64_t stage_bytes, int64_t budget, StagePlan& plan) {
  const int64_t stage = RoundUp(stage_bytes, 128);
  const int64_t stages = budget / (kRowWarps * (stage + static_cast<int64_t>(sizeof(uint64_t))));
  if (stages < 2) return false;
  plan = {static_cast<uint32_t>(stage), static_cast<uint32_t>(Min<int64_t>(stages, kMaxStages))};
  return true;
}

// Cuts payloads into as few pieces as fit, all multiples of `align` bytes except the last.
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

// Called by the whole warp: loads a piece of a payload and, with the first piece, the message's
// side unless `message` is nullptr.
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

// Like LoadPiece, but loads the side with every piece, because it holds the scales of all.
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

// Called by one lane: stores a piece of a message and, with the first piece, its side.
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

// Returns a token's slot at this lane's `destination`, or -1. The token's entries, with their ranks
// and slots, are in the lanes from `base` on.
__device__ inline int32_t SlotAt(uint32_t destination, uint32_t ranks, int32_t base, int32_t top_k,
                                 int32_t rank, int32_t slot) {
  const bool of_token = Lane() >= base && Lane() < base + top_k;
  unsigned lanes = 0;  // lanes with an entry for this destination
  JAX_EP_NO_UNROLL
  for (uint32_t to = 0; to < ranks; ++to) {
    const unsigned there = __ballot_sync(kFullWarp, of_token && rank == static_cast<int32_t>(to));
    if (to == destination) lanes = there;
  }
  const int32_t found = __shfl_sync(kFullWarp, slot, __ffs(static_cast<int>(lanes)) - 1);
  return lanes == 0 ? -1 : found;
}

// WindowCall::AwaitCredits, followed by the fence that bulk stores need.
__device__ inline bool AwaitCredits(const WindowCall& call) {
  const bool free = call.AwaitCredits<true>();
  FenceProxyAsyncGlobal();
  return free;
}

// Returns the rank to which this lane stores a chunk, or the number of ranks if none. Rotated by
// rank and chunk: if all ranks began with the same destination, its link would slow all of them
// down.
__device__ inline uint32_t DestinationOf(const WindowCall& call, uint32_t chunk) {
  const uint32_t lane = static_cast<uint32_t>(Lane()), ranks = call.ranks();
  return lane < ranks ? call.by_ranks().Rest(lane + call.rank() + 1 + chunk) : ranks;
}

// Called by the whole warp after all its stores of a chunk: announces the chunk to every
// destination. `first_slot` and `count` refer to this lane's destination.
__device__ inline void PublishChunk(const WindowCall& call, uint32_t chunk, uint32_t first_slot,
                                    uint32_t count) {
  const uint32_t destination = DestinationOf(call, chunk);
  // Every lane waits for its own stores, because its flag announces only those.
  BulkWait<0>();
  if (destination < call.ranks()) {
    call.Publish(destination, chunk, first_slot, count);
  }
}

// Called by the whole warp before EndRows: adds the lanes' values to the call's sum, which its last
// block gets.
__device__ inline void AddToSum(CallBlock& block, uint32_t value) {
  value = __reduce_add_sync(kFullWarp, value);
  if (Lane() == 0 && value != 0) atomicAdd(&block.part, value);
}

// Called by the whole block: leaves a call that stores rows; `ok` says whether this thread's part
// succeeded. If any part failed, `fail` fills in the results after all stores of the call are over.
// `finish` runs in one thread of the call. `mend` runs in the last block if the sum is not zero,
// before the region is returned.
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
  uint32_t sent;  // in cached dispatches: bit i says whether slot first_slot + i was sent
};

// Called by the whole warp: waits for the chunk of receive item `index`. Its slots are clamped to
// [0, tokens).
__device__ inline Arrival AwaitChunk(const WindowCall& call, uint32_t index, int64_t tokens) {
  // Start with the own rank's tokens, which arrive first.
  uint32_t turn;
  const uint32_t chunk = call.by_ranks().Divide(index, turn);
  const uint32_t after = call.rank() + turn;
  const uint32_t source = after < call.ranks() ? after : after - call.ranks();
  FlagCell flag{};
  bool ok = true;
  if (Lane() == 0) {
    ok = call.AwaitFlag(source, chunk, flag);
  }
  // From the acquire to the loads of every lane, including bulk loads.
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
