// How a warp takes item after item from a queue of a window call.
#pragma once

#include <cstdint>

#include "cuda/window/call.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// The ticket of a warp's next item. All functions are called by the whole warp.
class NextTicket {
 public:
  __device__ NextTicket(const WindowCall& call, Queue queue)
      : call_(call), queue_(queue), ahead_(call.DrawsAhead(queue)) {}
  // Call this while waiting for the current item. It prefetches the next ticket, but only when the
  // queue is nearly empty; otherwise it would take work from idle warps. Do not call it as a call
  // begins: blocks that start a little later would find their items taken by warps that are still
  // busy with another.
  __device__ void DrawAhead() {
    if (ahead_) ticket_ = call_.Draw(queue_);
  }
  // Returns the next item, when the current one is done.
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

// Calls `work(item, next)` for `item` and the following ones while there are any and `work` returns
// true. `work` must call next.DrawAhead() once.
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
