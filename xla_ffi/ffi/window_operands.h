// As operands.h, for the fused calls of the window transports. `Fits` then holds a call against the
// windows of its group: what it allows stays inside them.
#pragma once

#include <utility>

#include "ffi/targets.h"
#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::ffi_layer {

// What all calls must hold. A call of at most the group's K, H and tokens has a flag for each of
// its chunks, of which `tokens` is the number.
inline void CheckFits(Checker& check, const EpShape& shape, int64_t tokens, int64_t message_bytes,
                      CallKind kind, const WindowSizes& sizes, const WindowLayout& layout) {
  check.Require(shape.ranks == sizes.ranks, "the number of ranks must be the group's " +
                                                std::to_string(sizes.ranks) + ", got " +
                                                std::to_string(shape.ranks));
  const auto at_most = [&](const char* name, int64_t value, int64_t limit) {
    check.Require(value <= limit, std::string(name) + " must be at most " + std::to_string(limit) +
                                      ", got " + std::to_string(value));
  };
  at_most("top_k", shape.top_k, sizes.top_k);
  at_most("hidden_size", shape.hidden, sizes.hidden);
  at_most("the number of tokens", tokens,
          kind == CallKind::kCombine ? sizes.combine_tokens : sizes.dispatch_tokens);
  // Both factors are below 2^31.
  at_most("the bytes for a rank", tokens * message_bytes,
          layout.groups[static_cast<int>(kind)].region_bytes);
}

// Of a first dispatch, whose counts are of the group's experts.
inline void CheckDispatchFits(Checker& check, const EpShape& shape, int64_t message_bytes,
                              const WindowSizes& sizes, const WindowLayout& layout) {
  CheckFits(check, shape, shape.tokens, message_bytes, CallKind::kDispatch, sizes, layout);
  check.Require(shape.local_experts == sizes.local_experts,
                "the experts of a rank must be the group's " + std::to_string(sizes.local_experts) +
                    ", got " + std::to_string(shape.local_experts));
}

// `after` is a result of the group's call before, or anything in a first call. It only orders the
// two calls and is not read, so its shape does not matter. Never empty: XLA may make it a parameter
// of a program, and an empty parameter has no buffer on GPUs.
inline void CheckAfter(Checker& check, const I32& after) {
  check.Require(after.element_count() > 0, "after must have an element, got none");
}

