// The tables of the grouped matmuls: N rows in G groups of `group_sizes`, and a matrix per group.
// protocol/matmul_steps.h says what each of them computes.
#pragma once

#include <string>
#include <tuple>

#include "ffi/operand_table.h"
#include "protocol/matmul_steps.h"
#include "protocol/shape.h"

namespace jax_ep::ffi_layer {

// Kernels count in 32 bits, and no product of two such sizes overflows.
inline void CheckSizes(Checker& check, const CallState& call, bool has_rows) {
  const auto within = [&](Dim dim, int64_t least) {
    const int64_t size = call.sizes[dim];
    if (size >= least && size <= kMaxIndex) return;
    check.Fail(std::string(kDimNames[static_cast<size_t>(dim)]) + " must be in [" +
               std::to_string(least) + ", " + std::to_string(kMaxIndex) + "], got " +
               std::to_string(size));
  };
  within(Dim::G, 1);
  within(Dim::A, 1);
  within(Dim::B, 1);
  if (has_rows) within(Dim::N, 0);
}

inline void RequireMultiple(Checker& check, const CallState& call, int64_t multiple) {
  for (const Dim dim : {Dim::A, Dim::B}) {
    if (call.sizes[dim] % multiple == 0) continue;
    check.Fail(std::string(kDimNames[static_cast<size_t>(dim)]) + " must be a multiple of " +
               std::to_string(multiple) + ", got " + std::to_string(call.sizes[dim]));
  }
}

// Blocks of 128 x 128 of matrices share a scale.
inline constexpr int64_t kMatrixBlock = 128;

template <MatmulKind kKind>
struct MatmulCall : Call<MatmulStep> {
  static constexpr auto kGroupSizes = Arg<I32>("group_sizes", {Dim::G}, &Step::sizes);

  void Infer(Checker& check) {
    CheckSizes(check, *this, true);
    RequireMultiple(check, *this, ColumnsAlign(kKind));
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] / kMatrixBlock);
  }
  void Size(Checker& check) {
    step.kind = kKind;
    step.rows = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.left_columns = sizes[Dim::A];
    step.columns = sizes[Dim::B];
    const bool is_float = step.out_element == ElementType::kFloat32;
    if (kKind == MatmulKind::kCodeRows) {
      step.element = is_float ? ElementType::kBFloat16 : step.out_element;
    } else if (OfCodes(kKind)) {
      check.Require(!is_float, "gate and up must have 16 bits");
      step.element = step.out_element;
    } else {
      check.Require(step.element != ElementType::kFloat32, "operands must have 16 bits");
    }
    if (kKind == MatmulKind::kOuter) {
      check.Require(is_float || step.out_element == step.element,
                    "out must have the dtype of the operands, or float32");
    }
  }
};

// ---- Of 16 bits ---------------------------------------------------------------------------------

struct RowsCall : MatmulCall<MatmulKind::kRows> {
  static constexpr const char* kTarget = "ep_rows";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {N, A}, &Step::left),
                 Arg<Token>("matrices", {G, A, B}, &Step::right), kGroupSizes);
  static constexpr auto kResults = std::tuple(Ret<Token>("out", {N, B}, &Step::out));
  static constexpr auto kAttributes = std::tuple();
};

struct RowsTransposedCall : MatmulCall<MatmulKind::kRowsTransposed> {
  static constexpr const char* kTarget = "ep_rows_transposed";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {N, A}, &Step::left),
                 Arg<Token>("matrices", {G, B, A}, &Step::right), kGroupSizes);
  static constexpr auto kResults = std::tuple(Ret<Token>("out", {N, B}, &Step::out));
  static constexpr auto kAttributes = std::tuple();
};

struct GateUpCall : MatmulCall<MatmulKind::kGateUp> {
  static constexpr const char* kTarget = "ep_gate_up";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {N, A}, &Step::left),
                 Arg<Token>("matrices", {G, A, 2, B}, &Step::right), kGroupSizes);
  static constexpr auto kResults = std::tuple(
      Ret<Token>("h", {N, B}, &Step::out), Ret<Token>("both", {N, 2, B}, &Step::both).When(kKeep));
  static constexpr auto kAttributes = std::tuple(kKeep);
};

struct DownBackCall : MatmulCall<MatmulKind::kDownBack> {
  static constexpr const char* kTarget = "ep_down_back";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("cotangents", {N, A}, &Step::left),
                 Arg<Token>("matrices", {G, B, A}, &Step::right),
                 Arg<Token>("both", {N, 2, B}, &Step::both), kGroupSizes);
  static constexpr auto kResults =
      std::tuple(Ret<Token>("to_both", {N, 2, B}, &Step::to_both).InPlaceOf("both"));
  static constexpr auto kAttributes = std::tuple();
};

