// The steps of protocol/internode.h and bundle.h over NVSHMEM's puts: the kernels that run after
// the send half and before the receive half of a call with ranks on other nodes. They are linked
// with NVSHMEM's device library into an image that kernels.cc loads. See docs/protocol.md, "Ranks
// of other nodes".
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/common/signal_memory.cuh"
#include "cuda/internode/group.h"

namespace jax_ep::cuda {
namespace {

// A block is one lane: all its threads make each call together.
struct BlockPuts {
  const InternodeGroup& internode;

  __device__ uint8_t* At(int64_t at) const {
    return internode.group.windows[internode.group.rank] + at;
  }
  __device__ void Put(uint32_t rank, int64_t at, const void* from, int64_t bytes) const {
    nvshmemx_putmem_nbi_block(At(at), from, static_cast<size_t>(bytes), internode.pes[rank]);
  }
  __device__ void Fence() const {
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_fence();
  }
  __device__ void Signal(uint32_t rank, int64_t at, uint64_t value) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(At(at)), value, NVSHMEM_SIGNAL_SET,
                       internode.pes[rank]);
  }
  // NVSHMEM lets a thread read what the network has written only after one of its own tests has
  // succeeded. Our wait was not one of them, so this test, which always succeeds, follows it.
  __device__ void Settle() const {
    __syncthreads();
    auto* word = reinterpret_cast<uint64_t*>(At(internode.layout.groups[0].arrived));
    if (threadIdx.x == 0) nvshmem_uint64_test(word, NVSHMEM_CMP_GE, 0);
    __syncthreads();
  }
};
static_assert(PutAccess<BlockPuts>);

constexpr uint32_t kWarp = 32, kWarps = kInternodeThreads / kWarp;
constexpr int64_t kVector = sizeof(uint4);

// Called by the whole warp: copies a message to `to(i)` for each i below `copies`, except where
// `to(i)` is nullptr.
template <typename To>
__device__ void CopyMessage(const uint8_t* from, int64_t bytes, uint32_t copies, To to) {
  constexpr int kAtOnce = 4;
  const auto* vectors = reinterpret_cast<const uint4*>(from);
  const int64_t end = bytes / kVector;
  JAX_EP_NO_UNROLL
  for (int64_t first = threadIdx.x % kWarp; first < end; first += kAtOnce * kWarp) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * kWarp;
      if (at < end) loaded[i] = LoadAroundL1(vectors + at);
    }
    JAX_EP_NO_UNROLL
    for (uint32_t copy = 0; copy < copies; ++copy) {
      auto* there = reinterpret_cast<uint4*>(to(copy));
      if (there == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = first + i * kWarp;
        if (at < end) there[at] = loaded[i];
      }
    }
  }
}

// What the threads of a block share.
struct InternodeShared {
  Gate gate;
  WaitReport report;
  unsigned long long slots;
  // While bundling: how many tokens of the bundle come before this block's, how many this block
  // has, and where their messages are staged.
  uint32_t before;
  uint32_t count;
  int64_t from[kBundleTokens];
};

// A block and its peer, the internode rank that it serves.
class InternodeBlock {
 public:
  __device__ InternodeBlock(const InternodeGroup& internode, const InternodeCall& call)
      : internode_(internode),
        call_(call),
        group_(internode.group),
        puts_{internode},
        offsets_{group_.layout.groups[static_cast<int>(call.kind)],
                 internode.layout.groups[static_cast<int>(call.kind)], group_.ranks},
        bundles_{offsets_.window, internode.bundles, internode.map},
        own_(group_.windows[group_.rank]),
        staged_(own_ + internode.layout.staged),
        peer_(NthInternodeRank(blockIdx.y)),
        bundled_(Bundled(internode, call.kind)),
        shared_(SharedObject<InternodeShared>()) {}

  // Whether this rank and its peer put to each other directly.
  __device__ bool Hears() const { return !bundled_ || internode_.map.Relays(group_.rank, peer_); }

  // Read once for the whole block, because another block may poison the group meanwhile.
  __device__ Gate LoadGate() const {
    __syncthreads();
    if (threadIdx.x == 0) shared_.gate = *static_cast<const volatile Gate*>(&group_.control->gate);
    __syncthreads();
    return shared_.gate;
  }

