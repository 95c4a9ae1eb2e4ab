// The steps of protocol/far.h over NVSHMEM's puts: what a call of a group with ranks on other nodes
// runs behind its first half and before its second. Linked with NVSHMEM's device library into an
// image that kernels.cc loads; docs/protocol.md, "Ranks of other nodes".
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

#include "cuda/far_group.h"
#include "cuda/signal_memory.cuh"

namespace jax_ep::cuda {
namespace {

// A block is a lane: all of its threads call together.
struct BlockPuts {
  const FarGroup& far;

  __device__ uint8_t* At(int64_t at) const { return far.group.windows[far.group.rank] + at; }
  __device__ void Put(uint32_t rank, int64_t at, const void* from, int64_t bytes) const {
    nvshmemx_putmem_nbi_block(At(at), from, static_cast<size_t>(bytes), far.pes[rank]);
  }
  __device__ void Fence() const {
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_fence();
  }
  __device__ void Signal(uint32_t rank, int64_t at, uint64_t value) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(At(at)), value, NVSHMEM_SIGNAL_SET,
                       far.pes[rank]);
  }
  // Whoever has passed one of NVSHMEM's own tests may read what a network has written. The wait was
  // ours, so this test is one that anything passes.
  __device__ void Settle() const {
    __syncthreads();
    auto* word = reinterpret_cast<uint64_t*>(At(far.layout.groups[0].arrived));
    if (threadIdx.x == 0) nvshmem_uint64_test(word, NVSHMEM_CMP_GE, 0);
    __syncthreads();
  }
};
static_assert(PutAccess<BlockPuts>);

// One block, and the far rank that it is for.
class FarBlock {
 public:
  __device__ FarBlock(const FarGroup& far, const FarCall& call)
      : far_(far),
        call_(call),
        group_(far.group),
        puts_{far},
        places_{group_.layout.groups[static_cast<int>(call.kind)],
                far.layout.groups[static_cast<int>(call.kind)], group_.ranks},
        own_(group_.windows[group_.rank]),
        staged_(own_ + far.layout.staged),
        peer_(FarRank(blockIdx.y)) {}

  // The same for the whole block: another one may poison the group meanwhile.
  __device__ Gate LoadGate() const {
    __shared__ Gate gate;
    if (threadIdx.x == 0) gate = *static_cast<const volatile Gate*>(&group_.control->gate);
    __syncthreads();
    return gate;
  }

  // The block's share.
  __device__ void Forward(const PendingCall& pending) const {
    __shared__ unsigned long long slots;
    if (threadIdx.x == 0) slots = 0;
    __syncthreads();
    const auto* flags =
        reinterpret_cast<const FlagCell*>(staged_ + places_.Flags(pending.region, peer_));
    const int64_t end =
        SlotsEnd(memory_, flags, call_.shape, pending.epoch, threadIdx.x, blockDim.x);
    if (end > 0) atomicMax(&slots, static_cast<unsigned long long>(end));
    __syncthreads();
    ForwardShare(puts_, places_, staged_, group_.rank, peer_, call_.shape, pending,
                 static_cast<int64_t>(slots), blockIdx.x);
  }

  // What this rank has returned, into the staging area, and the source has not been told.
  __device__ void ReturnDueCredits() const {
    JAX_EP_NO_UNROLL
    for (uint32_t region = 0; region < group_.depth; ++region) {
      const uint64_t due = memory_.Peek(Word(staged_, places_.Credit(region, peer_)));
      uint64_t* returned = Word(own_, places_.Returned(region, peer_));
      const bool is_due = memory_.Peek(returned) != due;
      __syncthreads();
      if (!is_due) continue;
      if (!AwaitRegion({due, region, 0})) return;
      if (threadIdx.x == 0) memory_.Post(returned, due);
      ReturnFarCredit(puts_, memory_, peer_, places_.Credit(region, group_.rank), due);
    }
  }

  __device__ void Deliver(const PendingCall& pending) const {
    if (!AwaitRegion(pending)) return;
    const uint32_t region = pending.region;
    DeliverCells(memory_, reinterpret_cast<FlagCell*>(own_ + places_.Flags(region, peer_)),
                 reinterpret_cast<const FlagCell*>(own_ + places_.InboxFlags(region, peer_)),
                 call_.shape.flags, threadIdx.x, blockDim.x);
    DeliverCells(memory_, reinterpret_cast<CountCell*>(own_ + places_.Counts(region, peer_)),
                 reinterpret_cast<const CountCell*>(own_ + places_.InboxCounts(region, peer_)),
                 call_.shape.counts, threadIdx.x, blockDim.x);
  }

