// What signals_exchange.h exchanges: the windows of its ranks, programs of calls, their items and
// what each call sends. Also the mutants: each JAX_EP_MUTATE_* macro breaks one rule of the
// protocol, and signals_test.cc must then fail under ThreadSanitizer.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "protocol/host_signal_memory.h"
#include "protocol/signals.h"

namespace jax_ep {

template <SignalMemory M>
WorkItem TakeItem(const M& memory, CallState& state, const WorkPlan& plan, Queue queue) {
  return ItemOf(plan, queue, DrawTickets(memory, state, queue, 1));
}

// ---- Mutants ------------------------------------------------------------------------------------

#if defined(JAX_EP_MUTATE_UNFENCED)
struct TestMemory : HostSignalMemory {
  // Deferred to Post, which knows the type of the cell.
  void ReleaseFence() const {}

  template <typename Cell>
  void Post(Cell* cell, const Cell& value) const {
    if (!std::is_same_v<Cell, JAX_EP_MUTATE_UNFENCED>) HostSignalMemory::ReleaseFence();
    HostSignalMemory::Post(cell, value);
  }
};
#elif defined(JAX_EP_MUTATE_RELAXED_OBSERVE)
struct TestMemory : HostSignalMemory {
  template <typename Cell>
  Cell Acquire(const Cell* cell) const {
    return Peek(cell);
  }
};
#else
using TestMemory = HostSignalMemory;
#endif
static_assert(SignalMemory<TestMemory>);

struct RelaxedLastMemory : TestMemory {
  template <typename Counter>
  Counter FetchAddAcqRel(Counter* counter, Counter value) const {
    return std::atomic_ref(*counter).fetch_add(value, std::memory_order_relaxed);
  }
};
#if defined(JAX_EP_MUTATE_RELAXED_ROUTE)
using RouteMemory = RelaxedLastMemory;
#else
using RouteMemory = TestMemory;
#endif
#if defined(JAX_EP_MUTATE_RELAXED_LEAVE)
using LeaveMemory = RelaxedLastMemory;
#else
using LeaveMemory = TestMemory;
#endif

#if defined(JAX_EP_MUTATE_NO_CREDIT)
inline constexpr bool kWaitForCredit = false;
#else
inline constexpr bool kWaitForCredit = true;
#endif

// Each block returns the credits as soon as it is done itself.
#if defined(JAX_EP_MUTATE_EARLY_CREDIT)
inline constexpr bool kEarlyCredit = true;
#else
inline constexpr bool kEarlyCredit = false;
#endif

// The limit of waits that must succeed. In a mutant they may wait in vain.
inline constexpr std::chrono::milliseconds kLong{kWaitForCredit && !kEarlyCredit ? 60000 : 3000};

// Epochs at which calls start. From the later ones, they soon wrap or change sign.
inline constexpr uint64_t kFirstEpochs[] = {kFirstEpoch, (uint64_t{1} << 32) - 2,
                                            (uint64_t{1} << 63) - 2, UINT64_MAX - 1};

// ---- Windows and calls --------------------------------------------------------------------------

inline uint64_t Mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

inline constexpr uint32_t kMaxRanks = 4;
inline constexpr uint32_t kTokens = 40;
inline constexpr uint32_t kChunkLength = 16;
inline constexpr uint32_t kChunks = 3;  // the last one is short
inline constexpr uint32_t kRouteItems = 3;
inline constexpr uint32_t kRouteLength = 14;
static_assert(kChunks * kChunkLength >= kTokens && kRouteItems * kRouteLength >= kTokens);

// What the sources write into one region at a destination.
struct Region {
  CountCell counts[kMaxRanks];  // slots and the call's tag
  FlagCell flags[kMaxRanks][kChunks];
  uint64_t slots[kMaxRanks][kTokens];
};

// The sums of a call's route items; zero between calls.
struct Totals {
  uint32_t slots[kMaxRanks];
  uint32_t finished;
};

struct Window {
  Region regions[kMaxDepth];
  uint64_t credits[kMaxRanks][kMaxDepth];  // posted by each destination
  CallState state;
  Totals totals;
};

struct Call {
  uint32_t kind;  // 0: D, 1: C
  bool sends, places;
  bool needs;        // else the call ends without reading counts and flags
  std::string name;  // of the pending call
};

// "D C D>a D D<a C~": fused calls; >a only sends, <a places what >a sent, ~ needs nothing.
inline std::vector<Call> Parse(const std::string& program) {
  std::vector<Call> calls;
  std::istringstream words(program);
  for (std::string word; words >> word;) {
    const char form = word.size() > 1 ? word[1] : ' ';
    calls.push_back(
        {word[0] == 'C', form != '<', form != '>', form != '~', word.substr(1 + (form != ' '))});
  }
  return calls;
}

// One call of one source. Every rank can compute what it sends.
struct Draw {
  uint64_t epoch;
  uint32_t kind, source;

  uint64_t Seed(uint32_t destination) const {
    return Mix(epoch * 64 + kind * 32 + source * 8 + destination);
  }
  bool Goes(uint32_t token, uint32_t destination) const {
    const uint64_t seed = Seed(destination);
    return seed % 4 != 0 && Mix(seed + token) % 3 != 0;  // a quarter of the regions is empty
  }
  uint32_t SlotsBefore(uint32_t token, uint32_t destination) const {
    uint32_t slots = 0;
    for (uint32_t t = 0; t < std::min(token, kTokens); ++t) slots += Goes(t, destination);
    return slots;
  }
  uint64_t Value(uint32_t destination, uint32_t slot) const {
    return ~Mix(Seed(destination) + slot);
  }
};

}  // namespace jax_ep
