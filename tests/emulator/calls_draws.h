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
  bool one_region = false;  // in the windows, as for many tokens
  int64_t times = 1;        // that each call is made
  // Of the config that the windows are made for, where it is not that of the calls.
  std::string window_format;
  int64_t window_element_bytes = 0;
  int64_t window_tokens = 0;
};

inline std::string Text(const Draws& draws) {
  return Text(draws.options) + " halves " + std::to_string(draws.halves) + " one_region " +
         std::to_string(draws.one_region) + " times " + std::to_string(draws.times) + " windows " +
         draws.window_format + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

inline Draws Draw(Random& random) {
  Draws draws;
  // Few tokens, of which calls go a way of their own, as often as more.
  draws.options = DrawOptions(random, emulator::GetSettings().gpus, 40,
                              [&] { return random.OneIn(2) ? random.In(1, 8) : random.In(9, 40); });
  draws.halves = random.OneIn(3);
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

}  // namespace jax_ep
