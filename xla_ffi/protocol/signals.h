// The flag, epoch and credit state machine of the window transports: pure decisions first, then the
// memory operations around them, written over a SignalMemory that host threads and GPUs implement.
// Used by the CUDA kernels and by tests/cc; docs/protocol.md, "Signals", argues the memory order.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "protocol/platform.h"

namespace jax_ep {

// Regions of one kind of call in a window.
inline constexpr uint32_t kMaxDepth = 4;
inline constexpr uint32_t kNoRegion = UINT32_MAX;
// The epoch of the first call for which a zeroed window is a valid start (see StartMark).
inline constexpr uint64_t kFirstEpoch = 1;
// Polls between two looks at the clock and the poison cell, which cost more than a poll.
inline constexpr uint32_t kPollsPerCheck = 256;

// One chunk's arrival. Written and read in one 128-bit access, so that the epoch vouches for the
// other fields as well.
struct alignas(16) FlagCell {
  uint64_t epoch;
  uint32_t first_slot;  // of a combine by entry: a bit for each slot that was sent
  uint16_t count;       // along a route, kSlotCountBits
  uint16_t tag;         // names the call site, so that a mix-up of calls is an error and never data
};
static_assert(sizeof(FlagCell) == 16 && alignof(FlagCell) == 16);
static_assert(offsetof(FlagCell, first_slot) == 8 && offsetof(FlagCell, count) == 12);
static_assert(offsetof(FlagCell, tag) == 14 && std::is_trivially_copyable_v<FlagCell>);

// Of a dispatch along a route, in `count`: the slots between the first and the last that are sent,
// and above that number a bit for each of them that is.
inline constexpr uint32_t kSlotCountBits = 8;
inline constexpr uint32_t kSlotCountMask = (1u << kSlotCountBits) - 1;
inline constexpr uint32_t kMaxSlotSpan = 16 - kSlotCountBits;

enum class Observation : uint8_t { kPending, kArrived, kProtocolError };

// kNotPending: of a call's second half, whose first half nobody is waiting for.
enum class WaitStatus : uint8_t { kArrived = 0, kTimedOut, kPoisoned, kProtocolError, kNotPending };

// What a worker is doing; kNone is what a ticket past the end of a queue gets.
enum class Phase : uint8_t { kRoute, kSend, kReceive, kNone };

// A call has two queues of items. Senders take routing, then sending; placers take placing.
enum class Queue : uint8_t { kSend, kReceive };
inline constexpr uint32_t kQueues = 2;

// Counts that need no flag: an epoch comes with every three of them, in one 128-bit access, so a
// cell is there or not. One flight where counts and a flag behind a fence take three.
struct alignas(16) CountCell {
  int32_t counts[3];
  uint32_t stamp;
};
static_assert(sizeof(CountCell) == 16 && std::is_trivially_copyable_v<CountCell>);
inline constexpr int64_t kCountsPerCell = 3;

// Odd, so that a zeroed window is a valid start. A cell keeps its stamp through calls that use its
// region and post no counts (cached dispatches); it is taken for another's only where exactly 2^31
// epochs, or a multiple, lie between the two calls.
JAX_EP_HOST_DEVICE constexpr uint32_t CellStamp(uint64_t epoch) {
  return static_cast<uint32_t>(epoch << 1) | 1u;
}

// Why a group died. It is also the poison cell of each rank: written in one 128-bit access, so that
// every rank, in any process, names the wait that failed first as far as it knows. All zero: alive.
struct alignas(16) WaitReport {
  uint64_t epoch;
  uint16_t waiting_rank;
  uint16_t awaited_rank;
  uint16_t tag;
  Phase phase;
  WaitStatus status;
};
static_assert(sizeof(WaitReport) == 16 && std::is_trivially_copyable_v<WaitReport>);

// ---- Epochs -------------------------------------------------------------------------------------

// How far `epoch` is ahead of `mark`. Right across the wrap of 64 bits while the two are less than
// 2^63 apart; comparing the epochs themselves is not.
JAX_EP_HOST_DEVICE constexpr int64_t EpochsAhead(uint64_t epoch, uint64_t mark) {
  return static_cast<int64_t>(epoch - mark);
}

// What every flag's epoch and every credit holds before the first call: older than any epoch in use
// and "consumed", so the first call of a region needs no credit.
JAX_EP_HOST_DEVICE constexpr uint64_t StartMark(uint64_t first_epoch) { return first_epoch - 1; }

// A greater epoch means that the region was overwritten before this rank had read it.
JAX_EP_HOST_DEVICE constexpr Observation ClassifyFlag(const FlagCell& seen, uint64_t epoch,
                                                      uint16_t tag) {
  const int64_t ahead = EpochsAhead(seen.epoch, epoch);
  if (ahead < 0) return Observation::kPending;
  if (ahead > 0 || seen.tag != tag) return Observation::kProtocolError;
  return Observation::kArrived;
}

// ---- Regions and credits ------------------------------------------------------------------------

// The calls of one kind (dispatch or combine) at one rank, in its own memory. Every rank runs the
// same calls in the same order, so all ranks' states agree without a word on the wire. Workers read
// it during a call; only the last to leave writes it (LastOf).
struct CallState {
  uint64_t next_epoch;
  uint64_t last_epoch[kMaxDepth];  // last epoch sent through each region
  uint32_t pending;                // bit r: region r is sent and not yet placed
  uint32_t tickets[kQueues];
  uint32_t entered;
  uint64_t leavers;
};

struct RegionLease {
  uint64_t epoch;
  uint64_t previous;  // the region's epoch before this one; StartMark for its first
  uint32_t region;    // kNoRegion: every region holds a pending call
};

JAX_EP_HOST_DEVICE constexpr CallState StartState(uint64_t first_epoch) {
  CallState state{};
  state.next_epoch = first_epoch;
  for (uint64_t& epoch : state.last_epoch) epoch = StartMark(first_epoch);
  return state;
}

// epoch % depth, for depth in [1, kMaxDepth]. A 64-bit division would cost a GPU some hundred
// instructions at the start of each call.
JAX_EP_HOST_DEVICE constexpr uint32_t RegionOf(uint64_t epoch, uint32_t depth) {
  static_assert(kMaxDepth == 4);
  const uint32_t low = static_cast<uint32_t>(epoch);
  // 2^32 is 1 more than a multiple of 3.
  if (depth == 3) return (low % 3 + static_cast<uint32_t>(epoch >> 32) % 3) % 3;
  return low & (depth - 1);
}

// Where the next call goes: region epoch % turns, or the next one of all `depth` that holds no
// pending call, for 1 <= turns <= depth <= kMaxDepth. Regions from `turns` on are touched only
// beside pending calls.
// Without the second half a split call that stays pending over `turns` other calls deadlocks: the
// last of them waits for a credit that this rank gives only later in its own stream.
JAX_EP_HOST_DEVICE constexpr RegionLease LeaseRegion(const CallState& state, uint32_t turns,
                                                     uint32_t depth) {
  const uint64_t epoch = state.next_epoch;
  uint32_t region = RegionOf(epoch, turns);
  JAX_EP_NO_UNROLL
  for (uint32_t step = 0; step < depth; ++step) {
    if (((state.pending >> region) & 1) == 0) return {epoch, state.last_epoch[region], region};
    region = region + 1 == depth ? 0 : region + 1;
  }
  return {epoch, 0, kNoRegion};
}

JAX_EP_HOST_DEVICE constexpr void CommitSend(CallState& state, const RegionLease& lease) {
  state.next_epoch = lease.epoch + 1;
  state.last_epoch[lease.region] = lease.epoch;
  state.pending |= 1u << lease.region;
}

JAX_EP_HOST_DEVICE constexpr void CommitReceive(CallState& state, const RegionLease& lease) {
  state.pending &= ~(1u << lease.region);
}

// `consumed` is the last epoch that the destination has read out of this region. One word a region:
// a single mark for all would let an epoch placed out of order free a region that is still unread.
// With nothing pending, `previous` is epoch - turns (or StartMark, at the beginning). The
// destination may be done with this very epoch already, if it needed nothing of this source, but
// not with a later one of the region: there it waits for this rank's credit of this epoch. So a
// call that may end without a look at every source waits for all credits, even with nothing to
// send.
JAX_EP_HOST_DEVICE constexpr Observation ClassifyCredit(uint64_t consumed,
                                                        const RegionLease& lease) {
  if (EpochsAhead(consumed, lease.epoch) > 0) return Observation::kProtocolError;
  return EpochsAhead(consumed, lease.previous) >= 0 ? Observation::kArrived : Observation::kPending;
}

// ---- The work queues ----------------------------------------------------------------------------

// Items of each queue in the order of their tickets. A send item may wait only for lower items of
// its own queue (which running senders hold, since tickets are handed out in order) and for
// credits; a place item only for data from senders. A worker has a sender and a placer that do not
// wait for each other, or sends as long as there is something to send and places then; those that
// come after the first may place alone. So one resident worker a rank is enough for every call to
// end.
struct WorkPlan {
  uint32_t route_items;
  uint32_t send_items;
  uint32_t receive_items;
};

struct WorkItem {
  Phase phase;
  uint32_t index;  // within its phase
};

JAX_EP_HOST_DEVICE constexpr WorkItem ItemOf(const WorkPlan& plan, Queue queue, uint32_t ticket) {
  if (queue == Queue::kReceive) {
    return ticket < plan.receive_items ? WorkItem{Phase::kReceive, ticket}
                                       : WorkItem{Phase::kNone, 0};
  }
  if (ticket < plan.route_items) return {Phase::kRoute, ticket};
  ticket -= plan.route_items;
  return ticket < plan.send_items ? WorkItem{Phase::kSend, ticket} : WorkItem{Phase::kNone, 0};
}

// Of calls whose tickets all come from the send queue: what there is to send, then what there is to
// place. All senders run by the time that somebody places.
JAX_EP_HOST_DEVICE constexpr WorkItem ItemInOrder(const WorkPlan& plan, uint32_t ticket) {
  const WorkItem item = ItemOf(plan, Queue::kSend, ticket);
  if (item.phase != Phase::kNone) return item;
  return ItemOf(plan, Queue::kReceive, ticket - plan.route_items - plan.send_items);
}

// ---- Memory -------------------------------------------------------------------------------------

// ReleaseFence + Post is a release at system scope: everything this thread has written, and all
// that was ordered before it, is visible to whoever acquires the posted value. Either half may
// carry it (a fence and a relaxed store in PTX, a releasing store in C++); Post alone promises
// nothing. Each thread that posts must have executed the fence itself: a barrier does not pass it
// on. Peek is relaxed. All three are single accesses of the whole cell, never torn.
template <typename M, typename Cell>
concept CellAccess = requires(const M& memory, Cell* cell, const Cell* view, const Cell& value) {
  { memory.Post(cell, value) } -> std::same_as<void>;
  { memory.Peek(view) } -> std::same_as<Cell>;
  { memory.Acquire(view) } -> std::same_as<Cell>;
};

// FetchAdd* and StoreRelaxed work on counters of the own rank.
template <typename M>
concept SignalMemory =
    CellAccess<M, FlagCell> && CellAccess<M, CountCell> && CellAccess<M, uint64_t> &&
    CellAccess<M, WaitReport> && requires(const M& memory, uint32_t* counter, uint64_t* leavers) {
      { memory.ReleaseFence() } -> std::same_as<void>;
      { memory.FetchAddRelaxed(counter, 1u) } -> std::same_as<uint32_t>;
      { memory.FetchAddAcqRel(counter, 1u) } -> std::same_as<uint32_t>;
      { memory.FetchAddAcqRel(leavers, uint64_t{1}) } -> std::same_as<uint64_t>;
      { memory.StoreRelaxed(counter, 0u) } -> std::same_as<void>;
      { memory.StoreRelaxed(leavers, uint64_t{0}) } -> std::same_as<void>;
      { memory.NowNs() } -> std::same_as<uint64_t>;
      { memory.Pause() } -> std::same_as<void>;
    };

// Announces payload that this thread has written (or has waited to complete, if they are
// bulk copies). The lanes of a warp that each announce to one destination execute one fence.
template <SignalMemory M>
JAX_EP_HOST_DEVICE void PublishFlag(const M& memory, FlagCell* cell, const FlagCell& value) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveFlag at the destination.
  memory.Post(cell, value);
}

