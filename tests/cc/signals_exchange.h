// Whole exchanges between ranks that are threads, with the blocks, queues, waits and credits of a
// GPU kernel, over windows in host memory. signals_test.cc runs programs of calls through them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "protocol/pending.h"
#include "protocol/signals.h"
#include "signals_world.h"

namespace jax_ep {

struct Options {
  uint32_t ranks = 2;
  uint32_t turns = 0;  // 0: all regions
  uint32_t depth = 1;
  bool gives_up = false;  // gives up the oldest pending call if calls fill all regions
  uint32_t blocks = 1;    // workers of a rank, each with threads of two roles
  uint32_t senders = 1;
  uint32_t receivers = 1;
  uint64_t first_epoch = kFirstEpoch;
  std::chrono::milliseconds timeout = kLong;
  std::vector<uint16_t> tags = {5, 5, 5, 5};  // by rank
};

class Exchange {
 public:
  explicit Exchange(const Options& options) : options_(options) {
    for (uint32_t r = 0; r < options.ranks; ++r) {
      auto rank = std::make_unique<Rank>();
      rank->id = r;
      const FlagCell unset{StartMark(options.first_epoch), 0, 0, 0};
      for (Window& window : rank->windows) {
        for (Region& region : window.regions) {
          std::fill_n(&region.flags[0][0], kMaxRanks * kChunks, unset);
        }
        std::fill_n(&window.credits[0][0], kMaxRanks * kMaxDepth, unset.epoch);
        window.state = StartState(options.first_epoch);
      }
      ranks_.push_back(std::move(rank));
    }
  }

