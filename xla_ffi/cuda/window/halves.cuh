// Calls in halves: the send half routes, sends and leaves the call pending; the receive half
// receives what has arrived. protocol/pending.h has the rules.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/window/call.cuh"
#include "cuda/window/grid.h"
#include "protocol/pending.h"

namespace jax_ep::cuda {

// Blocks of a send half: enough to saturate the link, which leaves the other multiprocessors to
// concurrent work. Encoding senders need twice as many.
inline constexpr uint32_t kSendingBlocks = 24;

// In a send half every warp sends. The send half of a whole call has no work beside it to leave
// multiprocessors to.
inline BlockRoles SendingRoles(const WindowGroup& group, uint32_t warps, const CallPlan& plan,
                               bool encodes) {
  const uint32_t beside_work = encodes ? 2 * kSendingBlocks : kSendingBlocks;
  const uint32_t most = plan.of_whole_call ? UINT32_MAX : beside_work;
  return BlockRoles::Alike(BlockLimit(group, most), warps, warps, plan.work);
}
// In a receive half every warp receives. It takes all multiprocessors, because nothing that runs
// beside it is worth waiting for.
inline BlockRoles ReceivingRoles(const WindowGroup& group, uint32_t warps, const WorkPlan& work) {
  const uint32_t limit = BlockLimit(group, UINT32_MAX);
  const auto wanted = std::clamp<int64_t>(DivideUp(work.receive_items, warps), 1, limit);
  return {static_cast<uint32_t>(wanted), warps, 0, 0};
}

// Space at the start of shared memory for a receive half's own plan.
inline constexpr int64_t kOwnPlanBytes = 128;
static_assert(sizeof(CallPlan) <= kOwnPlanBytes);

class WindowSendHalf : public WindowCall {
 public:
  using WindowCall::WindowCall;

  // Hides the Commit of whole calls.
  __device__ void Commit(bool failed) {
    if (failed) return EndGroup();
    if (threadIdx.x == 0) CommitSend(state_, lease_);
    // The receive half is launched before any other call of this kind.
    if (plan_.of_whole_call) {
      if (threadIdx.x == 0) KeepSum(memory_, state_, block_.end);
      return;
    }
    __syncthreads();
    const uint32_t surplus = SurplusRegion(state_, group_.depth);
    if (surplus == kNoRegion) return;
    ReturnCredits(threadIdx.x, surplus, state_.last_epoch[surplus]);
    __syncthreads();
    if (threadIdx.x == 0) CommitRecv(state_, {0, 0, surplus});
  }

  // Called by one thread after Commit: records the call for its receive half.
  __device__ void Note(PendingCall* pending) const {
    *pending = {lease_.epoch, lease_.region, plan_.tag};
  }
};

class WindowRecvHalf : public WindowCall {
 public:
  // `own` is a copy of the plan in the block's shared memory, which gets the tag of the send half.
  __device__ WindowRecvHalf(const WindowGroup& group, CallKind kind, const CallPlan& plan,
                            CallBlock& block, CallPlan& own)
      : WindowCall(group, kind, own, block), given_(plan), own_(own) {}

  // Begin, Join and Commit hide those of whole calls.
  __device__ void Begin(const PendingCall& pending) {
    if (threadIdx.x == 0) Resume(pending);
    if (threadIdx.x == kWarpSize) DrawFirst(given_.roles);
  }
  __device__ bool Join() {
    if (WindowCall::Join()) return true;
    if (block_.gate == Gate::kOpen && threadIdx.x == 0) {
      GiveUp(Phase::kReceive, group_.rank, WaitStatus::kNotPending);
    }
    return false;
  }
  __device__ void Commit(bool failed) {
    if (failed) return EndGroup();
    ReturnCredits(threadIdx.x, lease_.region, lease_.epoch);
    if (threadIdx.x == 0) CommitRecv(state_, lease_);
  }

 private:
  // One thread.
  __device__ void Resume(const PendingCall& pending) {
    const PendingCall call = pending;
    const Gate gate = LoadGate();
    block_.lease = ResumeRegion(LoadState(), call, group_.depth);
    block_.gate = gate;
    block_.part = 0;
    own_ = given_;
    own_.tag = static_cast<uint16_t>(call.tag);
  }

  const CallPlan& given_;
  CallPlan& own_;
};

}  // namespace jax_ep::cuda
