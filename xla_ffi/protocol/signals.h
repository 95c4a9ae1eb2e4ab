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
// other fields as well. An empty chunk is flagged too.
struct alignas(16) FlagCell {
  uint64_t epoch;
  uint32_t first_slot;
  uint16_t count;
  uint16_t tag;  // names the call site, so that a mix-up of calls is an error and never data
};
static_assert(sizeof(FlagCell) == 16 && alignof(FlagCell) == 16);
static_assert(offsetof(FlagCell, first_slot) == 8 && offsetof(FlagCell, count) == 12);
static_assert(offsetof(FlagCell, tag) == 14 && std::is_trivially_copyable_v<FlagCell>);

enum class Observation : uint8_t { kPending, kArrived, kProtocolError };

enum class WaitStatus : uint8_t { kArrived = 0, kTimedOut, kPoisoned, kProtocolError };

// The phases in queue order. kNone is what a ticket past the end of the queue gets.
enum class Phase : uint8_t { kRoute, kSend, kPlace, kNone };

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
// and "consumed", so the first `depth` calls need no credit.
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
  uint32_t tickets;
  uint32_t leavers;
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

// Where the next call goes: region epoch % depth, or the next one that holds no pending call, for
// depth in [1, kMaxDepth].
// Without the second half a split call that stays pending over `depth` other calls deadlocks: the
// last of them waits for a credit that this rank gives only later in its own stream.
JAX_EP_HOST_DEVICE constexpr RegionLease LeaseRegion(const CallState& state, uint32_t depth) {
  const uint64_t epoch = state.next_epoch;
  const uint32_t first = static_cast<uint32_t>(epoch % depth);
  for (uint32_t step = 0; step < depth; ++step) {
    const uint32_t region = (first + step) % depth;
    if (((state.pending >> region) & 1) == 0) return {epoch, state.last_epoch[region], region};
  }
  return {epoch, 0, kNoRegion};
}

JAX_EP_HOST_DEVICE constexpr void CommitSend(CallState& state, const RegionLease& lease) {
  state.next_epoch = lease.epoch + 1;
  state.last_epoch[lease.region] = lease.epoch;
  state.pending |= 1u << lease.region;
}

JAX_EP_HOST_DEVICE constexpr void CommitPlace(CallState& state, const RegionLease& lease) {
  state.pending &= ~(1u << lease.region);
}

// `consumed` is the last epoch that the destination has read out of this region. One word a region:
// a single mark for all would let an epoch placed out of order free a region that is still unread.
// With nothing pending, `previous` is epoch - depth (or StartMark, at the beginning).
JAX_EP_HOST_DEVICE constexpr Observation ClassifyCredit(uint64_t consumed,
                                                        const RegionLease& lease) {
  if (EpochsAhead(consumed, lease.epoch) >= 0) return Observation::kProtocolError;
  return EpochsAhead(consumed, lease.previous) >= 0 ? Observation::kArrived : Observation::kPending;
}

// ---- The work queue -----------------------------------------------------------------------------

// Items in the order of their tickets. An item may wait only for lower items of its own rank (which
// running workers hold, since tickets are handed out in order) and for remote data and credits; so
// one resident worker a rank is enough for every call to end.
struct WorkPlan {
  uint32_t route_items;
  uint32_t send_items;
  uint32_t place_items;
};

struct WorkItem {
  Phase phase;
  uint32_t index;  // within its phase
};

JAX_EP_HOST_DEVICE constexpr WorkItem ItemOf(const WorkPlan& plan, uint32_t ticket) {
  if (ticket < plan.route_items) return {Phase::kRoute, ticket};
  ticket -= plan.route_items;
  if (ticket < plan.send_items) return {Phase::kSend, ticket};
  ticket -= plan.send_items;
  if (ticket < plan.place_items) return {Phase::kPlace, ticket};
  return {Phase::kNone, 0};
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
concept SignalMemory = CellAccess<M, FlagCell> && CellAccess<M, uint64_t> &&
                       CellAccess<M, WaitReport> && requires(const M& memory, uint32_t* counter) {
                         { memory.ReleaseFence() } -> std::same_as<void>;
                         { memory.FetchAddRelaxed(counter, 1u) } -> std::same_as<uint32_t>;
                         { memory.FetchAddAcqRel(counter, 1u) } -> std::same_as<uint32_t>;
                         { memory.StoreRelaxed(counter, 0u) } -> std::same_as<void>;
                         { memory.NowNs() } -> std::same_as<uint64_t>;
                         { memory.Pause() } -> std::same_as<void>;
                       };

// Announces payload or counts that this thread has written (or has waited to complete, if they are
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
  const Observation peeked = ClassifyFlag(memory.Peek(cell), epoch, tag);
  if (peeked != Observation::kArrived) return peeked;
  arrived = memory.Acquire(cell);  // Acquire; pairs with the release in PublishFlag at the source.
  return ClassifyFlag(arrived, epoch, tag);
}

