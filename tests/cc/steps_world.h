// All ranks of a group in one process, for steps_test.cc: inputs are random, the CPU steps run on
// every rank, copies stand for the exchange, and every buffer has its exact size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/quantize.h"
#include "cpu/steps.h"
#include "formats/combine_wire.h"
#include "formats/element_type.h"
#include "formats/numbers.h"
#include "formats/registry.h"
#include "protocol/layout.h"

namespace jax_ep {

struct Options {
  EpShape shape;
  ElementType element = ElementType::kBFloat16;
  ElementType wire = ElementType::kBFloat16;
  const char* format = Bf16Format::kName;  // of both kinds of dispatch
  bool tiled = false;                      // its scales
  bool columns = false;                    // its scales, if they are floats
  bool quantized_sums = false;
  bool coded = false;  // tokens come as codes and scales
  float input_scale = 1.0f;
  bool zero_tail = true;
  bool weights = true;  // in cached dispatch and in combine
  bool residual = false;
  int64_t offset = 0;   // of every row and wire buffer, off 16 bytes
  int64_t threads = 1;  // that share each task
};

inline float LoadElement(const uint8_t* rows, ElementType type, int64_t index) {
  if (type == ElementType::kFloat32) {
    float value;
    std::memcpy(&value, rows + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, rows + index * 2, 2);
  return type == ElementType::kBFloat16 ? ToFloat(BFloat16{bits}) : ToFloat(Float16{bits});
}

inline void StoreElement(uint8_t* rows, ElementType type, int64_t index, float value) {
  if (type == ElementType::kFloat32) {
    const float rounded = FromFloat<float>(value);
    std::memcpy(rows + index * 4, &rounded, 4);
    return;
  }
  const uint16_t bits = type == ElementType::kBFloat16 ? FromFloat<BFloat16>(value).bits
                                                       : FromFloat<Float16>(value).bits;
  std::memcpy(rows + index * 2, &bits, 2);
}

// Ordinary values, a few denormals, zeros of both signs and infinities.
inline void FillElements(Random& random, uint8_t* rows, ElementType type, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float value = static_cast<float>(random.In(-1000, 1000)) * 0x1.234p-7f;
    if (random.OneIn(97)) value = -0.0f;
    if (random.OneIn(89)) value *= 0x1p-20f;
    if (random.OneIn(991)) value = 1.0f / (value - value);
    StoreElement(rows, type, i, value);
  }
}

// Runs the items in pieces of random size and order, on `threads` threads. Pieces are assigned to
// threads beforehand: a shared counter would order the threads, and ThreadSanitizer would then miss
// items that touch the same byte.
inline void RunTask(const cpu::RowTask& task, int64_t threads, Random& random) {
  CHECK(task.items >= 0 && task.bytes >= 0);
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (int64_t begin = 0; begin < task.items;) {
    const int64_t end = std::min(task.items, begin + random.In(1, 1 + task.items / 3));
    pieces.emplace_back(begin, end);
    begin = end;
  }
  for (size_t i = pieces.size(); i > 1; --i) {
    std::swap(pieces[i - 1], pieces[static_cast<size_t>(random.In(0, int64_t(i) - 1))]);
  }
  const auto work = [&](int64_t thread) {
    for (auto i = static_cast<size_t>(thread); i < pieces.size();
         i += static_cast<size_t>(threads)) {
      task.run(pieces[i].first, pieces[i].second);
    }
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < threads; ++i) helpers.emplace_back(work, i);
  work(0);
  for (std::thread& helper : helpers) helper.join();
}

// The buffers of one rank.
struct Rank {
  Buffer tokens, ids, weights;
  Buffer slot_of, position, num_invalid;
  InvalidIdReport report{};
  RegionTag tag{};  // of its calls
  MixedCallReport mixed{};
  Buffer rows, scales, row_offsets, group_sizes, expert_counts, expert_ids, scales_offsets,
      src_info, router_weights, num_dropped, row_of, row_slot, slot_counts, row_base;
  Buffer cached_rows, cached_router_weights;
  Buffer expert_out, row_grads, residual, output, weight_grads;
  Buffer send, recv;
};

class World {
 public:
  World(const Options& options, Random& random)
      : options(options), ranks(static_cast<size_t>(options.shape.ranks)), random_(random) {
    OfFormat([&]<typename Format>(Format) {
      payload_bytes = Format::PayloadBytes(shape().hidden, shape().element_bytes);
      scale_bytes = Format::ScaleBytes(shape().hidden);
      tiles =
          ScaleTiles::Of(shape().recv_rows, shape().local_experts, shape().hidden / Format::kBlock);
    });
    for (Rank& rank : ranks) Allocate(rank);
  }

