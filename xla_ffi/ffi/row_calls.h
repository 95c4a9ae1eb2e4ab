// The tables of the passes over rows that gradients need (protocol/row_steps.h). They run on any
// GPU and nowhere else: on CPUs XLA's own code is as good.
#pragma once

#include <string>
#include <tuple>

#include "ffi/operand_table.h"
#include "protocol/row_steps.h"
#include "protocol/shape.h"

namespace jax_ep::ffi_layer {

struct CombineBackCall : Call<CombineBackStep> {
  static constexpr const char* kTarget = "ep_combine_back";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("cotangents", {N, H}, &Step::cotangents),
                 Arg<Token>("expert_out", {N, H}, &Step::expert_out),
                 Arg<F32>("router_weights", {N}, &Step::router_weights),
                 Arg<I32>("row_slot", {N}, &Step::row_slot));
  static constexpr auto kResults =
      std::tuple(Ret<Token>("to_rows", {N, H}, &Step::to_rows).InPlaceOf("cotangents"),
                 Ret<F32>("to_weights", {N}, &Step::to_weights));
  static constexpr auto kAttributes = std::tuple();

  void Size(Checker& check) {
    step.rows = sizes[Dim::N];
    step.hidden = sizes[Dim::H];
    const int64_t bytes = step.hidden * ElementBytes(element);
    if (bytes <= 0 || bytes % kRowAlignBytes != 0) {
      check.Fail("a row must be a positive multiple of 16 bytes, got " + std::to_string(bytes));
    }
  }
};

// Rows of A codes, each 128 of which share a scale.
template <typename StepType>
struct CodedRowsCall : Call<StepType> {
  static constexpr int64_t kBlock = 128;
  static constexpr auto kGroupSizes = Arg<I32>("group_sizes", {Dim::G}, &StepType::sizes);

  void Infer(Checker& check) {
    const int64_t columns = this->sizes[Dim::A];
    if (columns <= 0 || columns % kBlock != 0) {
      check.Fail("A must be a positive multiple of 128, got " + std::to_string(columns));
    }
    this->sizes.Set(Dim::X, columns / kBlock);
  }
  void Size(Checker&) {
    this->step.rows = this->sizes[Dim::N];
    this->step.groups = this->sizes[Dim::G];
    this->step.columns = this->sizes[Dim::A];
  }
};

struct QuantizeCotangentsCall : CodedRowsCall<QuantizeCotangentsStep> {
  static constexpr const char* kTarget = "ep_quantize_cotangents";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("values", {N, A}, &Step::values), kGroupSizes);
  static constexpr auto kResults = std::tuple(Ret<Code>("codes", {N, A}, &Step::codes),
                                              Ret<F32>("scales", {N, X}, &Step::scales));
  static constexpr auto kAttributes = std::tuple();
};

struct DequantizeRowsCall : CodedRowsCall<DequantizeRowsStep> {
  static constexpr const char* kTarget = "ep_dequantize_rows";
  static constexpr auto kOperands =
      std::tuple(Arg<Code>("codes", {N, A}, &Step::codes),
                 Arg<F32>("scales", {N, X}, &Step::scales), kGroupSizes);
  static constexpr auto kResults = std::tuple(Ret<Output>("out", {N, A}, &Step::out));
  static constexpr auto kAttributes = std::tuple(kOutDtype);
};

}  // namespace jax_ep::ffi_layer
