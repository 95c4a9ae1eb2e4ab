// Compares what the calls of window_kernels.cu left on the GPUs with what protocol/routing.h
// computes on the host.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "encoded.cuh"
#include "formats/combine_wire.h"
#include "formats/numbers.h"
#include "formats/registry.h"
#include "protocol/routing.h"
#include "protocol/scale_tiles.h"
#include "ranks.cuh"

namespace jax_ep::window_kernels {

// A byte that no valid index, count or offset consists of, and no element of ElementAt.
inline constexpr int kPoison = 0xEE;

class Mismatches {
 public:
  void Add(uint32_t rank, const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (count_++ < kShown) std::printf("  WRONG at rank %u: %s\n", rank, what.c_str());
  }
  int64_t count() const { return count_; }

 private:
  static constexpr int64_t kShown = 20;
  std::mutex mutex_;
  int64_t count_ = 0;
};

// ---- What a dispatch must return ----------------------------------------------------------------

struct Expected {
  std::vector<int32_t> slot_of, position, num_invalid;  // of this rank as a source
  std::vector<int32_t> rows_to, slots_to;               // [E] and [R], likewise
  std::vector<int32_t> row_offsets, group_sizes, expert_counts, expert_ids, src_info, num_dropped,
      row_of, row_slot, slot_counts;
  std::vector<float> router_weights;

