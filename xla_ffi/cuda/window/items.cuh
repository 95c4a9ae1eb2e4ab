// How a warp takes one item after the other from a queue of a window call. Used by
// window/dispatch_{send,receive}.cuh, window/combine_receive.cuh and window/cached_dispatch.cu.
#pragma once

#include <cstdint>

#include "cuda/window/call.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Whole warp: the ticket of its next item.
class NextTicket {
 public:
  __device__ NextTicket(const WindowCall& call, Queue queue)
      : call_(call), queue_(queue), ahead_(call.DrawsAhead(queue)) {}
  // While the item in hand is waited for, so that the ticket costs no time of its own, if hardly
  // any are left: elsewhere that would keep items from warps that have nothing else to do. Never as
  // a call begins: blocks that come a little later would find that their items are taken, by warps
  // that have another one in hand.
  __device__ void DrawAhead() {
    if (ahead_) ticket_ = call_.Draw(queue_);
  }
  // After the item in hand.
  __device__ WorkItem Item() {
    if (!ahead_) ticket_ = call_.Draw(queue_);
    return call_.Resolve(queue_, ticket_);
  }

 private:
  const WindowCall& call_;
  Queue queue_;
  bool ahead_;
  uint32_t ticket_ = 0;
};

// Calls `work(item, next)`, from `item` on, as long as there are items and it is true; `work` calls
// next.DrawAhead() once.
template <typename Work>
__device__ bool ForEachItem(const WindowCall& call, Queue queue, WorkItem item, Work work) {
  NextTicket next(call, queue);
  while (item.phase != Phase::kNone) {
    if (!work(item, next)) return false;
    item = next.Item();
  }
  return true;
}

}  // namespace jax_ep::cuda
