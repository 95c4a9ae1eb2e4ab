// Layers drawn at random, for steps_test.cc and, on emulated GPUs, tests/emulator/calls_draws.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "steps_world.h"

namespace jax_ep {

inline std::string Text(const Options& options) {
  const EpShape& s = options.shape;
  std::string text = options.format;
  const auto add = [&](const char* name, int64_t value) {
    text += std::string(" ") + name + " " + std::to_string(value);
  };
  add("R", s.ranks), add("L", s.local_experts), add("n", s.tokens), add("K", s.top_k);
  add("H", s.hidden), add("N", s.recv_rows), add("alignment", s.expert_alignment);
  add("element", int64_t(options.element)), add("wire", int64_t(options.wire));
  add("tiled", options.tiled), add("columns", options.columns), add("zero_tail", options.zero_tail);
  add("weights", options.weights), add("residual", options.residual);
  add("quantized_sums", options.quantized_sums), add("offset", options.offset);
  add("threads", options.threads), add("coded", options.coded);
  return text;
}

// Each quantised format is equally likely; otherwise tokens and sums are unquantised.
inline void DrawFormat(Random& random, Options& options) {
  int64_t pick = random.In(0, 7);
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) {
      if (pick-- != 0) return;
      options.format = Format::kName;
      options.tiled = kTilesScales<Format> && random.OneIn(2);
      const int64_t unit =
          options.tiled ? 4 * Format::kBlock : std::max<int64_t>(Format::kBlock, 32);
      options.shape.hidden = random.In(1, 5) * unit;
      if (Format::kTakesInputScale && random.OneIn(2)) {
        options.input_scale = random.OneIn(3) ? INFINITY : 37.5f;  // which makes a NaN of zero
      }
    }
  });
  options.quantized_sums = random.OneIn(4);
  if (!options.quantized_sums) return;
  options.shape.hidden = RoundUp(options.shape.hidden, CombineFormat::kBlock);
}

inline bool IsQuantized(const Options& options) {
  bool quantized = false;
  VisitFormat(options.format,
              [&]<typename Format>(Format) { quantized = QuantizedFormat<Format>; });
  return quantized;
}

// Up to `ranks` ranks and `units` units of alignment in an unquantised row. `tokens` draws the
// number of tokens if there are any.
template <typename DrawTokens>
Options DrawOptions(Random& random, int64_t ranks, int64_t units, DrawTokens tokens) {
  Options options;
  EpShape& shape = options.shape;
  options.element = static_cast<ElementType>(random.In(0, 2));
  options.wire = static_cast<ElementType>(random.In(0, 2));
  shape.element_bytes = ElementBytes(options.element);
  shape.hidden = random.In(1, units) * kRowAlignBytes / shape.element_bytes;
  DrawFormat(random, options);
  shape.ranks = random.In(1, ranks);
  shape.local_experts = random.In(1, 6);
  shape.tokens = random.OneIn(15) ? 0 : tokens();
  shape.top_k = random.OneIn(15) ? kMaxTopK : random.In(1, 6);
  shape.expert_alignment = random.OneIn(2) ? 1 : random.In(2, 9);
  const int64_t worst = shape.slots() * shape.top_k + shape.local_experts * shape.expert_alignment;
  shape.recv_rows = random.OneIn(15) ? 0 : random.In(0, worst / (random.OneIn(3) ? 4 : 1));
  options.zero_tail = random.OneIn(2);
  options.weights = random.OneIn(2);
  options.residual = random.OneIn(2);
  return options;
}

inline void DrawIds(World& world, Random& random) {
  const int64_t experts = world.shape().experts();
  for (Rank& rank : world.ranks) {
    // Anywhere, few experts (duplicates, overflow), or nothing at all.
    const int64_t spread = random.OneIn(3) ? std::min<int64_t>(2, experts) : experts;
    const bool silent = random.OneIn(8), with_invalid = random.OneIn(4);
    for (int64_t i = 0; i < world.shape().tokens * world.shape().top_k; ++i) {
      int64_t id = random.In(0, spread - 1);
      if (silent || random.OneIn(7)) id = -1;
      if (with_invalid && random.OneIn(9)) id = random.OneIn(2) ? experts : INT32_MIN;
      rank.ids.as<int32_t>()[i] = static_cast<int32_t>(id);
    }
  }
}

}  // namespace jax_ep
