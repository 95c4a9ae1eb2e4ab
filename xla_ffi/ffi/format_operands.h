// What decoders share about token formats: the encoding of a call's tokens, the results of a first
// dispatch, and the two targets that quantise without a dispatch.
#pragma once

#include <string>
#include <utility>

#include "ffi/decode.h"
#include "formats/registry.h"

namespace jax_ep::ffi_layer {

// A format as a decoder sees it.
struct Encoding {
  int64_t payload_bytes = 0;  // of a token
  int64_t scale_bytes = 0;
  int64_t scales = 0;  // of a token
  int64_t payload_columns = 0;
  ffi::DataType payload_dtype{};  // of a quantised one
  ffi::DataType scale_dtype{};
  bool quantized = false;
};

// Declared alone: a format whose dtype has no line below does not compile.
ffi::DataType NoSuchDtype();

consteval ffi::DataType DataTypeOf(std::string_view name) {
  if (name == "float32") return ffi::F32;
  if (name == "float8_e4m3fn") return ffi::F8E4M3FN;
  if (name == "float8_e8m0fnu") return ffi::F8E8M0FNU;
  if (name == "uint8") return ffi::U8;
  return NoSuchDtype();
}

inline Encoding CheckFormat(Checker& check, std::string_view format, int64_t hidden,
                            int64_t element_bytes) {
  Encoding encoding;
  const bool known = VisitFormat(format, [&]<typename Format>(Format) {
    check.Require(hidden % Format::kBlock == 0,
                  "hidden_size must be a multiple of the format's block of " +
                      std::to_string(Format::kBlock) + ", got " + std::to_string(hidden));
    encoding.payload_bytes = Format::PayloadBytes(hidden, element_bytes);
    encoding.scale_bytes = Format::ScaleBytes(hidden);
    encoding.payload_columns = hidden;
    if constexpr (QuantizedFormat<Format>) {
      encoding.quantized = true;
      encoding.scales = hidden / Format::kBlock;
      encoding.payload_columns = encoding.payload_bytes;
      encoding.payload_dtype = DataTypeOf(Format::kPayloadDtype);
      encoding.scale_dtype = DataTypeOf(Format::kScaleDtype);
    }
  });
  check.Require(known, "unknown format " + std::string(format));
  check.Require(encoding.payload_bytes % kRowAlignBytes == 0,
                "an encoded token must be a multiple of 16 bytes, got " +
                    std::to_string(encoding.payload_bytes));
  return encoding;
}

// H and the element type of rows that may be quantised: a quantised row says nothing of its tokens'
// type, and needs none.
inline void CheckRows(Checker& check, const char* name, const AnyBuffer& rows,
                      std::string_view format, EpShape& shape) {
  bool quantized = false;
  int64_t bits = 0;
  VisitFormat(format, [&]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) quantized = true, bits = Format::Code::kBits;
  });
  ElementType element{};
  if (!quantized) return CheckTokens(check, name, rows, shape, element);
  check.Rank(name, rows, 2);
  if (!check.ok()) return;
  shape.tokens = Dim(rows, 0);
  shape.hidden = Dim(rows, 1) * 8 / bits;
}

inline void CheckInputScale(Checker& check, const F32& input_scale) {
  check.Dims("input_scale", input_scale, {1});
}

// ---- A first dispatch's results by row and by group ---------------------------------------------