  // visit(name, table on the GPU, what it must hold)
  template <typename Visit>
  void ForEachTable(const DispatchStep& step, Visit visit) const {
    visit("slot_of", step.slot_of, slot_of);
    visit("num_invalid", step.num_invalid, num_invalid);
    visit("row_offsets", step.row_offsets, row_offsets);
    visit("group_sizes", step.group_sizes, group_sizes);
    visit("expert_counts", step.expert_counts, expert_counts);
    visit("expert_ids", step.expert_ids, expert_ids);
    visit("src_info", step.src_info, src_info);
    visit("num_dropped", step.num_dropped, num_dropped);
    visit("row_of", step.row_of, row_of);
    visit("row_slot", step.row_slot, row_slot);
    visit("slot_counts", step.slot_counts, slot_counts);
    visit("router_weights", step.router_weights, router_weights);
  }
};

inline void ExpectAtSource(const EpShape& shape, const std::vector<int32_t>& ids,
                           Expected& expected) {
  expected.slot_of.resize(shape.tokens * shape.top_k);
  expected.position.resize(expected.slot_of.size());
  expected.rows_to.assign(shape.experts(), 0);
  expected.slots_to.assign(shape.ranks, 0);
  KeptInvalidIds invalid;
  RouteTokens(shape, ids.data(), 0, shape.tokens,
              {expected.slots_to.data(), expected.rows_to.data()},
              {expected.slot_of.data(), expected.position.data()}, invalid);
  expected.num_invalid = {invalid.count};
}

// Fills in the tables of groups. Returns for each (source, expert) of `rank` the row of its first
// copy, as if N dropped none.
inline std::vector<int64_t> ExpectGroups(const EpShape& shape, int64_t rank,
                                         std::vector<Expected>& all) {
  Expected& expected = all[rank];
  std::vector<int64_t> starts(shape.experts());
  int64_t start = 0, dropped = 0;
  expected.row_offsets = {0};
  for (int64_t expert = 0; expert < shape.local_experts; ++expert) {
    int64_t rows = 0;
    for (int64_t source = 0; source < shape.ranks; ++source) {
      starts[source * shape.local_experts + expert] = start + rows;
      rows += all[source].rows_to[rank * shape.local_experts + expert];
    }
    dropped += DroppedRows(start, rows, shape.recv_rows);
    start = NextGroupStart(start, rows, shape.expert_alignment);
    const int32_t offset = static_cast<int32_t>(std::min(start, shape.recv_rows));
    expected.group_sizes.push_back(offset - expected.row_offsets.back());
    expected.row_offsets.push_back(offset);
    expected.expert_counts.push_back(static_cast<int32_t>(rows));
    expected.expert_ids.push_back(static_cast<int32_t>(expert));
  }
  expected.num_dropped = {static_cast<int32_t>(dropped)};
  return starts;
}

inline void ExpectRows(const EpShape& shape, const World& world, int routing, int64_t rank,
                       std::vector<Expected>& all) {
  const std::vector<int64_t> starts = ExpectGroups(shape, rank, all);
  Expected& expected = all[rank];
  expected.src_info.assign(shape.recv_rows * 3, -1);
  expected.router_weights.assign(shape.recv_rows, 0);
  expected.row_of.assign(shape.slots() * shape.top_k, -1);
  expected.row_slot.assign(shape.recv_rows, -1);
  for (int64_t source = 0; source < shape.ranks; ++source) {
    const Rank& from = world.ranks[source];
    expected.slot_counts.push_back(all[source].slots_to[rank]);
    for (int64_t entry = 0; entry < shape.tokens * shape.top_k; ++entry) {
      const ExpertPlace place =
          PlaceOf(from.host_ids[routing][entry], static_cast<int32_t>(shape.ranks),
                  static_cast<int32_t>(shape.local_experts));
      if (place.rank != rank) continue;
      const int64_t first = starts[source * shape.local_experts + place.local_expert];
      const int32_t row = RowOrDropped(first + all[source].position[entry], shape.recv_rows);
      if (row < 0) continue;
      const int64_t slot = source * shape.tokens + all[source].slot_of[entry] % shape.tokens;
      const int64_t k = entry % shape.top_k;
      expected.row_of[slot * shape.top_k + k] = row;
      expected.row_slot[row] = static_cast<int32_t>(slot);
      expected.src_info[row * 3] = static_cast<int32_t>(source);
      expected.src_info[row * 3 + 1] = static_cast<int32_t>(entry / shape.top_k);
      expected.src_info[row * 3 + 2] = static_cast<int32_t>(k);
      expected.router_weights[row] = from.host_weights[entry];
    }
  }
}

inline std::vector<Expected> Expect(const World& world, const EpShape& shape, int routing) {
  std::vector<Expected> all(world.ranks.size());
  for (size_t i = 0; i < all.size(); ++i) {
    ExpectAtSource(shape, world.ranks[i].host_ids[routing], all[i]);
  }
  OnEachRank(world,
             [&](const Rank& rank) { ExpectRows(shape, world, routing, rank.group.rank, all); });
  return all;
}

// ---- Comparisons --------------------------------------------------------------------------------

template <typename T>
void CheckTable(const char* name, const T* table, const std::vector<T>& expected, const Rank& rank,
                Mismatches& wrong) {
  std::vector<T> got(expected.size());
  Download(table, got);
  // Bitwise, also for floats.
  const auto differs = [&](size_t i) { return std::memcmp(&got[i], &expected[i], sizeof(T)) != 0; };
  for (size_t i = 0; i < got.size(); ++i) {
    if (!differs(i)) continue;
    wrong.Add(rank.group.rank, std::string(name) + "[" + std::to_string(i) + "] is " +
                                   std::to_string(got[i]) + ", not " + std::to_string(expected[i]));
  }
}

// Checks the rows, of `bytes` each, that a dispatch or cached dispatch returns. A row must equal
// its token; token_of(source) points to the first token of a source. Padding must be zero, and
// with `clear_tail` the tail, too.
template <typename TokenOf>
void CheckRows(const char* name, const uint8_t* table, int64_t bytes, TokenOf token_of,
               const EpShape& shape, const Expected& expected, bool clear_tail, const Rank& rank,
               Mismatches& wrong) {
  constexpr int64_t kBatchBytes = int64_t{64} << 20;
  const int64_t batch = std::max<int64_t>(kBatchBytes / bytes, 1);
  const std::vector<uint8_t> zeros(bytes);
  std::vector<uint8_t> rows;
  for (int64_t first = 0; first < shape.recv_rows; first += batch) {
    const int64_t end = std::min(first + batch, shape.recv_rows);
    rows.resize((end - first) * bytes);
    Download(table + first * bytes, rows);
    for (int64_t row = first; row < end; ++row) {
      const int32_t source = expected.src_info[row * 3], token = expected.src_info[row * 3 + 1];
      if (row >= expected.row_offsets.back() && !clear_tail) continue;
      const void* wanted = source < 0 ? zeros.data() : token_of(source) + token * bytes;
      if (std::memcmp(&rows[(row - first) * bytes], wanted, bytes) == 0) continue;
      wrong.Add(rank.group.rank, std::string(name) + ", row " + std::to_string(row));
    }
  }
}

// Checks all tiled scales. Every group begins with a tile of its own.
inline void CheckTiles(const World& world, const EpShape& shape, int64_t scale_bytes,
                       const Expected& expected, const Rank& rank, Mismatches& wrong) {
  const auto tiles = ScaleTiles::Of(shape.recv_rows, shape.local_experts, scale_bytes);
  std::vector<uint32_t> wanted(tiles.tiles * tiles.column_words * kTileRows);
  std::vector<int32_t> offsets;
  int64_t first_tile = 0;
  for (int64_t group = 0; group < shape.local_experts; ++group) {
    const int64_t begin = expected.row_offsets[group];
    offsets.push_back(static_cast<int32_t>(first_tile - begin / kTileRows));
    for (int64_t i = 0; i < expected.group_sizes[group]; ++i) {
      const int32_t* info = &expected.src_info[(begin + i) * 3];
      if (info[0] < 0) continue;
      const uint8_t* scales = &world.ranks[info[0]].encoded.scales[info[1] * scale_bytes];
      for (int64_t word = 0; word < tiles.column_words; ++word) {
        const int64_t at = tiles.Word(first_tile + i / kTileRows, i % kTileRows, word);
        std::memcpy(&wanted[at], scales + word * kTileColumns, kTileColumns);
      }
    }
    first_tile += DivideUp(expected.group_sizes[group], kTileRows);
  }
  CheckTable("scales_offsets", rank.dispatch.scales_offsets, offsets, rank, wrong);
  CheckTable("tiled scales", reinterpret_cast<const uint32_t*>(rank.dispatch.scales), wanted, rank,
             wrong);
}

inline void CheckDispatched(const World& world, const EpShape& shape, const Expected& expected,
                            bool clear_tail, const Rank& rank, Mismatches& wrong) {
  VisitFormat(rank.format, [&]<typename Format>(Format) {
    const auto payload_of = [&](int32_t source) {
      const Rank& from = world.ranks[source];
      return QuantizedFormat<Format> ? from.encoded.payload.data()
                                     : reinterpret_cast<const uint8_t*>(from.host_tokens.data());
    };
    CheckRows("dispatch", rank.dispatch.rows,
              Format::PayloadBytes(shape.hidden, shape.element_bytes), payload_of, shape, expected,
              clear_tail, rank, wrong);
    if constexpr (!QuantizedFormat<Format>) return;
    const int64_t scale_bytes = Format::ScaleBytes(shape.hidden);
    if (world.options.tiled) return CheckTiles(world, shape, scale_bytes, expected, rank, wrong);
    const auto scales_of = [&](int32_t source) {
      return world.ranks[source].encoded.scales.data();
    };
    CheckRows("scales", rank.dispatch.scales, scale_bytes, scales_of, shape, expected, clear_tail,
              rank, wrong);
  });
}

// One of the terms that combine adds up for a token.
struct Term {
  int64_t rank;
  int64_t row;
  float weight;
};

// Ordered by rank, then by k; without dropped rows.
inline std::vector<Term> TermsOf(const EpShape& shape, const std::vector<Expected>& all,
                                 const Rank& source, int64_t token, bool weighted) {
  std::vector<Term> terms;
  for (int64_t to = 0; to < shape.ranks; ++to) {
    for (int64_t k = 0; k < shape.top_k; ++k) {
      const int64_t entry = token * shape.top_k + k;
      const int64_t flat = all[source.group.rank].slot_of[entry];
      if (flat < 0 || flat / shape.tokens != to) continue;
      const int64_t slot = source.group.rank * shape.tokens + flat % shape.tokens;
      const int32_t row = all[to].row_of[slot * shape.top_k + k];
      if (row >= 0) terms.push_back({to, row, weighted ? source.host_weights[entry] : 1.0f});
    }
  }
  return terms;
}

// Columns that are added up together: one block of the format in which sums may travel.
constexpr int64_t kRunColumns = CombineFormat::kBlock;

// Sums of the columns from `first` on. A rank's float32 products are added in k order and rounded
// to what travels; these partial sums are added in order of ranks.
inline std::vector<BFloat16> SumsAt(const EpShape& shape, const std::vector<Term>& terms,
                                    int64_t first, bool quantized) {
  const int64_t count = std::min(kRunColumns, shape.hidden - first);
  float sums[kRunColumns] = {};
  for (auto term = terms.begin(); term != terms.end();) {
    const int64_t rank = term->rank;
    float parts[kRunColumns] = {};
    for (; term != terms.end() && term->rank == rank; ++term) {
      for (int64_t i = 0; i < count; ++i) {
        const uint64_t index = static_cast<uint64_t>(term->row * shape.hidden + first + i);
        const float value = ToFloat(ElementAt(ExpertStream(rank), index));
        parts[i] = MultiplyThenAdd(parts[i], term->weight, value);
      }
    }
    if (quantized) {
      uint8_t codes[kRunColumns], scale[sizeof(CombineFormat::Scale)];
      EncodeBlock<CombineFormat>(parts, 1.0f, codes, scale);
      DecodeBlock<CombineFormat>(codes, scale, parts);
    }
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = Add(sums[i], quantized ? parts[i] : ToFloat(FromFloat<BFloat16>(parts[i])));
    }
  }
  std::vector<BFloat16> rounded(count);
  for (int64_t i = 0; i < count; ++i) rounded[i] = FromFloat<BFloat16>(sums[i]);
  return rounded;
}