struct OuterCall : MatmulCall<MatmulKind::kOuter> {
  static constexpr const char* kTarget = "ep_outer";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("left", {N, A}, &Step::left), Arg<Token>("right", {N, B}, &Step::right),
                 kGroupSizes);
  static constexpr auto kResults = std::tuple(Ret<Output>("out", {G, A, B}, &Step::out));
  static constexpr auto kAttributes = std::tuple(kOutDtype);
};

// ---- Of codes -----------------------------------------------------------------------------------

// The scales of matrices lie in the weights' own order, [.., contracted, .., other], whether the
// codes are turned or not. Without `turned` the product is with the transposed weights, so it
// contracts the weights' other dimension.
struct CodeRowsCall : MatmulCall<MatmulKind::kCodeRows> {
  static constexpr const char* kTarget = "ep_code_rows";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {N, A}, &Step::left), Arg<F32>("row_scales", {N, X}, &Step::left_scales),
      Arg<Code>("matrices", {G, B, A}, &Step::right),
      Arg<F32>("matrix_scales", {G, Y, X}, &Step::right_scales).If(kTurned, {G, X, Y}),
      kGroupSizes);
  static constexpr auto kResults = std::tuple(Ret<Output>("out", {N, B}, &Step::out));
  static constexpr auto kAttributes = std::tuple(kTurned, kOutDtype);

  void Size(Checker& check) {
    MatmulCall::Size(check);
    step.SetRowsScales(turned);
  }
};

struct CodeGateUpCall : MatmulCall<MatmulKind::kCodeGateUp> {
  static constexpr const char* kTarget = "ep_code_gate_up";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {N, A}, &Step::left), Arg<F32>("row_scales", {N, X}, &Step::left_scales),
      Arg<Code>("matrices", {G, 2, B, A}, &Step::right),
      Arg<F32>("matrix_scales", {G, X, 2, Y}, &Step::right_scales), kGroupSizes);
  static constexpr auto kResults = std::tuple(
      Ret<Code>("h", {N, B}, &Step::out), Ret<F32>("h_scales", {N, Y}, &Step::out_scales),
      Ret<Output>("both", {N, 2, B}, &Step::both).When(kKeep));
  static constexpr auto kAttributes = std::tuple(kKeep, kOutDtype);

  void Size(Checker& check) {
    MatmulCall::Size(check);
    step.SetGateUpScales();
  }
};

struct CodeDownBackCall : MatmulCall<MatmulKind::kCodeDownBack> {
  static constexpr const char* kTarget = "ep_code_down_back";
  static constexpr auto kOperands =
      std::tuple(Arg<Code>("cotangents", {N, A}, &Step::left),
                 Arg<F32>("cotangent_scales", {N, X}, &Step::left_scales),
                 Arg<Code>("matrices", {G, B, A}, &Step::right),
                 Arg<F32>("matrix_scales", {G, Y, X}, &Step::right_scales),
                 Arg<Output>("both", {N, 2, B}, &Step::both), kGroupSizes);
  static constexpr auto kResults =
      std::tuple(Ret<Code>("codes", {N, 2, B}, &Step::out),
                 Ret<F32>("code_scales", {N, 2, Y}, &Step::out_scales),
                 Ret<Output>("to_both", {N, 2, B}, &Step::to_both).InPlaceOf("both"));
  static constexpr auto kAttributes = std::tuple(kOutDtype);

  void Size(Checker& check) {
    MatmulCall::Size(check);
    step.SetRowsScales(false);
  }
};

// ---- Both products of experts -------------------------------------------------------------------

// A is H and B is F.
template <MatmulKind kFirst>
struct BothCall : Call<ExpertsStep> {
  void Infer(Checker& check) {
    CheckSizes(check, *this, true);
    RequireMultiple(check, *this, ColumnsAlign(kFirst));
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] / kMatrixBlock);
  }
  void Size(Checker& check) {
    step.codes = OfCodes(kFirst);
    step.rows = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.hidden = sizes[Dim::A];
    step.inner = sizes[Dim::B];
    const bool is_float = step.out_element == ElementType::kFloat32;
    if (step.codes) {
      step.element = is_float ? ElementType::kBFloat16 : step.out_element;
    } else {
      check.Require(step.element != ElementType::kFloat32, "operands must have 16 bits");
    }
  }
};

