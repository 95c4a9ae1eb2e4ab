// Calls of the window transports as Python makes them, with what may differ in each: for
// window_operands_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/window_aside_operands.h"
#include "ffi_calls.h"

namespace jax_ep::ffi_layer {

// Pairwise different, so that no two operands agree by chance.
inline constexpr int64_t R = 3, L = 4, n = 5, K = 2, H = 256, N = 41;

struct Variant {
  std::string format = "bf16";
  bool tiled = false;
  bool weighted = false, weight_grads = false, residual = false, by_entry = false, shared = false;
  std::string wire = "bfloat16";
};

inline Encoding EncodingOf(const Variant& v) {
  Checker check("");
  return CheckFormat(check, v.format, H, 2);
}

// Of a dimension of an operand: its size is that of the call, and no other operand has it.
struct Free {
  size_t operand;
  size_t dim;
  bool larger;  // windows bound it where not
};
struct Made {
  Call call;
  size_t after;            // the operand of which only emptiness is refused
  std::vector<Free> free;  // nothing else may change
  int64_t pending = -1;    // the operand that may be longer
  // An operand, and what other dtypes it may have: those of tokens that nothing else is of.
  size_t tokens = 0;
  std::vector<ffi::DataType> dtypes = {};
  int64_t flag = -1;  // the attribute that may be either
};

inline std::vector<ffi::DataType> TokenTypes(const Variant& v, bool encoded_alone) {
  if (EncodingOf(v).quantized) return {ffi::F16, ffi::F32};
  // float32 tokens do not fit the windows.
  return encoded_alone ? std::vector{ffi::F16} : std::vector<ffi::DataType>{};
}

inline void AddArrived(Call& call, const Variant& v) {
  const Encoding encoding = EncodingOf(v);
  const auto tiles = ScaleTiles::Of(N, L, encoding.scales);
  call.Add(encoding.quantized ? encoding.payload_dtype : ffi::BF16, {N, encoding.payload_columns});
  call.Add(encoding.quantized ? encoding.scale_dtype : ffi::U8,
           !encoding.quantized ? std::vector<int64_t>{0}
           : v.tiled           ? std::vector<int64_t>{tiles.tiles, tiles.column_words, 32, 4, 4}
                               : std::vector<int64_t>{N, encoding.scales});
  call.Add(ffi::S32, {L + 1});            // row_offsets
  call.Add(ffi::S32, {L});                // group_sizes
  call.Add(ffi::S32, {L});                // expert_counts
  call.Add(ffi::S32, {L});                // expert_ids
  call.Add(ffi::S32, {v.tiled ? L : 0});  // scales_offsets
  call.Add(ffi::S32, {N, 3});             // src_info
  call.Add(ffi::F32, {N});                // router_weights
  call.Add(ffi::S32, {1});                // num_dropped
  call.Add(ffi::S32, {R, n, K});          // row_of
  call.Add(ffi::S32, {N});                // row_slot
  call.Add(ffi::S32, {R});                // slot_counts
}
inline std::string LayoutOf(const Variant& v) { return v.tiled ? "tiled_128x4" : "rows"; }

inline void AddRouted(Call& call) {
  call.Add(ffi::BF16, {n, H});  // tokens
  call.Add(ffi::S32, {n, K});   // topk_ids
  call.Add(ffi::F32, {n, K});   // router_weights
  call.Add(ffi::F32, {1});      // input_scale
  call.Add(ffi::S32, {1});      // after
}

inline Made Make(DecodedWindowDispatch*, const Variant& v) {
  Made made{.call = {}, .after = 4, .free = {}};
  AddRouted(made.call);
  AddArrived(made.call, v);
  made.call.Add(ffi::S32, {n, K});  // slot_of
  made.call.Add(ffi::S32, {1});     // num_invalid
  made.call.attributes = {int64_t{7}, int64_t{9}, int64_t{1}, true, v.format, LayoutOf(v)};
  made.dtypes = TokenTypes(v, false);
  made.flag = 3;
  return made;
}

inline Made Make(DecodedWindowCachedDispatch*, const Variant& v) {
  Made made{.call = {}, .after = 5, .free = {}};
  made.call.Add(ffi::BF16, {n, H});                  // tokens
  made.call.Add(ffi::F32, {n, v.weighted ? K : 0});  // weights
  made.call.Add(ffi::S32, {n, K});                   // slot_of
  made.call.Add(ffi::S32, {R, n, K});                // row_of
  made.call.Add(ffi::S32, {N});                      // row_slot
  made.call.Add(ffi::S32, {1});                      // after
  made.call.Add(ffi::BF16, {N, H});                  // rows
  made.call.Add(ffi::F32, {v.weighted ? N : 0});     // row_weights
  made.call.Add(ffi::S32, {1});                      // done
  made.call.attributes = {int64_t{7}, int64_t{9}, v.format};
  return made;
}

inline void AddTokenSide(Call& call, const Variant& v) {
  call.Add(ffi::S32, {n, K});                                 // slot_of
  call.Add(ffi::BF16, {v.residual ? n : 0, H});               // residual
  call.Add(ffi::F32, {v.by_entry && v.weighted ? n : 0, K});  // entry_weights
  call.Add(ffi::BF16, {v.shared ? N : 0, H});                 // shared_rows
  call.Add(ffi::S32, {v.shared ? 2 : 0});                     // shared_part
  call.Add(ffi::S32, {1});                                    // after
}

inline Made Make(DecodedWindowCombine*, const Variant& v) {
  const bool by_row = v.weighted && !v.by_entry;
  Made made{.call = {}, .after = 10, .free = {}};
  made.call.Add(ffi::BF16, {N, H});                   // expert_out
  made.call.Add(ffi::F32, {by_row ? N : 0});          // router_weights
  made.call.Add(ffi::F32, {v.weight_grads ? N : 0});  // weight_grads
  made.call.Add(ffi::S32, v.by_entry ? std::vector<int64_t>{R, n * K, 1}
                                     : std::vector<int64_t>{R, n, K});  // row_of
  made.call.Add(ffi::S32, {R});                                         // slot_counts
  AddTokenSide(made.call, v);
  made.call.Add(ffi::BF16, {n, H});                      // output
  made.call.Add(ffi::F32, {n, v.weight_grads ? K : 0});  // weight_grads
  made.call.Add(ffi::S32, {1});                          // done
  made.call.attributes = {int64_t{7},
                          int64_t{9},
                          by_row,
                          v.weight_grads,
                          v.residual,
                          v.by_entry,
                          v.by_entry && v.weighted,
                          v.shared,
                          v.wire};
  if (!by_row && !v.weight_grads && !v.shared) made.free.push_back({0, 0, true});
  return made;
}

inline Made Make(DecodedWindowDispatchSend*, const Variant& v) {
  Made made{.call = {}, .after = 4, .free = {}};
  AddRouted(made.call);
  made.call.Add(ffi::S32, {1, kPendingInts});
  made.call.Add(ffi::S32, {n, K});  // slot_of
  made.call.Add(ffi::S32, {1});     // num_invalid
  made.call.attributes = {int64_t{7}, int64_t{9}, R, L, v.format};
  made.dtypes = TokenTypes(v, true);
  return made;
}
inline Made Make(DecodedWindowDispatchSendAside*, const Variant& v) {
  Made made = Make(static_cast<DecodedWindowDispatchSend*>(nullptr), v);
  made.call.operands.resize(made.call.operands.size() - 3);
  made.call.Add(ffi::S32, {1, kPendingInts + n * K + 1});
  return made;
}

inline Made Make(DecodedWindowDispatchPlace*, const Variant& v) {
  Made made{.call = {}, .after = 2, .free = {}, .pending = 0};
  const bool quantized = EncodingOf(v).quantized;
  made.call.Add(ffi::S32, {1, kPendingInts});
  made.call.Add(ffi::BF16, {quantized ? 0 : n, H});  // tokens
  made.call.Add(ffi::S32, {1});                      // after
  AddArrived(made.call, v);
  made.call.attributes = {int64_t{7}, int64_t{1}, true, v.format, LayoutOf(v)};
  made.flag = 2;
  made.tokens = 1;
  made.dtypes = TokenTypes(v, false);
  constexpr size_t kRowOf = 3 + 10;
  made.free.push_back({kRowOf, 2, false});
  if (quantized) made.free.push_back({kRowOf, 1, false});
  return made;
}

inline Made Make(DecodedWindowCombineSend*, const Variant& v) {
  Made made{.call = {}, .after = 4, .free = {{2, 1, false}}};
  const bool by_row = v.weighted && !v.by_entry;
  made.call.Add(ffi::BF16, {N, H});           // expert_out
  made.call.Add(ffi::F32, {by_row ? N : 0});  // router_weights
  made.call.Add(ffi::S32, v.by_entry ? std::vector<int64_t>{R, n * K, 1}
                                     : std::vector<int64_t>{R, n, K});  // row_of
  made.call.Add(ffi::S32, {R});                                         // slot_counts
  made.call.Add(ffi::S32, {1});                                         // after
  made.call.Add(ffi::S32, {1, kPendingInts});
  made.call.Add(ffi::S32, {1});  // done
  made.call.attributes = {int64_t{7}, int64_t{9}, by_row, v.by_entry, v.wire};
  made.dtypes = {ffi::F16, ffi::F32};
  if (!by_row) made.free.push_back({0, 0, true});
  if (!v.by_entry) made.free.push_back({2, 2, false});
  // Tokens of one entry and entries that travel one by one are the same here.
  if (v.by_entry) made.flag = 3;
  return made;
}
inline Made Make(DecodedWindowCombineSendAside*, const Variant& v) {
  Made made = Make(static_cast<DecodedWindowCombineSend*>(nullptr), v);
  made.call.operands.resize(made.call.operands.size() - 2);
  made.call.Add(ffi::S32, {1, kPendingInts + 1});
  return made;
}

inline Made Make(DecodedWindowCombinePlace*, const Variant& v) {
  Made made{.call = {}, .after = 6, .free = {}, .pending = 0};
  made.call.Add(ffi::S32, {1, kPendingInts});
  AddTokenSide(made.call, v);
  made.call.Add(ffi::BF16, {n, H});  // output
  made.call.Add(ffi::S32, {1});      // done
  made.call.attributes = {int64_t{7}, R,     v.residual, v.by_entry, v.by_entry && v.weighted,
                          v.shared,   v.wire};
  if (v.shared) made.free.push_back({4, 0, true});
  // What its slots are of shows in row_of alone, which the first half has.
  if (v.by_entry && !v.weighted) made.flag = 3;
  return made;
}

}  // namespace jax_ep::ffi_layer