inline void CheckSums(const EpShape& shape, const std::vector<Expected>& all, bool weighted,
                      const Rank& rank, Mismatches& wrong) {
  // Only some tokens: the host is slow at this.
  constexpr int64_t kSampled = 128;
  std::vector<BFloat16> output(shape.tokens * shape.hidden);
  Download(static_cast<const BFloat16*>(rank.combine.output), output);
  for (int64_t token = 0; token < shape.tokens; token += DivideUp(shape.tokens, kSampled)) {
    const std::vector<Term> terms = TermsOf(shape, all, rank, token, weighted);
    std::vector<BFloat16> sums;
    for (int64_t column = 0; column < shape.hidden; ++column) {
      const int64_t in_run = column % kRunColumns;
      if (in_run == 0) sums = SumsAt(shape, terms, column, rank.quantized);
      const BFloat16 got = output[token * shape.hidden + column];
      const BFloat16 wanted = sums[in_run];
      if (got.bits == wanted.bits) continue;
      wrong.Add(rank.group.rank, std::string(weighted ? "weighted" : "plain") + " sum of token " +
                                     std::to_string(token) + ", column " + std::to_string(column) +
                                     " is " + std::to_string(ToFloat(got)) + ", not " +
                                     std::to_string(ToFloat(wanted)));
    }
  }
}

