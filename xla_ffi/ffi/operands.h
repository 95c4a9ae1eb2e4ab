// The operands, results and attributes of every target, once: the binding that XLA checks and the
// decoder that fills the step. cpu_handlers.cc and cuda_handlers.cc add their context and launch.
#pragma once

#include <utility>

#include "ffi/format_operands.h"
#include "protocol/layout.h"

namespace jax_ep::ffi_layer {

struct DecodedPack {
  PackStep step{};
  int64_t key = 0;
  std::string_view format;
  static constexpr const char* kTarget = "ep_pack";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // tokens [n, H]
        .template Arg<I32>()        // topk_ids [n, K]
        .template Arg<F32>()        // router_weights [n, K]
        .template Arg<F32>()        // input_scale [1]
        .template Ret<Wire>()       // send [R, region]
        .template Ret<I32>()        // slot_of [n, K]
        .template Ret<I32>()        // position [n, K]
        .template Ret<I32>()        // num_invalid [1]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<bool>("in_halves")
        .template Attr<int64_t>("num_experts")
        .template Attr<std::string_view>("format");
  }
  ffi::Error Decode(const AnyBuffer& tokens, const I32& ids, const F32& weights,
                    const F32& input_scale, Out<Wire> send, Out<I32> slot_of, Out<I32> position,
                    Out<I32> num_invalid, int64_t group_key, int64_t site, bool in_halves,
                    int64_t num_experts, std::string_view format_name) {
    key = group_key;
    format = format_name;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    CheckTokens(check, "tokens", tokens, shape, step.element);
    check.Rank("topk_ids", ids, 2);
    check.Rank("the wire buffer", *send, 2);
    if (!check.ok()) return check.error();
    shape.top_k = Dim(ids, 1);
    shape.ranks = Dim(*send, 0);
    check.Require(shape.ranks > 0 && num_experts > 0 && num_experts % shape.ranks == 0,
                  "num_experts must be a positive multiple of the ranks, got " +
                      std::to_string(num_experts) + " and " + std::to_string(shape.ranks));
    if (!check.ok()) return check.error();
    shape.local_experts = num_experts / shape.ranks;
    check.Shape(shape);
    check.Dims("topk_ids", ids, {shape.tokens, shape.top_k});
    check.Dims("router_weights", weights, {shape.tokens, shape.top_k});
    check.Dims("slot_of", *slot_of, {shape.tokens, shape.top_k});
    check.Dims("position", *position, {shape.tokens, shape.top_k});
    check.Dims("num_invalid", *num_invalid, {1});
    CheckInputScale(check, input_scale);
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    if (!check.ok()) return check.error();
    const auto message =
        DispatchMessage::Of(encoding.payload_bytes, encoding.scale_bytes, shape.top_k);
    CheckWire(check, *send, shape.ranks,
              RegionHeader::Of(shape.local_experts).bytes + shape.tokens * message.bytes);
    if (!check.ok()) return check.error();
    step.tokens = tokens.untyped_data();
    step.ids = ids.typed_data();
    step.weights = weights.typed_data();
    step.input_scale = input_scale.typed_data();
    step.send = Bytes(*send);
    step.slot_of = slot_of->typed_data();
    step.position = position->typed_data();
    step.num_invalid = num_invalid->typed_data();
    step.tag = RegionTag::Of(key, CallOp::kDispatch, in_halves, site, RegionBytes(*send));
    return ffi::Error::Success();
  }
};

// What came with a dispatch's pack goes through its unpack, in its place: with the results of no
// call it changes too.
inline void PassOn(Checker& check, const char* name, const I32& from, const I32& to,
                   std::initializer_list<int64_t> dims) {
  check.Dims(name, from, dims);
  check.Dims(name, to, dims);
  check.Require(from.element_count() == 0 || from.untyped_data() == to.untyped_data(),
                std::string(name) + " must be given as its own result");
}

struct DecodedUnpack {
  UnpackStep step{};
  int64_t key = 0;
  std::string_view format;
  static constexpr const char* kTarget = "ep_unpack";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return Arrived::Bind(std::move(binding)
                             .template Arg<Wire>()  // recv [R, region]
                             .template Arg<I32>()   // slot_of [n, K]
                             .template Arg<I32>())  // num_invalid [1]
        .template Ret<I32>()                        // row_base [R, L]
        .template Ret<I32>()                        // slot_of, in place
        .template Ret<I32>()                        // num_invalid, in place
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("expert_alignment")
        .template Attr<bool>("zero_tail")
        .template Attr<std::string_view>("format")
        .template Attr<std::string_view>("scale_layout");
  }
  ffi::Error Decode(const Wire& recv, const I32& slot_of, const I32& num_invalid,
                    Out<AnyBuffer> rows, Out<AnyBuffer> scales, Out<I32> row_offsets,
                    Out<I32> group_sizes, Out<I32> expert_counts, Out<I32> expert_ids,
                    Out<I32> scales_offsets, Out<I32> src_info, Out<F32> row_weights,
                    Out<I32> num_dropped, Out<I32> row_of, Out<I32> row_slot, Out<I32> slot_counts,
                    Out<I32> row_base, Out<I32> slot_of_on, Out<I32> num_invalid_on,
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
    arrived.ReadShape(check, format, shape);
    if (!check.ok()) return check.error();
    shape.expert_alignment = expert_alignment;
    check.Shape(shape);
    if (!check.ok()) return check.error();
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    arrived.Check(check, shape, encoding, tiled);
    check.Dims("row_base", *row_base, {shape.ranks, shape.local_experts});
    PassOn(check, "slot_of", slot_of, *slot_of_on, {shape.tokens, shape.top_k});
    PassOn(check, "num_invalid", num_invalid, *num_invalid_on, {1});
    if (!check.ok()) return check.error();
    const auto message =
        DispatchMessage::Of(encoding.payload_bytes, encoding.scale_bytes, shape.top_k);
    CheckWire(check, recv, shape.ranks,
              RegionHeader::Of(shape.local_experts).bytes + shape.tokens * message.bytes);
    if (!check.ok()) return check.error();
    arrived.Fill(step, tiled);
    step.zero_tail = zero_tail;
    step.recv = Bytes(recv);
    step.row_base = row_base->typed_data();
    step.slot_of = slot_of_on->typed_data();
    step.num_invalid = num_invalid_on->typed_data();
    return ffi::Error::Success();
  }
};