struct DecodedWindowDispatch {
  WindowDispatchStep step{};
  int64_t key = 0;
  std::string_view format;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_dispatch";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return Arrived::Bind(std::move(binding)
                             .template Arg<AnyBuffer>()  // tokens [n, H]
                             .template Arg<I32>()        // topk_ids [n, K]
                             .template Arg<F32>()        // router_weights [n, K]
                             .template Arg<F32>()        // input_scale [1]
                             .template Arg<I32>())       // after [...]
        .template Ret<I32>()                             // slot_of [n, K]
        .template Ret<I32>()                             // num_invalid [1]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<int64_t>("expert_alignment")
        .template Attr<bool>("zero_tail")
        .template Attr<std::string_view>("format")
        .template Attr<std::string_view>("scale_layout");
  }
  ffi::Error Decode(const AnyBuffer& tokens, const I32& ids, const F32& weights,
                    const F32& input_scale, const I32& after, Out<AnyBuffer> rows,
                    Out<AnyBuffer> scales, Out<I32> row_offsets, Out<I32> group_sizes,
                    Out<I32> expert_counts, Out<I32> expert_ids, Out<I32> scales_offsets,
                    Out<I32> src_info, Out<F32> row_weights, Out<I32> num_dropped, Out<I32> row_of,
                    Out<I32> row_slot, Out<I32> slot_counts, Out<I32> slot_of, Out<I32> num_invalid,
                    int64_t group_key, int64_t site, int64_t expert_alignment, bool zero_tail,
                    std::string_view format_name, std::string_view scale_layout) {
    key = group_key;
    format = format_name;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    Arrived arrived{rows,       scales,         row_offsets, group_sizes, expert_counts,
                    expert_ids, scales_offsets, src_info,    row_weights, num_dropped,
                    row_of,     row_slot,       slot_counts};
    const bool tiled = CheckTiled(check, scale_layout);
    EpShape rows_shape;
    arrived.ReadShape(check, format, rows_shape);
    CheckTokens(check, "tokens", tokens, shape, step.element);
    if (!check.ok()) return check.error();
    shape.top_k = rows_shape.top_k;
    shape.ranks = rows_shape.ranks;
    shape.local_experts = rows_shape.local_experts;
    shape.recv_rows = rows_shape.recv_rows;
    shape.expert_alignment = expert_alignment;
    check.Shape(shape);
    if (!check.ok()) return check.error();
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    check.Require(encoding.quantized || rows->element_type() == tokens.element_type(),
                  "the rows must have the dtype of the tokens");
    check.Dims("row_of", *row_of, {shape.ranks, shape.tokens, shape.top_k});
    check.Dims("topk_ids", ids, {shape.tokens, shape.top_k});
    check.Dims("router_weights", weights, {shape.tokens, shape.top_k});
    check.Dims("slot_of", *slot_of, {shape.tokens, shape.top_k});
    check.Dims("num_invalid", *num_invalid, {1});
    CheckInputScale(check, input_scale);
    CheckAfter(check, after);
    arrived.Check(check, shape, encoding, tiled);
    if (!check.ok()) return check.error();
    message_bytes =
        DispatchMessage::Of(encoding.payload_bytes, encoding.scale_bytes, shape.top_k).bytes;
    arrived.Fill(step, tiled);
    step.zero_tail = zero_tail;
    step.site = site;
    step.tokens = tokens.untyped_data();
    step.ids = ids.typed_data();
    step.weights = weights.typed_data();
    step.input_scale = input_scale.typed_data();
    step.num_invalid = num_invalid->typed_data();
    step.slot_of = slot_of->typed_data();
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    Checker check(kTarget);
    CheckDispatchFits(check, step.shape, message_bytes, sizes, layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

struct DecodedWindowCachedDispatch {
  WindowCachedDispatchStep step{};
  int64_t key = 0;
  std::string_view format;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_dispatch_cached";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // tokens [n, H]
        .template Arg<F32>()        // weights [n, K] or [n, 0]
        .template Arg<I32>()        // slot_of [n, K]
        .template Arg<I32>()        // row_of [R, n, K]
        .template Arg<I32>()        // row_slot [N]
        .template Arg<I32>()        // after [...]
        .template Ret<AnyBuffer>()  // rows [N, H]
        .template Ret<F32>()        // row_weights [N] or [0]
        .template Ret<I32>()        // done [1]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<std::string_view>("format");
  }
  ffi::Error Decode(const AnyBuffer& tokens, const F32& weights, const I32& slot_of,
                    const I32& row_of, const I32& row_slot, const I32& after, Out<AnyBuffer> rows,
                    Out<F32> row_weights, Out<I32> done, int64_t group_key, int64_t site,
                    std::string_view format_name) {
    key = group_key;
    format = format_name;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    ElementType row_element{};
    EpShape row_shape;
    CheckTokens(check, "rows", *rows, row_shape, row_element);
    CheckTokens(check, "tokens", tokens, shape, step.element);
    check.Rank("weights", weights, 2);
    check.Rank("row_of", row_of, 3);
    if (!check.ok()) return check.error();
    shape.recv_rows = row_shape.tokens;
    shape.ranks = Dim(row_of, 0);
    shape.top_k = Dim(row_of, 2);
    step.num_weights = Dim(weights, 1);
    check.Shape(shape);
    check.Require(step.element == row_element, "rows must have the dtype of the tokens");
    check.Require(step.num_weights == 0 || step.num_weights == shape.top_k,
                  "weights must have 0 or K columns");
    check.Dims("weights", weights, {shape.tokens, step.num_weights});
    check.Dims("slot_of", slot_of, {shape.tokens, shape.top_k});
    check.Dims("row_of", row_of, {shape.ranks, shape.tokens, shape.top_k});
    check.Dims("row_slot", row_slot, {shape.recv_rows});
    check.Dims("rows", *rows, {shape.recv_rows, shape.hidden});
    check.Dims("row_weights", *row_weights, {step.num_weights != 0 ? shape.recv_rows : 0});
    check.Dims("done", *done, {1});
    CheckAfter(check, after);
    if (!check.ok()) return check.error();
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    if (!check.ok()) return check.error();
    message_bytes = CachedMessageOf(encoding, step.num_weights).bytes;
    step.site = site;
    step.tokens = tokens.untyped_data();
    step.weights = weights.typed_data();
    step.slot_of = slot_of.typed_data();
    step.row_of = row_of.typed_data();
    step.row_slot = row_slot.typed_data();
    step.rows = static_cast<uint8_t*>(rows->untyped_data());
    step.row_weights = row_weights->typed_data();
    step.done = done->typed_data();
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    Checker check(kTarget);
    CheckFits(check, step.shape, step.shape.tokens, message_bytes, CallKind::kDispatch, sizes,
              layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

// Of a combine, at the source: rows that come one by one, and a shared expert's.
struct CombineOptions {
  const F32& entry_weights;
  const AnyBuffer& shared_rows;
  const I32& shared_part;
  bool by_entry;
  bool with_entry_weights;
  bool with_shared;

  // After the step's tokens, K, H and element. `rows` are those of shared_rows, if there are any.
  void Decode(Checker& check, int64_t rows, WindowCombineStep& step) const {
    const EpShape& shape = step.shape;
    step.by_entry = by_entry;
    check.Require(by_entry || !with_entry_weights,
                  "weights at the source must be of rows, not of sums");
    check.Require(!by_entry || step.num_weights == 0, "rows must travel without weight_grads");
    check.Dims("entry_weights", entry_weights,
               {with_entry_weights ? shape.tokens : 0, shape.top_k});
    ElementType element{};
    check.Require(DecodeElement(shared_rows.element_type(), element) && element == step.element,
                  "shared_rows must have the dtype of the output");
    check.Dims("shared_rows", shared_rows, {with_shared ? rows : 0, shape.hidden});
    check.Dims("shared_part", shared_part, {with_shared ? 2 : 0});
    step.entry_weights = with_entry_weights ? entry_weights.typed_data() : nullptr;
    step.shared_rows = with_shared ? shared_rows.untyped_data() : nullptr;
    step.shared_part = shared_part.typed_data();
  }
};

struct DecodedWindowCombine {
  WindowCombineStep step{};
  int64_t key = 0;
  int64_t message_bytes = 0;
  static constexpr const char* kTarget = "ep_combine";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // expert_out [N, H]
        .template Arg<F32>()        // router_weights [N] or [0]
        .template Arg<F32>()        // weight_grads [N] or [0]
        .template Arg<I32>()        // row_of [R, n, K], by_entry [R, n * K, 1]
        .template Arg<I32>()        // slot_counts [R]
        .template Arg<I32>()        // slot_of [n, K]
        .template Arg<AnyBuffer>()  // residual [n, H] or [0, H]
        .template Arg<F32>()        // entry_weights [n, K] or [0, K], of by_entry
        .template Arg<AnyBuffer>()  // shared_rows [N, H] or [0, H]
        .template Arg<I32>()        // shared_part [2] or [0]
        .template Arg<I32>()        // after [...]
        .template Ret<AnyBuffer>()  // output [n, H]
        .template Ret<F32>()        // weight_grads [n, K] or [n, 0]
        .template Ret<I32>()        // done [1]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<bool>("weighted")
        .template Attr<bool>("with_weight_grads")
        .template Attr<bool>("with_residual")
        .template Attr<bool>("by_entry")
        .template Attr<bool>("with_entry_weights")
        .template Attr<bool>("with_shared")
        .template Attr<std::string_view>("combine_dtype");
  }
  ffi::Error Decode(const AnyBuffer& expert_out, const F32& row_weights, const F32& weight_grads,
                    const I32& row_of, const I32& slot_counts, const I32& slot_of,
                    const AnyBuffer& residual, const F32& entry_weights,
                    const AnyBuffer& shared_rows, const I32& shared_part, const I32& after,
                    Out<AnyBuffer> output, Out<F32> output_weight_grads, Out<I32> done,
                    int64_t group_key, int64_t site, bool weighted, bool with_weight_grads,
                    bool with_residual, bool by_entry, bool with_entry_weights, bool with_shared,
                    std::string_view combine_dtype) {
    key = group_key;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    ElementType output_element{};
    EpShape row_shape;
    CheckTokens(check, "expert_out", expert_out, row_shape, step.element);
    CheckTokens(check, "output", *output, shape, output_element);
    CheckWireType(check, combine_dtype, step);
    check.Rank("row_of", row_of, 3);
    if (!check.ok()) return check.error();
    check.Rank("slot_of", slot_of, 2);
    if (!check.ok()) return check.error();
    shape.recv_rows = row_shape.tokens;
    shape.ranks = Dim(row_of, 0);
    shape.top_k = Dim(slot_of, 1);
    step.num_weights = with_weight_grads ? shape.top_k : 0;
    check.Shape(shape);
    check.Require(step.element == output_element, "output must have the dtype of expert_out");
    if (!check.ok()) return check.error();
    const CombineOptions options{entry_weights, shared_rows,        shared_part,
                                 by_entry,      with_entry_weights, with_shared};
    options.Decode(check, shape.recv_rows, step);
    const RowOperands row_operands{expert_out,  row_weights, weight_grads,     row_of,
                                   slot_counts, weighted,    with_weight_grads};
    row_operands.Decode(check, step, step.messages(), by_entry ? 1 : shape.top_k);
    const TokenOperands token_operands{slot_of, residual, *output, with_residual};
    token_operands.Decode(check, step);
    check.Dims("the tokens' weight_grads", *output_weight_grads, {shape.tokens, step.num_weights});
    check.Dims("done", *done, {1});
    CheckAfter(check, after);
    if (!check.ok()) return check.error();
    message_bytes = CombineMessageOf(step).bytes;
    step.site = site;
    step.output_weight_grads = output_weight_grads->typed_data();
    step.done = done->typed_data();
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    Checker check(kTarget);
    CheckFits(check, step.shape, step.messages(), message_bytes, CallKind::kCombine, sizes, layout);
    return check.ok() ? ffi::Error::Success() : check.error();
  }
};

using WindowCalls =
    TargetList<DecodedWindowDispatch, DecodedWindowCachedDispatch, DecodedWindowCombine>;

}  // namespace jax_ep::ffi_layer
