// Draws of whole calls on emulated GPUs, for calls_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "../cc/check.h"
#include "../cc/steps_world.h"
#include "emulator.h"

namespace jax_ep {

struct Draws {
  Options options;
  bool halves = false;
  bool one_region = false;  // in the windows, as for many tokens
  int64_t times = 1;        // that each call is made
};

inline std::string Text(const Draws& draws) {
  const Options& o = draws.options;
  const EpShape& s = o.shape;
  std::string text = o.format;
  const auto add = [&](const char* name, int64_t value) {
    text += std::string(" ") + name + " " + std::to_string(value);
  };
  add("R", s.ranks), add("L", s.local_experts), add("n", s.tokens), add("K", s.top_k);
  add("H", s.hidden), add("N", s.recv_rows), add("alignment", s.expert_alignment);
  add("element", int64_t(o.element)), add("wire", int64_t(o.wire)), add("tiled", o.tiled);
  add("zero_tail", o.zero_tail), add("weights", o.weights), add("residual", o.residual);
  add("quantized_sums", o.quantized_sums), add("halves", draws.halves),
      add("one_region", draws.one_region), add("times", draws.times);
  return text + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

inline Draws Draw(Random& random) {
  Draws draws;
  Options& options = draws.options;
  EpShape& shape = options.shape;
  options.element = static_cast<ElementType>(random.In(0, 2));
  options.wire = static_cast<ElementType>(random.In(0, 2));
  shape.element_bytes = ElementBytes(options.element);
  shape.hidden = random.In(1, 40) * kRowAlignBytes / shape.element_bytes;
  int64_t pick = random.In(0, 7);
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) {
      if (pick-- != 0) return;
      options.format = Format::kName;
      options.tiled = sizeof(typename Format::Scale) == 1 && random.OneIn(2);
      const int64_t unit =
          options.tiled ? 4 * Format::kBlock : std::max<int64_t>(Format::kBlock, 32);
      shape.hidden = random.In(1, 5) * unit;
      if (Format::kTakesInputScale && random.OneIn(2)) options.input_scale = 37.5f;
    }
  });
  options.quantized_sums = random.OneIn(4);
  if (options.quantized_sums) shape.hidden = RoundUp(shape.hidden, CombineFormat::kBlock);
  shape.ranks = random.In(1, emulator::GetSettings().gpus);
  shape.local_experts = random.In(1, 6);
  // Few tokens, of which calls go a way of their own, as often as more.
  shape.tokens = random.OneIn(15) ? 0 : random.OneIn(2) ? random.In(1, 8) : random.In(9, 40);
  shape.top_k = random.OneIn(15) ? kMaxTopK : random.In(1, 6);
  shape.expert_alignment = random.OneIn(2) ? 1 : random.In(2, 9);
  const int64_t worst = shape.slots() * shape.top_k + shape.local_experts * shape.expert_alignment;
  shape.recv_rows = random.OneIn(15) ? 0 : random.In(0, worst / (random.OneIn(3) ? 4 : 1));
  options.zero_tail = random.OneIn(2);
  options.weights = random.OneIn(2);
  options.residual = random.OneIn(2);
  draws.halves = random.OneIn(3);
  draws.one_region = random.OneIn(2);
  draws.times = random.OneIn(2) ? 1 : random.In(2, 4);
  return draws;
}

inline void DrawIds(World& world, Random& random) {
  const int64_t experts = world.shape().experts();
  for (Rank& rank : world.ranks) {
    const bool silent = random.OneIn(9);
    for (int64_t i = 0; i < world.shape().tokens * world.shape().top_k; ++i) {
      int64_t id = random.In(0, experts - 1);
      if (silent || random.OneIn(7)) id = -1;
      if (random.OneIn(40)) id = random.OneIn(2) ? experts : INT32_MIN;
      rank.ids.as<int32_t>()[i] = static_cast<int32_t>(id);
    }
  }
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
