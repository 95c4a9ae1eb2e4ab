// Tests of protocol/signals.h: its decisions, also where epochs wrap, and programs of calls between
// ranks that are threads, including late peers and mixed-up calls.
#include "protocol/signals.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <vector>

#include "check.h"
#include "signals_exchange.h"
#include "signals_world.h"

namespace jax_ep {
namespace {

// ---- Decisions ----------------------------------------------------------------------------------

void TestFlags() {
  for (const uint64_t first : kFirstEpochs) {
    for (uint64_t epoch = first; epoch != first + 6; ++epoch) {
      CHECK(ClassifyFlag({StartMark(first), 0, 0, 0}, epoch, 7) == Observation::kPending);
      CHECK(ClassifyFlag({epoch - 1, 0, 0, 7}, epoch, 7) == Observation::kPending);
      CHECK(ClassifyFlag({epoch, 0, 0, 7}, epoch, 7) == Observation::kArrived);
      CHECK(ClassifyFlag({epoch, 0, 0, 8}, epoch, 7) == Observation::kProtocolError);
      CHECK(ClassifyFlag({epoch + 1, 0, 0, 7}, epoch, 7) == Observation::kProtocolError);
    }
  }
  // A zeroed window is a valid start.
  CHECK(StartMark(kFirstEpoch) == FlagCell{}.epoch && StartState(kFirstEpoch).last_epoch[0] == 0);
}

// A cell arrives only with its own stamp; zeros and stamps of nearby calls are pending.
void TestCounts() {
  const HostSignalMemory memory;
  for (const uint64_t first : kFirstEpochs) {
    for (uint64_t epoch = first; epoch != first + 6; ++epoch) {
      CountCell cell{}, seen{};
      CHECK(ObserveCounts(memory, &cell, epoch, seen) == Observation::kPending);
      for (uint64_t other = epoch - 2 * kMaxDepth; other != epoch + 2 * kMaxDepth; ++other) {
        memory.Post(&cell, CountCell{{1, 2, 3}, CellStamp(other)});
        const Observation found = ObserveCounts(memory, &cell, epoch, seen);
        CHECK((found == Observation::kArrived) == (other == epoch));
      }
      memory.Post(&cell, CountCell{{4, -5, 6}, CellStamp(epoch)});
      CHECK(ObserveCounts(memory, &cell, epoch, seen) == Observation::kArrived);
      CHECK(seen.counts[0] == 4 && seen.counts[1] == -5 && seen.counts[2] == 6);
    }
  }
}

void TestCredits() {
  for (const uint64_t first : kFirstEpochs) {
    for (uint32_t depth = 1; depth <= kMaxDepth; ++depth) {
      CallState state = StartState(first);
      uint64_t consumed[kMaxDepth];
      std::fill_n(consumed, kMaxDepth, StartMark(first));
      for (uint32_t call = 0; call < 3 * depth + 2; ++call) {
        const RegionLease lease = LeaseRegion(state, depth, depth);
        CHECK(lease.epoch == first + call && lease.region == lease.epoch % depth);
        uint64_t& credit = consumed[lease.region];
        CHECK(credit == lease.previous);                  // StartMark for the region's first call
        const bool divides = (depth & (depth - 1)) == 0;  // 2^64, so regions take turns
        if (divides && call >= depth) CHECK(lease.previous == lease.epoch - depth);
        CHECK(ClassifyCredit(credit, lease) == Observation::kArrived);
        CHECK(ClassifyCredit(lease.previous - 1, lease) == Observation::kPending);
        // A destination that needs nothing may give this epoch's credit; none gives a later one.
        CHECK(ClassifyCredit(lease.epoch, lease) == Observation::kArrived);
        CHECK(ClassifyCredit(lease.epoch + 1, lease) == Observation::kProtocolError);
        CHECK(ClassifyCredit(lease.epoch + depth, lease) == Observation::kProtocolError);
        CommitSend(state, lease);
        CommitRecv(state, lease);
        if (LeaseRegion(state, depth, depth).region == lease.region) {
          CHECK(ClassifyCredit(credit, LeaseRegion(state, depth, depth)) == Observation::kPending);
        }
        credit = lease.epoch;
      }
    }
  }
}

void CheckQueue(const WorkPlan& plan, Queue queue, std::initializer_list<WorkItem> items) {
  uint32_t ticket = 0;
  for (const WorkItem& item : items) {
    const WorkItem taken = ItemOf(plan, queue, ticket++);
    CHECK(taken.phase == item.phase && taken.index == item.index);
  }
  CHECK(ItemOf(plan, queue, ticket).phase == Phase::kNone);
  CHECK(ItemOf(plan, queue, UINT32_MAX).phase == Phase::kNone);
}

void TestQueues() {
  const WorkPlan plan{2, 3, 4};
  CheckQueue(plan, Queue::kSend,
             {{Phase::kRoute, 0},
              {Phase::kRoute, 1},
              {Phase::kSend, 0},
              {Phase::kSend, 1},
              {Phase::kSend, 2}});
  CheckQueue(
      plan, Queue::kReceive,
      {{Phase::kReceive, 0}, {Phase::kReceive, 1}, {Phase::kReceive, 2}, {Phase::kReceive, 3}});
  CheckQueue({0, 1, 0}, Queue::kSend, {{Phase::kSend, 0}});
  for (const Queue queue : {Queue::kSend, Queue::kReceive}) CheckQueue({0, 0, 0}, queue, {});
  // In one queue, a worker does not place while there is something to send.
  for (uint32_t i = 0; i < 5; ++i) CHECK(ItemInOrder(plan, i).phase != Phase::kReceive);
  CHECK(ItemInOrder(plan, 8).index == 3 && ItemInOrder(plan, 9).phase == Phase::kNone);
}

// Arrivals are numbered. Only the last to leave resets the counters for the next call.
void TestLeaving() {
  const HostSignalMemory memory;
  CallState state = StartState(kFirstEpoch);
  const WorkPlan plan{1, 2, 2};
  // In the first call no worker fails, then each one in turn; 4 is the last to leave.
  for (uint32_t failing = 0; failing <= 4; ++failing) {
    for (uint32_t worker = 0; worker < 4; ++worker) CHECK(EnterCall(memory, state) == worker);
    for (const Queue queue : {Queue::kReceive, Queue::kSend}) {
      uint32_t items = 0;
      while (TakeItem(memory, state, plan, queue).phase != Phase::kNone) ++items;
      CHECK(items == (queue == Queue::kSend ? 3 : 2));
    }
    for (uint32_t worker = 1; worker < 4; ++worker) {
      CHECK(!LeaveCall(memory, state, 4, failing == worker, UINT32_MAX - worker).last);
      CHECK(TakeItem(memory, state, plan, Queue::kSend).phase == Phase::kNone);
      CHECK(EnterCall(memory, state) == 3 + worker);  // a late one is not the first again
    }
    const Departure end = LeaveCall(memory, state, 4, failing == 4, 9);
    CHECK(end.last && end.failed == (failing != 0));
    CHECK(end.sum == 0);  // the sum wraps
    CHECK(state.leavers == 0 && state.tickets[0] == 0 && state.tickets[1] == 0);
    CHECK(state.entered == 0);
  }
  // A single worker is the last.
  CHECK(TakeItem(memory, state, plan, Queue::kSend).phase == Phase::kRoute);
  CHECK(EnterCall(memory, state) == 0);
  const Departure end = LeaveCall(memory, state, 1, false);
  CHECK(end.last && !end.failed && LeaveCall(memory, state, 1, true).failed);
  CHECK(LeaveCall(memory, state, 1, false, 7).sum == 7);
  // A receive half starts from the sum that its send half has kept.
  KeepSum(memory, state, LeaveCall(memory, state, 1, false, 7));
  CHECK(!LeaveCall(memory, state, 2, false, 5).last);
  CHECK(LeaveCall(memory, state, 2, false, 2).sum == 14);
  // A failure in the receive half counts, whatever was kept; the kept sum ends with the call.
  KeepSum(memory, state, {.last = true, .failed = false, .sum = UINT32_MAX});
  CHECK(!LeaveCall(memory, state, 2, true, 5).last && LeaveCall(memory, state, 2, false).failed);
  for (const bool failed : {false, true}) {
    KeepSum(memory, state, {.last = true, .failed = false, .sum = 7});
    const Departure alone = LeaveCall(memory, state, 1, failed);
    CHECK(alone.last && alone.failed == failed && state.leavers == 0);
  }
  CHECK(state.leavers == 0 && state.tickets[0] == 0 && state.entered == 0);
}

// A clock that only the test advances.
struct ScriptedMemory : HostSignalMemory {
  uint64_t* now;
  uint64_t* looks;