// `arrived` is set, and the chunk may be read, iff the result is kArrived.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveFlag(const M& memory, const FlagCell* cell, uint64_t epoch,
                                           uint16_t tag, FlagCell& arrived) {
  // Acquire; pairs with the release in PublishFlag at the source. In every poll: a relaxed look
  // before it would cost another access once the flag is there.
  arrived = memory.Acquire(cell);
  return ClassifyFlag(arrived, epoch, tag);
}

// The cell's counts may be used iff the result is kArrived; they are all that it vouches for.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveCounts(const M& memory, const CountCell* cell, uint64_t epoch,
                                             CountCell& arrived) {
  // Relaxed: the cell is the whole message. Posted relaxed as well, after the region's credit.
  arrived = memory.Peek(cell);
  return arrived.stamp == CellStamp(epoch) ? Observation::kArrived : Observation::kPending;
}

// The region at the destination may be overwritten iff the result is kArrived.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveCredit(const M& memory, const uint64_t* credit,
                                             const RegionLease& lease) {
  // Acquire; pairs with the release in ReturnCredit at the destination.
  return ClassifyCredit(memory.Acquire(credit), lease);
}

// True for the last of `members` calls on `counter`, which then sees all that the others wrote and
// whose own accesses come after all of theirs. The counter is left at zero for its next use, which
// must be ordered after this one: by a credit or by the next launch.
template <SignalMemory M>
JAX_EP_HOST_DEVICE bool LastOf(const M& memory, uint32_t* counter, uint32_t members) {
  if (members == 1) return true;
  // Acquire and release; pairs with itself in the other members.
  if (memory.FetchAddAcqRel(counter, 1u) + 1 != members) return false;
  memory.StoreRelaxed(counter, 0u);
  return true;
}

