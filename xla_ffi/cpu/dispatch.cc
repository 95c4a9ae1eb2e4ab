// Dispatch on the CPU: route, encode and place, for a first call and along a known route.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/encoding.h"
#include "cpu/mixed_calls.h"
#include "cpu/rows.h"
#include "cpu/steps.h"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cpu {
namespace {

int32_t* Int32At(uint8_t* base, int64_t offset) {
  return reinterpret_cast<int32_t*>(base + offset);
}
const int32_t* Int32At(const uint8_t* base, int64_t offset) {
  return reinterpret_cast<const int32_t*>(base + offset);
}

template <typename Format>
bool Streaming(const EpShape& shape, int64_t rows) {
  return rows * PayloadBytes<Format>(shape) > kStreamingBytes;
}

// Calls `send(slot, first_k)` once for each distinct slot of a token, in the order of its entries.
// Tables come back from the caller's program, so a slot out of range is skipped.
template <typename Send>
void ForEachSlot(const EpShape& shape, const int32_t* slots, Send&& send) {
  for (int64_t k = 0; k < shape.top_k; ++k) {
    const int32_t slot = slots[k];
    if (slot < 0 || slot >= shape.slots()) continue;
    if (std::find(slots, slots + k, slot) == slots + k) send(slot, k);
  }
}

// Gathers the scales of a tile's rows; those of rows that nothing fills become zero.
// `scales_of(slot)` returns the scales of a message.
template <typename ScalesOf>
void PlaceTile(const DispatchUnpackStep& step, const ScaleTiles& tiles, int64_t tile,
               ScalesOf scales_of) {
  const RowsOfTile rows =
      FindRowsOfTile(tile, step.row_offsets, step.scales_offsets, step.shape.local_experts);
  for (int64_t i = 0; i < kTileRows; ++i) {
    const int32_t slot = i < rows.count ? step.row_slot[rows.first + i] : -1;
    const uint8_t* from = slot < 0 ? nullptr : scales_of(slot);
    for (int64_t column = 0; column < tiles.column_words; ++column) {
      uint32_t word = 0;
      if (from != nullptr) std::memcpy(&word, from + column * kTileColumns, sizeof word);
      std::memcpy(step.scales + tiles.Word(tile, i, column) * kTileColumns, &word, sizeof word);
    }
  }
}

// Where a row's scales go, if there are no tiles.
class ScaleRows {
 public:
  ScaleRows(const DispatchUnpackStep& step, int64_t scale_bytes)
      : scales_(step.scales),
        bytes_(scale_bytes),
        line_bytes_(step.scale_layout == ScaleLayout::kColumns
                        ? ScaleLine(step.shape.recv_rows) * kColumnBytes
                        : 0) {}

  // `from` nullptr: zeros.
  void Place(int64_t row, const uint8_t* from) const {
    if (line_bytes_ == 0) {
      Store(scales_ + row * bytes_, from, bytes_);
      return;
    }
    for (int64_t at = 0; at < bytes_; at += kColumnBytes) {
      Store(scales_ + at / kColumnBytes * line_bytes_ + row * kColumnBytes,
            from == nullptr ? nullptr : from + at, kColumnBytes);
    }
  }

 private:
  static constexpr int64_t kColumnBytes = 4;

