// As operands.h, for the two targets of combine.
#pragma once

#include <utility>

#include "ffi/decode.h"
#include "formats/combine_wire.h"

namespace jax_ep::ffi_layer {

// `wire` is a dtype or, of quantised sums, the name of their format.
template <typename Step>
void CheckWireType(Checker& check, std::string_view wire, Step& step) {
  step.quantized = wire == CombineFormat::kName;
  if (wire == "float32" || step.quantized) {
    step.wire = ElementType::kFloat32;
  } else if (wire == "bfloat16") {
    step.wire = ElementType::kBFloat16;
  } else if (wire == "float16") {
    step.wire = ElementType::kFloat16;
  } else {
    check.Require(false, "unknown combine_dtype " + std::string(wire));
  }
  check.Require(!step.quantized || step.shape.hidden % CombineFormat::kBlock == 0,
                "hidden_size must be a multiple of 128 where sums are quantised");
}

// What both kinds of combine take at the expert rank. `shape` has all but the sizes of `row_of`.
struct RowOperands {
  const AnyBuffer& expert_out;
  const F32& row_weights;
  const F32& weight_grads;
  const I32& row_of;
  const I32& slot_counts;
  bool weighted;
  bool with_weight_grads;

  template <typename Step>
  void Decode(Checker& check, Step& step) const {
    Decode(check, step, step.shape.tokens, step.shape.top_k);
  }
  // With slots of other tokens than the step's.
  template <typename Step>
  void Decode(Checker& check, Step& step, int64_t tokens, int64_t top_k) const {
    const EpShape& shape = step.shape;
    check.Dims("expert_out", expert_out, {shape.recv_rows, shape.hidden});
    check.Dims("router_weights", row_weights, {weighted ? shape.recv_rows : 0});
    check.Dims("weight_grads", weight_grads, {with_weight_grads ? shape.recv_rows : 0});
    check.Dims("row_of", row_of, {shape.ranks, tokens, top_k});
    check.Dims("slot_counts", slot_counts, {shape.ranks});
    step.expert_out = expert_out.untyped_data();
    step.row_weights = weighted ? row_weights.typed_data() : nullptr;
    step.weight_grads = weight_grads.typed_data();
    step.row_of = row_of.typed_data();
    step.slot_counts = slot_counts.typed_data();
  }
};

// And at the source.
struct TokenOperands {
  const I32& slot_of;
  const AnyBuffer& residual;
  const AnyBuffer& output;
  bool with_residual;

  template <typename Step>
  void Decode(Checker& check, Step& step) const {
    const EpShape& shape = step.shape;
    check.Require(residual.element_type() == output.element_type(),
                  "residual must have the dtype of the output");
    check.Dims("residual", residual, {with_residual ? shape.tokens : 0, shape.hidden});
    check.Dims("slot_of", slot_of, {shape.tokens, shape.top_k});
    step.slot_of = slot_of.typed_data();
    step.residual = with_residual ? residual.untyped_data() : nullptr;
    step.output = output.untyped_data();
  }
};

struct DecodedCombinePack {
  CombinePackStep step{};
  static constexpr const char* kTarget = "ep_combine_pack";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<AnyBuffer>()  // expert_out [N, H]
        .template Arg<F32>()        // router_weights [N] or [0]
        .template Arg<F32>()        // weight_grads [N] or [0]
        .template Arg<I32>()        // row_of [R, n, K]
        .template Arg<I32>()        // slot_counts [R]
        .template Ret<Wire>()       // send [R, region]
        .template Attr<int64_t>("key")
        .template Attr<int64_t>("site")
        .template Attr<bool>("in_halves")
        .template Attr<bool>("weighted")
        .template Attr<bool>("with_weight_grads")
        .template Attr<std::string_view>("combine_dtype");
  }
  ffi::Error Decode(const AnyBuffer& expert_out, const F32& row_weights, const F32& weight_grads,
                    const I32& row_of, const I32& slot_counts, Out<Wire> send, int64_t key,
                    int64_t site, bool in_halves, bool weighted, bool with_weight_grads,
                    std::string_view combine_dtype) {
    Checker check(kTarget);
    EpShape& shape = step.shape;
    CheckTokens(check, "expert_out", expert_out, shape, step.element);
    CheckWireType(check, combine_dtype, step);
    check.Rank("row_of", row_of, 3);
    if (!check.ok()) return check.error();
    shape.recv_rows = shape.tokens;
    shape.ranks = Dim(row_of, 0);
    shape.tokens = Dim(row_of, 1);
    shape.top_k = Dim(row_of, 2);
    step.num_weights = with_weight_grads ? shape.top_k : 0;
    check.Shape(shape);
    if (!check.ok()) return check.error();
    const RowOperands operands{expert_out,  row_weights, weight_grads,     row_of,
                               slot_counts, weighted,    with_weight_grads};
    operands.Decode(check, step);
    CheckWire(check, *send, shape.ranks,
              CombineRegion::Of(shape.tokens, CombineMessageOf(step).bytes).bytes);
    if (!check.ok()) return check.error();
    step.send = Bytes(*send);
    step.tag = RegionTag::Of(key, CallOp::kCombine, in_halves, site, RegionBytes(*send));
    return ffi::Error::Success();
  }
};

