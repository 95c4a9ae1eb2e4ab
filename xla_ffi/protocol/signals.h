// The state machine of flags, epochs and credits in the window transports: first pure decisions,
// then the memory operations around them, over a SignalMemory that host threads and GPUs implement.
// docs/protocol.md, "Signals", argues the memory order.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "protocol/platform.h"

namespace jax_ep {

// Regions per kind of call in a window.
inline constexpr uint32_t kMaxDepth = 4;
inline constexpr uint32_t kNoRegion = UINT32_MAX;
// The epoch of the first call for which a zeroed window is validly initialised (see StartMark).
inline constexpr uint64_t kFirstEpoch = 1;
// Polls between two looks at the clock and the poison cell, which cost more than a poll.
inline constexpr uint32_t kPollsPerCheck = 256;

// Announces one chunk. Written and read in one 128-bit access, so that the epoch vouches for the
// other fields.
struct alignas(16) FlagCell {
  uint64_t epoch;
  uint32_t first_slot;  // in combines by entry: a bit for each slot that was sent
  uint16_t count;       // in cached dispatches, see kSlotCountBits
  uint16_t tag;  // names the call site, so that mixed-up calls are an error and never give data
};
static_assert(sizeof(FlagCell) == 16 && alignof(FlagCell) == 16);
static_assert(offsetof(FlagCell, first_slot) == 8 && offsetof(FlagCell, count) == 12);
static_assert(offsetof(FlagCell, tag) == 14 && std::is_trivially_copyable_v<FlagCell>);

// How cached dispatches use `count`: the low bits are the number of slots from the first to the
// last that is sent, and above them is a bit for each of those that is sent.
inline constexpr uint32_t kSlotCountBits = 8;
inline constexpr uint32_t kSlotCountMask = (1u << kSlotCountBits) - 1;
inline constexpr uint32_t kMaxSlotSpan = 16 - kSlotCountBits;

enum class Observation : uint8_t { kPending, kArrived, kProtocolError };

// kNotPending is the result of a receive half without a pending send half.
enum class WaitStatus : uint8_t { kArrived = 0, kTimedOut, kPoisoned, kProtocolError, kNotPending };

// What a worker is doing. A ticket past the end of a queue gets kNone.
enum class Phase : uint8_t { kRoute, kSend, kReceive, kNone };

// A call has two queues of items: senders take items to route and then to send, receivers take
// items to receive.
enum class Queue : uint8_t { kSend, kReceive };
inline constexpr uint32_t kQueues = 2;

// Counts that need no flag: every three of them carry an epoch in the same 128-bit access, so a
// cell is either there or not. That takes one flight, where counts and a flag behind a fence take
// three.
struct alignas(16) CountCell {
  int32_t counts[3];
  uint32_t stamp;
};
static_assert(sizeof(CountCell) == 16 && std::is_trivially_copyable_v<CountCell>);
inline constexpr int64_t kCountsPerCell = 3;

// Odd, so that a zeroed window is validly initialised. Calls that use a region without posting
// counts (cached dispatches) leave its cells alone; an old stamp is mistaken for a new one only if
// the two calls are exactly 2^31 epochs, or a multiple of that, apart.
JAX_EP_HOST_DEVICE constexpr uint32_t CellStamp(uint64_t epoch) {
  return static_cast<uint32_t>(epoch << 1) | 1u;
}

// Why a group died; also the poison cell of each rank. Written in one 128-bit access, so that every
// rank in any process can name the wait that, as far as it knows, failed first. All zeros mean
// alive.
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

// Returns how far `epoch` is ahead of `mark`. Correct across the wrap of 64 bits while the two are
// less than 2^63 apart, which a comparison of the epochs is not.
JAX_EP_HOST_DEVICE constexpr int64_t EpochsAhead(uint64_t epoch, uint64_t mark) {
  return static_cast<int64_t>(epoch - mark);
}

// The initial epoch of all flags and value of all credits: older than any epoch in use, and
// "consumed", so a region's first call needs no credit.
JAX_EP_HOST_DEVICE constexpr uint64_t StartMark(uint64_t first_epoch) { return first_epoch - 1; }

// A greater epoch means that the region was overwritten before this rank had read it.
JAX_EP_HOST_DEVICE constexpr Observation ClassifyFlag(const FlagCell& flag, uint64_t epoch,
                                                      uint16_t tag) {
  const int64_t ahead = EpochsAhead(flag.epoch, epoch);
  if (ahead < 0) return Observation::kPending;
  if (ahead > 0 || flag.tag != tag) return Observation::kProtocolError;
  return Observation::kArrived;
}

// ---- Regions and credits ------------------------------------------------------------------------

// The calls of one kind (dispatch or combine) at one rank, in its own memory. Every rank runs the
// same calls in the same order, so all ranks' states agree without communication. Workers read it
// during a call; only the last one to leave writes it (LeaveCall).
struct CallState {
  uint64_t next_epoch;
  uint64_t last_epoch[kMaxDepth];  // last epoch sent through each region
  uint32_t pending;                // bit r: region r was sent and not yet received
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

// epoch % depth for depth in [1, kMaxDepth]. A 64-bit division would cost some hundred instructions
// at the start of each call.
JAX_EP_HOST_DEVICE constexpr uint32_t RegionOf(uint64_t epoch, uint32_t depth) {
  static_assert(kMaxDepth == 4);
  const uint32_t low = static_cast<uint32_t>(epoch);
  // 2^32 is 1 more than a multiple of 3.
  if (depth == 3) return (low % 3 + static_cast<uint32_t>(epoch >> 32) % 3) % 3;
  return low & (depth - 1);
}

// Chooses the region of the next call: epoch % turns or, if that is pending, the next of all
// `depth` regions that is not, for 1 <= turns <= depth <= kMaxDepth. So regions from `turns` on are
// touched only beside pending calls.
//
// Without that second rule a pending call would deadlock after `turns` other calls: the last of
// them would wait for a credit that this rank gives only later in its own stream.
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

JAX_EP_HOST_DEVICE constexpr void CommitRecv(CallState& state, const RegionLease& lease) {
  state.pending &= ~(1u << lease.region);
}

// `consumed` is the last epoch that the destination has read out of this region. There is one word
// per region, because a single mark for all would let an epoch that was received out of order free
// a region that is still unread. With nothing pending, `previous` is epoch - turns (StartMark at
// the beginning). The destination may already be done with this very epoch, if it needs nothing
// from this source, but not with a later one of the region, because there it waits for this rank's
// credit of this epoch. That is why a call that may end without looking at every source waits for
// all credits, even with nothing to send.
JAX_EP_HOST_DEVICE constexpr Observation ClassifyCredit(uint64_t consumed,
                                                        const RegionLease& lease) {
  if (EpochsAhead(consumed, lease.epoch) > 0) return Observation::kProtocolError;
  return EpochsAhead(consumed, lease.previous) >= 0 ? Observation::kArrived : Observation::kPending;
}

// ---- The work queues ----------------------------------------------------------------------------

// The items of each queue, in the order of tickets. A send item may wait only for credits and for
// lower items of its own queue, which running senders hold because tickets are handed out in order.
// A receive item may wait only for data from senders. A worker either has a sender and a receiver
// that do not wait for each other, or sends while there is something to send and then receives;
// later workers may be receivers only. One resident worker per rank is therefore enough for every
// call to end.
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

// For calls that draw all tickets from the send queue: first everything to send, then everything to
// receive. When the first worker receives, all senders are running.
JAX_EP_HOST_DEVICE constexpr WorkItem ItemInOrder(const WorkPlan& plan, uint32_t ticket) {
  const WorkItem item = ItemOf(plan, Queue::kSend, ticket);
  if (item.phase != Phase::kNone) return item;
  return ItemOf(plan, Queue::kReceive, ticket - plan.route_items - plan.send_items);
}

// ---- Memory -------------------------------------------------------------------------------------

// ReleaseFence followed by Post is a release at system scope: everything that this thread has
// written, and all that was ordered before it, is visible to whoever acquires the posted value.
// Either of the two may implement it: the fence, with a relaxed store, in PTX; a releasing store in
// C++. Post alone promises nothing. Each thread that posts must execute the fence itself, because a
// barrier does not pass it on. Peek is relaxed. All accesses are single accesses to the whole cell
// and never torn.
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

// Announces payload that this thread has written or, in the case of bulk copies, has waited for.
// The lanes of a warp, each of which announces to one destination, execute one common fence.
template <SignalMemory M>
JAX_EP_HOST_DEVICE void PublishFlag(const M& memory, FlagCell* cell, const FlagCell& value) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveFlag at the destination.
  memory.Post(cell, value);
}

// `arrived` is set, and the chunk may be read, only if the result is kArrived.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveFlag(const M& memory, const FlagCell* cell, uint64_t epoch,
                                           uint16_t tag, FlagCell& arrived) {
  // Acquire; pairs with the release in PublishFlag at the source. Every poll acquires, because a
  // relaxed look before would cost another access once the flag is there.
  arrived = memory.Acquire(cell);
  return ClassifyFlag(arrived, epoch, tag);
}

