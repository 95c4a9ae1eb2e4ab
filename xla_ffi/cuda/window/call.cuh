// One fused call at one rank: its place in the window, its work queues, its bounded waits, and how
// the blocks of its kernel begin and leave it. Used by window/*.cu; protocol/signals.h has the
// rules.
#pragma once

#include <cstdint>

#include "cuda/common/divisor.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/signal_memory.cuh"
#include "cuda/window/roles.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Kernels have the others for themselves.
inline constexpr uint32_t kCreditsBarrier = 14;
// What a wait for a rank of another node may take longer than others.
inline constexpr uint64_t kGraceNs = 1'000'000'000;

// What every kind of call is told.
struct CallPlan {
  WorkPlan work;
  BlockRoles roles;
  Divisor ranks;
  uint16_t tag;
  bool of_whole_call;  // of a first half: it is that of a whole call
};

// What the warps of a block share of a call; in shared memory. One thread a block asks for each: in
// a short call hundreds of warps that did would queue for microseconds at one address.
struct CallBlock {
  Gate gate;
  bool free;  // every destination's region is
  RegionLease lease;
  uint32_t senders;
  uint32_t first_tickets[kQueues];
  uint32_t part;  // of the block, of the sum of a call
  Departure end;
};

// Every warp has its own.
class WindowCall {
 public:
  __device__ WindowCall(const WindowGroup& group, CallKind kind, const CallPlan& plan,
                        CallBlock& block)
      : group_(group),
        plan_(plan),
        block_(block),
        state_(group.control->calls[static_cast<int>(kind)]),
        layout_(group.layout.groups[static_cast<int>(kind)]) {}

  // Whole block, before a barrier and Join.
  __device__ void Begin() {
    if (threadIdx.x == 0) Lease();
    // Beside it, in another warp.
    if (threadIdx.x == kWarpSize) DrawFirst(plan_.roles);
  }
  // Likewise where blocks take items in order; `first` is in shared memory.
  __device__ void BeginInOrder(WorkItem& first) {
    if (threadIdx.x == 0) Lease();
    if (threadIdx.x != kWarpSize) return;
    first = ItemInOrder(plan_.work, DrawTickets(memory_, state_, Queue::kSend, 1));
  }

  // False where the group is closed or poisoned, for all of a block: then no window may be touched.
  __device__ bool Join() {
    lease_ = block_.lease;
    return block_.gate == Gate::kOpen && lease_.region != kNoRegion;
  }
  __device__ uint32_t senders() const { return block_.senders; }

  // Whole warp: what the block has drawn for it, or else the next one.
  __device__ WorkItem First(Queue queue) {
    const uint32_t warp = static_cast<uint32_t>(Warp());
    const uint32_t ticket = plan_.roles.TicketOf(warp, block_.senders, queue);
    if (ticket == BlockRoles::kNoTicket) return Take(queue);
    return ItemOf(plan_.work, queue, block_.first_tickets[static_cast<uint32_t>(queue)] + ticket);
  }

  // Whole warp: the next item, in one step or in two.
  __device__ WorkItem Take(Queue queue) { return Resolve(queue, Draw(queue)); }
  __device__ uint32_t Draw(Queue queue) const {
    return Lane() == 0 ? DrawTickets(memory_, state_, queue, 1) : 0;
  }
  __device__ WorkItem Resolve(Queue queue, uint32_t ticket) const {
    return ItemOf(plan_.work, queue, __shfl_sync(kFullWarp, ticket, 0));
  }
  __device__ WorkItem ResolveInOrder(uint32_t ticket) const {
    return ItemInOrder(plan_.work, __shfl_sync(kFullWarp, ticket, 0));
  }
  __device__ bool DrawsAhead(Queue queue) const {
    return plan_.roles.DrawnAtOnce(plan_.work, queue);
  }