  static void Store(uint8_t* to, const uint8_t* from, int64_t bytes) {
    if (bytes == 0) return;
    from == nullptr ? std::memset(to, 0, static_cast<size_t>(bytes))
                    : std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  uint8_t* scales_;
  int64_t bytes_;
  int64_t line_bytes_;  // 0: scales lie by row
};

void Report(const DispatchPackStep& step, const KeptInvalidIds& invalid) {
  WriteReport(*step.report, [&] {
    const auto top_k = static_cast<int32_t>(step.shape.top_k);
    step.report->token = invalid.first_entry / top_k;
    step.report->k = invalid.first_entry % top_k;
    step.report->value = invalid.first_id;
  });
}

// Fills in what an unpack returns if its sources were in different calls.
template <typename Format>
void ReturnNothing(const DispatchUnpackStep& step) {
  const EpShape& shape = step.shape;
  const int64_t experts = shape.local_experts, entries = shape.tokens * shape.top_k;
  const bool tiled = step.scale_layout == ScaleLayout::kTiled128x4;
  const auto tiles =
      ScaleTiles::Of(shape.recv_rows, shape.local_experts, shape.hidden / Format::kBlock);
  FillNoValue(step.rows, shape.recv_rows * PayloadBytes<Format>(shape));
  FillNoValue(step.scales,
              tiled ? tiles.tiles * tiles.column_words * kTileRows * kTileColumns
                    : (step.scale_layout == ScaleLayout::kColumns ? ScaleLine(shape.recv_rows)
                                                                  : shape.recv_rows) *
                          Format::ScaleBytes(shape.hidden));
  FillNoValue(step.router_weights, shape.recv_rows * kWeightBytes);
  std::fill_n(step.row_slot, shape.recv_rows, -1);
  std::fill_n(step.src_info, shape.recv_rows * 3, -1);
  std::fill_n(step.expert_ids, experts, -1);
  std::fill_n(step.row_of, shape.ranks * entries, -1);
  std::fill_n(step.row_offsets, experts + 1, 0);
  std::fill_n(step.group_sizes, experts, 0);
  std::fill_n(step.expert_counts, experts, 0);
  if (tiled) std::fill_n(step.scales_offsets, experts, 0);
  std::fill_n(step.slot_counts, shape.ranks, 0);
  std::fill_n(step.row_base, shape.ranks * experts, 0);
  *step.num_dropped = 0;
  if (step.slot_of == nullptr) return;
  std::fill_n(step.slot_of, entries, -1);
  *step.num_invalid = 0;
}

}  // namespace

template <typename Format>
RowTask DispatchPack(const DispatchPackStep& step) {
  const EpShape& shape = step.shape;
  const auto header = RegionHeader::Of(shape.local_experts);
  const auto message = DispatchMessage::Of(PayloadBytes<Format>(shape),
                                           Format::ScaleBytes(shape.hidden), shape.top_k);
  const int64_t region_bytes = header.bytes + shape.tokens * message.bytes;

  std::vector<int32_t> slots(static_cast<size_t>(shape.ranks), 0);
  std::vector<int32_t> rows(static_cast<size_t>(shape.experts()), 0);
  KeptInvalidIds invalid;
  RouteTokens(shape, step.ids, 0, shape.tokens, {slots.data(), rows.data()},
              {step.slot_of, step.position}, invalid);
  *step.num_invalid = invalid.count;
  if (invalid.count > 0 && step.report != nullptr) Report(step, invalid);
  int64_t sent = 0;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    uint8_t* region = step.send + rank * region_bytes;
    WriteTag(region, step.tag);
    *Int32At(region, header.num_slots) = slots[static_cast<size_t>(rank)];
    std::memcpy(region + header.expert_counts, rows.data() + rank * shape.local_experts,
                static_cast<size_t>(shape.local_experts * kIndexBytes));
    sent += slots[static_cast<size_t>(rank)];
  }

  const bool streaming = Streaming<Format>(shape, sent);
  const float input_scale = Format::kTakesInputScale ? *step.input_scale : kNoInputScale;
  auto run = [=](int64_t begin, int64_t end) {
    const EpShape& shape = step.shape;
    Encoder<Format> encoder(shape, message.scales - message.payload);
    for (int64_t token = begin; token < end; ++token) {
      const int32_t* token_slots = step.slot_of + token * shape.top_k;
      bool made = false;
      ForEachSlot(shape, token_slots, [&](int32_t slot, int64_t first_k) {
        if (!made && step.token_scales != nullptr) {
          encoder.Take(step.tokens, step.token_scales, token);
        } else if (!made) {
          encoder.Make(step.tokens, step.element, token, input_scale);
        }
        made = true;
        uint8_t* to = step.send + (slot / shape.tokens) * region_bytes + header.bytes +
                      (slot % shape.tokens) * message.bytes;
        encoder.CopyTo(to + message.payload, streaming);
        *Int32At(to, message.source_token) = static_cast<int32_t>(token);
        for (int64_t k = 0; k < shape.top_k; ++k) {
          const bool here = k >= first_k && token_slots[k] == slot;
          const int64_t entry = token * shape.top_k + k;
          Int32At(to, message.expert)[k] =
              here ? step.ids[entry] % static_cast<int32_t>(shape.local_experts) : -1;
          Int32At(to, message.position)[k] = here ? step.position[entry] : -1;
        }
        std::memcpy(to + message.weight, step.weights + token * shape.top_k,
                    static_cast<size_t>(shape.top_k * kWeightBytes));
      });
    }
    if (streaming) FenceStreaming();
  };
  return {shape.tokens, sent * message.bytes, std::move(run)};
}