// The cell's counts may be used only if the result is kArrived. The cell vouches for nothing else.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveCounts(const M& memory, const CountCell* cell, uint64_t epoch,
                                             CountCell& arrived) {
  // Relaxed, because the cell is the whole message. Its Post is relaxed too, and comes after the
  // credit of the region.
  arrived = memory.Peek(cell);
  return arrived.stamp == CellStamp(epoch) ? Observation::kArrived : Observation::kPending;
}

// The region at the destination may be overwritten only if the result is kArrived.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveCredit(const M& memory, const uint64_t* credit,
                                             const RegionLease& lease) {
  // Acquire; pairs with the release in ReturnCredit at the destination.
  return ClassifyCredit(memory.Acquire(credit), lease);
}

// Returns true in the last of `members` calls on `counter`. That caller sees all that the others
// wrote, and its later accesses come after all of theirs. The counter is then zero again; its next
// use must be ordered after this one by a credit or by the next launch.
template <SignalMemory M>
JAX_EP_HOST_DEVICE bool LastOf(const M& memory, uint32_t* counter, uint32_t members) {
  if (members == 1) return true;
  // Acquire and release; pairs with itself in the other members.
  if (memory.FetchAddAcqRel(counter, 1u) + 1 != members) return false;
  memory.StoreRelaxed(counter, 0u);
  return true;
}