  __device__ uint32_t rank() const { return group_.rank; }
  __device__ uint32_t ranks() const { return group_.ranks; }
  __device__ bool IsInternode(uint32_t rank) const { return (group_.internode >> rank & 1) != 0; }
  __device__ const Divisor& by_ranks() const { return plan_.ranks; }

  // ---- Addresses: in the window of `owner`, for this call's region ----

  // What this rank sends lies in the destination's part of its own number; in what is staged for
  // another node, in the part of the destination's.
  __device__ uint32_t PartAt(uint32_t destination) const {
    return IsInternode(destination) ? destination : group_.rank;
  }

  __device__ uint8_t* Region(uint32_t owner, uint32_t source) const {
    return group_.windows[owner] + layout_.regions + Part(source) * layout_.region_bytes;
  }
  __device__ CountCell* Counts(uint32_t owner, uint32_t source) const {
    return reinterpret_cast<CountCell*>(group_.windows[owner] + layout_.counts) +
           Part(source) * layout_.count_cells;
  }
  // Of the message of a token or slot, where calls have few: never for other nodes.
  __device__ CountCell* Cells(uint32_t owner, uint32_t source, int64_t message) const {
    return reinterpret_cast<CountCell*>(group_.windows[owner] + layout_.cells) +
           Part(source) * layout_.cells_per_source + message * layout_.message_cells;
  }
  __device__ RouteTotals Totals(int64_t experts) const {
    return {Int32At(group_.windows[group_.rank], group_.layout.route_totals), experts,
            group_.ranks};
  }

  // The cells of a RoutePart.
  __device__ CountCell* RouteCells(int64_t experts, int64_t part) const {
    uint8_t* const parts = group_.windows[group_.rank] + group_.layout.route_parts;
    return reinterpret_cast<CountCell*>(parts) + part * RoutePart::Cells(experts, group_.ranks);
  }

  // ---- Signals ----

  // For one lane a destination, after this warp's stores: the lane that issued bulk copies to the
  // destination, once they are complete; plain stores of other lanes before a __syncwarp.
  __device__ void Publish(uint32_t destination, int64_t index, uint32_t first_slot,
                          uint32_t count) const {
    PublishFlag(memory_, Flag(destination, PartAt(destination), index),
                {lease_.epoch, first_slot, static_cast<uint16_t>(count), plan_.tag});
  }

  // Any lanes, each for its own source. Bulk loads of what arrived need a FenceProxyAsyncGlobal.
  __device__ bool AwaitFlag(uint32_t source, int64_t index, FlagCell& flag) const {
    const FlagCell* cell = Flag(group_.rank, source, index);
    return Await(Phase::kReceive, source,
                 [&] { return ObserveFlag(memory_, cell, lease_.epoch, plan_.tag, flag); });
  }

  // What a flag of this rank holds that has been awaited.
  __device__ FlagCell SeenFlag(uint32_t source, int64_t index) const {
    return memory_.Peek(Flag(group_.rank, source, index));
  }

  // After AwaitCredits.
  __device__ void PostCell(CountCell* cell, const uint32_t (&words)[3]) const {
    memory_.Post(cell, {{static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1]),
                         static_cast<int32_t>(words[2])},
                        CellStamp(lease_.epoch)});
  }

  // Any lanes, each for its own cells, all at once; nullptr for none. `sources` are the ranks that
  // they come from. Waits for cells [0, needed(cells)) as soon as cell 0 is there.
  template <int kCells, typename Needed>
  __device__ bool AwaitCells(const CountCell* const (&from)[kCells],
                             const uint32_t (&sources)[kCells], CountCell (&cells)[kCells],
                             Needed needed) const {
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < kCells; ++i) missing |= from[i] == nullptr ? 0 : 1u << i;
    if (missing == 0) return true;
    const WaitBound bound{group_.timeout_ns, Poison(group_.rank)};
    const WaitStatus status = WaitUntil(memory_, bound, [&] {
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        if (from[i] == nullptr) continue;
        // Again where it is there already: all loads are under way at once.
        const bool there =
            ObserveCounts(memory_, from[i], lease_.epoch, cells[i]) == Observation::kArrived;
        missing &= there ? ~(1u << i) : ~0u;
      }
      if ((missing & 1) == 0) missing &= (1u << needed(cells)) - 1;
      return missing == 0 ? Observation::kArrived : Observation::kPending;
    });
    if (status == WaitStatus::kArrived) return true;
    uint32_t awaited = 0;
