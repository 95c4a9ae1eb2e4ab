// Who sends and who places in a window dispatch. Used by window_dispatch.cu and
// window_cached_dispatch.cu.
//
// Bulk stores that the link cannot take fast enough hold up everything else that their
// multiprocessor does. So in long calls whole blocks send, the first to come, and the others place;
// when nothing is left to send they place as well. In short calls, which wait for single flights
// and not for the link, every block has warps of both kinds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/groups.cuh"
#include "cuda/window_call.cuh"
#include "cuda/window_grid.h"
#include "cuda/window_rows.cuh"

namespace jax_ep::cuda {

struct BlockRoles {
  uint32_t blocks;
  uint32_t sender_blocks;  // 0: every block has kMixedSenders sending warps

  static constexpr uint32_t kMixedSenders = 2;

  __device__ bool ByBlock() const { return sender_blocks != 0; }

  // Whole block, before a barrier: begins the call, and takes this warp's first item where its role
  // is known.
  __device__ bool EnterAndTake(WindowCall& call, const WorkPlan& work, uint32_t& entered,
                               WorkItem& item) const {
    if (!ByBlock()) {
      const bool sends = static_cast<uint32_t>(Warp()) < kMixedSenders;
      return call.BeginAndTake(work, sends ? Queue::kSend : Queue::kPlace, item);
    }
    if (threadIdx.x == 0) entered = call.Enter();
    return call.Begin();
  }

  // Sending warps of this block, the first ones.
  __device__ uint32_t Senders(uint32_t entered) const {
    if (!ByBlock()) return kMixedSenders;
    return entered < sender_blocks ? kRowWarps : 0;
  }

  // Whole block, after its senders are done: whether this warp places, and with which others.
  __device__ bool Places(uint32_t senders, Team& team) const {
    if (!ByBlock()) {
      constexpr uint32_t kSending = kMixedSenders * kWarpSize;
      team = {threadIdx.x - kSending, kRowThreads - kSending, kPlacerBarrier};
      return threadIdx.x >= kSending;
    }
    if (senders != 0) __syncthreads();
    team = {threadIdx.x, kRowThreads, 0};
    return true;
  }
};

// A warp clears this much at a time.
inline constexpr int64_t kClearBytes = int64_t{64} << 10;

// Enough items for the chunks, and for clearing in case that is more.
inline uint32_t PlaceItems(int64_t chunk_items, int64_t clear_bytes) {
  return static_cast<uint32_t>(
      std::max({int64_t{1}, chunk_items, CeilDiv(clear_bytes, kClearBytes)}));
}

// In a long call one block of `share` sends.
inline BlockRoles RolesOf(const WindowGroup& group, const WorkPlan& work, int64_t tokens,
                          uint32_t share) {
  constexpr int64_t kLongCall = 2048;  // tokens
  // Eight multiprocessors nearly fill the link; with many a chunk is whole later.
  constexpr uint32_t kMostSenderBlocks = 24;
  // Placing keeps up with the link; more blocks would only take multiprocessors from other work.
  constexpr uint32_t kLongCallBlocks = 64;
  const bool is_long = tokens >= kLongCall;
  const uint32_t limit = BlockLimit(group, is_long ? kLongCallBlocks : UINT32_MAX);
  const int64_t sending = CeilDiv(work.route_items + work.send_items, BlockRoles::kMixedSenders);
  const int64_t placing = CeilDiv(work.place_items, kRowWarps - BlockRoles::kMixedSenders);
  BlockRoles roles{};
  roles.blocks = static_cast<uint32_t>(std::clamp<int64_t>(std::max(sending, placing), 1, limit));
  if (is_long) roles.sender_blocks = std::min(kMostSenderBlocks, roles.blocks / share);
  return roles;
}

}  // namespace jax_ep::cuda
