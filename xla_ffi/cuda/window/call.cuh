// One fused call at one rank: its addresses in the windows, its work queues, its bounded waits, and
// how the blocks of its kernel enter and leave it. protocol/signals.h has the rules.
#pragma once

#include <cstdint>

#include "cuda/common/divisor.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/signal_memory.cuh"
#include "cuda/window/roles.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// The named barrier of AwaitCredits. Kernels may use all lower ones.
inline constexpr uint32_t kCreditsBarrier = 14;
// How much longer a rank waits, at most, for a rank on another node than for others.
inline constexpr uint64_t kGraceNs = 1'000'000'000;

// What every kind of call needs to know.
struct CallPlan {
  WorkPlan work;
  BlockRoles roles;
  Divisor ranks;
  uint16_t tag;
  bool of_whole_call;  // of a send half: the receive half follows as part of one whole call
};

// What the warps of a block share of a call, in shared memory. One thread per block fetches it: in
// a short call, hundreds of warps asking for themselves would queue at one address for
// microseconds.
struct CallBlock {
  Gate gate;
  bool free;  // whether every destination's region is free
  RegionLease lease;
  uint32_t senders;
  uint32_t first_tickets[kQueues];
  uint32_t part;  // of this block, of the call's sum
  Departure end;
};

// Each warp has one.
class WindowCall {
 public:
  __device__ WindowCall(const WindowGroup& group, CallKind kind, const CallPlan& plan,
                        CallBlock& block)
      : group_(group),
        plan_(plan),
        block_(block),
        state_(group.control->calls[static_cast<int>(kind)]),
        layout_(group.layout.groups[static_cast<int>(kind)]) {}

  // Called by the whole block. A barrier and Join follow.
  __device__ void Begin() {
    if (threadIdx.x == 0) Lease();
    // In another warp, so that the two wait for memory at the same time.
    if (threadIdx.x == kWarpSize) DrawFirst(plan_.roles);
  }
  // The same for kernels whose blocks take all items from one queue; `first` is in shared memory.
  __device__ void BeginInOrder(WorkItem& first) {
    if (threadIdx.x == 0) Lease();
    if (threadIdx.x != kWarpSize) return;
    first = ItemInOrder(plan_.work, DrawTickets(memory_, state_, Queue::kSend, 1));
  }

  // Returns false in the whole block if the group is closed or poisoned; then no window may be
  // touched.
  __device__ bool Join() {
    lease_ = block_.lease;
    return block_.gate == Gate::kOpen && lease_.region != kNoRegion;
  }
  __device__ uint32_t senders() const { return block_.senders; }

  // Called by the whole warp: returns the item that the block has drawn for it, or else draws one.
  __device__ WorkItem First(Queue queue) {
    const uint32_t warp = static_cast<uint32_t>(Warp());
    const uint32_t ticket = plan_.roles.TicketOf(warp, block_.senders, queue);
    if (ticket == BlockRoles::kNoTicket) return Take(queue);
    return ItemOf(plan_.work, queue, block_.first_tickets[static_cast<uint32_t>(queue)] + ticket);
  }

  // Called by the whole warp: takes the next item, in one step or in two.
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

  // At the destination, this rank's data lie in the part numbered by this rank. What is staged for
  // another node lies in the part numbered by the destination.
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
  // The cells of a token's or slot's message in a low-latency call, which never crosses nodes.
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

  // For one lane per destination, after this warp's stores. Bulk copies to the destination must be
  // complete and must have been issued by this very lane; plain stores of other lanes need a
  // __syncwarp before.
  __device__ void Publish(uint32_t destination, int64_t index, uint32_t first_slot,
                          uint32_t count) const {
    PublishFlag(memory_, Flag(destination, PartAt(destination), index),
                {lease_.epoch, first_slot, static_cast<uint16_t>(count), plan_.tag});
  }

  // For any lanes, each for its own source. Bulk loads of what arrived need FenceProxyAsyncGlobal
  // after it.
  __device__ bool AwaitFlag(uint32_t source, int64_t index, FlagCell& flag) const {
    const FlagCell* cell = Flag(group_.rank, source, index);
    return Await(Phase::kReceive, source,
                 [&] { return ObserveFlag(memory_, cell, lease_.epoch, plan_.tag, flag); });
  }