struct Arrived {
  Out<AnyBuffer> rows, scales;
  Out<I32> row_offsets, group_sizes, expert_counts, expert_ids, scales_offsets, src_info;
  Out<F32> row_weights;
  Out<I32> num_dropped, row_of, row_slot, slot_counts;

  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Ret<AnyBuffer>()  // tokens [N, H], of a 4-bit format [N, H / 2]
        .template Ret<AnyBuffer>()  // scales [N, H / block], tiled or [0]
        .template Ret<I32>()        // row_offsets [G + 1]
        .template Ret<I32>()        // group_sizes [G]
        .template Ret<I32>()        // expert_counts [G]
        .template Ret<I32>()        // expert_ids [G]
        .template Ret<I32>()        // scales_offsets [G], or [0] where scales are not tiled
        .template Ret<I32>()        // src_info [N, 3]
        .template Ret<F32>()        // router_weights [N]
        .template Ret<I32>()        // num_dropped [1]
        .template Ret<I32>()        // row_of [R, n, K]
        .template Ret<I32>()        // row_slot [N]
        .template Ret<I32>();       // slot_counts [R]
  }

  // N, R, L, n, K and H from the results themselves.
  void ReadShape(Checker& check, std::string_view format, EpShape& shape) {
    CheckRows(check, "the rows", *rows, format, shape);
    check.Rank("row_of", *row_of, 3);
    check.Rank("expert_counts", *expert_counts, 1);
    if (!check.ok()) return;
    shape.recv_rows = shape.tokens;
    shape.ranks = Dim(*row_of, 0);
    shape.tokens = Dim(*row_of, 1);
    shape.top_k = Dim(*row_of, 2);
    shape.local_experts = Dim(*expert_counts, 0);
  }

  // Of a valid shape.
  void Check(Checker& check, const EpShape& shape, const Encoding& encoding, bool tiled) {
    check.Dims("row_offsets", *row_offsets, {shape.local_experts + 1});
    check.Dims("group_sizes", *group_sizes, {shape.local_experts});
    check.Dims("expert_ids", *expert_ids, {shape.local_experts});
    check.Dims("scales_offsets", *scales_offsets, {tiled ? shape.local_experts : 0});
    check.Dims("src_info", *src_info, {shape.recv_rows, 3});
    check.Dims("the rows' router_weights", *row_weights, {shape.recv_rows});
    check.Dims("num_dropped", *num_dropped, {1});
    check.Dims("row_slot", *row_slot, {shape.recv_rows});
    check.Dims("slot_counts", *slot_counts, {shape.ranks});
    check.Dims("the rows", *rows, {shape.recv_rows, encoding.payload_columns});
    if (!encoding.quantized) {
      check.Dims("scales", *scales, {0});
      check.Require(!tiled, "a format without scales has none to tile");
      return;
    }
    check.Require(rows->element_type() == encoding.payload_dtype &&
                      scales->element_type() == encoding.scale_dtype,
                  "the rows and scales must have the dtypes of their format");
    if (!tiled) return check.Dims("scales", *scales, {shape.recv_rows, encoding.scales});
    check.Require(encoding.scale_bytes == encoding.scales && encoding.scales % kTileColumns == 0,
                  "tiled scales must be bytes, in multiples of 4 a row");
    const auto tiles = ScaleTiles::Of(shape.recv_rows, shape.local_experts, encoding.scales);
    check.Dims("scales", *scales, {tiles.tiles, tiles.column_words, 32, 4, 4});
  }

  template <typename Step>
  void Fill(Step& step, bool tiled) {
    step.scale_layout = tiled ? ScaleLayout::kTiled128x4 : ScaleLayout::kRows;
    step.rows = static_cast<uint8_t*>(rows->untyped_data());
    step.scales = static_cast<uint8_t*>(scales->untyped_data());
    step.row_offsets = row_offsets->typed_data();
    step.group_sizes = group_sizes->typed_data();
    step.expert_counts = expert_counts->typed_data();
    step.expert_ids = expert_ids->typed_data();
    step.scales_offsets = scales_offsets->typed_data();
    step.src_info = src_info->typed_data();
    step.row_weights = row_weights->typed_data();
    step.num_dropped = num_dropped->typed_data();
    step.row_of = row_of->typed_data();
    step.row_slot = row_slot->typed_data();
    step.slot_counts = slot_counts->typed_data();
  }
};

// ---- Quantising alone ---------------------------------------------------------------------------

