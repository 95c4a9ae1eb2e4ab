// The tables of the collective transport, and of quantising without a dispatch.
#pragma once

#include <tuple>

#include "ffi/decode.h"
#include "protocol/layout.h"

namespace jax_ep::ffi_layer {

// The results at the expert rank that all dispatches with routing share.
struct ArrivalRows {
  using enum Dim;
  static constexpr auto kRows =
      std::tuple(Ret<Payload>("tokens", {N, P}, &Arrivals::rows),
                 Ret<Scale>("scales", {A, B}, &Arrivals::scales)
                     .If(kTiled, {V, C, 32, 4, 4})
                     .When(kQuantized, Shape{0}),
                 Ret<I32>("row_offsets", {G + 1}, &Arrivals::row_offsets),
                 Ret<I32>("group_sizes", {G}, &Arrivals::group_sizes),
                 Ret<I32>("expert_counts", {G}, &Arrivals::expert_counts),
                 Ret<I32>("expert_ids", {G}, &Arrivals::expert_ids),
                 Ret<I32>("scales_offsets", {G}, &Arrivals::scales_offsets).When(kTiled),
                 Ret<I32>("src_info", {N, 3}, &Arrivals::src_info),
                 Ret<F32>("router_weights", {N}, &Arrivals::router_weights),
                 Ret<I32>("num_dropped", {1}, &Arrivals::num_dropped),
                 Ret<I32>("row_of", {R, n, K}, &Arrivals::row_of),
                 Ret<I32>("row_slot", {N}, &Arrivals::row_slot),
                 Ret<I32>("slot_counts", {R}, &Arrivals::slot_counts));
};

inline DispatchMessage DispatchMessageOf(const CallState& call) {
  return DispatchMessage::Of(call.encoding.payload_bytes, call.encoding.scale_bytes,
                             call.shape.top_k);
}
inline DispatchCachedMessage DispatchCachedMessageOf(const CallState& call) {
  return DispatchCachedMessage::Of(call.encoding.payload_bytes, call.encoding.scale_bytes,
                                   call.num_weights());
}

// The operands at the source rank that all dispatches with routing share. Tokens that come as codes
// have scales, which are omitted otherwise.
template <typename Step>
struct SentRows {
  using enum Dim;
  static constexpr auto kRows = std::tuple(
      Arg<Token>("tokens", {n, H}, &Step::tokens).If(kCoded, {n, P}, Kind::kPayload),
      Arg<I32>("topk_ids", {n, K}, &Step::ids), Arg<F32>("router_weights", {n, K}, &Step::weights),
      Arg<F32>("input_scale", {1}, &Step::input_scale),
      Arg<Scale>("token_scales", {n, S}, &Step::token_scales).When(kCoded, Shape{0}));
};

// Infers H from the payload's columns. Codes do not show the dtype of their tokens and need none.
inline void InferHidden(CallState& call) {
  call.sizes.Set(Dim::H, call.encoding.HiddenOf(call.sizes[Dim::P]));
}

// A call with a wire buffer `[R, W]`, of regions of `region_bytes` bytes.
template <typename Step>
struct WireCall : Call<Step> {
  int64_t region_bytes = 0;

  void SetRegion(int64_t bytes) {
    region_bytes = bytes;
    this->sizes.Set(Dim::W, bytes / kWireWordBytes);
  }
  // The tag with which the regions of a pack begin.
  RegionTag Tag(CallOp op) const {
    return RegionTag::Of(this->key, op, this->in_halves, this->site, region_bytes);
  }
};

// A first dispatch.
template <typename Step>
struct RoutedCall : WireCall<Step> {
  static constexpr bool kFormatted = true;

  void Size(Checker&) {
    const EpShape& shape = this->shape;
    this->SetRegion(RegionHeader::Of(shape.local_experts).bytes +
                    shape.tokens * DispatchMessageOf(*this).bytes);
  }
};

struct DispatchPackCall : RoutedCall<DispatchPackStep> {
  static constexpr const char* kTarget = "ep_dispatch_pack";
  static constexpr auto kOperands = SentRows<Step>::kRows;
  static constexpr auto kResults = std::tuple(Ret<Wire>("send", {R, W}, &Step::send),
                                              Ret<I32>("slot_of", {n, K}, &Step::slot_of),
                                              Ret<I32>("position", {n, K}, &Step::position),
                                              Ret<I32>("num_invalid", {1}, &Step::num_invalid));
  static constexpr auto kAttributes = std::tuple_cat(
      std::tuple(kKey, kSite, kInHalves, kNumExperts, kCoded, kFormat), kDispatchOptions);