template <typename Format>
RowTask DispatchUnpack(const DispatchUnpackStep& step) {
  const EpShape& shape = step.shape;
  const int64_t payload_bytes = PayloadBytes<Format>(shape);
  const auto header = RegionHeader::Of(shape.local_experts);
  const auto message =
      DispatchMessage::Of(payload_bytes, Format::ScaleBytes(shape.hidden), shape.top_k);
  const int64_t region_bytes = header.bytes + shape.tokens * message.bytes;
  if (!OfOneCall(step.check, step.recv, shape.ranks, region_bytes)) {
    ReturnNothing<Format>(step);
    return {};
  }

  // Counts first: those of all sources determine the place of every row.
  int64_t start = 0;
  int64_t dropped = 0;
  step.row_offsets[0] = 0;
  for (int64_t expert = 0; expert < shape.local_experts; ++expert) {
    int64_t rows = 0;
    for (int64_t source = 0; source < shape.ranks; ++source) {
      step.row_base[source * shape.local_experts + expert] =
          static_cast<int32_t>(Min(start + rows, kMaxIndex));
      // No more than there can be, because row_offsets decide below which rows are cleared.
      rows += std::clamp<int64_t>(
          Int32At(step.recv + source * region_bytes, header.expert_counts)[expert], 0,
          shape.tokens * shape.top_k);
    }
    dropped += DroppedRows(start, rows, shape.recv_rows);
    start = NextGroupStart(start, rows, shape.expert_alignment);
    step.expert_counts[expert] = static_cast<int32_t>(rows);
    step.expert_ids[expert] = static_cast<int32_t>(expert);
    step.row_offsets[expert + 1] = static_cast<int32_t>(Min(start, shape.recv_rows));
    step.group_sizes[expert] = step.row_offsets[expert + 1] - step.row_offsets[expert];
  }
  const bool tiled = step.scale_layout == ScaleLayout::kTiled128x4;
  if (tiled) {
    int32_t first_tile = 0;
    for (int64_t group = 0; group < shape.local_experts; ++group) {
      step.scales_offsets[group] = ScalesOffset(first_tile, step.row_offsets[group]);
      first_tile += TilesOfGroup(step.group_sizes[group]);
    }
  }
  *step.num_dropped = static_cast<int32_t>(dropped);

  // Then the tables, row by row, so that the copies below may run in any order.
  std::fill_n(step.row_slot, shape.recv_rows, -1);
  std::fill_n(step.src_info, shape.recv_rows * 3, -1);
  std::fill_n(step.router_weights, shape.recv_rows, 0.0f);
  std::fill_n(step.row_of, shape.slots() * shape.top_k, -1);
  int64_t received = 0;
  for (int64_t source = 0; source < shape.ranks; ++source) {
    const uint8_t* region = step.recv + source * region_bytes;
    const int32_t num_slots = std::clamp<int32_t>(*Int32At(region, header.num_slots), 0,
                                                  static_cast<int32_t>(shape.tokens));
    step.slot_counts[source] = num_slots;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const uint8_t* from = region + header.bytes + slot * message.bytes;
      const int64_t flat_slot = source * shape.tokens + slot;
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int32_t expert = Int32At(from, message.expert)[k];
        if (expert < 0 || expert >= shape.local_experts) continue;
        const int64_t base = step.row_base[source * shape.local_experts + expert];
        const int32_t row =
            RowOrDropped(base + Int32At(from, message.position)[k], shape.recv_rows);
        if (row < 0) continue;
        ++received;
        step.row_of[flat_slot * shape.top_k + k] = row;
        step.row_slot[row] = static_cast<int32_t>(flat_slot);
        int32_t* info = step.src_info + int64_t{row} * 3;
        info[0] = static_cast<int32_t>(source);
        info[1] = *Int32At(from, message.source_token);
        info[2] = static_cast<int32_t>(k);
        std::memcpy(step.router_weights + row, from + message.weight + k * kWeightBytes,
                    kWeightBytes);
      }
    }
  }

  // Items are slots, whose payload is read once for all its rows, then rows that nothing fills,
  // then tiles of scales.
  const int64_t end_of_zeros =
      step.zero_tail ? shape.recv_rows : step.row_offsets[shape.local_experts];
  const ScaleRows scales(step, tiled ? 0 : Format::ScaleBytes(shape.hidden));
  // The end of a line belongs to no row.
  if (step.scale_layout == ScaleLayout::kColumns) {
    for (int64_t row = shape.recv_rows; row < ScaleLine(shape.recv_rows); ++row) {
      scales.Place(row, nullptr);
    }
  }
  const auto tiles =
      ScaleTiles::Of(shape.recv_rows, shape.local_experts, shape.hidden / Format::kBlock);
  const int64_t rows_end = shape.slots() + end_of_zeros;
  const bool streaming = Streaming<Format>(shape, std::max(received, end_of_zeros));
  const auto message_of = [=](int64_t slot) {
    return step.recv + (slot / step.shape.tokens) * region_bytes + header.bytes +
           (slot % step.shape.tokens) * message.bytes;
  };
  auto run = [=](int64_t begin, int64_t end) {
    const EpShape& shape = step.shape;
    for (int64_t item = begin; item < Min(end, shape.slots()); ++item) {
      const uint8_t* from = message_of(item);
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int32_t row = step.row_of[item * shape.top_k + k];
        if (row < 0) continue;
        CopyRow(step.rows + row * payload_bytes, from + message.payload, payload_bytes, streaming);
        scales.Place(row, from + message.scales);
      }
    }
    for (int64_t row = std::max<int64_t>(begin - shape.slots(), 0);
         row < Min(end, rows_end) - shape.slots(); ++row) {
      if (step.row_slot[row] >= 0) continue;
      ClearRow(step.rows + row * payload_bytes, payload_bytes, streaming);
      scales.Place(row, nullptr);
    }
    for (int64_t tile = std::max<int64_t>(begin - rows_end, 0); tile < end - rows_end; ++tile) {
      PlaceTile(step, tiles, tile, [&](int32_t slot) { return message_of(slot) + message.scales; });
    }
    if (streaming) FenceStreaming();
  };
  return {rows_end + (tiled ? tiles.tiles : 0), std::max(received, end_of_zeros) * payload_bytes,
          std::move(run)};
}