  // After a failure that this rank has told the ranks of its node.
  __device__ void TellFailure() const {
    // Likewise.
    __shared__ WaitReport report;
    __syncthreads();
    if (threadIdx.x == 0) report = memory_.Peek(Poison(staged_));
    __syncthreads();
    if (report.status != WaitStatus::kArrived) {
      SpreadFarPoison(puts_, peer_, group_.layout.poison, report);
    }
  }

 private:
  // The n-th of those with a bit.
  __device__ uint32_t FarRank(uint32_t n) const {
    uint32_t left = group_.far;
    for (; n > 0; --n) left &= left - 1;
    return static_cast<uint32_t>(__ffs(static_cast<int>(left)) - 1);
  }
  __device__ static uint64_t* Word(uint8_t* base, int64_t at) {
    return reinterpret_cast<uint64_t*>(base + at);
  }
  __device__ WaitReport* Poison(uint8_t* window) const {
    return reinterpret_cast<WaitReport*>(window + group_.layout.poison);
  }

  // For the whole block: whether all shares of the peer's region are there.
  __device__ bool AwaitRegion(const PendingCall& call) const {
    bool ok = true;
    if (threadIdx.x < kFarShares) {
      const uint64_t* arrived = Word(own_, places_.Arrived(call.region, peer_, threadIdx.x));
      const WaitBound bound{group_.timeout_ns, Poison(own_)};
      const WaitStatus status =
          WaitUntil(memory_, bound, [&] { return ObserveShare(memory_, arrived, call.epoch); });
      ok = status == WaitStatus::kArrived;
      if (!ok) GiveUp(call, status);
    }
    if (__syncthreads_and(ok) == 0) return false;
    puts_.Settle();
    return true;
  }

  // As WindowCall::GiveUp and EndGroup: the second half, launched behind this, finds the gate.
  __device__ void GiveUp(const PendingCall& call, WaitStatus status) const {
    WaitReport report{call.epoch,
                      static_cast<uint16_t>(group_.rank),
                      static_cast<uint16_t>(peer_),
                      static_cast<uint16_t>(call.tag),
                      Phase::kPlace,
                      status};
    if (status == WaitStatus::kPoisoned) {
      report = memory_.Peek(Poison(own_));
    } else {
      SpreadPoison(memory_, report, group_.ranks,
                   [&](uint32_t rank) { return Poison(group_.windows[rank]); });
    }
    memory_.Post(group_.host_report, report);
    volatile Gate& gate = group_.control->gate;
    gate = Gate::kPoisoned;
  }

  const FarGroup& far_;
  const FarCall& call_;
  const WindowGroup& group_;
  const BlockPuts puts_;
  const FarPlaces places_;
  uint8_t* const own_;
  uint8_t* const staged_;
  const uint32_t peer_;
  const DeviceSignalMemory memory_{};
};

}  // namespace

// Behind a first half, or with no call behind a second.
extern "C" __global__ void __launch_bounds__(kFarThreads, 1)
    JaxEpFarSend(const __grid_constant__ FarGroup far, const __grid_constant__ FarCall call) {
  const FarBlock block(far, call);
  const Gate gate = block.LoadGate();
  if (gate == Gate::kOpen && call.pending != nullptr) block.Forward(*call.pending);
  if (blockIdx.x != 0 || gate == Gate::kClosed) return;
  if (gate == Gate::kOpen) block.ReturnDueCredits();
  block.TellFailure();
}

// Before a second half. A call that is not pending is left to it.
extern "C" __global__ void __launch_bounds__(kFarThreads, 1)
    JaxEpFarArrive(const __grid_constant__ FarGroup far, const __grid_constant__ FarCall call) {
  const FarBlock block(far, call);
  if (block.LoadGate() != Gate::kOpen) return;
  const CallState& state = far.group.control->calls[static_cast<int>(call.kind)];
  const PendingCall pending = *call.pending;
  if (ResumeRegion(state, pending, far.group.depth).region == kNoRegion) return;
  block.Deliver(pending);
}

}  // namespace jax_ep::cuda
