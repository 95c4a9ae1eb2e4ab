// Whole exchanges between ranks that are threads, with the items, waits and credits of a GPU
// kernel, over windows in host memory. signals_test.cc runs programs of calls through it. Each
// JAX_EP_MUTATE_* macro breaks one rule, and then the test must fail (RELAXED_*: under
// ThreadSanitizer).
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "protocol/host_signal_memory.h"
#include "protocol/signals.h"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)

namespace jax_ep {

#if defined(JAX_EP_MUTATE_RELAXED_PUBLISH)
struct TestMemory : HostSignalMemory {
  template <typename Cell>
  void Post(Cell* cell, const Cell& value) const {
    std::atomic_ref<Cell>(*cell).store(value, std::memory_order_relaxed);
  }
};
#elif defined(JAX_EP_MUTATE_RELAXED_OBSERVE)
struct TestMemory : HostSignalMemory {
  template <typename Cell>
  Cell Acquire(const Cell* cell) const {
    return Peek(cell);
  }
};
#elif defined(JAX_EP_MUTATE_RELAXED_FINISH)
struct TestMemory : HostSignalMemory {
  uint32_t FetchAddAcqRel(uint32_t* counter, uint32_t value) const {
    return FetchAddRelaxed(counter, value);
  }
};
#else
using TestMemory = HostSignalMemory;
#endif
static_assert(SignalMemory<TestMemory>);

#if defined(JAX_EP_MUTATE_NO_CREDIT)
inline constexpr bool kWaitForCredit = false;
#else
inline constexpr bool kWaitForCredit = true;
#endif

inline uint64_t Mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

inline constexpr uint32_t kMaxRanks = 4;
inline constexpr uint32_t kChunks = 3;
inline constexpr uint32_t kChunkSlots = 16;

// What the sources write into one region at a destination. `finished` is the destination's own.
struct Region {
  FlagCell counts_flag[kMaxRanks];
  uint32_t counts[kMaxRanks];
  FlagCell flags[kMaxRanks][kChunks];
  uint64_t slots[kMaxRanks][kChunks * kChunkSlots];
  uint32_t finished[kMaxRanks];
};

struct Window {
  Region regions[kMaxDepth];
  uint64_t credits[kMaxRanks][kMaxDepth];  // posted by each destination
  CallState state;
  FlagCell routed;  // this rank's route item to its send items
  uint32_t slots_to[kMaxRanks];
};

struct Call {
  uint32_t kind;  // 0: D, 1: C
  bool sends, places;
  std::string name;  // of the pending call
};

// "D C D>a D D<a": fused calls; >a only sends, <a places what >a sent.
inline std::vector<Call> Parse(const std::string& program) {
  std::vector<Call> calls;
  std::istringstream words(program);
  for (std::string word; words >> word;) {
    const char form = word.size() > 1 ? word[1] : ' ';
    calls.push_back({word[0] == 'C', form != '<', form != '>', word.substr(1 + (form != ' '))});
  }
  return calls;
}

struct Options {
  uint32_t ranks = 2;
  uint32_t depth = 1;
  uint32_t workers = 1;
  uint64_t first_epoch = kFirstEpoch;
  std::chrono::milliseconds timeout{60000};
  std::vector<uint16_t> tags = {5, 5, 5, 5};  // by rank
};

inline uint32_t SlotsTo(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t destination) {
  const uint64_t draw = Mix(epoch * 64 + kind * 32 + source * 8 + destination);
  if (draw % 4 == 0) return 0;
  return static_cast<uint32_t>(draw / 4 % (kChunks * kChunkSlots + 1));
}

inline uint64_t SlotValue(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t destination,
                          uint32_t slot) {
  return Mix(Mix(epoch * 64 + kind * 32 + source * 8 + destination) + slot);
}

inline uint16_t ChunkCount(uint32_t slots, uint32_t chunk) {
  const uint32_t first = chunk * kChunkSlots;
  return static_cast<uint16_t>(slots < first ? 0 : std::min(slots - first, kChunkSlots));
}

class Exchange {
 public:
  explicit Exchange(const Options& options) : options_(options) {
    for (uint32_t r = 0; r < options.ranks; ++r) {
      auto rank = std::make_unique<Rank>();
      rank->id = r;
      const FlagCell unset{StartMark(options.first_epoch), 0, 0, 0};
      for (Window& window : rank->windows) {
        for (Region& region : window.regions) {
          std::fill_n(region.counts_flag, kMaxRanks, unset);
          std::fill_n(&region.flags[0][0], kMaxRanks * kChunks, unset);
        }
        std::fill_n(&window.credits[0][0], kMaxRanks * kMaxDepth, unset.epoch);
        window.state = StartState(options.first_epoch);
        window.routed = unset;
      }
      ranks_.push_back(std::move(rank));
    }
  }