  // Returns a flag of this rank that was awaited before.
  __device__ FlagCell SeenFlag(uint32_t source, int64_t index) const {
    return memory_.Peek(Flag(group_.rank, source, index));
  }

  // Only after AwaitCredits.
  __device__ void PostCell(CountCell* cell, const uint32_t (&words)[3]) const {
    memory_.Post(cell, {{static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1]),
                         static_cast<int32_t>(words[2])},
                        CellStamp(lease_.epoch)});
  }

  // For any lanes: waits for several cells per lane at once. `from` may hold nullptr for no cell;
  // `sources` are the ranks that the cells come from. As soon as cell 0 has arrived, only cells [0,
  // needed(cells)) are waited for.
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
        // Load cells again even if they have arrived, so that all loads are in flight at once.
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

  // Cells in this rank's scratch, for other warps of the call: PostHere writes one, LookAt returns
  // whether it has arrived. Relaxed on both sides, because a cell carries its whole meaning.
  __device__ void PostHere(CountCell* cell, const int32_t (&counts)[3]) const {
    const CountCell all{{counts[0], counts[1], counts[2]}, CellStamp(lease_.epoch)};
    StoreRelaxedGpu(reinterpret_cast<Bits128*>(cell), __builtin_bit_cast(Bits128, all));
  }
  __device__ bool LookAt(const CountCell* from, CountCell& cell) const {
    cell = __builtin_bit_cast(CountCell, LoadRelaxedGpu(reinterpret_cast<const Bits128*>(from)));
    return cell.stamp == CellStamp(lease_.epoch);
  }

  // For any lane, after AwaitCredit: posts one cell of this rank's counts to a destination.
  __device__ void PostCounts(uint32_t destination, int64_t cell, const int32_t (&counts)[3]) const {
    memory_.Post(Counts(destination, PartAt(destination)) + cell,
                 {{counts[0], counts[1], counts[2]}, CellStamp(lease_.epoch)});
  }

  // For any lanes, each for its own cell. The first cell has the tag, which is checked.
  __device__ bool AwaitCounts(uint32_t source, int64_t cell, CountCell& counts) const {
    const CountCell* from = Counts(group_.rank, source) + cell;
    return Await(Phase::kReceive, source, [&] {
      const Observation observed = ObserveCounts(memory_, from, lease_.epoch, counts);
      const bool differs =
          observed == Observation::kArrived && cell == 0 && counts.counts[1] != plan_.tag;
      return differs ? Observation::kProtocolError : observed;
    });
  }
  // Returns whether a cell holds this call's counts. If it holds those of another call, AwaitCounts
  // reports that.
  __device__ bool HasCounts(int64_t cell, const CountCell& counts) const {
    return counts.stamp == CellStamp(lease_.epoch) &&
           (cell != 0 || counts.counts[1] == static_cast<int32_t>(plan_.tag));
  }
  __device__ uint16_t tag() const { return plan_.tag; }

  // Called by the whole block, once per warp, just before the warp's first store: waits until every
  // destination's region is free. Needed even if there is nothing to send, because otherwise ranks
  // that need nothing from each other could drift further apart than credits can express.
  // `kCalled`: makes the wait an out-of-line function, for kernels that wait in several places and
  // would fetch each copy. Combine is faster without, because its last warp sends and has loads in
  // flight.
  template <bool kCalled = false>
  __device__ bool AwaitCredits() const {
    // The last warp has the least other work.
    if (threadIdx.x >= blockDim.x - kWarpSize) kCalled ? CallLook() : LookForCredits();
    __syncwarp();
    NamedBarrierApart(kCreditsBarrier, blockDim.x);
    return block_.free;
  }
  // Called by a whole warp on behalf of its block.
  __device__ bool WarpAwaitsCredits() const {
    const uint32_t rank = static_cast<uint32_t>(Lane());
    return __all_sync(kFullWarp, rank >= group_.ranks || AwaitCredit(rank)) != 0;
  }

  // ---- The end ----

  __device__ uint32_t Sum() const { return block_.end.sum; }  // valid in the last block
  // Called by the whole block when all of its reads of the window are over, or after a wait of this
  // thread failed (`ok` is false). Returns true in the last block to leave; `failed` then says
  // whether any wait of the call failed.
  __device__ bool Leave(bool ok, bool& failed) {
    const bool block_failed = __syncthreads_and(ok) == 0;
    if (threadIdx.x == 0) {
      block_.end = LeaveCall(memory_, state_, gridDim.x, block_failed, block_.part);
    }
    __syncthreads();
    failed = block_.end.failed;
    return block_.end.last;
  }

  // Called by a whole warp on behalf of its block, when no other warp reads the window any more:
  // does the work of Leave and, if no wait failed, of Commit.
  __device__ void WarpLeaves(bool failed) {
    if (Lane() == 0) block_.end = LeaveCall(memory_, state_, gridDim.x, failed);
    __syncwarp();
    if (block_.end.last && !block_.end.failed) EndCall(static_cast<uint32_t>(Lane()));
  }

  // In the last block, after Leave: returns the credits and makes the next call possible or, after
  // a failure, ends the group.
  __device__ void Commit(bool failed) { failed ? EndGroup() : EndCall(threadIdx.x); }

  // In the last block of a failed call. Returns when no other block stores results any more, so
  // that they can be filled in.
  __device__ void EndGroup() {
    const volatile Gate& gate = group_.control->gate;  // reads no window, which may be gone
    if (threadIdx.x == 0) PoisonGate(group_.control->gate);
    __syncthreads();
    // Blocks that had no part in the failure may still be storing. They run whenever this block
    // runs, so a number of looks, each about half a microsecond long, bounds their time better than
    // a clock does.
    constexpr int kLooks = 2'000;
    JAX_EP_NO_UNROLL
    for (int look = 0; look < kLooks && gate != Gate::kOpen; ++look) {
    }
  }

 protected:
  // In the last block: thread i returns the credit of rank i.
  __device__ void ReturnCredits(uint32_t thread, uint32_t region, uint64_t epoch) const {
    if (thread < group_.ranks) {
      ReturnCredit(memory_, Credit(thread, region, PartAt(thread)), epoch);
    }
  }
  // Loads all words at once: the region depends on the epoch, and each load takes most of a
  // microsecond.
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
    const uint32_t receivers = roles.Receivers(senders);
    const uint32_t send = senders == 0 ? 0 : DrawTickets(memory_, state_, Queue::kSend, senders);
    const uint32_t place =
        receivers == 0 ? 0 : DrawTickets(memory_, state_, Queue::kReceive, receivers);
    block_.senders = senders;
    block_.first_tickets[static_cast<uint32_t>(Queue::kSend)] = send;
    block_.first_tickets[static_cast<uint32_t>(Queue::kReceive)] = place;
  }
  // Tells every rank, and the host of this one. Out of line because it is cold. A later failure of
  // this rank overwrites the report; both are true.
  __device__ __noinline__ void GiveUp(Phase phase, uint32_t awaited, WaitStatus status) const {
    if (status == WaitStatus::kTimedOut && IsInternode(awaited)) {
      // Perhaps the rank that relays messages from there is missing. Its neighbours can name it, so
      // let them report first.
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
  // Called by a whole warp.
  __device__ void LookForCredits() const {
    const bool free = WarpAwaitsCredits();
    if (Lane() == 0) block_.free = free;
  }
  __device__ __noinline__ void CallLook() const { LookForCredits(); }

  // Looks for poison too: a rank that comes after the others have given up must not send.
  __device__ bool AwaitCredit(uint32_t destination) const {
    const uint64_t* credit = Credit(group_.rank, lease_.region, destination);
    // Both loads are in flight before either result is used.
    const WaitReport report = memory_.Peek(Poison(group_.rank));
    const Observation first = ObserveCredit(memory_, credit, lease_);
    if (report.status != WaitStatus::kArrived) {
      GiveUp(Phase::kSend, destination, WaitStatus::kPoisoned);
      return false;
    }
    if (first == Observation::kArrived) return true;
    return Await(Phase::kSend, destination, [&] { return ObserveCredit(memory_, credit, lease_); });
  }

  // Returns a rank's credit; thread 0 also ends the call.
  __device__ void EndCall(uint32_t thread) {
    ReturnCredits(thread, lease_.region, lease_.epoch);
    if (thread == 0) {
      CommitSend(state_, lease_);
      CommitRecv(state_, lease_);
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