  const EpShape& shape() const { return options.shape; }
  ScaleLayout layout() const {
    return options.tiled     ? ScaleLayout::kTiled128x4
           : options.columns ? ScaleLayout::kColumns
                             : ScaleLayout::kRows;
  }
  int64_t num_weights() const { return options.weights ? shape().top_k : 0; }

  void Dispatch() {
    for (Rank& rank : ranks) DispatchPack(rank);
    Exchange(RegionBytes());
    for (Rank& rank : ranks) DispatchUnpack(rank);
  }

  void DispatchPack(Rank& rank) {
    rank.send = Wire(RegionBytes());
    DispatchPackStep step{{},
                          shape(),
                          options.element,
                          rank.tokens.data(),
                          rank.ids.as<int32_t>(),
                          rank.weights.as<float>(),
                          &options.input_scale,
                          rank.send.data(),
                          rank.slot_of.as<int32_t>(),
                          rank.position.as<int32_t>(),
                          rank.num_invalid.as<int32_t>(),
                          &rank.report,
                          rank.tag};
    const Codes codes = options.coded ? CodesOf(rank) : Codes{};
    if (options.coded) step.tokens = codes.codes.data(), step.token_scales = codes.scales.data();
    OfFormat([&]<typename Format>(Format) { Run(cpu::DispatchPack<Format>(step)); });
  }

  void DispatchUnpack(Rank& rank) {
    const DispatchUnpackStep step{
        {rank.rows.data(), rank.scales.data(), rank.row_offsets.as<int32_t>(),
         rank.group_sizes.as<int32_t>(), rank.expert_counts.as<int32_t>(),
         rank.expert_ids.as<int32_t>(), rank.scales_offsets.as<int32_t>(),
         rank.src_info.as<int32_t>(), rank.router_weights.as<float>(),
         rank.num_dropped.as<int32_t>(), rank.row_of.as<int32_t>(), rank.row_slot.as<int32_t>(),
         rank.slot_counts.as<int32_t>()},
        {options.zero_tail, layout()},
        shape(),
        rank.recv.data(),
        rank.row_base.as<int32_t>(),
        rank.slot_of.as<int32_t>(),
        rank.num_invalid.as<int32_t>(),
        CheckOf(rank)};
    OfFormat([&]<typename Format>(Format) { Run(cpu::DispatchUnpack<Format>(step)); });
  }

  void DispatchCached() {
    for (Rank& rank : ranks) DispatchCachedPack(rank);
    Exchange(DispatchCachedRegionBytes());
    for (Rank& rank : ranks) DispatchCachedUnpack(rank);
  }

  void DispatchCachedPack(Rank& rank) {
    rank.send = Wire(DispatchCachedRegionBytes());
    const DispatchCachedPackStep step{shape(),
                                      options.element,
                                      num_weights(),
                                      rank.tokens.data(),
                                      options.weights ? rank.weights.as<float>() : nullptr,
                                      rank.slot_of.as<int32_t>(),
                                      rank.send.data(),
                                      rank.tag};
    OfFormat([&]<typename Format>(Format) { Run(cpu::DispatchCachedPack<Format>(step)); });
  }

  void DispatchCachedUnpack(Rank& rank) {
    const DispatchCachedUnpackStep step{
        shape(),
        options.element,
        num_weights(),
        rank.recv.data(),
        rank.row_of.as<int32_t>(),
        rank.row_slot.as<int32_t>(),
        rank.cached_rows.data(),
        options.weights ? rank.cached_router_weights.as<float>() : nullptr,
        CheckOf(rank)};
    OfFormat([&]<typename Format>(Format) { Run(cpu::DispatchCachedUnpack<Format>(step)); });
  }