  uint64_t NowNs() const {
    ++*looks;
    return *now;
  }
  void Pause() const {}
};
static_assert(SignalMemory<ScriptedMemory>);

void TestWaitUntil() {
  for (const uint64_t start : {uint64_t{0}, UINT64_MAX - 5}) {  // the clock may wrap as well
    uint64_t now = start, looks = 0, polls = 0;
    WaitReport poison{};
    ScriptedMemory memory;
    memory.now = &now;
    memory.looks = &looks;
    const WaitBound bound{10, &poison};
    const auto wait = [&](auto observe) {
      looks = polls = 0;
      now = start;
      return WaitUntil(memory, bound, [&] {
        ++polls;
        return observe();
      });
    };

    CHECK(wait([] { return Observation::kArrived; }) == WaitStatus::kArrived);
    CHECK(polls == 1 && looks == 0);
    CHECK(wait([] { return Observation::kProtocolError; }) == WaitStatus::kProtocolError);
    CHECK(polls == 1 && looks == 0);

    // Eleven batches until the clock is past the deadline, and one more.
    const auto tick = [&] {
      if (polls % kPollsPerCheck == 0 && polls / kPollsPerCheck > 1) ++now;
      return Observation::kPending;
    };
    CHECK(wait(tick) == WaitStatus::kTimedOut);
    CHECK(looks == 11 && polls == 12 * kPollsPerCheck);

    // The worker sleeps past the deadline, and what it waits for arrives meanwhile.
    const auto sleep = [&] {
      if (polls > kPollsPerCheck) now = start + 1000;
      return polls > 2 * kPollsPerCheck ? Observation::kArrived : Observation::kPending;
    };
    CHECK(wait(sleep) == WaitStatus::kArrived);
    CHECK(looks == 2);

    poison.status = WaitStatus::kTimedOut;
    CHECK(wait([] { return Observation::kPending; }) == WaitStatus::kPoisoned);
    CHECK(polls == kPollsPerCheck && looks == 0);
  }
}

// ---- Exchanges ----------------------------------------------------------------------------------

void TestPrograms() {
  const struct {
    std::vector<std::string> by_rank;  // ranks take these in turn
    uint32_t min_depth;
  } programs[] = {
      {{"D D D D D"}, 1},
      {{"D C D D C D C C"}, 1},
      {{"D>a D>b D<a D<b D>c C D<c"}, 2},
      {{"D>a D>b D<b D>c D<a D<c"}, 2},
      {{"D>a D C D D C>b D<a D C C<b"}, 2},
      // Credits are early.
      {{"C C~ D C C~ C C", "C~ C D C~ C~ C C~", "C~ C~ D C~ C C~ C"}, 1},
      {{"C>a C~ C<a C~ C", "C>a C C<a C C~"}, 2},
  };
  for (const auto& [by_rank, min_depth] : programs) {
    for (uint32_t depth = min_depth; depth <= 2; ++depth) {
      for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks) {
        for (const uint64_t first : kFirstEpochs) {
          // A single worker shows that the queues do not need a second.
          for (const uint32_t many : {1u, 2u}) {
            CurrentCase() = by_rank[0] + ", depth " + std::to_string(depth) + ", " +
                            std::to_string(ranks) + " ranks, " + std::to_string(many) +
                            " of each role, from epoch " + std::to_string(first);
            Exchange exchange({.ranks = ranks,
                               .depth = depth,
                               .blocks = many,
                               .senders = many,
                               .receivers = many,
                               .first_epoch = first});
            exchange.Run(0, ranks, by_rank);
            for (uint32_t r = 0; r < ranks; ++r) {
              CHECK(exchange.ok(r) && exchange.calls_done(r) == Parse(by_rank[0]).size());
            }
          }
        }
      }
    }
  }
}

// The others end a call, and return its credits, before the first rank begins it.
void TestEarlyCredits() {
  for (const uint32_t depth : {1u, 2u}) {
    Exchange exchange({.ranks = 3, .depth = depth, .blocks = 2});
    const uint32_t region = kFirstEpoch % depth;
    exchange.Run(1, 3, {"C~"});
    CHECK(exchange.window(0, 1).credits[1][region] == kFirstEpoch);
    CHECK(exchange.window(0, 1).credits[2][region] == kFirstEpoch);
    exchange.Run(0, 1, {"C"});
    exchange.Run("C C");
    for (uint32_t r = 0; r < 3; ++r) CHECK(exchange.ok(r) && exchange.calls_done(r) == 3);
  }
}

void CheckReport(const WaitReport& report, uint32_t awaited, uint64_t epoch, WaitStatus status) {
  CHECK(report.status == status && report.epoch == epoch && report.tag == 5);
  CHECK(report.awaited_rank == awaited && report.waiting_rank != awaited);
}

constexpr std::chrono::milliseconds kShort{700};

// The last rank calls after the others have given up: every report names it, and it sends nothing
// into windows whose owners no longer read them.
void TestLatePeer() {
  for (const uint32_t ranks : {2u, 4u}) {
    for (const uint32_t blocks : {1u, 2u}) {
      Exchange exchange({.ranks = ranks, .blocks = blocks, .timeout = kShort});
      const uint32_t late = ranks - 1;
      exchange.Run(0, late, {"D D"});
      for (uint32_t r = 0; r < ranks; ++r) {
        CheckReport(exchange.report(r), late, kFirstEpoch, WaitStatus::kTimedOut);
        CHECK(exchange.report(r).phase == Phase::kReceive);
        CHECK(r == late || !exchange.ok(r));
      }
      exchange.Run(late, ranks, {"D D"});
      CHECK(!exchange.ok(late) && exchange.calls_done(late) == 0);
      for (uint32_t r = 0; r < ranks; ++r) {
        const Region& region = exchange.window(r, 0).regions[0];
        CHECK(region.counts[late].stamp == 0);
        CHECK(region.flags[late][0].epoch == StartMark(kFirstEpoch));
      }
    }
  }
}

// The last rank sends its first call but never reads. The others' second call waits for its credit,
// and their receivers for ranks that wait for the credit. All give up.
void TestMissingCredit() {
  if (!kWaitForCredit) return;
  Exchange exchange({.ranks = 3, .blocks = 2, .timeout = kShort});
  exchange.Run(0, 3, {"D D", "D D", "D>a"});
  CHECK(!exchange.ok(0) && !exchange.ok(1) && exchange.ok(2));
  CHECK(exchange.calls_done(0) == 1 && exchange.calls_done(1) == 1);
  for (uint32_t r = 0; r < 3; ++r) {
    const WaitReport& report = exchange.report(r);
    CHECK(report.status == WaitStatus::kTimedOut && report.epoch == kFirstEpoch + 1);
    CHECK(report.waiting_rank != 2 && report.tag == 5);
    // Senders wait for credits, and only the last rank's is missing.
    CHECK(report.phase == Phase::kReceive || report.awaited_rank == 2);
    const Region& region = exchange.window(r, 0).regions[0];
    CHECK(region.counts[0].stamp == CellStamp(kFirstEpoch));
    CHECK(region.flags[1][0].epoch == kFirstEpoch);
  }
}

// Calls of two kinds in opposite orders cannot end, but waits time out and say who waited for whom.
void TestOppositeOrders() {
  Exchange exchange({.ranks = 2, .timeout = kShort});
  exchange.Run(0, 2, {"D C", "C D"});
  for (uint32_t r = 0; r < 2; ++r) {
    CHECK(!exchange.ok(r) && exchange.calls_done(r) == 0);
    const WaitReport& report = exchange.report(r);
    CheckReport(report, 1u - report.waiting_rank, kFirstEpoch, WaitStatus::kTimedOut);
  }
}

void TestWrongTag() {
  Exchange exchange({.ranks = 4, .blocks = 2, .tags = {5, 5, 9, 5}});
  exchange.Run("D D");
  for (uint32_t r = 0; r < 4; ++r) {
    const WaitReport& report = exchange.report(r);
    CHECK(!exchange.ok(r) && exchange.calls_done(r) == 0);
    CHECK(report.status == WaitStatus::kProtocolError && report.phase == Phase::kReceive);
    CHECK((report.waiting_rank == 2) != (report.awaited_rank == 2));
    CHECK(report.tag == (report.waiting_rank == 2 ? 9 : 5));
  }
}

// A flag or credit of a later epoch is refused, and the report reaches ranks that wait for others.
void TestGreaterEpoch() {
  for (const bool credit : {false, true}) {
    if (credit && !kWaitForCredit) continue;
    Exchange exchange({.ranks = 3, .depth = 2});
    if (credit) {
      exchange.window(0, 0).credits[1][kFirstEpoch % 2] = kFirstEpoch + 2;
    } else {
      Region& region = exchange.window(0, 0).regions[kFirstEpoch % 2];
      for (uint32_t source = 1; source < 3; ++source) {
        const Draw draw{kFirstEpoch, 0, source};
        region.counts[source] = {{static_cast<int32_t>(draw.SlotsBefore(kTokens, 0)), 5, 0},
                                 CellStamp(kFirstEpoch)};
      }
      region.flags[1][0] = {kFirstEpoch + 2, 0, 0, 5};
    }
    exchange.Run(0, credit ? 3 : 1, {"D"});
    for (uint32_t r = 0; r < 3; ++r) {
      const WaitReport& report = exchange.report(r);
      CHECK(report.waiting_rank == 0);
      CheckReport(report, 1, kFirstEpoch, WaitStatus::kProtocolError);
      if (credit) CHECK(!exchange.ok(r) && report.phase == Phase::kRoute);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestFlags();
  jax_ep::TestCounts();
  jax_ep::TestCredits();
  jax_ep::TestQueues();
  jax_ep::TestLeaving();
  jax_ep::TestWaitUntil();
  jax_ep::TestPrograms();
  jax_ep::TestEarlyCredits();
  jax_ep::TestLatePeer();
  jax_ep::TestMissingCredit();
  jax_ep::TestOppositeOrders();
  jax_ep::TestWrongTag();
  jax_ep::TestGreaterEpoch();
  std::printf("signals_test: ok\n");
  return 0;
}