inline CachedDispatchMessage CachedMessageOf(const Encoding& encoding, int64_t num_weights) {
  return CachedDispatchMessage::Of(encoding.payload_bytes, encoding.scale_bytes, num_weights);
}
template <typename Step>
int64_t CachedRegionBytes(const Step& step, const Encoding& encoding) {
  const int64_t message_bytes = CachedMessageOf(encoding, step.num_weights).bytes;
  return CachedRegion::Of(step.shape.tokens, message_bytes).bytes;
}

struct DecodedCachedPack {
  CachedPackStep step{};
  std::string_view format;
  static constexpr const char* kTarget = "ep_pack_cached";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // tokens [n, H]
        .template Arg<F32>()        // weights [n, K] or [n, 0]
        .template Arg<I32>()        // slot_of [n, K]
        .template Ret<Wire>()       // send [R, region]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<std::string_view>("format");
  }
  ffi::Error Decode(const AnyBuffer& tokens, const F32& weights, const I32& slot_of, Out<Wire> send,
                    int64_t key, int64_t site, std::string_view format_name) {
    format = format_name;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    CheckTokens(check, "tokens", tokens, shape, step.element);
    check.Rank("weights", weights, 2);
    check.Rank("slot_of", slot_of, 2);
    check.Rank("the wire buffer", *send, 2);
    if (!check.ok()) return check.error();
    shape.ranks = Dim(*send, 0);
    shape.top_k = Dim(slot_of, 1);
    step.num_weights = Dim(weights, 1);
    check.Shape(shape);
    check.Require(step.num_weights == 0 || step.num_weights == shape.top_k,
                  "weights must have 0 or K columns");
    check.Dims("weights", weights, {shape.tokens, step.num_weights});
    check.Dims("slot_of", slot_of, {shape.tokens, shape.top_k});
    if (!check.ok()) return check.error();
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    if (!check.ok()) return check.error();
    CheckWire(check, *send, shape.ranks, CachedRegionBytes(step, encoding));
    if (!check.ok()) return check.error();
    step.tokens = tokens.untyped_data();
    step.weights = weights.typed_data();
    step.slot_of = slot_of.typed_data();
    step.send = Bytes(*send);
    step.tag = RegionTag::Of(key, CallOp::kCachedDispatch, false, site, RegionBytes(*send));
    return ffi::Error::Success();
  }
};

struct DecodedCachedUnpack {
  CachedUnpackStep step{};
  int64_t key = 0;
  std::string_view format;
  static constexpr const char* kTarget = "ep_unpack_cached";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<Wire>()       // recv [R, region]
        .template Arg<I32>()        // row_of [R, n, K]
        .template Arg<I32>()        // row_slot [N]
        .template Ret<AnyBuffer>()  // rows [N, H]
        .template Ret<F32>()        // row_weights [N] or [0]
        .template Attr<int64_t>("key")
        .template Attr<std::string_view>("format");
  }
  ffi::Error Decode(const Wire& recv, const I32& row_of, const I32& row_slot, Out<AnyBuffer> rows,
                    Out<F32> row_weights, int64_t group_key, std::string_view format_name) {
    key = group_key;
    format = format_name;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    CheckTokens(check, "rows", *rows, shape, step.element);
    check.Rank("row_of", row_of, 3);
    check.Rank("row_weights", *row_weights, 1);
    if (!check.ok()) return check.error();
    shape.recv_rows = shape.tokens;
    shape.ranks = Dim(row_of, 0);
    shape.tokens = Dim(row_of, 1);
    shape.top_k = Dim(row_of, 2);
    const bool weighted = Dim(*row_weights, 0) != 0;
    step.num_weights = weighted ? shape.top_k : 0;
    check.Shape(shape);
    check.Dims("row_slot", row_slot, {shape.recv_rows});
    check.Dims("row_weights", *row_weights, {weighted ? shape.recv_rows : 0});
    if (!check.ok()) return check.error();
    const Encoding encoding = CheckFormat(check, format, shape.hidden, shape.element_bytes);
    if (!check.ok()) return check.error();
    CheckWire(check, recv, shape.ranks, CachedRegionBytes(step, encoding));
    if (!check.ok()) return check.error();
    step.recv = Bytes(recv);
    step.row_of = row_of.typed_data();
    step.row_slot = row_slot.typed_data();
    step.rows = static_cast<uint8_t*>(rows->untyped_data());
    step.row_weights = row_weights->typed_data();
    return ffi::Error::Success();
  }
};

}  // namespace jax_ep::ffi_layer
