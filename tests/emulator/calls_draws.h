// Draws of whole calls on emulated GPUs, for calls_test.cc.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "../cc/steps_draws.h"
#include "emulator.h"

namespace jax_ep {

struct Draws {
  Options options;
  bool halves = false;
  bool drops = false;       // of halves: nobody ends some of the first ones
  bool one_region = false;  // in the windows, as for many tokens
  int64_t node = 0;         // ranks of a node; 0: all
  bool bundles = false;     // of dispatches, where nodes are of one size
  int64_t times = 1;        // that each call is made
  // Of the config that the windows are made for, where it is not that of the calls.
  std::string window_format;
  int64_t window_element_bytes = 0;
  int64_t window_tokens = 0;
};

inline std::string Text(const Draws& draws) {
  return Text(draws.options) + " halves " + std::to_string(draws.halves) + " drops " +
         std::to_string(draws.drops) + " one_region " + std::to_string(draws.one_region) +
         " node " + std::to_string(draws.node) + " bundles " + std::to_string(draws.bundles) +
         " times " + std::to_string(draws.times) + " windows " + draws.window_format +
         " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

inline Draws Draw(Random& random) {
  Draws draws;
  // Few tokens, of which calls go a way of their own, as often as more.
  draws.options = DrawOptions(random, emulator::GetSettings().gpus, 40,
                              [&] { return random.OneIn(2) ? random.In(1, 8) : random.In(9, 40); });
  draws.halves = random.OneIn(3);
  draws.drops = draws.halves && random.OneIn(2);
  draws.one_region = random.OneIn(2);
  draws.times = random.OneIn(2) ? 1 : random.In(2, 4);
  return draws;
}

// NaN wherever combine must not look, unless it may look everywhere.
inline void FillExpertOutputs(World& world, Random& random, bool everywhere = false) {
  const EpShape& shape = world.shape();
  for (Rank& rank : world.ranks) {
    std::memset(rank.expert_out.data(), 0xFF, static_cast<size_t>(rank.expert_out.bytes()));
    std::memset(rank.row_grads.data(), 0xFF, static_cast<size_t>(rank.row_grads.bytes()));
    for (int64_t row = 0; row < shape.recv_rows; ++row) {
      if (!everywhere && rank.row_slot.as<int32_t>()[row] < 0) continue;
      FillElements(random, rank.expert_out.data() + row * shape.row_bytes(), world.options.element,
                   shape.hidden);
      FillElements(random, rank.row_grads.data() + row * kWeightBytes, ElementType::kFloat32, 1);
    }
  }
}

inline constexpr int32_t kHostile[] = {INT32_MIN, -2, INT32_MAX, 1 << 30};
// Of `end`, one that tables may have, or one that they must not.
inline int32_t AnyIndex(Random& random, int64_t end) {
  if (random.OneIn(2)) return static_cast<int32_t>(random.In(-1, end - 1));
  return random.OneIn(4) ? static_cast<int32_t>(end) : kHostile[random.In(0, 3)];
}

// A wait for what was not sent takes so many rounds of all threads.
inline uint64_t ShortTimeoutNs() { return 2000 * emulator::GetSettings().ns_a_round; }

}  // namespace jax_ep
