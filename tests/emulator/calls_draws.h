// Draws of whole calls on emulated GPUs, for calls_test.cc, internode_test.cc and options_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "../cc/steps_draws.h"
#include "asked.h"
#include "emulator.h"

namespace jax_ep {

struct Draws {
  Options options;
  bool halves = false;
  bool drops = false;       // some first halves are never ended
  bool one_region = false;  // in the windows, as for many tokens
  int64_t node = 0;         // ranks per node; 0: all
  bool bundles = false;     // dispatches are bundled if nodes have equal sizes
  int64_t times = 1;        // how often each call is made
  bool coded = false;       // whether tokens of dispatches come as codes and scales
  // The config that the windows are made for, if it is not that of the calls.
  std::string window_format;
  int64_t window_element_bytes = 0;
  int64_t window_tokens = 0;
  int64_t window_widths = 1;  // how many of the calls' rows fit one of the windows' rows
};

inline std::string Text(const Draws& draws) {
  return Text(draws.options) + " halves " + std::to_string(draws.halves) + " drops " +
         std::to_string(draws.drops) + " one_region " + std::to_string(draws.one_region) +
         " node " + std::to_string(draws.node) + " bundles " + std::to_string(draws.bundles) +
         " times " + std::to_string(draws.times) + " codes " + std::to_string(draws.coded) +
         " windows " + draws.window_format + " x " + std::to_string(draws.window_widths) +
         " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

inline Draws Draw(Random& random) {
  Draws draws;
  // Few tokens, for which there are separate kernels, half of the time.
  draws.options = DrawOptions(random, emulator::GetSettings().gpus, 40,
                              [&] { return random.OneIn(2) ? random.In(1, 8) : random.In(9, 40); });
  draws.halves = random.OneIn(3);
  draws.drops = draws.halves && random.OneIn(2);
  draws.one_region = random.OneIn(2);
  draws.times = random.OneIn(2) ? 1 : random.In(2, 4);
  if (random.OneIn(3)) draws.window_widths = random.In(2, 5);
  return draws;
}

// Tokens come as codes and scales, sometimes in several pieces. `draw` draws the rest.
template <typename Draw>
Draws DrawCoded(Random& random, Draw draw) {
  Draws draws = draw(random);
  while (!IsQuantized(draws.options)) draws = draw(random);
  draws.coded = true;
  if (emulator::kRaces || !random.OneIn(6)) return draws;
  EpShape& shape = draws.options.shape;
  shape.hidden = 112 * 512, shape.tokens = random.In(9, 12), draws.times = 1;
  shape.recv_rows = Min<int64_t>(shape.recv_rows, 40);
  return draws;
}

// Scales in columns, for tokens of either kind.
inline Draws DrawColumns(Random& random) {
  Draws draws = Draw(random);
  while (draws.options.format != Fp8Block128Format::kName) draws = Draw(random);
  draws.options.columns = true;
  draws.coded = random.OneIn(3);
  return draws;
}

// Calls over several nodes.
inline Draws DrawNodes(Random& random) {
  Draws draws = Draw(random);
  while (draws.options.shape.ranks < 2) draws = Draw(random);
  const int64_t ranks = draws.options.shape.ranks;
  draws.bundles = random.OneIn(2);
  draws.node = draws.bundles && ranks % 2 == 0 ? ranks / 2 : random.In(1, ranks - 1);
  return draws;
}

// The first `entries` entries of each token of `world`, which has dispatched, as rows that are sent
// one by one. Like `entry_route` of jax_ep/_ops/options.py: (token, k) are tokens, (slot, k) slots.
// Their chunks have gaps for entries that go elsewhere and, if tokens have more than `entries`
// entries, for tokens that only other entries brought there.
inline World OneByOne(const World& world, int64_t entries, Random& random) {
  const int64_t all = world.shape().top_k;
  Options options = world.options;
  EpShape& shape = options.shape;
  shape.tokens *= entries, shape.top_k = 1;
  World one_by_one(options, random);
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    const Rank& from = world.ranks[r];
    const Rank& to = one_by_one.ranks[r];
    std::fill_n(to.row_slot.as<int32_t>(), shape.recv_rows, -1);
    for (int64_t i = 0; i < shape.tokens; ++i) {
      const int32_t slot = from.slot_of.as<int32_t>()[i / entries * all + i % entries];
      to.slot_of.as<int32_t>()[i] =
          slot < 0 ? -1 : static_cast<int32_t>(slot * entries + i % entries);
    }
    for (int64_t i = 0; i < shape.slots(); ++i) {
      const int32_t row = from.row_of.as<int32_t>()[i / entries * all + i % entries];
      to.row_of.as<int32_t>()[i] = row;
      if (row >= 0) to.row_slot.as<int32_t>()[row] = static_cast<int32_t>(i);
    }
    for (int64_t i = 0; i < shape.ranks; ++i) {
      to.slot_counts.as<int32_t>()[i] =
          static_cast<int32_t>(from.slot_counts.as<int32_t>()[i] * entries);
    }
  }
  return one_by_one;
}

// Fills whatever combine must not read with NaN, unless it may read everything.
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
// An index in [-1, end), or one that tables must not have.
inline int32_t AnyIndex(Random& random, int64_t end) {
  if (random.OneIn(2)) return static_cast<int32_t>(random.In(-1, end - 1));
  return random.OneIn(4) ? static_cast<int32_t>(end) : kHostile[random.In(0, 3)];
}

// A time-out of 2000 rounds of all threads.
inline uint64_t ShortTimeoutNs() { return 2000 * emulator::GetSettings().ns_a_round; }

}  // namespace jax_ep