  // Runs ranks [begin, end) to the end of their programs or to their first failure.
  void Run(uint32_t begin, uint32_t end, const std::vector<std::string>& programs) {
    const uint32_t threads_a_block = options_.senders + options_.receivers;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::thread> threads;
    for (uint32_t r = begin; r < end; ++r) {
      const std::vector<Call> calls = Parse(programs[r % programs.size()]);
      Rank& rank = *ranks_[r];
      rank.launch = std::make_unique<std::barrier<>>(options_.blocks * threads_a_block);
      for (uint32_t b = 0; b < options_.blocks; ++b) {
        Block& block = *blocks.emplace_back(
            std::make_unique<Block>(rank, threads_a_block, options_.receivers));
        for (uint32_t t = 0; t < threads_a_block; ++t) {
          const uint64_t noise = Mix(options_.first_epoch * 1000 + r * 100 + b * 10 + t);
          threads.emplace_back([this, &block, calls, t, noise] {
            RunThread({block, t, t < options_.senders, noise}, calls);
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Run(const std::string& program) { Run(0, options_.ranks, {program}); }

  bool ok(uint32_t rank) const { return !ranks_[rank]->failed; }
  const WaitReport& report(uint32_t rank) const { return ranks_[rank]->poison; }
  Window& window(uint32_t rank, uint32_t kind) { return ranks_[rank]->windows[kind]; }
  uint64_t calls_done(uint32_t rank) const { return ranks_[rank]->calls_done; }

 private:
  struct Rank {
    uint32_t id = 0;
    Window windows[2] = {};
    WaitReport poison = {};
    std::unique_ptr<std::barrier<>> launch;
    std::atomic<uint32_t> placed = 0;
    std::atomic<bool> failed = false;
    uint64_t calls_done = 0;
  };

  // What the threads of a block share. The first thread writes it (the first receiver writes the
  // counts), and all read it after a barrier.
  struct Block {
    Block(Rank& of, uint32_t threads, uint32_t receivers)
        : rank(of), barrier(threads), receiver_barrier(receivers) {}

    Rank& rank;
    std::barrier<> barrier;
    std::barrier<> receiver_barrier;
    Call call = {};
    RegionLease lease = {};
    WorkPlan plan = {};
    std::array<int32_t, kMaxRanks> slots = {};  // by source
    bool counts_arrived = false;
    std::atomic<bool> failed = false;
    Departure end = {};
  };

  struct Self {
    Block& block;
    uint32_t thread;
    bool sender;
    uint64_t noise;

    Rank& rank() const { return block.rank; }
    Window& window() const { return block.rank.windows[block.call.kind]; }
    Draw DrawOf(uint32_t source) const { return {block.lease.epoch, block.call.kind, source}; }
  };

  void RunThread(Self self, const std::vector<Call>& calls) {
    std::map<std::pair<uint32_t, std::string>, RegionLease> pending;
    for (const Call& call : calls) {
      if (self.thread == 0) Begin(self.block, call, pending[{call.kind, call.name}]);
      self.block.barrier.arrive_and_wait();
      const bool done = self.sender ? RunSender(self) : RunReceiver(self);
      if (!done) self.rank().failed = self.block.failed = true;
      Leave(self);
      self.rank().launch->arrive_and_wait();  // like a stream: a rank's launches do not overlap
      if (self.rank().failed) return;
    }
  }

  void Begin(Block& block, const Call& call, RegionLease& lease) {
    block.call = call;
    if (call.sends) {
      const uint32_t turns = options_.turns == 0 ? options_.depth : options_.turns;
      lease = LeaseRegion(block.rank.windows[call.kind].state, turns, options_.depth);
    }
    CHECK(lease.region != kNoRegion);
    block.lease = lease;
    block.plan = {call.sends ? kRouteItems : 0, call.sends ? kChunks : 0,
                  call.places && call.needs ? kChunks * options_.ranks : 0};
  }

  void Leave(Self& self) {
    Block& block = self.block;
    CallState& state = self.window().state;
    block.barrier.arrive_and_wait();
    if (kEarlyCredit) ReturnCredits(self);
    if (self.thread == 0) {
      block.end = LeaveCall(leave_memory_, state, options_.blocks, block.failed);
    }
    block.barrier.arrive_and_wait();
    if (!block.end.last) return;
    CHECK(block.end.failed == self.rank().failed);
    if (block.end.failed) return;
    if (!kEarlyCredit) ReturnCredits(self);
    if (self.thread != 0) return;
    if (block.call.sends) CommitSend(state, block.lease);
    if (!block.call.places && options_.gives_up) GiveUpSurplus(self);
    if (block.call.places) CommitRecv(state, block.lease);
    CHECK(self.rank().placed.exchange(0, std::memory_order_relaxed) == block.plan.receive_items);
    ++self.rank().calls_done;
  }

  void ReturnCredits(const Self& self) {
    const Block& block = self.block;
    if (!block.call.places) return;
    for (uint32_t source = self.thread; source < options_.ranks;
         source += options_.senders + options_.receivers) {
      Window& window = ranks_[source]->windows[block.call.kind];
      ReturnCredit(memory_, &window.credits[self.rank().id][block.lease.region], block.lease.epoch);
    }
  }

  // Called by one thread.
  void GiveUpSurplus(const Self& self) {
    CallState& state = self.window().state;
    const uint32_t region = SurplusRegion(state, options_.depth);
    if (region == kNoRegion) return;
    for (const auto& source : ranks_) {
      Window& window = source->windows[self.block.call.kind];
      ReturnCredit(memory_, &window.credits[self.rank().id][region], state.last_epoch[region]);
    }
    CommitRecv(state, {0, 0, region});
  }

  static void Skew(uint64_t& noise) {
    noise = Mix(noise);
    if (noise % 4 == 0) std::this_thread::yield();
    if (noise % 64 == 1) std::this_thread::sleep_for(std::chrono::microseconds(noise / 64 % 100));
  }

  // The own rank comes first.
  uint32_t Peer(const Self& self, uint32_t index) const {
    return (self.rank().id + index) % options_.ranks;
  }

  Region& RegionAt(const Self& self, uint32_t rank) {
    return ranks_[rank]->windows[self.block.call.kind].regions[self.block.lease.region];
  }

  // ---- Waits ----

  template <typename Observe>
  bool Await(const Self& self, Phase phase, uint32_t awaited, Observe observe) {
    const WaitBound bound{static_cast<uint64_t>(options_.timeout.count()) * 1000000,
                          &self.rank().poison};
    const WaitStatus status = WaitUntil(memory_, bound, observe);
    if (status == WaitStatus::kTimedOut || status == WaitStatus::kProtocolError) {
      const WaitReport report{self.block.lease.epoch,
                              static_cast<uint16_t>(self.rank().id),
                              static_cast<uint16_t>(awaited),
                              TagOf(self),
                              phase,
                              status};
      SpreadPoison(memory_, report, options_.ranks, [&](uint32_t r) { return &ranks_[r]->poison; });
    }
    return status == WaitStatus::kArrived;
  }

  uint16_t TagOf(const Self& self) const { return options_.tags[self.rank().id]; }

  bool AwaitFlag(const Self& self, uint32_t source, const FlagCell* cell, FlagCell& flag) {
    return Await(self, Phase::kReceive, source, [&] {
      return ObserveFlag(memory_, cell, self.block.lease.epoch, TagOf(self), flag);
    });
  }

  bool AwaitCredits(const Self& self, Phase phase) {
    const RegionLease& lease = self.block.lease;
    // Credits may have arrived before the group failed.
    if (IsPoisoned(memory_, &self.rank().poison)) return false;
    for (uint32_t i = 0; kWaitForCredit && i < options_.ranks; ++i) {
      const uint32_t destination = Peer(self, i);
      const uint64_t* credit = &self.window().credits[destination][lease.region];
      if (!Await(self, phase, destination, [&] { return ObserveCredit(memory_, credit, lease); })) {
        return false;
      }
    }
    return true;
  }

  // ---- Senders ----

  bool RunSender(Self& self) {
    bool may_store = false;
    for (;;) {
      Skew(self.noise);
      const WorkItem item = TakeItem(memory_, self.window().state, self.block.plan, Queue::kSend);
      if (item.phase == Phase::kNone) return true;
      if (!(item.phase == Phase::kRoute ? Route(self, item.index)
                                        : Send(self, item.index, may_store))) {
        return false;
      }
    }
  }

  // Counts a part of the tokens; the worker that adds the last part posts all counts.
  bool Route(const Self& self, uint32_t item) {
    const Draw draw = self.DrawOf(self.rank().id);
    Totals& totals = self.window().totals;
    for (uint32_t r = 0; r < options_.ranks; ++r) {
      const uint32_t begin = draw.SlotsBefore(item * kRouteLength, r);
      memory_.FetchAddRelaxed(&totals.slots[r],
                              draw.SlotsBefore((item + 1) * kRouteLength, r) - begin);
    }
    if (!LastOf(route_memory_, &totals.finished, kRouteItems)) return true;
    if (!AwaitCredits(self, Phase::kRoute)) return false;
    const uint32_t me = self.rank().id;
    for (uint32_t r = 0; r < options_.ranks; ++r) {
      const auto slots = static_cast<int32_t>(std::exchange(totals.slots[r], 0));
      memory_.Post(&RegionAt(self, r).counts[me],
                   CountCell{{slots, TagOf(self), 0}, CellStamp(self.block.lease.epoch)});
    }
    return true;
  }

  // Sends one chunk of tokens to all destinations.
  bool Send(const Self& self, uint32_t chunk, bool& may_store) {
    if (!may_store && !AwaitCredits(self, Phase::kSend)) return false;
    may_store = true;
    const uint32_t me = self.rank().id;
    const Draw draw = self.DrawOf(me);
    const uint32_t begin = chunk * kChunkLength;
    std::array<uint32_t, kMaxRanks> first = {}, next = {};
    for (uint32_t r = 0; r < options_.ranks; ++r) next[r] = first[r] = draw.SlotsBefore(begin, r);
    for (uint32_t token = begin; token < std::min(begin + kChunkLength, kTokens); ++token) {
      for (uint32_t r = 0; r < options_.ranks; ++r) {
        if (!draw.Goes(token, r)) continue;
        RegionAt(self, r).slots[me][next[r]] = draw.Value(r, next[r]);
        ++next[r];
      }
    }
    for (uint32_t r = 0; r < options_.ranks; ++r) {
      PublishFlag(memory_, &RegionAt(self, r).flags[me][chunk],
                  {self.block.lease.epoch, first[r], static_cast<uint16_t>(next[r] - first[r]),
                   TagOf(self)});
    }
    return true;
  }

  // ---- Receivers ----

  bool RunReceiver(Self& self) {
    Block& block = self.block;
    if (block.plan.receive_items == 0) return true;
    if (self.thread == options_.senders) block.counts_arrived = AwaitCounts(self);
    block.receiver_barrier.arrive_and_wait();
    if (!block.counts_arrived) return false;
    for (;;) {
      Skew(self.noise);
      const WorkItem item = TakeItem(memory_, self.window().state, block.plan, Queue::kReceive);
      if (item.phase == Phase::kNone) return true;
      if (!Place(self, Peer(self, item.index % options_.ranks), item.index / options_.ranks)) {
        return false;
      }
    }
  }

  // One thread waits; all receivers of its block read the counts.
  bool AwaitCounts(const Self& self) {
    for (uint32_t i = 0; i < options_.ranks; ++i) {
      const uint32_t source = Peer(self, i);
      const CountCell* cell = &RegionAt(self, self.rank().id).counts[source];
      CountCell seen{};
      const bool arrived = Await(self, Phase::kReceive, source, [&] {
        const Observation found = ObserveCounts(memory_, cell, self.block.lease.epoch, seen);
        const bool differs = found == Observation::kArrived && seen.counts[1] != TagOf(self);
        return differs ? Observation::kProtocolError : found;
      });
      if (!arrived) return false;
      self.block.slots[source] = seen.counts[0];
    }
    return true;
  }

  bool Place(const Self& self, uint32_t source, uint32_t chunk) {
    const uint32_t me = self.rank().id;
    const Draw draw = self.DrawOf(source);
    const Region& region = RegionAt(self, me);
    CHECK(self.block.slots[source] == static_cast<int32_t>(draw.SlotsBefore(kTokens, me)));
    FlagCell flag;
    if (!AwaitFlag(self, source, &region.flags[source][chunk], flag)) return false;
    CHECK(flag.first_slot == draw.SlotsBefore(chunk * kChunkLength, me));
    CHECK(flag.first_slot + flag.count == draw.SlotsBefore((chunk + 1) * kChunkLength, me));
    for (uint32_t slot = flag.first_slot; slot < flag.first_slot + flag.count; ++slot) {
      CHECK(region.slots[source][slot] == draw.Value(me, slot));
    }
    self.rank().placed.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  const TestMemory memory_{};
  const RouteMemory route_memory_{};
  const LeaveMemory leave_memory_{};
  const Options options_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace jax_ep