template <typename Format>
RowTask DispatchCachedPack(const DispatchCachedPackStep& step) {
  const EpShape& shape = step.shape;
  const auto message = DispatchCachedMessage::Of(
      PayloadBytes<Format>(shape), Format::ScaleBytes(shape.hidden), step.num_weights);
  const auto region = DispatchCachedRegion::Of(shape.tokens, message.bytes);
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    uint8_t* to = step.send + rank * region.bytes;
    WriteTag(to, step.tag);
    std::memset(to + region.sent, 0, static_cast<size_t>(shape.tokens));
  }
  const int64_t sent = Min(shape.tokens * shape.top_k, shape.slots());  // at most
  const bool streaming = Streaming<Format>(shape, sent);
  auto run = [=](int64_t begin, int64_t end) {
    const EpShape& shape = step.shape;
    Encoder<Format> encoder(shape, message.scales - message.payload);
    for (int64_t token = begin; token < end; ++token) {
      bool made = false;
      ForEachSlot(shape, step.slot_of + token * shape.top_k, [&](int32_t slot, int64_t) {
        if (!made) encoder.Make(step.tokens, step.element, token, kRouteInputScale<Format>);
        made = true;
        uint8_t* to_region = step.send + (slot / shape.tokens) * region.bytes;
        to_region[region.sent + slot % shape.tokens] = 1;
        uint8_t* to = to_region + region.messages + (slot % shape.tokens) * message.bytes;
        encoder.CopyTo(to + message.payload, streaming);
        if (step.num_weights != 0) {
          std::memcpy(to + message.weight, step.weights + token * step.num_weights,
                      static_cast<size_t>(step.num_weights * kWeightBytes));
        }
      });
    }
    if (streaming) FenceStreaming();
  };
  return {shape.tokens, sent * message.bytes, std::move(run)};
}