struct ExpertsCall : BothCall<MatmulKind::kGateUp> {
  static constexpr const char* kTarget = "ep_experts";
  static constexpr auto kOperands = std::tuple(
      Arg<Token>("rows", {N, A}, &Step::left), Arg<Token>("gate_up", {G, A, 2, B}, &Step::gate_up),
      Arg<Token>("down", {G, B, A}, &Step::down), Arg<I32>("group_sizes", {G}, &Step::sizes));
  static constexpr auto kResults =
      std::tuple(Ret<Token>("h", {N, B}, &Step::h), Ret<Token>("out", {N, A}, &Step::out));
  static constexpr auto kAttributes = std::tuple();
};

struct CodeExpertsCall : BothCall<MatmulKind::kCodeGateUp> {
  static constexpr const char* kTarget = "ep_code_experts";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {N, A}, &Step::left), Arg<F32>("row_scales", {N, X}, &Step::left_scales),
      Arg<Code>("gate_up", {G, 2, B, A}, &Step::gate_up),
      Arg<F32>("gate_up_scales", {G, X, 2, Y}, &Step::gate_up_scales),
      Arg<Code>("down", {G, A, B}, &Step::down),
      Arg<F32>("down_scales", {G, Y, X}, &Step::down_scales),
      Arg<I32>("group_sizes", {G}, &Step::sizes));
  static constexpr auto kResults =
      std::tuple(Ret<Code>("h", {N, B}, &Step::h), Ret<F32>("h_scales", {N, Y}, &Step::h_scales),
                 Ret<Output>("out", {N, A}, &Step::out));
  static constexpr auto kAttributes = std::tuple(kOutDtype);
};

// ---- Of four bits -------------------------------------------------------------------------------

// Rows are bfloat16, and `scaled` says whether they have scales. With two sides, gate and up,
// SwiGLU is applied.
template <int64_t kSides>
struct FourBitCall : Call<FourBitStep> {
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {Dim::N, Dim::A}, &FourBitStep::left),
                 Arg<F32>("row_scales", {Dim::N, Dim::X}, &FourBitStep::left_scales).When(kScaled),
                 Arg<U8>("tiles", {Dim::G, Dim::Y, Dim::Z, kFourBitAtomBytes}, &FourBitStep::right),
                 Arg<I32>("group_sizes", {Dim::G}, &FourBitStep::sizes));
  static constexpr auto kResults =
      std::tuple(Ret<Output>("out", {Dim::N, Dim::B}, &FourBitStep::out));
  static constexpr auto kAttributes = std::tuple(kScaled, kOutDtype);

  void Infer(Checker& check) {
    CheckSizes(check, *this, true);
    RequireMultiple(check, *this, kFourBitColumns / kSides);
    check.Require(sizes[Dim::A] % kFourBitAlign == 0, "A must be a multiple of 128");
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] * kSides / kFourBitColumns);
    sizes.Set(Dim::Z, sizes[Dim::A] / kFourBitSteps);
  }
  void Size(Checker& check) {
    step.gate_up = kSides == 2;
    step.rows = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.left_columns = sizes[Dim::A];
    step.columns = sizes[Dim::B];
    check.Require(element == ElementType::kBFloat16, "rows must be bfloat16");
    check.Require(step.out_element != ElementType::kFloat16, "out must be bfloat16 or float32");
  }
};
struct FourBitRowsCall : FourBitCall<1> {
  static constexpr const char* kTarget = "ep_four_bit_rows";
};
struct FourBitGateUpCall : FourBitCall<2> {
  static constexpr const char* kTarget = "ep_four_bit_gate_up";
};

// ---- Their weights ------------------------------------------------------------------------------

struct QuantizeMatricesCall : Call<QuantizeMatricesStep> {
  static constexpr const char* kTarget = "ep_quantize_matrices";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("matrices", {G, A, Z, B}, &Step::matrices));
  static constexpr auto kResults =
      std::tuple(Ret<Code>("codes", {G, A, Z, B}, &Step::codes),
                 Ret<F32>("scales", {G, X, Z, Y}, &Step::scales),
                 Ret<Code>("turned", {G, Z, B, A}, &Step::turned).When(kTurned));
  static constexpr auto kAttributes = std::tuple(kTurned);

  void Infer(Checker& check) {
    CheckSizes(check, *this, false);
    check.Require(sizes[Dim::Z] == 1 || sizes[Dim::Z] == 2, "matrices must have one side or two");
    RequireMultiple(check, *this, kMatrixBlock);
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] / kMatrixBlock);
  }
  void Size(Checker&) {
    step.groups = sizes[Dim::G];
    step.rows = sizes[Dim::A];
    step.sides = sizes[Dim::Z];
    step.columns = sizes[Dim::B];
  }
};

}  // namespace jax_ep::ffi_layer