  void Infer(Checker& check) {
    const int64_t ranks = sizes[R];
    if (ranks <= 0 || num_experts <= 0 || num_experts % ranks != 0) {
      return check.Fail("num_experts must be a positive multiple of the ranks, got " +
                        std::to_string(num_experts) + " and " + std::to_string(ranks));
    }
    sizes.Set(G, num_experts / ranks);
    if (coded) InferHidden(*this);
  }
  void Finish() { step.tag = Tag(CallOp::kDispatch); }
};

struct DispatchUnpackCall : RoutedCall<DispatchUnpackStep> {
  static constexpr const char* kTarget = "ep_dispatch_unpack";
  static constexpr auto kOperands =
      std::tuple(Arg<Wire>("recv", {R, W}, &Step::recv), Arg<I32>("slot_of", {n, K}, nullptr),
                 Arg<I32>("num_invalid", {1}, nullptr));
  // The results of a dispatch's pack pass through its unpack in place, because the unpack
  // overwrites them, too, if calls were mixed up.
  static constexpr auto kResults = std::tuple_cat(
      ArrivalRows::kRows,
      std::tuple(Ret<I32>("row_base", {R, G}, &Step::row_base),
                 Ret<I32>("slot_of", {n, K}, &Step::slot_of).InPlaceOf("slot_of"),
                 Ret<I32>("num_invalid", {1}, &Step::num_invalid).InPlaceOf("num_invalid")));
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kKey, kFormat), kDispatchOptions);

  void Infer(Checker&) { InferHidden(*this); }
};

// A dispatch along a route.
template <typename Step>
struct CachedCall : WireCall<Step> {
  static constexpr bool kFormatted = true;

  void Size(Checker&) {
    this->SetRegion(
        DispatchCachedRegion::Of(this->shape.tokens, DispatchCachedMessageOf(*this).bytes).bytes);
  }
};

struct DispatchCachedPackCall : CachedCall<DispatchCachedPackStep> {
  static constexpr const char* kTarget = "ep_dispatch_cached_pack";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("tokens", {n, H}, &Step::tokens),
                 Arg<F32>("router_weights", {n, K}, &Step::weights).Shows(kWithWeights, 1),
                 Arg<I32>("slot_of", {n, K}, &Step::slot_of));
  static constexpr auto kResults = std::tuple(Ret<Wire>("send", {R, W}, &Step::send));
  static constexpr auto kAttributes = std::tuple(kKey, kSite, kFormat);

  void Finish() { step.tag = Tag(CallOp::kDispatchCached); }
};

struct DispatchCachedUnpackCall : CachedCall<DispatchCachedUnpackStep> {
  static constexpr const char* kTarget = "ep_dispatch_cached_unpack";
  static constexpr auto kOperands = std::tuple(Arg<Wire>("recv", {R, W}, &Step::recv),
                                               Arg<I32>("row_of", {R, n, K}, &Step::row_of),
                                               Arg<I32>("row_slot", {N}, &Step::row_slot));
  static constexpr auto kResults =
      std::tuple(Ret<Token>("rows", {N, H}, &Step::rows),
                 Ret<F32>("router_weights", {N}, &Step::router_weights).Shows(kWithWeights));
  static constexpr auto kAttributes = std::tuple(kKey, kFormat);
};

// Rejects options of a combine that no step has together.
inline void CheckCombineOptions(Checker& check, const CallState& call) {
  check.Require(call.by_entry || !call.with_entry_weights,
                "weights at the source must be of rows, not of sums");
  check.Require(!call.by_entry || !call.with_weight_grads, "rows must travel without weight_grads");
}

// The operands at the expert rank that all combines share.
template <typename Step>
struct CombineRows {
  using enum Dim;
  static constexpr auto kRows =
      std::tuple(Arg<Token>("expert_out", {N, H}, &Step::expert_out),
                 Arg<F32>("router_weights", {N}, &Step::router_weights).Optional(),
                 Arg<I32>("slot_counts", {R}, &Step::slot_counts));
  // Of whole calls.
  static constexpr auto kWeightGrads =
      Arg<F32>("weight_grads", {N}, &Step::weight_grads).Shows(kWithWeightGrads);
  static constexpr auto kRowOf = Arg<I32>("row_of", {R, n, K}, &Step::row_of);
};