template <typename Format>
RowTask DispatchCachedUnpack(const DispatchCachedUnpackStep& step) {
  const EpShape& shape = step.shape;
  const auto message = DispatchCachedMessage::Of(
      PayloadBytes<Format>(shape), Format::ScaleBytes(shape.hidden), step.num_weights);
  const auto region = DispatchCachedRegion::Of(shape.tokens, message.bytes);
  if (!OfOneCall(step.check, step.recv, shape.ranks, region.bytes)) {
    FillNoValue(step.rows, shape.recv_rows * shape.row_bytes());
    if (step.num_weights != 0) FillNoValue(step.router_weights, shape.recv_rows * kWeightBytes);
    return {};
  }
  const bool streaming = shape.recv_rows * shape.row_bytes() > kStreamingBytes;
  // Tables come back from the caller's program, which may have changed any of them.
  const auto message_of = [=](int64_t slot) -> const uint8_t* {
    const uint8_t* from = step.recv + (slot / step.shape.tokens) * region.bytes;
    const int64_t at = slot % step.shape.tokens;
    return from[region.sent + at] != 0 ? from + region.messages + at * message.bytes : nullptr;
  };
  const auto is_filled = [=](int64_t row) {
    const int64_t slot = step.row_slot[row], top_k = step.shape.top_k;
    if (slot < 0 || slot >= step.shape.slots() || message_of(slot) == nullptr) return false;
    const int32_t* rows = step.row_of + slot * top_k;
    return std::find(rows, rows + top_k, static_cast<int32_t>(row)) != rows + top_k;
  };
  // As in the unpack: slots, then rows that nothing fills.
  auto run = [=](int64_t begin, int64_t end) {
    const EpShape& shape = step.shape;
    const int64_t row_bytes = shape.row_bytes();
    std::vector<uint8_t> decoded;
    if constexpr (QuantizedFormat<Format>) decoded.resize(static_cast<size_t>(row_bytes));
    for (int64_t item = begin; item < Min(end, shape.slots()); ++item) {
      const uint8_t* message_of_slot = message_of(item);
      if (message_of_slot == nullptr) continue;
      const uint8_t* from = nullptr;
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int32_t row = RowOrDropped(step.row_of[item * shape.top_k + k], shape.recv_rows);
        if (row < 0) continue;
        if (from == nullptr) {
          from = Decoded<Format>(shape, step.element, message_of_slot + message.payload,
                                 message_of_slot + message.scales, decoded.data());
        }
        CopyRow(step.rows + row * row_bytes, from, row_bytes, streaming);
        if (step.num_weights != 0) {
          std::memcpy(step.router_weights + row,
                      message_of_slot + message.weight + k * kWeightBytes, kWeightBytes);
        }
      }
    }
    for (int64_t row = std::max<int64_t>(begin - shape.slots(), 0); row < end - shape.slots();
         ++row) {
      if (is_filled(row)) continue;
      ClearRow(step.rows + row * row_bytes, row_bytes, streaming);
      if (step.num_weights != 0) step.router_weights[row] = 0.0f;
    }
    if (streaming) FenceStreaming();
  };
  return {shape.slots() + shape.recv_rows, shape.recv_rows * shape.row_bytes(), std::move(run)};
}

#define JAX_EP_INSTANTIATE(Format)                                            \
  template RowTask DispatchPack<Format>(const DispatchPackStep&);             \
  template RowTask DispatchUnpack<Format>(const DispatchUnpackStep&);         \
  template RowTask DispatchCachedPack<Format>(const DispatchCachedPackStep&); \
  template RowTask DispatchCachedUnpack<Format>(const DispatchCachedUnpackStep&);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cpu
