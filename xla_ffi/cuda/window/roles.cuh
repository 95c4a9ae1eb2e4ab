// Who sends and who places in a window call. Used by window/call.cuh and window/*.cu.
//
// Stores that the link cannot take fast enough hold up everything else that their multiprocessor
// does. So in long calls whole blocks send, the first to come, and the others place; when nothing
// is left to send they place as well. In short calls, which wait for single flights and not for the
// link, every block has warps of both kinds, or all of its warps send and then place.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol/window.h"

namespace jax_ep::cuda {

struct BlockRoles {
  uint32_t blocks;
  uint32_t warps;          // of a block
  uint32_t senders;        // of a block's warps, the first ones, where blocks are alike
  uint32_t sender_blocks;  // 0: blocks are alike

  static constexpr uint32_t kNoTicket = UINT32_MAX;

  // No more blocks than have work.
  static BlockRoles Alike(uint32_t limit, uint32_t warps, uint32_t senders, const WorkPlan& work) {
    BlockRoles roles{limit, warps, senders, 0};
    const int64_t wanted = std::max(DivideUp(work.route_items + work.send_items, senders),
                                    DivideUp(work.receive_items, roles.Receivers(senders)));
    roles.blocks = static_cast<uint32_t>(std::clamp<int64_t>(wanted, 1, limit));
    return roles;
  }
  static BlockRoles ByArrival(uint32_t blocks, uint32_t warps, uint32_t sender_blocks) {
    return {blocks, warps, 0, std::clamp(sender_blocks, 1u, blocks)};
  }

  __host__ __device__ bool ByBlock() const { return sender_blocks != 0; }

  // Sending warps of the block before which `entered` blocks came.
  __device__ uint32_t Senders(uint32_t entered) const {
    if (!ByBlock()) return senders;
    return entered < sender_blocks ? warps : 0;
  }
  // Warps of a block with so many senders for which place tickets are drawn as it begins. Not those
  // of a block that sends for long.
  __host__ __device__ uint32_t Receivers(uint32_t block_senders) const {
    if (block_senders < warps) return warps - block_senders;
    return ByBlock() ? 0 : warps;
  }
  // Whether the tickets that are drawn as blocks begin are all there are. No warp may take that as
  // leave not to ask: some of the blocks may come only when others have ended.
  __device__ bool DrawnAtOnce(const WorkPlan& work, Queue queue) const {
    if (ByBlock()) return false;
    return queue == Queue::kSend ? work.route_items + work.send_items <= blocks * senders
                                 : work.receive_items <= blocks * Receivers(senders);
  }
  // The place of a warp among those of its block for which tickets of a queue were drawn.
  __device__ uint32_t TicketOf(uint32_t warp, uint32_t block_senders, Queue queue) const {
    if (queue == Queue::kSend) return warp < block_senders ? warp : kNoTicket;
    if (block_senders == warps) return ByBlock() ? kNoTicket : warp;
    return warp < block_senders ? kNoTicket : warp - block_senders;
  }
};

}  // namespace jax_ep::cuda
