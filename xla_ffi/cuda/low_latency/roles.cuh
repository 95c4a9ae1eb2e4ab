// How a block works in a low-latency call: a clerk warp beside its workers.
//
// Every request to memory takes half a microsecond or more, so the clerk makes them while the
// workers are busy: it waits for credits while tokens are routed, draws the next item while one is
// in progress, and leaves the call as soon as the workers have read what they need from the window,
// while they still write rows.
#pragma once

#include <cstdint>

#include "cuda/common/groups.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/window/call.cuh"

namespace jax_ep::cuda {

inline constexpr uint32_t kLowLatencyWarps = 16;  // of workers
inline constexpr uint32_t kLowLatencyWorkers = kLowLatencyWarps * kWarpSize;
inline constexpr uint32_t kLowLatencyThreads = kLowLatencyWorkers + kWarpSize;

// In shared memory.
struct LowLatencyBlock {
  CallBlock call;
  WorkItem item;
  bool failed;  // set by any thread whose wait failed
};

// Each thread is a worker's or the clerk's.
class LowLatencyRoles {
 public:
  __device__ LowLatencyRoles(WindowCall& call, LowLatencyBlock& block)
      : call_(call), block_(block) {}

  // Called by the whole block after BeginInOrder and a barrier. `send(index)` and `receive(index)`
  // are the workers' parts of an item. Each must call ReadsOver once. `send` must call AwaitCredits
  // once before its first store to a peer, and return if that is false. If a wait of theirs fails,
  // they set `failed` before ReadsOver. Returns true in the last block to leave, if any block has
  // failed.
  template <typename Send, typename Receive>
  __device__ bool Run(Send send, Receive receive) {
    const bool clerk = threadIdx.x >= kLowLatencyWorkers;
    const bool open = call_.Join();
    // A block may start only when the others have taken all items.
    if (!open || block_.item.phase == Phase::kNone) {
      if (clerk) call_.WarpLeaves(!open);
      __syncthreads();
      return block_.call.end.last && block_.call.end.failed;
    }
    JAX_EP_NO_UNROLL
    for (WorkItem item = block_.item; item.phase != Phase::kNone; item = block_.item) {
      if (clerk) {
        Assist(item);
      } else if (item.phase == Phase::kSend) {
        send(item.index);
      } else {
        receive(item.index);
      }
      // The next item has been drawn, and the workers have stored all of this one.
      __syncthreads();
    }
    return block_.call.end.last && block_.call.end.failed;
  }

  // For all workers: returns false if a wait of the block has failed.
  __device__ bool AwaitCredits() const {
    __syncwarp();  // barriers count whole warps
    NamedBarrierApart(kCreditsBarrier, kLowLatencyThreads);
    return !block_.failed;
  }
  // For all workers; they do not wait here.
  __device__ void ReadsOver() const {
    __syncwarp();
    ArriveAtBarrier(kReadsBarrier, kLowLatencyThreads);
  }
  // For all workers; orders their accesses to shared memory.
  __device__ void Sync() const { team().Sync(); }
  __device__ Team team() const { return {threadIdx.x, kLowLatencyWorkers, kWorkersBarrier}; }

 private:
  static constexpr uint32_t kWorkersBarrier = 1, kReadsBarrier = 2;

  // The clerk's part of an item.
  __device__ void Assist(WorkItem item) {
    // In flight during all that follows.
    const uint32_t ticket = call_.Draw(Queue::kSend);
    if (item.phase == Phase::kSend) {
      if (!call_.WarpAwaitsCredits()) StoreSame(&block_.failed, true);
      NamedBarrierApart(kCreditsBarrier, kLowLatencyThreads);
    }
    NamedBarrier(kReadsBarrier, kLowLatencyThreads);
    const bool failed = block_.failed;
    const WorkItem next = failed ? WorkItem{Phase::kNone, 0} : call_.ResolveInOrder(ticket);
    if (next.phase == Phase::kNone) call_.WarpLeaves(failed);
    __syncwarp();
    if (Lane() == 0) block_.item = next;
  }

  WindowCall& call_;
  LowLatencyBlock& block_;
};

}  // namespace jax_ep::cuda