  void Combine() {
    for (Rank& rank : ranks) CombinePack(rank);
    Exchange(CombineRegionBytes());
    for (Rank& rank : ranks) CombineUnpack(rank);
  }

  void CombinePack(Rank& rank) {
    rank.send = Wire(CombineRegionBytes());
    const CombineInputs inputs{rank.expert_out.data(),
                               options.weights ? rank.router_weights.as<float>() : nullptr,
                               options.weights ? rank.row_grads.as<float>() : nullptr,
                               rank.row_of.as<int32_t>(), rank.slot_counts.as<int32_t>()};
    const CombinePackStep step{inputs,        {},
                               shape(),       options.element,
                               options.wire,  options.quantized_sums,
                               num_weights(), rank.send.data(),
                               rank.tag};
    Run(cpu::CombinePack(step));
  }

  void CombineUnpack(Rank& rank) {
    CombineUnpackStep step{{.slot_of = rank.slot_of.as<int32_t>(),
                            .residual = options.residual ? rank.residual.data() : nullptr},
                           {},
                           shape(),
                           options.element,
                           options.wire,
                           options.quantized_sums,
                           num_weights(),
                           rank.recv.data(),
                           rank.output.data(),
                           options.weights ? rank.weight_grads.as<float>() : nullptr};
    step.check = CheckOf(rank);
    Run(cpu::CombineUnpack(step));
  }

  int64_t RegionBytes() const {
    return RegionHeader::Of(shape().local_experts).bytes +
           shape().tokens * DispatchMessage::Of(payload_bytes, scale_bytes, shape().top_k).bytes;
  }
  int64_t DispatchCachedRegionBytes() const {
    const auto message = DispatchCachedMessage::Of(payload_bytes, scale_bytes, num_weights());
    return DispatchCachedRegion::Of(shape().tokens, message.bytes).bytes;
  }
  int64_t CombineRegionBytes() const {
    const CombineMessage message =
        CombineMessageOf(shape().hidden, options.wire, options.quantized_sums, num_weights());
    return CombineRegion::Of(shape().tokens, message.bytes).bytes;
  }
  // Filled with `wire_fill`, or at random with bytes that have different meanings if they are read:
  // a row of expert 0, an absent row, a NaN.
  Buffer Wire(int64_t region_bytes) {
    Buffer wire(shape().ranks * region_bytes, options.offset == 0 ? 0 : kIndexBytes);
    const int fills[] = {0x00, kPoison, 0xFF}, drawn = fills[random_.In(0, 2)];
    std::memset(wire.data(), wire_fill < 0 ? drawn : wire_fill, static_cast<size_t>(wire.bytes()));
    return wire;
  }
  int wire_fill = -1;

  template <typename Visit>
  void OfFormat(Visit&& visit) const {
    CHECK(VisitFormat(options.format, visit));
  }
  // A token in the format: payload, scales, and the elements after decoding. Computed by the loops
  // of cpu/quantize.h, which quantized_test.cc checks.
  struct Coded {
    std::vector<uint8_t> payload, scales, elements;
  };
  float route_input_scale() const {
    float found = kNoInputScale;
    OfFormat([&]<typename Format>(Format) { found = kRouteInputScale<Format>; });
    return found;
  }
  Coded Code(const uint8_t* token, float input_scale) const {
    Coded coded{std::vector<uint8_t>(static_cast<size_t>(payload_bytes)),
                std::vector<uint8_t>(static_cast<size_t>(scale_bytes)),
                std::vector<uint8_t>(token, token + shape().row_bytes())};
    OfFormat([&]<typename Format>(Format) {
      if constexpr (QuantizedFormat<Format>) {
        VisitElement(options.element, [&]<typename Element>(Element) {
          auto* elements = reinterpret_cast<Element*>(coded.elements.data());
          cpu::QuantizeRow(Format{}, elements, shape().hidden, input_scale, coded.payload.data(),
                           coded.scales.data());
          cpu::DequantizeRow(Format{}, coded.payload.data(), coded.scales.data(), shape().hidden,
                             input_scale, elements);
        });
      } else {
        coded.payload = coded.elements;
      }
    });
    return coded;
  }
  // All tokens of a rank as codes, for a dispatch that does not encode them.
  struct Codes {
    Buffer codes, scales;
  };
  Codes CodesOf(const Rank& rank) const {
    Codes all{Buffer(shape().tokens * payload_bytes, options.offset),
              Buffer(shape().tokens * scale_bytes)};
    for (int64_t token = 0; token < shape().tokens; ++token) {
      const Coded coded =
          Code(rank.tokens.data() + token * shape().row_bytes(), options.input_scale);
      std::copy(coded.payload.begin(), coded.payload.end(),
                all.codes.data() + token * payload_bytes);
      std::copy(coded.scales.begin(), coded.scales.end(), all.scales.data() + token * scale_bytes);
    }
    return all;
  }

