// Where threads meet: the collectives of a warp, the barriers of a block.
#include <algorithm>

#include "emulator.h"

namespace jax_ep::emulator {

const uint64_t* Exchange(uint32_t mask, uint64_t value, const char* kind, bool orders) {
  const Unseen unseen;
  current->fenced = false;
  Warp& warp = current->block->warps[current->thread.x / kWarpLanes];
  if (mask != ~0u) Die("%s of lanes %08x: only whole warps are emulated", kind, mask);
  if (warp.arrived == 0) {
    warp.kind = kind;
  } else if (warp.kind != kind && std::strcmp(warp.kind, kind) != 0) {
    Die("lanes of a warp are at %s and at %s", warp.kind, kind);
  }
  const uint32_t generation = warp.generation;
  uint64_t* values = warp.values[generation % 2];
  values[current->thread.x % kWarpLanes] = value;
  if (orders) Release(values);
  if (++warp.arrived == kWarpLanes) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    SleepWhile(&warp.generation, generation, kind);
  }
  if (orders) Acquire(values);
  return values;
}

const std::array<uint32_t, 6>* ExchangeWords(const std::array<uint32_t, 6>& words,
                                             const char* kind) {
  Warp& warp = current->block->warps[current->thread.x / kWarpLanes];
  auto* all = warp.words[warp.generation % 2];
  all[current->thread.x % kWarpLanes] = words;
  Exchange(~0u, 0, kind);
  return all;
}

bool Sync(uint32_t id, uint32_t threads, bool value, bool wait) {
  static constexpr const char* kNames[kBarriers] = {
      "__syncthreads", "barrier 1",  "barrier 2",  "barrier 3", "barrier 4",  "barrier 5",
      "barrier 6",     "barrier 7",  "barrier 8",  "barrier 9", "barrier 10", "barrier 11",
      "barrier 12",    "barrier 13", "barrier 14", "barrier 15"};
  const Unseen unseen;
  current->fenced = false;
  Block& block = *current->block;
  if (id >= kBarriers || threads == 0 || threads % kWarpLanes != 0 ||
      threads > block.launch->threads) {
    Die("barrier %u of %u threads, in a block of %u", id, threads, block.launch->threads);
  }
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.all = true;
    std::fill(barrier.by_warp.begin(), barrier.by_warp.end(), 0u);
  } else if (barrier.expected != threads) {
    Die("%s is of %u threads for some and of %u for others", kNames[id], barrier.expected, threads);
  }
  if (++barrier.by_warp[current->thread.x / kWarpLanes] > kWarpLanes) {
    Die("a warp comes to %s twice", kNames[id]);
  }
  barrier.all &= value;
  const uint32_t generation = barrier.generation;
  Release(&barrier.result[generation % 2]);
  if (++barrier.arrived == barrier.expected) {
    for (const uint32_t count : barrier.by_warp) {
      if (count % kWarpLanes != 0) Die("%u threads of a warp are at %s", count, kNames[id]);
    }
    barrier.arrived = 0;
    barrier.result[generation % 2] = barrier.all;
    ++barrier.generation;
  } else if (wait) {
    SleepWhile(&barrier.generation, generation, kNames[id]);
  }
  if (wait) Acquire(&barrier.result[generation % 2]);
  return barrier.result[generation % 2];
}

void Fence() {
  if constexpr (!kRaces) return;
  const Unseen unseen;
  for (const void* at : current->loaded) LoadsAcquire(at);
  current->loaded.clear();
  current->fenced = true;
}

void LoadsRelaxed(const void* at) {
  if constexpr (!kRaces) return;
  const Unseen unseen;
  auto& loaded = current->loaded;
  if (std::find(loaded.begin(), loaded.end(), at) == loaded.end()) loaded.push_back(at);
}

void LoadsAcquire(const void* at) {
  if constexpr (!kRaces) return;
  Acquire(at);
  AcquiresSignal(at);
}

void StoresRelaxed(const void* at) {
  if (kRaces && current->fenced) Release(at);
}

void ExpectNoArrivals(const Block& block) {
  for (uint32_t id = 0; id < kBarriers; ++id) {
    if (block.barriers[id].arrived != 0) {
      Die("a block ends with %u of %u threads at barrier %u", block.barriers[id].arrived,
          block.barriers[id].expected, id);
    }
  }
}

}  // namespace jax_ep::emulator
