// As window_operands.h, for calls of the window transports in two halves.
#pragma once

#include <string>
#include <utility>

#include "ffi/window_operands.h"
#include "protocol/pending.h"

namespace jax_ep::ffi_layer {

// As int32s, which is all that crosses from one half to the other of what kernels know.
inline constexpr int64_t kPendingInts = sizeof(PendingCall) / sizeof(int32_t);

inline PendingCall* PendingOf(const I32& pending) {
  return reinterpret_cast<PendingCall*>(pending.typed_data());
}
// Of a second half: what follows in the array is the caller's.
inline void CheckPending(Checker& check, const I32& pending) {
  check.Rank("pending", pending, 2);
  if (!check.ok()) return;
  check.Require(Dim(pending, 0) == 1 && Dim(pending, 1) >= kPendingInts,
                "pending must have shape [1, " + std::to_string(kPendingInts) +
                    "] or longer, got " + DimsText(pending.dimensions()));
}
inline void CheckHalvesFit(Checker& check, const WindowSizes& sizes) {
  check.Require(sizes.depth > 1, "pending_calls must be at least 1, got 0");
}

struct DecodedWindowDispatchSend {
  WindowDispatchStep step{};
  PendingCall* pending = nullptr;
  int64_t key = 0;
  std::string_view format;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_dispatch_send";
  template <typename Binding>
  static auto BindOperands(Binding&& binding) {
    return std::forward<Binding>(binding)
        .template Arg<AnyBuffer>()  // tokens [n, H]
        .template Arg<I32>()        // topk_ids [n, K]
        .template Arg<F32>()        // router_weights [n, K]
        .template Arg<F32>()        // input_scale [1]
        .template Arg<I32>();       // after [...]
  }
  template <typename Binding>
  static auto BindAttributes(Binding&& binding) {
    return std::forward<Binding>(binding)
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<int64_t>("ranks")
        .template Attr<int64_t>("local_experts")
        .template Attr<std::string_view>("format");
  }
  template <typename Binding>
  static auto Bind(Binding binding) {
    return BindAttributes(BindOperands(std::move(binding))
                              .template Ret<I32>()    // pending [1, 4]
                              .template Ret<I32>()    // slot_of [n, K]
                              .template Ret<I32>());  // num_invalid [1]
  }
  ffi::Error Decode(const AnyBuffer& tokens, const I32& ids, const F32& weights,
                    const F32& input_scale, const I32& after, Out<I32> pending_out,
                    Out<I32> slot_of, Out<I32> num_invalid, int64_t group_key, int64_t site,
                    int64_t ranks, int64_t local_experts, std::string_view format_name) {
    Checker check(kTarget);
    DecodeOperands(check, tokens, ids, weights, input_scale, after, ranks, local_experts,
                   format_name);
    const EpShape& shape = step.shape;
    check.Dims("pending", *pending_out, {1, kPendingInts});
    check.Dims("slot_of", *slot_of, {shape.tokens, shape.top_k});
    check.Dims("num_invalid", *num_invalid, {1});
    if (!check.ok()) return check.error();
    key = group_key;
    step.site = site;
    pending = PendingOf(*pending_out);
    step.slot_of = slot_of->typed_data();
    step.num_invalid = num_invalid->typed_data();
    return ffi::Error::Success();
  }
  void DecodeOperands(Checker& check, const AnyBuffer& tokens, const I32& ids, const F32& weights,
                      const F32& input_scale, const I32& after, int64_t ranks,
                      int64_t local_experts, std::string_view format_name) {
    format = format_name;
    EpShape& shape = step.shape;
    CheckTokens(check, "tokens", tokens, shape, step.element);
    check.Rank("topk_ids", ids, 2);
    if (!check.ok()) return;
    shape.ranks = ranks;
    shape.local_experts = local_experts;
    shape.top_k = Dim(ids, 1);
    check.Shape(shape);
    if (!check.ok()) return;
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    check.Dims("topk_ids", ids, {shape.tokens, shape.top_k});
    check.Dims("router_weights", weights, {shape.tokens, shape.top_k});
    CheckInputScale(check, input_scale);
    CheckAfter(check, after);
    if (!check.ok()) return;
    message_bytes =
        DispatchMessage::Of(encoding.payload_bytes, encoding.scale_bytes, shape.top_k).bytes;
    step.tokens = tokens.untyped_data();
    step.ids = ids.typed_data();
    step.weights = weights.typed_data();
    step.input_scale = input_scale.typed_data();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    return FitsAs(kTarget, sizes, layout);
  }
  ffi::Error FitsAs(const char* target, const WindowSizes& sizes,
                    const WindowLayout& layout) const {
    Checker check(target);
    CheckHalvesFit(check, sizes);
    CheckDispatchFits(check, step.shape, message_bytes, sizes, layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

struct DecodedWindowDispatchPlace {
  WindowDispatchStep step{};
  const PendingCall* pending = nullptr;
  int64_t key = 0;
  std::string_view format;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_dispatch_place";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return Arrived::Bind(std::move(binding)
                             .template Arg<I32>()        // pending [1, 4 or more]
                             .template Arg<AnyBuffer>()  // tokens [n, H], of a format [0, H]
                             .template Arg<I32>())       // after [...]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("expert_alignment")
        .template Attr<bool>("zero_tail")
        .template Attr<std::string_view>("format")
        .template Attr<std::string_view>("scale_layout");
  }
  ffi::Error Decode(const I32& pending_in, const AnyBuffer& tokens, const I32& after,
                    Out<AnyBuffer> rows, Out<AnyBuffer> scales, Out<I32> row_offsets,
                    Out<I32> group_sizes, Out<I32> expert_counts, Out<I32> expert_ids,
                    Out<I32> scales_offsets, Out<I32> src_info, Out<F32> row_weights,
                    Out<I32> num_dropped, Out<I32> row_of, Out<I32> row_slot, Out<I32> slot_counts,
                    int64_t group_key, int64_t expert_alignment, bool zero_tail,
                    std::string_view format_name, std::string_view scale_layout) {
    key = group_key;
    format = format_name;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    Arrived arrived{rows,       scales,         row_offsets, group_sizes, expert_counts,
                    expert_ids, scales_offsets, src_info,    row_weights, num_dropped,
                    row_of,     row_slot,       slot_counts};
    const bool tiled = CheckTiled(check, scale_layout);
    EpShape token_shape;
    CheckTokens(check, "tokens", tokens, token_shape, step.element);
    arrived.ReadShape(check, format, shape);
    if (!check.ok()) return check.error();
    shape.element_bytes = token_shape.element_bytes;
    shape.expert_alignment = expert_alignment;
    check.Shape(shape);
    if (!check.ok()) return check.error();
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    check.Dims("tokens", tokens, {encoding.quantized ? 0 : shape.tokens, shape.hidden});
    check.Require(encoding.quantized || rows->element_type() == tokens.element_type(),
                  "the rows must have the dtype of the tokens");
    CheckAfter(check, after);
    CheckPending(check, pending_in);
    arrived.Check(check, shape, encoding, tiled);
    if (!check.ok()) return check.error();
    message_bytes =
        DispatchMessage::Of(encoding.payload_bytes, encoding.scale_bytes, shape.top_k).bytes;
    arrived.Fill(step, tiled);
    step.zero_tail = zero_tail;
    step.tokens = tokens.untyped_data();
    pending = PendingOf(pending_in);
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    Checker check(kTarget);
    CheckHalvesFit(check, sizes);
    CheckDispatchFits(check, step.shape, message_bytes, sizes, layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

struct DecodedWindowCombineSend {
  WindowCombineStep step{};
  PendingCall* pending = nullptr;
  int64_t key = 0;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_combine_send";
  template <typename Binding>
  static auto BindOperands(Binding&& binding) {
    return std::forward<Binding>(binding)
        .template Arg<AnyBuffer>()  // expert_out [N, H]
        .template Arg<F32>()        // router_weights [N] or [0]
        .template Arg<I32>()        // row_of [R, n, K]
        .template Arg<I32>()        // slot_counts [R]
        .template Arg<I32>();       // after [...]
  }
  template <typename Binding>
  static auto BindAttributes(Binding&& binding) {
    return std::forward<Binding>(binding)
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<bool>("weighted")
        .template Attr<bool>("by_entry")
        .template Attr<std::string_view>("combine_dtype");
  }
  template <typename Binding>
  static auto Bind(Binding binding) {
    return BindAttributes(BindOperands(std::move(binding))
                              .template Ret<I32>()    // pending [1, 4]
                              .template Ret<I32>());  // done [1]
  }
  ffi::Error Decode(const AnyBuffer& expert_out, const F32& row_weights, const I32& row_of,
                    const I32& slot_counts, const I32& after, Out<I32> pending_out, Out<I32> done,
                    int64_t group_key, int64_t site, bool weighted, bool by_entry,
                    std::string_view combine_dtype) {
    Checker check(kTarget);
    DecodeOperands(check, expert_out, row_weights, row_of, slot_counts, after, weighted, by_entry,
                   combine_dtype);
    check.Dims("pending", *pending_out, {1, kPendingInts});
    check.Dims("done", *done, {1});
    if (!check.ok()) return check.error();
    key = group_key;
    step.site = site;
    pending = PendingOf(*pending_out);
    step.done = done->typed_data();
    return ffi::Error::Success();
  }
  void DecodeOperands(Checker& check, const AnyBuffer& expert_out, const F32& row_weights,
                      const I32& row_of, const I32& slot_counts, const I32& after, bool weighted,
                      bool by_entry, std::string_view combine_dtype) {
    EpShape& shape = step.shape;
    CheckTokens(check, "expert_out", expert_out, shape, step.element);
    CheckWireType(check, combine_dtype, step);
    check.Rank("row_of", row_of, 3);
    if (!check.ok()) return;
    shape.recv_rows = shape.tokens;
    shape.ranks = Dim(row_of, 0);
    shape.tokens = Dim(row_of, 1);
    shape.top_k = Dim(row_of, 2);
    check.Shape(shape);
    if (!check.ok()) return;
    step.by_entry = by_entry;
    check.Require(!by_entry || shape.top_k == 1,
                  "rows that travel one by one must be of tokens with one");
    check.Dims("router_weights", row_weights, {weighted ? shape.recv_rows : 0});
    check.Dims("slot_counts", slot_counts, {shape.ranks});
    CheckAfter(check, after);
    if (!check.ok()) return;
    message_bytes = CombineMessageOf(step).bytes;
    step.expert_out = expert_out.untyped_data();
    step.row_weights = weighted ? row_weights.typed_data() : nullptr;
    step.row_of = row_of.typed_data();
    step.slot_counts = slot_counts.typed_data();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    return FitsAs(kTarget, sizes, layout);
  }
  ffi::Error FitsAs(const char* target, const WindowSizes& sizes,
                    const WindowLayout& layout) const {
    Checker check(target);
    CheckHalvesFit(check, sizes);
    CheckFits(check, step.shape, step.messages(), message_bytes, CallKind::kCombine, sizes, layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

struct DecodedWindowCombinePlace {
  WindowCombineStep step{};
  const PendingCall* pending = nullptr;
  int64_t key = 0;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_combine_place";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<I32>()        // pending [1, 4 or more]
        .template Arg<I32>()        // slot_of [n, K]
        .template Arg<AnyBuffer>()  // residual [n, H] or [0, H]
        .template Arg<F32>()        // entry_weights [n, K] or [0, K], of by_entry
        .template Arg<AnyBuffer>()  // shared_rows [N, H] or [0, H]
        .template Arg<I32>()        // shared_part [2] or [0]
        .template Arg<I32>()        // after [...]
        .template Ret<AnyBuffer>()  // output [n, H]
        .template Ret<I32>()        // done [1]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("ranks")
        .template Attr<bool>("with_residual")
        .template Attr<bool>("by_entry")
        .template Attr<bool>("with_entry_weights")
        .template Attr<bool>("with_shared")
        .template Attr<std::string_view>("combine_dtype");
  }
  ffi::Error Decode(const I32& pending_in, const I32& slot_of, const AnyBuffer& residual,
                    const F32& entry_weights, const AnyBuffer& shared_rows, const I32& shared_part,
                    const I32& after, Out<AnyBuffer> output, Out<I32> done, int64_t group_key,
                    int64_t ranks, bool with_residual, bool by_entry, bool with_entry_weights,
                    bool with_shared, std::string_view combine_dtype) {
    key = group_key;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    CheckTokens(check, "output", *output, shape, step.element);
    CheckWireType(check, combine_dtype, step);
    check.Rank("slot_of", slot_of, 2);
    check.Rank("shared_rows", shared_rows, 2);
    if (!check.ok()) return check.error();
    shape.ranks = ranks;
    shape.top_k = Dim(slot_of, 1);
    shape.recv_rows = Dim(shared_rows, 0);
    check.Shape(shape);
    if (!check.ok()) return check.error();
    const CombineOptions options{entry_weights, shared_rows,        shared_part,
                                 by_entry,      with_entry_weights, with_shared};
    options.Decode(check, shape.recv_rows, step);
    const TokenOperands operands{slot_of, residual, *output, with_residual};
    operands.Decode(check, step);
    check.Dims("done", *done, {1});
    CheckAfter(check, after);
    CheckPending(check, pending_in);
    if (!check.ok()) return check.error();
    message_bytes = CombineMessageOf(step).bytes;
    step.done = done->typed_data();
    pending = PendingOf(pending_in);
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    Checker check(kTarget);
    CheckHalvesFit(check, sizes);
    CheckFits(check, step.shape, step.messages(), message_bytes, CallKind::kCombine, sizes, layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

using WindowHalves = TargetList<DecodedWindowDispatchSend, DecodedWindowDispatchPlace,
                                DecodedWindowCombineSend, DecodedWindowCombinePlace>;

}  // namespace jax_ep::ffi_layer