// The region at the destination may be overwritten iff the result is kArrived.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveCredit(const M& memory, const uint64_t* credit,
                                             const RegionLease& lease) {
  const Observation peeked = ClassifyCredit(memory.Peek(credit), lease);
  if (peeked != Observation::kArrived) return peeked;
  // Acquire; pairs with the release in FinishReads at the destination.
  return ClassifyCredit(memory.Acquire(credit), lease);
}

// True for the last of `members` calls on `counter`, which then sees all that the others wrote and
// whose own accesses come after all of theirs. The counter is left at zero for its next use, which
// must be ordered after this one: by a credit (FinishReads) or by the next launch (leaving a call).
template <SignalMemory M>
JAX_EP_HOST_DEVICE bool LastOf(const M& memory, uint32_t* counter, uint32_t members) {
  // Acquire and release; pairs with itself in the other members.
  if (memory.FetchAddAcqRel(counter, 1u) + 1 != members) return false;
  memory.StoreRelaxed(counter, 0u);
  return true;
}

// Ends one reader's use of a region, its counts and its flags from one source. `finished` belongs
// to that region and source; the last of `readers` returns the credit to the source.
template <SignalMemory M>
JAX_EP_HOST_DEVICE void FinishReads(const M& memory, uint32_t* finished, uint32_t readers,
                                    uint64_t* credit, uint64_t epoch) {
  if (!LastOf(memory, finished, readers)) return;
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveCredit at the source.
  memory.Post(credit, epoch);
}

// Claims the next item. Relaxed: the order of tickets carries no data, only progress.
template <SignalMemory M>
JAX_EP_HOST_DEVICE WorkItem TakeItem(const M& memory, CallState& state, const WorkPlan& plan) {
  return ItemOf(plan, memory.FetchAddRelaxed(&state.tickets, 1u));
}

// For a worker whose ticket was past the end. True for the last one, which alone may commit the
// call's state afterwards; workers of the next call start after this call's launch has ended.
template <SignalMemory M>
JAX_EP_HOST_DEVICE bool LeaveCall(const M& memory, CallState& state, uint32_t workers) {
  if (!LastOf(memory, &state.leavers, workers)) return false;
  memory.StoreRelaxed(&state.tickets, 0u);
  return true;
}

// ---- Bounded waits ------------------------------------------------------------------------------

struct WaitBound {
  uint64_t deadline_ns;
  const WaitReport* poison;  // this rank's poison cell
};

template <SignalMemory M>
JAX_EP_HOST_DEVICE bool IsPoisoned(const M& memory, const WaitReport* poison) {
  // Relaxed: the cell says all there is to know, no other memory is read on its account.
  return memory.Peek(poison).status != WaitStatus::kArrived;
}

// Polls `observe() -> Observation` until it decides, the group is poisoned or the deadline passes.
// A full batch of polls follows the look at the clock that finds the deadline past, so a worker
// that was not running for longer than the time limit still sees what arrived meanwhile.
template <SignalMemory M, typename Observe>
JAX_EP_HOST_DEVICE WaitStatus WaitUntil(const M& memory, const WaitBound& bound, Observe observe) {
  bool expired = false;
  for (;;) {
    for (uint32_t poll = 0; poll < kPollsPerCheck; ++poll) {
      const Observation seen = observe();
      if (seen == Observation::kArrived) return WaitStatus::kArrived;
      if (seen == Observation::kProtocolError) return WaitStatus::kProtocolError;
      memory.Pause();
    }
    if (IsPoisoned(memory, bound.poison)) return WaitStatus::kPoisoned;
    if (expired) return WaitStatus::kTimedOut;
    expired = EpochsAhead(memory.NowNs(), bound.deadline_ns) >= 0;
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
