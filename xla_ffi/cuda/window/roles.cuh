// Which blocks and warps of a window call send and which receive.
//
// Stores that the link cannot take fast enough delay everything else on their multiprocessor. In
// long calls, therefore, the first blocks to arrive only send and the others receive; when nothing
// is left to send, senders receive as well. Short calls wait for latency and not for the link, so
// every block has warps of both kinds, or all its warps send and then receive.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol/window.h"

namespace jax_ep::cuda {

struct BlockRoles {
  uint32_t blocks;
  uint32_t warps;          // per block
  uint32_t senders;        // the first warps of each block, where blocks are alike
  uint32_t sender_blocks;  // 0 if blocks are alike

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

  // Returns the number of sending warps of a block that `entered` blocks preceded.
  __device__ uint32_t Senders(uint32_t entered) const {
    if (!ByBlock()) return senders;
    return entered < sender_blocks ? warps : 0;
  }
  // Returns for how many warps of a block receive tickets are drawn as it begins: none if the block
  // sends for a long time.
  __host__ __device__ uint32_t Receivers(uint32_t block_senders) const {
    if (block_senders < warps) return warps - block_senders;
    return ByBlock() ? 0 : warps;
  }
  // Returns whether the tickets that blocks draw as they begin cover all items. Warps must still
  // ask for more items: some blocks may start only after others have ended.
  __device__ bool DrawnAtOnce(const WorkPlan& work, Queue queue) const {
    if (ByBlock()) return false;
    return queue == Queue::kSend ? work.route_items + work.send_items <= blocks * senders
                                 : work.receive_items <= blocks * Receivers(senders);
  }
  // Returns the index of a warp's ticket among those that its block drew from a queue, or
  // kNoTicket.
  __device__ uint32_t TicketOf(uint32_t warp, uint32_t block_senders, Queue queue) const {
    if (queue == Queue::kSend) return warp < block_senders ? warp : kNoTicket;
    if (block_senders == warps) return ByBlock() ? kNoTicket : warp;
    return warp < block_senders ? kNoTicket : warp - block_senders;
  }
};

}  // namespace jax_ep::cuda