// Both ways; leading dimensions are rows. `input_scale` has one value, or one for each of as many
// runs of rows.
inline Encoding CheckQuantized(Checker& check, std::string_view format, const AnyBuffer& tokens,
                               const AnyBuffer& payload, const AnyBuffer& scales,
                               const F32& input_scale, ElementType& element, int64_t& rows,
                               int64_t& hidden) {
  check.Require(DecodeElement(tokens.element_type(), element),
                "tokens must be bfloat16, float16 or float32");
  check.Require(tokens.dimensions().size() > 0, "tokens must have a dimension");
  if (!check.ok()) return {};
  hidden = tokens.dimensions().back();
  const Encoding encoding = CheckFormat(check, format, hidden, ElementBytes(element));
  check.Require(encoding.quantized && hidden > 0, "the format must have blocks and tokens some");
  if (!check.ok()) return {};
  rows = static_cast<int64_t>(tokens.element_count()) / hidden;
  const auto num_scales = static_cast<int64_t>(input_scale.element_count());
  check.Require(num_scales > 0 && rows % num_scales == 0,
                "input_scale must have one value, or one for each run of rows");
  check.Require(payload.element_type() == encoding.payload_dtype &&
                    scales.element_type() == encoding.scale_dtype,
                "payload and scales must have the dtypes of their format");
  check.Require(static_cast<int64_t>(payload.element_count()) == rows * encoding.payload_columns &&
                    static_cast<int64_t>(scales.element_count()) == rows * encoding.scales,
                "payload and scales must have the sizes of their format");
  return encoding;
}

struct DecodedQuantize {
  QuantizeStep step{};
  std::string_view format;
  static constexpr const char* kTarget = "ep_quantize";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // tokens [.., H]
        .template Arg<F32>()        // input_scale
        .template Ret<AnyBuffer>()  // payload [.., H] or [.., H / 2]
        .template Ret<AnyBuffer>()  // scales [.., H / block]
        .template Attr<std::string_view>("format");
  }
  ffi::Error Decode(const AnyBuffer& tokens, const F32& input_scale, Out<AnyBuffer> payload,
                    Out<AnyBuffer> scales, std::string_view format_name) {
    format = format_name;
    Checker check(kTarget);
    CheckQuantized(check, format, tokens, *payload, *scales, input_scale, step.element, step.rows,
                   step.hidden);
    if (!check.ok()) return check.error();
    step.tokens = tokens.untyped_data();
    step.input_scales = input_scale.typed_data();
    step.num_input_scales = static_cast<int64_t>(input_scale.element_count());
    step.payload = static_cast<uint8_t*>(payload->untyped_data());
    step.scales = static_cast<uint8_t*>(scales->untyped_data());
    return ffi::Error::Success();
  }
};

struct DecodedDequantize {
  DequantizeStep step{};
  std::string_view format;
  static constexpr const char* kTarget = "ep_dequantize";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // payload [.., H] or [.., H / 2]
        .template Arg<AnyBuffer>()  // scales [.., H / block]
        .template Arg<F32>()        // input_scale
        .template Ret<AnyBuffer>()  // tokens [.., H]
        .template Attr<std::string_view>("format");
  }
  ffi::Error Decode(const AnyBuffer& payload, const AnyBuffer& scales, const F32& input_scale,
                    Out<AnyBuffer> tokens, std::string_view format_name) {
    format = format_name;
    Checker check(kTarget);
    CheckQuantized(check, format, *tokens, payload, scales, input_scale, step.element, step.rows,
                   step.hidden);
    if (!check.ok()) return check.error();
    step.payload = static_cast<const uint8_t*>(payload.untyped_data());
    step.scales = static_cast<const uint8_t*>(scales.untyped_data());
    step.input_scales = input_scale.typed_data();
    step.num_input_scales = static_cast<int64_t>(input_scale.element_count());
    step.tokens = tokens->untyped_data();
    return ffi::Error::Success();
  }
};

// "rows" or "tiled_128x4".
inline bool CheckTiled(Checker& check, std::string_view scale_layout) {
  const bool tiled = scale_layout == "tiled_128x4";
  check.Require(tiled || scale_layout == "rows",
                "unknown scale_layout " + std::string(scale_layout));
  return tiled;
}

}  // namespace jax_ep::ffi_layer