// ---- Calls that are checked ---------------------------------------------------------------------

// The memset runs on the default stream, which does not order it with the calls' streams.
template <typename T>
void Poison(T* memory, int64_t count) {
  CHECK_CUDA(cudaMemset(memory, kPoison, static_cast<size_t>(count) * sizeof(T)));
  CHECK_CUDA(cudaDeviceSynchronize());
}

inline int64_t ScaleTableBytes(const World& world, const EpShape& shape) {
  int64_t bytes = 0;
  VisitFormat(world.options.format, [&]<typename Format>(Format) {
    const int64_t scales = Format::ScaleBytes(shape.hidden);
    const auto tiles = ScaleTiles::Of(shape.recv_rows, shape.local_experts, scales);
    bytes = world.options.tiled ? tiles.tiles * kTileRows * scales : shape.recv_rows * scales;
  });
  return bytes;
}

// Checks all three calls with one routing.
inline void CheckRouting(const World& world, int64_t tokens, int routing, Mismatches& wrong) {
  const EpShape shape = world.Shape(tokens);
  const std::vector<Expected> expected = Expect(world, shape, routing);
  const int64_t row_bytes = shape.recv_rows * shape.row_bytes();
  // Alternates over the routings. Without it the tail is unspecified.
  const bool zero_tail = routing % 2 == 1;

  OnEachRank(world, [&](const Rank& rank) {
    Poison(rank.dispatch.rows, row_bytes);
    Poison(rank.dispatch.scales, ScaleTableBytes(world, shape));
    Poison(rank.dispatch.scales_offsets, shape.local_experts);
    expected[rank.group.rank].ForEachTable(
        rank.dispatch,
        [](const char*, auto* table, const auto& values) { Poison(table, std::ssize(values)); });
  });
  Run(world,
      {.call = Call::kDispatch, .tokens = tokens, .routing = routing, .zero_tail = zero_tail});
  OnEachRank(world, [&](const Rank& rank) {
    const Expected& of_rank = expected[rank.group.rank];
    of_rank.ForEachTable(rank.dispatch, [&](const char* name, auto* table, const auto& values) {
      CheckTable(name, table, values, rank, wrong);
    });
    CheckDispatched(world, shape, of_rank, zero_tail, rank, wrong);
    Poison(rank.dispatch.rows, row_bytes);
    Poison(rank.dispatch.router_weights, shape.recv_rows);
  });
  // The next calls cannot be checked along a wrong route.
  if (wrong.count() != 0) return;

  Run(world, {.call = Call::kDispatchCached, .tokens = tokens});
  OnEachRank(world, [&](const Rank& rank) {
    const Expected& of_rank = expected[rank.group.rank];
    CheckTable("cached router_weights", rank.dispatch.router_weights, of_rank.router_weights, rank,
               wrong);
    const auto token_of = [&](int32_t source) {
      const Rank& from = world.ranks[source];
      const auto& tokens = rank.quantized ? from.decoded : from.host_tokens;
      return reinterpret_cast<const uint8_t*>(tokens.data());
    };
    CheckRows("cached dispatch", rank.dispatch.rows, shape.row_bytes(), token_of, shape, of_rank,
              true, rank, wrong);
  });
  if (wrong.count() != 0) return;

  for (const bool weighted : {true, false}) {
    OnEachRank(world, [&](const Rank& rank) {
      Poison(static_cast<BFloat16*>(rank.combine.output), shape.tokens * shape.hidden);
    });
    Run(world, {.call = Call::kCombine, .tokens = tokens, .weighted = weighted});
    OnEachRank(world, [&](const Rank& rank) { CheckSums(shape, expected, weighted, rank, wrong); });
  }
}

}  // namespace jax_ep::window_kernels