// Claims the next `count` tickets and returns the first; the caller must process all of them.
// Relaxed, because tickets carry no data.
template <SignalMemory M>
JAX_EP_HOST_DEVICE uint32_t DrawTickets(const M& memory, CallState& state, Queue queue,
                                        uint32_t count) {
  return memory.FetchAddRelaxed(&state.tickets[static_cast<uint32_t>(queue)], count);
}

// Returns how many workers came before this one. The first few may take other work than the rest:
// whoever waits for them waits for workers that are running. Relaxed, because the number carries no
// data.
template <SignalMemory M>
JAX_EP_HOST_DEVICE uint32_t EnterCall(const M& memory, CallState& state) {
  return memory.FetchAddRelaxed(&state.entered, 1u);
}

struct Departure {
  bool last;
  bool failed;   // valid in the last one: whether any worker has failed
  uint32_t sum;  // valid in the last one: the sum of all `part`s, wrapping around
};

// For a worker whose queues are empty and whose reads are over, or one of whose waits has `failed`.
// The one for which `last` is true must return the credits and commit the call's state. Workers of
// the next call start only after this call's launch has ended.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Departure LeaveCall(const M& memory, CallState& state, uint32_t workers,
                                       bool failed, uint32_t part = 0) {
  // One word counts leavers in its lowest quarter and failures in the next one, and adds up the
  // parts in its upper half.
  constexpr uint32_t kFailed = 1u << 16;
  const uint64_t leaver = uint64_t{part} << 32 | (failed ? kFailed + 1 : 1);
  // Acquire and release; pairs with itself in the other workers, as in LastOf. A single worker
  // needs it only for the sum that a send half has left.
  const uint64_t before =
      workers == 1 && part == 0 ? 0 : memory.FetchAddAcqRel(&state.leavers, leaver);
  if (before % kFailed + 1 != workers) return {false, failed, 0};
  const uint64_t leavers = before + leaver;
  memory.StoreRelaxed(&state.leavers, uint64_t{0});
  for (uint32_t& tickets : state.tickets) memory.StoreRelaxed(&tickets, 0u);
  memory.StoreRelaxed(&state.entered, 0u);
  return {true, static_cast<uint32_t>(leavers) >= kFailed, static_cast<uint32_t>(leavers >> 32)};
}

// Returns a region to its source: `credit` is the source's cell for this region and rank. For the
// last worker to leave a call, after LeaveCall: by then all workers have finished reading the
// region, its counts and its flags.
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
  // Relaxed, because the cell is the whole message and no other memory is read on its account.
  return memory.Peek(poison).status != WaitStatus::kArrived;
}

// Polls `observe() -> Observation` until it decides, the group is poisoned, or the time is up. The
// time starts with the first look at the clock. A full batch of polls follows the look that finds
// it up, so a worker that did not run for that long still sees what has arrived meanwhile.
template <SignalMemory M, typename Observe>
JAX_EP_HOST_DEVICE WaitStatus WaitUntil(const M& memory, const WaitBound& bound, Observe observe) {
  uint64_t deadline_ns = 0;
  bool timed = false, expired = false;
  for (;;) {
    JAX_EP_NO_UNROLL
    for (uint32_t poll = 0; poll < kPollsPerCheck; ++poll) {
      const Observation observed = observe();
      if (observed == Observation::kArrived) return WaitStatus::kArrived;
      if (observed == Observation::kProtocolError) return WaitStatus::kProtocolError;
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

// Ends the group after a wait that timed out or met a protocol error. `cell_of(rank)` is that
// rank's poison cell. Relaxed, because the report is the whole message. Reports of several ranks
// may overwrite each other; each of them is true.
template <SignalMemory M, typename CellOf>
JAX_EP_HOST_DEVICE void SpreadPoison(const M& memory, const WaitReport& report, uint32_t ranks,
                                     CellOf cell_of) {
  for (uint32_t rank = 0; rank < ranks; ++rank) memory.Post(cell_of(rank), report);
}

}  // namespace jax_ep