struct CombinePackCall : WireCall<CombinePackStep> {
  static constexpr const char* kTarget = "ep_combine_pack";
  using Rows = CombineRows<Step>;
  static constexpr auto kOperands =
      std::tuple_cat(Rows::kRows, std::tuple(Rows::kWeightGrads, Rows::kRowOf));
  static constexpr auto kResults = std::tuple(Ret<Wire>("send", {R, W}, &Step::send));
  static constexpr auto kAttributes =
      std::tuple_cat(std::tuple(kKey, kSite, kInHalves), kCombineOptions);

  void Size(Checker&) {
    SetRegion(CombineRegion::Of(shape.tokens, CombineMessageOf(step).bytes).bytes);
  }
  void Finish() { step.tag = Tag(CallOp::kCombine); }
};

// The operands at the source that all combines share.
template <typename Step>
struct SumRows {
  using enum Dim;
  static constexpr auto kRows =
      std::tuple(Arg<I32>("slot_of", {n, K}, &Step::slot_of),
                 Arg<Token>("residual", {n, H}, &Step::residual).Optional(),
                 Arg<F32>("entry_weights", {n, K}, &Step::entry_weights).Shows(kWithEntryWeights),
                 Arg<Token>("shared_rows", {N, H}, &Step::shared_rows).Shows(kWithShared),
                 Arg<I32>("shared_part", {2}, &Step::shared_part).When(kWithShared));
};

struct CombineUnpackCall : WireCall<CombineUnpackStep> {
  static constexpr const char* kTarget = "ep_combine_unpack";
  static constexpr auto kOperands =
      std::tuple_cat(std::tuple(Arg<Wire>("recv", {R, W}, &Step::recv)), SumRows<Step>::kRows);
  static constexpr auto kResults =
      std::tuple(Ret<Token>("output", {n, H}, &Step::output),
                 Ret<F32>("weight_grads", {n, K}, &Step::weight_grads).Shows(kWithWeightGrads, 1));
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kKey), kCombineOptions);

  void Size(Checker& check) {
    CheckCombineOptions(check, *this);
    SetRegion(CombineRegion::Of(step.slots_of_rank(), CombineMessageOf(step).bytes).bytes);
  }
};

// ---- Quantising alone ---------------------------------------------------------------------------

// Both directions; leading dimensions are rows. `input_scale` has one value, or one for each of
// equally long runs of rows.
template <typename Step>
struct QuantizingCall : Call<Step> {
  static constexpr bool kFormatted = true;
  // The bytes of a row of so many columns do not overflow.
  static constexpr int64_t kMostColumns = int64_t{1} << 40;
  static constexpr auto kAttributes = std::tuple(kFormat);

  void Infer(Checker& check) {
    const int64_t rows = this->sizes[Dim::n], hidden = this->sizes[Dim::H];
    const int64_t scales = this->sizes[Dim::I];
    check.Require(this->quantized, "the format must have scales");
    check.Require(rows >= 0 && hidden > 0 && hidden <= kMostColumns,
                  "tokens must have a positive last dimension, of at most 2^40");
    check.Require(scales > 0 && rows % scales == 0,
                  "input_scale must have one value, or one for each run of rows");
  }
  void Size(Checker&) {
    this->step.rows = this->sizes[Dim::n];
    this->step.hidden = this->sizes[Dim::H];
    this->step.num_input_scales = this->sizes[Dim::I];
  }
};

struct QuantizeCall : QuantizingCall<QuantizeStep> {
  static constexpr const char* kTarget = "ep_quantize";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("tokens", {n, H}, &Step::tokens).As(Form::kLeading),
                 Arg<F32>("input_scale", {I}, &Step::input_scales).As(Form::kFlat));
  static constexpr auto kResults =
      std::tuple(Ret<Payload>("payload", {n, P}, &Step::payload).As(Form::kLeading),
                 Ret<Scale>("scales", {n, S}, &Step::scales).As(Form::kLeading));
};

struct DequantizeCall : QuantizingCall<DequantizeStep> {
  static constexpr const char* kTarget = "ep_dequantize";
  static constexpr auto kOperands =
      std::tuple(Arg<Payload>("payload", {n, P}, &Step::payload).As(Form::kLeading),
                 Arg<Scale>("scales", {n, S}, &Step::scales).As(Form::kLeading),
                 Arg<F32>("input_scale", {I}, &Step::input_scales).As(Form::kFlat));
  static constexpr auto kResults =
      std::tuple(Ret<Token>("tokens", {n, H}, &Step::tokens).As(Form::kLeading));
};

}  // namespace jax_ep::ffi_layer