  // Gathers the messages of this block's tokens and writes their rows of the table.
  __device__ void Bundle(const PendingCall& pending) const {
    const TokenSlots& slots = call_.slots;
    const uint32_t node = internode_.map.node_of[peer_], region = pending.region;
    const BundleSide& side = internode_.bundles.staged;
    const int64_t first = blockIdx.x * kBundleTokens;
    const int64_t end = Min(first + kBundleTokens, slots.tokens);
    const auto goes = [&](int64_t token) {
      return GoesTo(internode_.map, group_.ranks, slots, token, node);
    };
    if (threadIdx.x == 0) shared_.before = 0;
    __syncthreads();
    uint32_t earlier = 0;
    JAX_EP_NO_UNROLL
    for (int64_t token = threadIdx.x; token < first; token += kInternodeThreads)
      earlier += goes(token);
    if (earlier != 0) atomicAdd(&shared_.before, earlier);
    __syncthreads();
    const uint32_t before = shared_.before;
    if (threadIdx.x < kWarp) {
      static_assert(kBundleTokens == kWarp);
      const int64_t token = first + threadIdx.x;
      const bool here = token < end && goes(token);
      const unsigned lanes = __ballot_sync(~0u, here);
      const int at = __popc(lanes & ((1u << threadIdx.x) - 1));
      if (here) {
        auto* row =
            reinterpret_cast<int32_t*>(own_ + bundles_.Row(side, region, node, before + at));
        shared_.from[at] =
            WriteRow(internode_.map, offsets_, call_.shape, slots, token, node, region, row);
      }
      if (threadIdx.x == 0) shared_.count = static_cast<uint32_t>(__popc(lanes));
    }
    __syncthreads();
    const uint32_t count = shared_.count;
    if (threadIdx.x == 0 && end == slots.tokens) {
      *reinterpret_cast<int64_t*>(own_ + bundles_.Table(side, region, node)) = before + count;
    }
    uint8_t* messages = own_ + bundles_.Messages(side, region, node);
    JAX_EP_NO_UNROLL
    for (uint32_t i = threadIdx.x / kWarp; i < count; i += kWarps) {
      uint8_t* to = messages + int64_t{before + i} * call_.shape.message_bytes;
      CopyMessage(staged_ + shared_.from[i], call_.shape.message_bytes, 1,
                  [&](uint32_t) { return to; });
    }
  }

  // Sends this block's share.
  __device__ void Forward(const PendingCall& pending) const {
    if (bundled_) {
      const uint8_t* table = own_ + bundles_.Table(internode_.bundles.staged, pending.region,
                                                   internode_.map.node_of[peer_]);
      ForwardBundle(puts_, offsets_, bundles_, own_, staged_, group_.rank, peer_, call_.shape,
                    pending, *reinterpret_cast<const int64_t*>(table), blockIdx.x);
      return;
    }
    if (threadIdx.x == 0) shared_.slots = 0;
    __syncthreads();
    const auto* flags =
        reinterpret_cast<const FlagCell*>(staged_ + offsets_.Flags(pending.region, peer_));
    const int64_t end =
        SlotsEnd(memory_, flags, call_.shape, pending.epoch, threadIdx.x, blockDim.x);
    if (end > 0) atomicMax(&shared_.slots, static_cast<unsigned long long>(end));
    __syncthreads();
    ForwardShare(puts_, offsets_, staged_, group_.rank, peer_, call_.shape, pending,
                 static_cast<int64_t>(shared_.slots), blockIdx.x);
  }

  // Sends the credits that receive halves have returned into the staging area and that sources have
  // not been told yet.
  __device__ void ReturnDueCredits() const {
    const bool combines = call_.kind == CallKind::kCombine;
    const uint16_t tag = KindTag(combines ? TagKind::kCombine : TagKind::kDispatch);
    JAX_EP_NO_UNROLL
    for (uint32_t region = 0; region < group_.depth; ++region) {
      const uint64_t due = memory_.Peek(Word(staged_, offsets_.Credit(region, peer_)));
      uint64_t* returned = Word(own_, offsets_.Returned(region, peer_));
      const bool is_due = memory_.Peek(returned) != due;
      __syncthreads();
      if (!is_due) continue;
      if (!Hears()) {
        puts_.Fence();
      } else if (!AwaitRegion({due, region, tag})) {
        return;
      }
      if (threadIdx.x == 0) memory_.Post(returned, due);
      ReturnInternodeCredit(puts_, memory_, peer_, offsets_.Credit(region, group_.rank), due);
    }
  }