// Claims the next `count` tickets and returns the first; all are the caller's to work off. Relaxed:
// the order of tickets carries no data, only progress.
template <SignalMemory M>
JAX_EP_HOST_DEVICE uint32_t DrawTickets(const M& memory, CallState& state, Queue queue,
                                        uint32_t count) {
  return memory.FetchAddRelaxed(&state.tickets[static_cast<uint32_t>(queue)], count);
}

// How many workers came before this one. The first few may take other work than the rest: whoever
// waits for them waits for workers that are running.
template <SignalMemory M>
JAX_EP_HOST_DEVICE uint32_t EnterCall(const M& memory, CallState& state) {
  return memory.FetchAddRelaxed(&state.entered, 1u);
}

struct Departure {
  bool last;
  bool failed;   // in the last one: whether any worker has
  uint32_t sum;  // in the last one: of all `part`s, wrapping
};

// For a worker whose queues are empty and whose reads are over, or of which a wait has `failed`.
// `last` is true for the last one, which alone returns the credits and commits the call's state
// afterwards; workers of the next call start after this call's launch has ended.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Departure LeaveCall(const M& memory, CallState& state, uint32_t workers,
                                       bool failed, uint32_t part = 0) {
  // Failures are counted in the second quarter and parts added up in the upper half, so that they
  // come with the number.
  constexpr uint32_t kFailed = 1u << 16;
  const uint64_t leaver = uint64_t{part} << 32 | (failed ? kFailed + 1 : 1);
  // As in LastOf. What a first half has left matters to a worker with a part alone.
  const uint64_t before =
      workers == 1 && part == 0 ? 0 : memory.FetchAddAcqRel(&state.leavers, leaver);
  if (before % kFailed + 1 != workers) return {false, failed, 0};
  const uint64_t leavers = before + leaver;
  memory.StoreRelaxed(&state.leavers, uint64_t{0});
  for (uint32_t& tickets : state.tickets) memory.StoreRelaxed(&tickets, 0u);
  memory.StoreRelaxed(&state.entered, 0u);
  return {true, static_cast<uint32_t>(leavers) >= kFailed, static_cast<uint32_t>(leavers >> 32)};
}