  // Runs ranks [begin, end) to the end of their programs or to their first failure.
  void Run(uint32_t begin, uint32_t end, const std::vector<std::string>& programs) {
    std::vector<std::thread> threads;
    for (uint32_t r = begin; r < end; ++r) {
      const std::vector<Call> calls = Parse(programs[r % programs.size()]);
      Rank& rank = *ranks_[r];
      rank.launch = std::make_unique<std::barrier<>>(options_.workers);
      for (uint32_t w = 0; w < options_.workers; ++w) {
        threads.emplace_back([this, &rank, calls, w] { RunWorker(rank, calls, w); });
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

  // One worker's view of one call.
  struct Job {
    Rank& rank;
    Window& window;
    Call call;
    RegionLease lease;
    uint64_t deadline_ns;
    uint16_t tag;
  };

  void RunWorker(Rank& rank, const std::vector<Call>& calls, uint32_t worker) {
    uint64_t noise = Mix(options_.first_epoch * 100 + rank.id * 10 + worker);
    std::map<std::pair<uint32_t, std::string>, RegionLease> pending;
    for (const Call& call : calls) {
      Window& window = rank.windows[call.kind];
      RegionLease& lease = pending[{call.kind, call.name}];
      if (call.sends) lease = LeaseRegion(window.state, options_.depth);
      CHECK(lease.region != kNoRegion);
      const uint64_t timeout_ns = static_cast<uint64_t>(options_.timeout.count()) * 1000000;
      const Job job{
          rank, window, call, lease, memory_.NowNs() + timeout_ns, options_.tags[rank.id]};
      if (!RunCall(job, noise)) {
        rank.failed = true;
        rank.launch->arrive_and_drop();
        return;
      }
      rank.launch->arrive_and_wait();  // a stream: launches of one rank do not overlap
    }
  }

  bool RunCall(const Job& job, uint64_t& noise) {
    const uint32_t items = options_.ranks * kChunks;
    const WorkPlan plan{job.call.sends ? 1u : 0u, job.call.sends ? items : 0u,
                        job.call.places ? items : 0u};
    for (;;) {
      Skew(noise);
      const WorkItem item = TakeItem(memory_, job.window.state, plan);
      if (item.phase == Phase::kNone) break;
      if (IsPoisoned(memory_, &job.rank.poison)) return false;
      const bool done = item.phase == Phase::kRoute  ? Route(job)
                        : item.phase == Phase::kSend ? Send(job, item.index)
                                                     : Place(job, item.index);
      if (!done) return false;
    }
    if (!LeaveCall(memory_, job.window.state, options_.workers)) return true;
    if (job.call.sends) CommitSend(job.window.state, job.lease);
    if (job.call.places) CommitPlace(job.window.state, job.lease);
    CHECK(job.rank.placed.exchange(0, std::memory_order_relaxed) == plan.place_items);
    ++job.rank.calls_done;
    return true;
  }

  static void Skew(uint64_t& noise) {
    noise = Mix(noise);
    if (noise % 4 == 0) std::this_thread::yield();
    if (noise % 64 == 1) std::this_thread::sleep_for(std::chrono::microseconds(noise / 64 % 100));
  }

  uint32_t Peer(const Job& job, uint32_t index) const {
    return (job.rank.id + index) % options_.ranks;
  }

  template <typename Observe>
  bool Await(const Job& job, Phase phase, uint32_t awaited, Observe observe) {
    const WaitStatus status = WaitUntil(memory_, {job.deadline_ns, &job.rank.poison}, observe);
    if (status == WaitStatus::kTimedOut || status == WaitStatus::kProtocolError) {
      const WaitReport report{job.lease.epoch,
                              static_cast<uint16_t>(job.rank.id),
                              static_cast<uint16_t>(awaited),
                              job.tag,
                              phase,
                              status};
      SpreadPoison(memory_, report, options_.ranks, [&](uint32_t r) { return &ranks_[r]->poison; });
    }
    return status == WaitStatus::kArrived;
  }

  bool AwaitFlag(const Job& job, Phase phase, uint32_t awaited, const FlagCell* cell,
                 FlagCell& flag) {
    return Await(job, phase, awaited,
                 [&] { return ObserveFlag(memory_, cell, job.lease.epoch, job.tag, flag); });
  }

  bool AwaitCredit(const Job& job, Phase phase, uint32_t destination) {
    if (!kWaitForCredit) return true;
    const uint64_t* credit = &job.window.credits[destination][job.lease.region];
    return Await(job, phase, destination,
                 [&] { return ObserveCredit(memory_, credit, job.lease); });
  }

  Region& RegionAt(const Job& job, uint32_t rank) {
    return ranks_[rank]->windows[job.call.kind].regions[job.lease.region];
  }

  bool Route(const Job& job) {
    const uint64_t epoch = job.lease.epoch;
    const uint32_t me = job.rank.id;
    for (uint32_t r = 0; r < options_.ranks; ++r) {
      job.window.slots_to[r] = SlotsTo(epoch, job.call.kind, me, r);
    }
    PublishFlag(memory_, &job.window.routed, {epoch, 0, 0, job.tag});
    for (uint32_t i = 0; i < options_.ranks; ++i) {
      const uint32_t destination = Peer(job, i);
      if (!AwaitCredit(job, Phase::kRoute, destination)) return false;
      Region& region = RegionAt(job, destination);
      region.counts[me] = job.window.slots_to[destination];
      PublishFlag(memory_, &region.counts_flag[me], {epoch, 0, 0, job.tag});
    }
    return true;
  }

  bool Send(const Job& job, uint32_t index) {
    const uint64_t epoch = job.lease.epoch;
    const uint32_t me = job.rank.id, destination = Peer(job, index % options_.ranks);
    const uint32_t chunk = index / options_.ranks;
    FlagCell routed;
    if (!AwaitFlag(job, Phase::kSend, me, &job.window.routed, routed)) return false;
    if (!AwaitCredit(job, Phase::kSend, destination)) return false;
    Region& region = RegionAt(job, destination);
    const uint32_t first = chunk * kChunkSlots;
    const uint16_t count = ChunkCount(job.window.slots_to[destination], chunk);
    for (uint32_t slot = first; slot < first + count; ++slot) {
      region.slots[me][slot] = SlotValue(epoch, job.call.kind, me, destination, slot);
    }
    PublishFlag(memory_, &region.flags[me][chunk], {epoch, first, count, job.tag});
    return true;
  }

  bool Place(const Job& job, uint32_t index) {
    const uint64_t epoch = job.lease.epoch;
    const uint32_t me = job.rank.id, source = Peer(job, index % options_.ranks);
    const uint32_t chunk = index / options_.ranks;
    Region& region = RegionAt(job, me);
    FlagCell flag;
    if (!AwaitFlag(job, Phase::kPlace, source, &region.counts_flag[source], flag)) return false;
    const uint32_t slots = region.counts[source];
    CHECK(slots == SlotsTo(epoch, job.call.kind, source, me));
    if (!AwaitFlag(job, Phase::kPlace, source, &region.flags[source][chunk], flag)) return false;
    CHECK(flag.first_slot == chunk * kChunkSlots && flag.count == ChunkCount(slots, chunk));
    for (uint32_t slot = flag.first_slot; slot < flag.first_slot + flag.count; ++slot) {
      CHECK(region.slots[source][slot] == SlotValue(epoch, job.call.kind, source, me, slot));
    }
    job.rank.placed.fetch_add(1, std::memory_order_relaxed);
    uint64_t* credit = &ranks_[source]->windows[job.call.kind].credits[me][job.lease.region];
    FinishReads(memory_, &region.finished[source], kChunks, credit, epoch);
    return true;
  }

  const TestMemory memory_{};
  const Options options_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace jax_ep
