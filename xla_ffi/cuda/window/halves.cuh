// The halves of a window call that is cut in two: the first routes and sends and leaves the call
// pending, the second places what has arrived. Used by window/dispatch_halves.cu,
// window/combine_{send,receive}.cu and window/cached_dispatch.cu; protocol/pending.h has the rules.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/window/call.cuh"
#include "cuda/window/grid.h"
#include "protocol/pending.h"

namespace jax_ep::cuda {

// Blocks of a first half: work beside it has the other multiprocessors. They fill the link; senders
// that encode need twice as many for it.
inline constexpr uint32_t kSendingBlocks = 24;

// Every warp sends.
inline BlockRoles SendingRoles(const WindowGroup& group, uint32_t warps, const WorkPlan& work,
                               bool encodes) {
  const uint32_t most = encodes ? 2 * kSendingBlocks : kSendingBlocks;
  return BlockRoles::Alike(BlockLimit(group, most), warps, warps, work);
}
// Every warp places; nothing runs beside it that is worth waiting for.
inline BlockRoles ReceivingRoles(const WindowGroup& group, uint32_t warps, const WorkPlan& work) {
  const uint32_t limit = BlockLimit(group, UINT32_MAX);
  const auto wanted = std::clamp<int64_t>(DivideUp(work.receive_items, warps), 1, limit);
  return {static_cast<uint32_t>(wanted), warps, 0, 0};
}

// Where a second half keeps its plan in shared memory, before all else.
inline constexpr int64_t kOwnPlanBytes = 128;
static_assert(sizeof(CallPlan) <= kOwnPlanBytes);

class WindowSendHalf : public WindowCall {
 public:
  using WindowCall::WindowCall;

  // In place of that of a whole call.
  __device__ void Commit(bool failed) {
    if (failed) return EndGroup();
    if (threadIdx.x == 0) CommitSend(state_, lease_);
    // The second half is launched before any other call of the kind.
    if (plan_.of_whole_call) {
      if (threadIdx.x == 0) KeepSum(memory_, state_, block_.end);
      return;
    }
    __syncthreads();
    const uint32_t surplus = SurplusRegion(state_, group_.depth);
    if (surplus == kNoRegion) return;
    ReturnCredits(threadIdx.x, surplus, state_.last_epoch[surplus]);
    __syncthreads();
    if (threadIdx.x == 0) CommitReceive(state_, {0, 0, surplus});
  }

  // One thread, after Commit: for the second half.
  __device__ void Note(PendingCall* pending) const {
    *pending = {lease_.epoch, lease_.region, plan_.tag};
  }
};

class WindowReceiveHalf : public WindowCall {
 public:
  // `own` is the block's, in shared memory: the plan with the tag of the first half.
  __device__ WindowReceiveHalf(const WindowGroup& group, CallKind kind, const CallPlan& plan,
                               CallBlock& block, CallPlan& own)
      : WindowCall(group, kind, own, block), given_(plan), own_(own) {}

  // As those of a whole call.
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
    if (threadIdx.x == 0) CommitReceive(state_, lease_);
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