  const Options options;
  std::vector<Rank> ranks;
  int64_t payload_bytes = 0, scale_bytes = 0;  // of a token
  ScaleTiles tiles{};

  MixedCallCheck CheckOf(Rank& rank) {
    return {static_cast<int32_t>(&rank - ranks.data()), &rank.mixed};
  }

 private:
  void Run(const cpu::RowTask& task) { RunTask(task, options.threads, random_); }

  // The all-to-all: region d of source s becomes region s at d.
  void Exchange(int64_t region_bytes) {
    for (size_t to = 0; to < ranks.size(); ++to) {
      ranks[to].recv = Wire(region_bytes);
      for (size_t from = 0; from < ranks.size(); ++from) {
        std::memcpy(ranks[to].recv.data() + int64_t(from) * region_bytes,
                    ranks[from].send.data() + int64_t(to) * region_bytes,
                    static_cast<size_t>(region_bytes));
      }
    }
  }

  Buffer Int32s(int64_t count) const { return Buffer(count * kIndexBytes); }
  Buffer Rows(int64_t count) const { return Buffer(count * shape().row_bytes(), options.offset); }

  void Allocate(Rank& rank) {
    const int64_t n = shape().tokens, entries = n * shape().top_k, N = shape().recv_rows;
    const int64_t local = shape().local_experts, R = shape().ranks;
    rank.tokens = Rows(n);
    FillElements(random_, rank.tokens.data(), options.element, n * shape().hidden);
    rank.residual = Rows(n);
    FillElements(random_, rank.residual.data(), options.element, n * shape().hidden);
    rank.ids = Int32s(entries);
    rank.weights = Buffer(entries * kWeightBytes);
    FillElements(random_, rank.weights.data(), ElementType::kFloat32, entries);
    rank.slot_of = Int32s(entries);
    rank.position = Int32s(entries);
    rank.num_invalid = Int32s(1);
    rank.rows = Buffer(N * payload_bytes, options.offset);
    rank.scales = Buffer(options.tiled     ? tiles.tiles * tiles.column_words * 512
                         : options.columns ? ScaleLine(N) * scale_bytes
                                           : N * scale_bytes);
    rank.scales_offsets = Int32s(options.tiled ? local : 0);
    rank.row_offsets = Int32s(local + 1);
    rank.group_sizes = Int32s(local);
    rank.expert_counts = Int32s(local);
    rank.expert_ids = Int32s(local);
    rank.src_info = Int32s(N * 3);
    rank.router_weights = Buffer(N * kWeightBytes);
    rank.num_dropped = Int32s(1);
    rank.row_of = Int32s(R * entries);
    rank.row_slot = Int32s(N);
    rank.slot_counts = Int32s(R);
    rank.row_base = Int32s(R * local);
    rank.cached_rows = Rows(N);
    rank.cached_router_weights = Buffer(N * kWeightBytes);
    rank.expert_out = Rows(N);
    rank.row_grads = Buffer(N * kWeightBytes);
    rank.output = Rows(n);
    rank.weight_grads = Buffer(entries * kWeightBytes);
  }

  Random& random_;
};

}  // namespace jax_ep