#pragma unroll
    for (int i = kCells - 1; i >= 0; --i) {
      if ((missing >> i & 1) != 0) awaited = sources[i];
    }
    GiveUp(Phase::kReceive, awaited, status);
    return false;
  }

  template <int kCells>
  __device__ bool AwaitCells(const CountCell* const (&from)[kCells],
                             const uint32_t (&sources)[kCells], CountCell (&cells)[kCells]) const {
    return AwaitCells(from, sources, cells, [](const CountCell(&)[kCells]) { return kCells; });
  }

  // In cells of this rank's scratch, for other warps of the call; whether one is there yet.
  __device__ void PostHere(CountCell* cell, const int32_t (&counts)[3]) const {
    const CountCell all{{counts[0], counts[1], counts[2]}, CellStamp(lease_.epoch)};
    StoreRelaxedGpu(reinterpret_cast<Bits128*>(cell), __builtin_bit_cast(Bits128, all));
  }
  __device__ bool LookAt(const CountCell* from, CountCell& cell) const {
    cell = __builtin_bit_cast(CountCell, LoadRelaxedGpu(reinterpret_cast<const Bits128*>(from)));
    return cell.stamp == CellStamp(lease_.epoch);
  }

  // Any lane, after AwaitCredit: one cell of this rank's counts for a destination.
  __device__ void PostCounts(uint32_t destination, int64_t cell, const int32_t (&counts)[3]) const {
    memory_.Post(Counts(destination, PartAt(destination)) + cell,
                 {{counts[0], counts[1], counts[2]}, CellStamp(lease_.epoch)});
  }

  // Any lanes, each for its own cell. The tag is in the first.
  __device__ bool AwaitCounts(uint32_t source, int64_t cell, CountCell& counts) const {
    const CountCell* from = Counts(group_.rank, source) + cell;
    return Await(Phase::kReceive, source, [&] {
      const Observation seen = ObserveCounts(memory_, from, lease_.epoch, counts);
      const bool differs =
          seen == Observation::kArrived && cell == 0 && counts.counts[1] != plan_.tag;
      return differs ? Observation::kProtocolError : seen;
    });
  }
  // Whether a cell holds this call's counts. Where it holds another call's, AwaitCounts says so.
  __device__ bool HasCounts(int64_t cell, const CountCell& counts) const {
    return counts.stamp == CellStamp(lease_.epoch) &&
           (cell != 0 || counts.counts[1] == static_cast<int32_t>(plan_.tag));
  }
  __device__ uint16_t tag() const { return plan_.tag; }

  // Whole block, each warp once, where its own work has come to the first store: every
  // destination's region is free. Even where there is nothing to send, or ranks that need nothing
  // of each other could get further apart than credits tell. `kCalled`: for kernels that wait in
  // several places, each of which is fetched. Combine, whose last warp sends and has loads under
  // way, is faster without.
  template <bool kCalled = false>
  __device__ bool AwaitCredits() const {
    // In the last warp, which has the least else to do.
    if (threadIdx.x >= blockDim.x - kWarpSize) kCalled ? CallLook() : LookForCredits();
    __syncwarp();
    NamedBarrierApart(kCreditsBarrier, blockDim.x);
    return block_.free;
  }
  // Whole warp, for its block.
  __device__ bool WarpAwaitsCredits() const {
    const uint32_t rank = static_cast<uint32_t>(Lane());
    return __all_sync(kFullWarp, rank >= group_.ranks || AwaitCredit(rank)) != 0;
  }

  // ---- The end ----

  __device__ uint32_t Sum() const { return block_.end.sum; }  // in the last block
  // Whole block, when all of its reads of the window are over, or after a wait of this thread was
  // not `ok`. True in the one block that is the last of all; `failed` then says whether a wait of
  // the call failed anywhere.
  __device__ bool Leave(bool ok, bool& failed) {
    const bool block_failed = __syncthreads_and(ok) == 0;
    if (threadIdx.x == 0) {
      block_.end = LeaveCall(memory_, state_, gridDim.x, block_failed, block_.part);
    }
    __syncthreads();
    failed = block_.end.failed;
    return block_.end.last;
  }

  // Whole warp, for its block: Leave, when the other warps read nothing of the window any more, and
  // what Commit does where no wait has failed.
  __device__ void WarpLeaves(bool failed) {
    if (Lane() == 0) block_.end = LeaveCall(memory_, state_, gridDim.x, failed);
    __syncwarp();
    if (block_.end.last && !block_.end.failed) EndCall(static_cast<uint32_t>(Lane()));
  }

  // The last block, after Leave: gives the regions back and makes the next call possible, or ends
  // the group.
  __device__ void Commit(bool failed) { failed ? EndGroup() : EndCall(threadIdx.x); }

  // The last block, of a call that failed: what it fills its results with comes after what others
  // have stored there.
  __device__ void EndGroup() {
    const volatile Gate& gate = group_.control->gate;  // the window may be gone
    if (threadIdx.x == 0) PoisonGate(group_.control->gate);
    __syncthreads();
    // Blocks that had no part in the failure may still store. A look takes half a microsecond, and
    // they run whenever this one does, so no clock has to tell when they are done.
    constexpr int kLooks = 2'000;
    JAX_EP_NO_UNROLL
    for (int look = 0; look < kLooks && gate != Gate::kOpen; ++look) {
    }
  }

 protected:
  // Threads below the number of ranks, in the last block.
  __device__ void ReturnCredits(uint32_t thread, uint32_t region, uint64_t epoch) const {
    if (thread < group_.ranks) {
      ReturnCredit(memory_, Credit(thread, region, PartAt(thread)), epoch);
    }
  }
  // All words at once: the region depends on the epoch, and a load takes most of a microsecond.
  __device__ CallState LoadState() const {
    static_assert(sizeof(CallState) % sizeof(uint64_t) == 0);
    struct Words {
      uint64_t word[sizeof(CallState) / sizeof(uint64_t)];
    } words;
    const auto* from = reinterpret_cast<const volatile uint64_t*>(&state_);
#pragma unroll
    for (size_t i = 0; i < sizeof(CallState) / sizeof(uint64_t); ++i) words.word[i] = from[i];
    return __builtin_bit_cast(CallState, words);
  }
  __device__ Gate LoadGate() const {
    return *static_cast<const volatile Gate*>(&group_.control->gate);
  }
  // One thread.
  __device__ void DrawFirst(const BlockRoles& roles) const {
    const uint32_t senders = roles.Senders(roles.ByBlock() ? EnterCall(memory_, state_) : 0);
    const uint32_t placers = roles.Receivers(senders);
    const uint32_t send = senders == 0 ? 0 : DrawTickets(memory_, state_, Queue::kSend, senders);
    const uint32_t place =
        placers == 0 ? 0 : DrawTickets(memory_, state_, Queue::kReceive, placers);
    block_.senders = senders;
    block_.first_tickets[static_cast<uint32_t>(Queue::kSend)] = send;
    block_.first_tickets[static_cast<uint32_t>(Queue::kReceive)] = place;
  }
  // Out of line: it is cold. Tells every rank and this one's host; a later failure of the rank
  // overwrites the report, and each of them is true.
  __device__ __noinline__ void GiveUp(Phase phase, uint32_t awaited, WaitStatus status) const {
    if (status == WaitStatus::kTimedOut && IsInternode(awaited)) {
      // Perhaps for want of a rank that passes its messages on, which its neighbours can tell.
      const WaitBound bound{Min<uint64_t>(group_.timeout_ns / 8, kGraceNs), Poison(group_.rank)};
      status = WaitUntil(memory_, bound, [] { return Observation::kPending; });
    }
    const auto own = static_cast<uint16_t>(group_.rank), other = static_cast<uint16_t>(awaited);
    WaitReport report{lease_.epoch, own, other, plan_.tag, phase, status};
    if (status == WaitStatus::kPoisoned) {
      report = memory_.Peek(Poison(group_.rank));
    } else {
      SpreadPoison(memory_, report, group_.ranks, [&](uint32_t rank) { return Poison(rank); });
    }
    memory_.Post(group_.host_report, report);
  }

  const WindowGroup& group_;
  const CallPlan& plan_;
  CallBlock& block_;
  CallState& state_;
  RegionLease lease_{};
  DeviceSignalMemory memory_;

 private:
  // Whole warp.
  __device__ void LookForCredits() const {
    const bool free = WarpAwaitsCredits();
    if (Lane() == 0) block_.free = free;
  }
  __device__ __noinline__ void CallLook() const { LookForCredits(); }

  // A rank that comes when the others have given up sends nothing.
  __device__ bool AwaitCredit(uint32_t destination) const {
    const uint64_t* credit = Credit(group_.rank, lease_.region, destination);
    // Both loads are under way before either is looked at.
    const WaitReport report = memory_.Peek(Poison(group_.rank));
    const Observation first = ObserveCredit(memory_, credit, lease_);
    if (report.status != WaitStatus::kArrived) {
      GiveUp(Phase::kSend, destination, WaitStatus::kPoisoned);
      return false;
    }
    if (first == Observation::kArrived) return true;
    return Await(Phase::kSend, destination, [&] { return ObserveCredit(memory_, credit, lease_); });
  }

  // As ReturnCredits; the first one also ends the call.
  __device__ void EndCall(uint32_t thread) {
    ReturnCredits(thread, lease_.region, lease_.epoch);
    if (thread == 0) {
      CommitSend(state_, lease_);
      CommitReceive(state_, lease_);
    }
  }

  // One thread.
  __device__ void Lease() const {
    const Gate gate = LoadGate();
    block_.lease = LeaseRegion(LoadState(), group_.turns, group_.depth);
    block_.gate = gate;
    block_.part = 0;
  }

  __device__ int64_t Part(uint32_t peer) const { return Part(lease_.region, peer); }
  __device__ int64_t Part(uint32_t region, uint32_t peer) const {
    return static_cast<int64_t>(region) * group_.ranks + peer;
  }
  __device__ FlagCell* Flag(uint32_t owner, uint32_t source, int64_t index) const {
    return reinterpret_cast<FlagCell*>(group_.windows[owner] + layout_.flags) +
           Part(source) * layout_.flags_per_source + index;
  }
  __device__ uint64_t* Credit(uint32_t owner, uint32_t region, uint32_t destination) const {
    return reinterpret_cast<uint64_t*>(group_.windows[owner] + layout_.credits) +
           Part(region, destination);
  }
  __device__ WaitReport* Poison(uint32_t owner) const {
    return reinterpret_cast<WaitReport*>(group_.windows[owner] + group_.layout.poison);
  }

  template <typename Observe>
  __device__ bool Await(Phase phase, uint32_t awaited, Observe observe) const {
    const WaitBound bound{group_.timeout_ns, Poison(group_.rank)};
    const WaitStatus status = WaitUntil(memory_, bound, observe);
    if (status == WaitStatus::kArrived) return true;
    GiveUp(phase, awaited, status);
    return false;
  }

  const BufferGroupLayout& layout_;
};

}  // namespace jax_ep::cuda
