// How a block works in a call of few tokens: a clerk beside its workers. Used by low_latency/*.cu.
//
// Everything that has to be asked for takes half a microsecond or more, so the clerk asks for it
// beside the work: it waits for credits while tokens are routed, draws the next item while one is
// in hand, and leaves the call as soon as the workers have read what they need of the window, while
// they still write rows.
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
  bool failed;  // set by any thread of which a wait failed
};

// A worker or the clerk, in each thread.
class LowLatencyCrew {
 public:
  __device__ LowLatencyCrew(WindowCall& call, LowLatencyBlock& block)
      : call_(call), block_(block) {}

  // Whole block, after BeginInOrder and a barrier. `send(index)` and `place(index)` are the
  // workers' parts of an item. Each calls ReadsOver once; `send` calls AwaitCredits once, before
  // the first store to a peer, and stops if that is false. Where a wait of theirs fails they set
  // `failed` before ReadsOver. True where the block is the last to leave, and has failed or finds
  // that another has.
  template <typename Send, typename Place>
  __device__ bool Run(Send send, Place place) {
    const bool clerk = threadIdx.x >= kLowLatencyWorkers;
    const bool open = call_.Join();
    // A block may come when the others have taken everything.
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
        place(item.index);
      }
      // The next item, and the end, are there; workers have stored all of this one.
      __syncthreads();
    }
    return block_.call.end.last && block_.call.end.failed;
  }

  // Whole workers: false where a wait of the block has failed.
  __device__ bool AwaitCredits() const {
    __syncwarp();  // barriers want whole warps
    NamedBarrierApart(kCreditsBarrier, kLowLatencyThreads);
    return !block_.failed;
  }
  // Whole workers; they do not wait here.
  __device__ void ReadsOver() const {
    __syncwarp();
    ArriveAtBarrier(kReadsBarrier, kLowLatencyThreads);
  }
  // Whole workers; orders their accesses of shared memory.
  __device__ void Sync() const { team().Sync(); }
  __device__ Team team() const { return {threadIdx.x, kLowLatencyWorkers, kWorkersBarrier}; }

 private:
  static constexpr uint32_t kWorkersBarrier = 1, kReadsBarrier = 2;

  // The clerk.
  __device__ void Assist(WorkItem item) {
    // Under way during all that follows.
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