  __device__ void Arrive(const PendingCall& pending) const {
    const uint32_t region = pending.region;
    if (!AwaitRegion(pending) || bundled_) return;
    DeliverTo(own_, region, offsets_.InboxFlags(region, peer_),
              offsets_.InboxCounts(region, peer_));
  }

  // Stores some of the messages of the peer's bundle, one per warp.
  __device__ void Relay(const PendingCall& pending) const {
    const BundleSide& side = internode_.bundles.inbox;
    const uint32_t from = internode_.map.node_of[peer_], here = internode_.map.node_of[group_.rank];
    const uint32_t region = pending.region;
    const int64_t bytes = call_.shape.message_bytes, most = offsets_.window.region_bytes / bytes;
    const auto* table = reinterpret_cast<const int32_t*>(own_ + bundles_.Table(side, region, from));
    const int64_t count = Min<int64_t>(LoadAroundL1(table), most);
    JAX_EP_NO_UNROLL
    for (int64_t i = blockIdx.x * kWarps + threadIdx.x / kWarp; i < count;
         i += gridDim.x * kWarps) {
      const auto* row =
          reinterpret_cast<const int32_t*>(own_ + bundles_.Row(side, region, from, i));
      const auto to = [&](uint32_t local_rank) -> uint8_t* {
        const int64_t slot = LoadAroundL1(row + local_rank);
        if (slot < 0 || slot >= most) return nullptr;
        return group_.windows[internode_.map.RankAt(here, local_rank)] +
               offsets_.Messages(region, peer_) + slot * bytes;
      };
      CopyMessage(own_ + bundles_.Messages(side, region, from) + i * bytes, bytes,
                  internode_.map.size, to);
    }
  }

  // Delivers the cells of the peer's bundle. Call it after all of its messages were stored.
  __device__ void Deliver(const PendingCall& pending) const {
    const uint32_t from = internode_.map.node_of[peer_], here = internode_.map.node_of[group_.rank];
    const uint32_t region = pending.region;
    JAX_EP_NO_UNROLL
    for (uint32_t local_rank = 0; local_rank < internode_.map.size; ++local_rank) {
      DeliverTo(group_.windows[internode_.map.RankAt(here, local_rank)], region,
                bundles_.Flags(region, from, local_rank),
                bundles_.Counts(region, from, local_rank));
    }
  }

  // Passes on a failure that this rank has already told the ranks of its node.
  __device__ void TellFailure() const {
    // Read once for the whole block, as in LoadGate.
    __syncthreads();
    if (threadIdx.x == 0) shared_.report = memory_.Peek(Poison(staged_));
    __syncthreads();
    if (shared_.report.status != WaitStatus::kArrived) {
      SpreadInternodePoison(puts_, peer_, group_.layout.poison, shared_.report);
    }
  }

 private:
  // Returns the n-th rank whose bit is set.
  __device__ uint32_t NthInternodeRank(uint32_t n) const {
    uint32_t left = group_.internode;
    for (; n > 0; --n) left &= left - 1;
    return static_cast<uint32_t>(__ffs(static_cast<int>(left)) - 1);
  }
  __device__ static uint64_t* Word(uint8_t* base, int64_t at) {
    return reinterpret_cast<uint64_t*>(base + at);
  }
  __device__ WaitReport* Poison(uint8_t* window) const {
    return reinterpret_cast<WaitReport*>(window + group_.layout.poison);
  }

  // Delivers cells from the inbox to a window of this node.
  __device__ void DeliverTo(uint8_t* window, uint32_t region, int64_t flags, int64_t counts) const {
    DeliverCells(memory_, reinterpret_cast<FlagCell*>(window + offsets_.Flags(region, peer_)),
                 reinterpret_cast<const FlagCell*>(own_ + flags), call_.shape.flags, threadIdx.x,
                 blockDim.x);
    DeliverCells(memory_, reinterpret_cast<CountCell*>(window + offsets_.Counts(region, peer_)),
                 reinterpret_cast<const CountCell*>(own_ + counts), call_.shape.counts, threadIdx.x,
                 blockDim.x);
  }