// Gives a source its region back: `credit` is the source's cell for this region and rank. For the
// last to leave a call, after LeaveCall: all reads of the region, its counts and its flags, by all
// workers, are over.
template <SignalMemory M>
JAX_EP_HOST_DEVICE void ReturnCredit(const M& memory, uint64_t* credit, uint64_t epoch) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveCredit at the source.
  memory.Post(credit, epoch);
}

// ---- Bounded waits ------------------------------------------------------------------------------

struct WaitBound {
  uint64_t timeout_ns;
  const WaitReport* poison;  // this rank's poison cell
};

template <SignalMemory M>
JAX_EP_HOST_DEVICE bool IsPoisoned(const M& memory, const WaitReport* poison) {
  // Relaxed: the cell says all there is to know, no other memory is read on its account.
  return memory.Peek(poison).status != WaitStatus::kArrived;
}

// Polls `observe() -> Observation` until it decides, the group is poisoned or the time is up, which
// counts from the first look at the clock. A full batch of polls follows the look that finds it up,
// so a worker that was not running for longer than that still sees what arrived meanwhile.
template <SignalMemory M, typename Observe>
JAX_EP_HOST_DEVICE WaitStatus WaitUntil(const M& memory, const WaitBound& bound, Observe observe) {
  uint64_t deadline_ns = 0;
  bool timed = false, expired = false;
  for (;;) {
    JAX_EP_NO_UNROLL
    for (uint32_t poll = 0; poll < kPollsPerCheck; ++poll) {
      const Observation seen = observe();
      if (seen == Observation::kArrived) return WaitStatus::kArrived;
      if (seen == Observation::kProtocolError) return WaitStatus::kProtocolError;
      memory.Pause();
    }
    if (IsPoisoned(memory, bound.poison)) return WaitStatus::kPoisoned;
    if (expired) return WaitStatus::kTimedOut;
    const uint64_t now_ns = memory.NowNs();
    if (!timed) deadline_ns = now_ns + bound.timeout_ns;
    expired = timed && EpochsAhead(now_ns, deadline_ns) >= 0;
    timed = true;
  }
}

// Ends the group after a wait that timed out or met a protocol error: `cell_of(rank)` is that
// rank's poison cell. Nothing is released: the report is the whole message. Reports of several
// ranks may overwrite each other; each of them is true.
template <SignalMemory M, typename CellOf>
JAX_EP_HOST_DEVICE void SpreadPoison(const M& memory, const WaitReport& report, uint32_t ranks,
                                     CellOf cell_of) {
  for (uint32_t rank = 0; rank < ranks; ++rank) memory.Post(cell_of(rank), report);
}

}  // namespace jax_ep
