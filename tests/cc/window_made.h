// Calls of the window transports as Python makes them, with what may differ in each. Used by
// window_operands_test.cc.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "ffi/window_calls.h"
#include "ffi_calls.h"

namespace jax_ep::ffi_layer {

// Pairwise different, so that no two operands agree by chance.
inline constexpr int64_t R = 3, L = 4, n = 5, K = 2, H = 256, N = 41;

struct Variant {
  std::string format = "bf16";
  bool tiled = false;
  bool columns = false;
  bool coded = false;  // tokens come as codes and scales
  bool weighted = false, weight_grads = false, residual = false, by_entry = false, shared = false;
  std::string wire = "bfloat16";
};

inline Encoding EncodingOf(const Variant& v) {
  Checker check("");
  Encoding encoding = Encoding::Of(check, v.format);
  encoding.Size(check, H, 2);
  CHECK(check.ok());
  return encoding;
}

// A dimension of an operand whose size no other operand shares, so that it may change.
struct Free {
  std::string operand;
  size_t dim;
  bool larger;  // may also be larger; else windows bound it
};
struct Made {
  CustomCall call;
  std::vector<Free> free = {};  // nothing else may change, but `after` and a longer `pending`
  // Other dtypes that the tokens may have, as no other operand depends on them.
  std::vector<ffi::DataType> dtypes = {};
  std::set<std::string> flags = {};  // the attributes that may have either value
};

inline std::vector<ffi::DataType> TokenTypes(const Variant& v, bool encoded_alone) {
  if (v.coded) return {};
  if (EncodingOf(v).quantized) return {ffi::F16, ffi::F32};
  // float32 tokens do not fit the windows.
  return encoded_alone ? std::vector{ffi::F16} : std::vector<ffi::DataType>{};
}

inline void AddArrived(CustomCall& call, const Variant& v) {
  const Encoding encoding = EncodingOf(v);
  const auto tiles = ScaleTiles::Of(N, L, encoding.scales);
  call.Add("-> tokens", encoding.quantized ? encoding.payload_dtype : ffi::BF16,
           {N, encoding.payload_columns});
  call.Add("-> scales", encoding.quantized ? encoding.scale_dtype : ffi::U8,
           !encoding.quantized ? std::vector<int64_t>{0}
           : v.tiled           ? std::vector<int64_t>{tiles.tiles, tiles.column_words, 32, 4, 4}
           : v.columns         ? std::vector<int64_t>{encoding.scales, ScaleLine(N)}
                               : std::vector<int64_t>{N, encoding.scales});
  call.Add("-> row_offsets", ffi::S32, {L + 1});
  call.Add("-> group_sizes", ffi::S32, {L});
  call.Add("-> expert_counts", ffi::S32, {L});
  call.Add("-> expert_ids", ffi::S32, {L});
  call.Add("-> scales_offsets", ffi::S32, {v.tiled ? L : 0});
  call.Add("-> src_info", ffi::S32, {N, 3});
  call.Add("-> router_weights", ffi::F32, {N});
  call.Add("-> num_dropped", ffi::S32, {1});
  call.Add("-> row_of", ffi::S32, {R, n, K});
  call.Add("-> row_slot", ffi::S32, {N});
  call.Add("-> slot_counts", ffi::S32, {R});
}
inline void AddOptions(Made& made, const Variant& v) {
  const std::string layout = v.tiled ? "tiled_128x4" : v.columns ? "columns" : "rows";
  made.call.attributes.insert(
      made.call.attributes.end(),
      {{"expert_alignment", int64_t{1}}, {"zero_tail", true}, {"scale_layout", layout}});
  made.flags = {"zero_tail"};
}

inline void AddRouted(CustomCall& call, const Variant& v) {
  const Encoding encoding = EncodingOf(v);
  v.coded ? call.Add("tokens", encoding.payload_dtype, {n, encoding.payload_columns})
          : call.Add("tokens", ffi::BF16, {n, H});
  call.Add("topk_ids", ffi::S32, {n, K});
  call.Add("router_weights", ffi::F32, {n, K});
  call.Add("input_scale", ffi::F32, {1});
  call.Add("token_scales", encoding.quantized ? encoding.scale_dtype : ffi::U8,
           v.coded ? std::vector<int64_t>{n, encoding.scales} : std::vector<int64_t>{0});
  call.Add("after", ffi::S32, {1});
}
inline void AddTables(CustomCall& call) {
  call.Add("-> slot_of", ffi::S32, {n, K});
  call.Add("-> num_invalid", ffi::S32, {1});
}

inline Made Make(DispatchCall*, const Variant& v) {
  Made made;
  AddRouted(made.call, v);
  AddArrived(made.call, v);
  AddTables(made.call);
  made.call.attributes = {
      {"key", int64_t{7}}, {"site", int64_t{9}}, {"coded", v.coded}, {"format", v.format}};
  AddOptions(made, v);
  made.dtypes = TokenTypes(v, false);
  made.flags = {"zero_tail"};
  return made;
}

inline Made Make(DispatchCachedCall*, const Variant& v) {
  Made made;
  made.call.Add("tokens", ffi::BF16, {n, H});
  made.call.Add("router_weights", ffi::F32, {n, v.weighted ? K : 0});
  made.call.Add("slot_of", ffi::S32, {n, K});
  made.call.Add("row_of", ffi::S32, {R, n, K});
  made.call.Add("row_slot", ffi::S32, {N});
  made.call.Add("after", ffi::S32, {1});
  made.call.Add("-> rows", ffi::BF16, {N, H});
  made.call.Add("-> router_weights", ffi::F32, {v.weighted ? N : 0});
  made.call.Add("-> done", ffi::S32, {1});
  made.call.attributes = {
      {"key", int64_t{7}}, {"site", int64_t{9}}, {"zero_tail", true}, {"format", v.format}};
  made.flags = {"zero_tail"};
  return made;
}

inline void AddWire(Made& made, const Variant& v) {
  made.call.attributes.insert(
      made.call.attributes.end(),
      {{"combine_dtype", v.wire}, {"gradients", false}, {"by_entry", v.by_entry}});
  made.flags = {"gradients"};
}
inline void AddTokenSide(CustomCall& call, const Variant& v) {
  call.Add("slot_of", ffi::S32, {n, K});
  call.Add("residual", ffi::BF16, {v.residual ? n : 0, H});
  call.Add("entry_weights", ffi::F32, {v.by_entry && v.weighted ? n : 0, K});
  call.Add("shared_rows", ffi::BF16, {v.shared ? N : 0, H});
  call.Add("shared_part", ffi::S32, {v.shared ? 2 : 0});
  call.Add("after", ffi::S32, {1});
}
inline std::vector<int64_t> RowOfDims(const Variant& v) {
  return v.by_entry ? std::vector<int64_t>{R, n * K, 1} : std::vector<int64_t>{R, n, K};
}

inline Made Make(CombineCall*, const Variant& v) {
  const bool by_row = v.weighted && !v.by_entry;
  Made made;
  made.call.Add("expert_out", ffi::BF16, {N, H});
  made.call.Add("router_weights", ffi::F32, {by_row ? N : 0});
  made.call.Add("slot_counts", ffi::S32, {R});
  made.call.Add("weight_grads", ffi::F32, {v.weight_grads ? N : 0});
  made.call.Add("row_of", ffi::S32, RowOfDims(v));
  AddTokenSide(made.call, v);
  made.call.Add("-> output", ffi::BF16, {n, H});
  made.call.Add("-> weight_grads", ffi::F32, {n, v.weight_grads ? K : 0});
  made.call.Add("-> done", ffi::S32, {1});
  made.call.attributes = {{"key", int64_t{7}}, {"site", int64_t{9}}};
  AddWire(made, v);
  if (!by_row && !v.weight_grads && !v.shared) made.free.push_back({"expert_out", 0, true});
  return made;
}

inline Made Make(DispatchSendCall*, const Variant& v) {
  Made made;
  AddRouted(made.call, v);
  made.call.Add("-> pending", ffi::S32, {1, kPendingInts});
  AddTables(made.call);
  made.call.attributes = {{"key", int64_t{7}},  {"site", int64_t{9}}, {"ranks", R},
                          {"local_experts", L}, {"coded", v.coded},   {"format", v.format}};
  AddOptions(made, v);
  made.dtypes = TokenTypes(v, true);
  return made;
}
inline Made Make(DispatchSendOnStreamCall*, const Variant& v) {
  Made made = Make(static_cast<DispatchSendCall*>(nullptr), v);
  made.call.operands.resize(made.call.operands.size() - 3);
  made.call.Add("-> results", ffi::S32, {1, kPendingInts + n * K + 1});
  return made;
}

inline Made Make(DispatchRecvCall*, const Variant& v) {
  Made made;
  const bool quantized = EncodingOf(v).quantized;
  made.call.Add("pending", ffi::S32, {1, kPendingInts});
  made.call.Add("tokens", ffi::BF16, {quantized ? 0 : n, H});
  made.call.Add("after", ffi::S32, {1});
  AddArrived(made.call, v);
  made.call.attributes = {{"key", int64_t{7}}, {"format", v.format}};
  AddOptions(made, v);
  made.dtypes = TokenTypes(v, false);
  made.free.push_back({"-> row_of", 2, false});
  if (quantized) made.free.push_back({"-> row_of", 1, false});
  return made;
}

inline Made Make(CombineSendCall*, const Variant& v) {
  Made made{.call = {}, .free = {{"row_of", 1, false}}};
  const bool by_row = v.weighted && !v.by_entry;
  made.call.Add("expert_out", ffi::BF16, {N, H});
  made.call.Add("router_weights", ffi::F32, {by_row ? N : 0});
  made.call.Add("slot_counts", ffi::S32, {R});
  made.call.Add("row_of", ffi::S32, RowOfDims(v));
  made.call.Add("after", ffi::S32, {1});
  made.call.Add("-> pending", ffi::S32, {1, kPendingInts});
  made.call.Add("-> done", ffi::S32, {1});
  made.call.attributes = {{"key", int64_t{7}}, {"site", int64_t{9}}};
  AddWire(made, v);
  made.dtypes = {ffi::F16, ffi::F32};
  if (!by_row) made.free.push_back({"expert_out", 0, true});
  if (!v.by_entry) made.free.push_back({"row_of", 2, false});
  // Tokens of one entry each look the same here as entries sent one by one.
  if (v.by_entry) made.flags.insert("by_entry");
  return made;
}
inline Made Make(CombineSendOnStreamCall*, const Variant& v) {
  Made made = Make(static_cast<CombineSendCall*>(nullptr), v);
  made.call.operands.resize(made.call.operands.size() - 2);
  made.call.Add("-> results", ffi::S32, {1, kPendingInts + 1});
  return made;
}

inline Made Make(CombineRecvCall*, const Variant& v) {
  Made made;
  made.call.Add("pending", ffi::S32, {1, kPendingInts});
  AddTokenSide(made.call, v);
  made.call.Add("-> output", ffi::BF16, {n, H});
  made.call.Add("-> done", ffi::S32, {1});
  made.call.attributes = {{"key", int64_t{7}}, {"ranks", R}};
  AddWire(made, v);
  if (v.shared) made.free.push_back({"shared_rows", 0, true});
  // Only row_of, which the first half has, shows what the slots stand for.
  if (v.by_entry && !v.weighted) made.flags.insert("by_entry");
  return made;
}

}  // namespace jax_ep::ffi_layer