  // Called by the whole block: returns whether all shares of the peer's region have arrived.
  __device__ bool AwaitRegion(const PendingCall& call) const {
    bool ok = true;
    if (threadIdx.x < kInternodeShares) {
      const uint64_t* arrived = Word(own_, offsets_.Arrived(call.region, peer_, threadIdx.x));
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

  // Like WindowCall::GiveUp and EndGroup. The receive half that follows finds the gate poisoned.
  __device__ void GiveUp(const PendingCall& call, WaitStatus status) const {
    WaitReport report{call.epoch,
                      static_cast<uint16_t>(group_.rank),
                      static_cast<uint16_t>(peer_),
                      static_cast<uint16_t>(call.tag),
                      Phase::kReceive,
                      status};
    if (status == WaitStatus::kPoisoned) {
      report = memory_.Peek(Poison(own_));
    } else {
      SpreadPoison(memory_, report, group_.ranks,
                   [&](uint32_t rank) { return Poison(group_.windows[rank]); });
    }
    memory_.Post(group_.host_report, report);
    PoisonGate(group_.control->gate);
  }

  const InternodeGroup& internode_;
  const InternodeCall& call_;
  const WindowGroup& group_;
  const BlockPuts puts_;
  const InternodeOffsets offsets_;
  const BundleOffsets bundles_;
  uint8_t* const own_;
  uint8_t* const staged_;
  const uint32_t peer_;
  const bool bundled_;
  InternodeShared& shared_;
  const DeviceSignalMemory memory_{};
};

// Whether to go on with the call. If it is not pending, its receive half reports that.
__device__ bool Goes(const InternodeBlock& block, const InternodeGroup& internode,
                     const InternodeCall& call) {
  if (block.LoadGate() != Gate::kOpen || !block.Hears()) return false;
  const CallState& state = internode.group.control->calls[static_cast<int>(call.kind)];
  return ResumeRegion(state, *call.pending, internode.group.depth).region != kNoRegion;
}

}  // namespace

// Follows a send half.
extern "C" __global__ void __launch_bounds__(kInternodeThreads, 1)
    JaxEpInternodeBundle(const __grid_constant__ InternodeGroup internode,
                         const __grid_constant__ InternodeCall call) {
  const InternodeBlock block(internode, call);
  if (Goes(block, internode, call)) block.Bundle(*call.pending);
}

// Follows a send half or, without a call, a receive half.
extern "C" __global__ void __launch_bounds__(kInternodeThreads, 1)
    JaxEpInternodeSend(const __grid_constant__ InternodeGroup internode,
                       const __grid_constant__ InternodeCall call) {
  const InternodeBlock block(internode, call);
  if (call.pending != nullptr && Goes(block, internode, call)) block.Forward(*call.pending);
  if (blockIdx.x != 0) return;
  const Gate gate = block.LoadGate();
  if (gate == Gate::kClosed) return;
  if (gate == Gate::kOpen) block.ReturnDueCredits();
  block.TellFailure();
}

// Precedes a receive half, as do the next two kernels.
extern "C" __global__ void __launch_bounds__(kInternodeThreads, 1)
    JaxEpInternodeArrive(const __grid_constant__ InternodeGroup internode,
                         const __grid_constant__ InternodeCall call) {
  const InternodeBlock block(internode, call);
  if (Goes(block, internode, call)) block.Arrive(*call.pending);
}

extern "C" __global__ void __launch_bounds__(kInternodeThreads, 1)
    JaxEpInternodeRelay(const __grid_constant__ InternodeGroup internode,
                        const __grid_constant__ InternodeCall call) {
  const InternodeBlock block(internode, call);
  if (Goes(block, internode, call)) block.Relay(*call.pending);
}

extern "C" __global__ void __launch_bounds__(kInternodeThreads, 1)
    JaxEpInternodeDeliver(const __grid_constant__ InternodeGroup internode,
                          const __grid_constant__ InternodeCall call) {
  const InternodeBlock block(internode, call);
  if (Goes(block, internode, call)) block.Deliver(*call.pending);
}

}  // namespace jax_ep::cuda