struct DecodedCombineUnpack {
  CombineUnpackStep step{};
  int64_t key = 0;
  static constexpr const char* kTarget = "ep_combine_unpack";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return std::move(binding)
        .template Arg<Wire>()       // recv [R, region]
        .template Arg<I32>()        // slot_of [n, K]
        .template Arg<AnyBuffer>()  // residual [n, H] or [0, H]
        .template Arg<F32>()        // router_weights [n, K] or [0, K], of by_entry
        .template Arg<AnyBuffer>()  // shared_rows [N, H] or [0, H]
        .template Arg<I32>()        // shared_part [2] or [0]
        .template Ret<AnyBuffer>()  // output [n, H]
        .template Ret<F32>()        // weight_grads [n, K] or [n, 0]
        .template Attr<int64_t>("key")
        .template Attr<bool>("with_residual")
        .template Attr<bool>("by_entry")
        .template Attr<bool>("with_entry_weights")
        .template Attr<bool>("with_shared")
        .template Attr<std::string_view>("combine_dtype");
  }
  ffi::Error Decode(const Wire& recv, const I32& slot_of, const AnyBuffer& residual,
                    const F32& entry_weights, const AnyBuffer& shared_rows, const I32& shared_part,
                    Out<AnyBuffer> output, Out<F32> weight_grads, int64_t group_key,
                    bool with_residual, bool by_entry, bool with_entry_weights, bool with_shared,
                    std::string_view combine_dtype) {
    key = group_key;
    Checker check(kTarget);
    EpShape& shape = step.shape;
    CheckTokens(check, "output", *output, shape, step.element);
    CheckWireType(check, combine_dtype, step);
    check.Rank("slot_of", slot_of, 2);
    check.Rank("shared_rows", shared_rows, 2);
    check.Rank("weight_grads", *weight_grads, 2);
    check.Rank("the wire buffer", recv, 2);
    if (!check.ok()) return check.error();
    shape.ranks = Dim(recv, 0);
    shape.top_k = Dim(slot_of, 1);
    step.num_weights = Dim(*weight_grads, 1);
    check.Shape(shape);
    check.Require(step.num_weights == 0 || step.num_weights == shape.top_k,
                  "weight_grads must have 0 or K columns");
    check.Dims("weight_grads", *weight_grads, {shape.tokens, step.num_weights});
    if (!check.ok()) return check.error();
    const TokenOperands operands{slot_of, residual, *output, with_residual};
    operands.Decode(check, step);
    shape.recv_rows = with_shared ? Dim(shared_rows, 0) : 0;
    step.by_entry = by_entry;
    check.Require(by_entry || !with_entry_weights,
                  "weights at the source must be of rows, not of sums");
    check.Require(!by_entry || step.num_weights == 0, "rows must travel without weight_grads");
    check.Dims("router_weights", entry_weights,
               {with_entry_weights ? shape.tokens : 0, shape.top_k});
    check.Require(shared_rows.element_type() == output->element_type(),
                  "shared_rows must have the dtype of the output");
    check.Dims("shared_rows", shared_rows, {shape.recv_rows, shape.hidden});
    check.Dims("shared_part", shared_part, {with_shared ? 2 : 0});
    CheckWire(check, recv, shape.ranks,
              CombineRegion::Of(step.slots_of_rank(), CombineMessageOf(step).bytes).bytes);
    check.Shape(shape);
    if (!check.ok()) return check.error();
    step.recv = Bytes(recv);
    step.entry_weights = with_entry_weights ? entry_weights.typed_data() : nullptr;
    step.shared_rows = with_shared ? shared_rows.untyped_data() : nullptr;
    step.shared_part = shared_part.typed_data();
    step.weight_grads = weight_grads->typed_data();
    return ffi::Error::Success();
  }
};

}  // namespace jax_ep::ffi_layer
