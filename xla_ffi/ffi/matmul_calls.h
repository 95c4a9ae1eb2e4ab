// The tables of the grouped matmuls: N rows in G groups of `group_sizes`, and a matrix per group.
// protocol/matmul_steps.h says what each of them computes; N, A and B here are its M, K and N.
#pragma once

#include <string>
#include <tuple>

#include "ffi/operand_table.h"
#include "protocol/matmul_steps.h"
#include "protocol/shape.h"

namespace jax_ep::ffi_layer {

// Kernels count in 32 bits, and no product of two such sizes overflows.
inline void CheckSize(Checker& check, const CallState& call, Dim dim, int64_t least) {
  const int64_t size = call.sizes[dim];
  if (size >= least && size <= kMaxIndex) return;
  check.Fail(std::string(kDimNames[static_cast<size_t>(dim)]) + " must be in [" +
             std::to_string(least) + ", " + std::to_string(kMaxIndex) + "], got " +
             std::to_string(size));
}
inline void CheckSizes(Checker& check, const CallState& call, bool has_rows) {
  for (const Dim dim : {Dim::G, Dim::A, Dim::B}) CheckSize(check, call, dim, 1);
  if (has_rows) CheckSize(check, call, Dim::N, 0);
}

inline void RequireMultiple(Checker& check, const CallState& call, Dim dim, int64_t multiple) {
  if (call.sizes[dim] % multiple == 0) return;
  check.Fail(std::string(kDimNames[static_cast<size_t>(dim)]) + " must be a multiple of " +
             std::to_string(multiple) + ", got " + std::to_string(call.sizes[dim]));
}
// Of both sizes of a matrix.
inline void RequireMultiple(Checker& check, const CallState& call, int64_t multiple) {
  for (const Dim dim : {Dim::A, Dim::B}) RequireMultiple(check, call, dim, multiple);
}

// Blocks of 128 x 128 of matrices share a scale.
inline constexpr int64_t kMatrixBlock = 128;

template <MatmulKind kKind, bool kPortable = false>
struct MatmulCall : Call<MatmulStep> {
  static constexpr auto kGroupSizes = Arg<I32>("group_sizes", {Dim::G}, &Step::sizes);
  static constexpr auto kBias = Arg<F32>("bias", {Dim::G, Dim::B}, &Step::bias).Optional();
  static constexpr auto kGateUpBias = Arg<F32>("bias", {Dim::G, 2, Dim::B}, &Step::bias).Optional();

  void Infer(Checker& check) {
    CheckSizes(check, *this, true);
    RequireMultiple(check, *this, ColumnsAlign(kKind));
    if (sizes.known(Dim::Z)) CheckSides(check);
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] / kMatrixBlock);
  }
  void Size(Checker& check) {
    step.kind = kKind;
    step.portable = kPortable;
    step.exact = exact;
    step.m = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.k = sizes[Dim::A];
    step.n = sizes[Dim::B];
    const bool is_float = step.out_element == ElementType::kFloat32;
    if (kKind == MatmulKind::kFp8Matmul || kKind == MatmulKind::kFp8Wgrad) {
      step.element = is_float ? ElementType::kBFloat16 : step.out_element;
    } else if (IsFp8(kKind)) {
      check.Require(!is_float, "gate and up must have 16 bits");
      step.element = step.out_element;
    } else if (!kPortable) {
      check.Require(step.element != ElementType::kFloat32, "operands must have 16 bits");
    }
    constexpr bool kSums = kKind == MatmulKind::kFprop || kKind == MatmulKind::kDgrad;
    if (kKind == MatmulKind::kWgrad || (kPortable && kSums)) {
      check.Require(is_float || step.out_element == step.element,
                    "out must have the dtype of the operands, or float32");
    } else if (!IsFp8(kKind)) {
      step.out_element = step.element;
    }
  }

 private:
  // Z is the sides of a matrix, or of rows that are multiplied by gate and up.
  void CheckSides(Checker& check) {
    const int64_t found = sizes[Dim::Z];
    if (IsWgrad(kKind)) {
      check.Require(side >= -1 && side < 2, "side must be -1, 0 or 1");
      check.Require(found == (side < 0 ? 1 : 2), "cotangents must have one side, or with side two");
    } else {
      const bool both = (kKind == MatmulKind::kDgrad) == with_up;
      check.Require(found == (both ? 2 : 1), "Z must be the sides that `up` leaves");
    }
  }
};

// ---- Of 16 bits, or of 32 by the portable kernels -----------------------------------------------

// What portable kernels take besides `options`.
template <bool kPortable>
constexpr auto WithExact(auto options) {
  if constexpr (kPortable) {
    return std::tuple_cat(std::tuple(kExact), options);
  } else {
    return options;
  }
}

template <bool kPortable>
struct FpropCallOf : MatmulCall<MatmulKind::kFprop, kPortable> {
  using Base = MatmulCall<MatmulKind::kFprop, kPortable>;
  static constexpr const char* kTarget = kPortable ? "ep_portable_fprop" : "ep_fprop";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {Dim::N, Dim::A}, &MatmulStep::a),
                 Arg<Token>("matrices", {Dim::G, Dim::A, Dim::B}, &MatmulStep::b),
                 Base::kGroupSizes, Base::kBias);
  static constexpr auto kResults = std::tuple(
      Ret<std::conditional_t<kPortable, Output, Token>>("out", {Dim::N, Dim::B}, &MatmulStep::d));
  static constexpr auto kAttributes = [] {
    if constexpr (kPortable) {
      return std::tuple(kExact, kOutDtype);
    } else {
      return std::tuple();
    }
  }();
};
using FpropCall = FpropCallOf<false>;
using PortableFpropCall = FpropCallOf<true>;

// With the matrices of up as an operand of their own, cotangents are of gate and up, and the
// products are summed.
template <bool kPortable>
struct DgradCallOf : MatmulCall<MatmulKind::kDgrad, kPortable> {
  static constexpr const char* kTarget = kPortable ? "ep_portable_dgrad" : "ep_dgrad";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("cotangents", {Dim::N, Dim::Z, Dim::A}, &MatmulStep::a),
                 Arg<Token>("matrices", {Dim::G, Dim::B, Dim::A}, &MatmulStep::b),
                 Arg<Token>("up", {Dim::G, Dim::B, Dim::A}, &MatmulStep::b_up).Shows(kWithUp),
                 MatmulCall<MatmulKind::kDgrad, kPortable>::kGroupSizes);
  static constexpr auto kResults = FpropCallOf<kPortable>::kResults;
  static constexpr auto kAttributes = FpropCallOf<kPortable>::kAttributes;
};
using DgradCall = DgradCallOf<false>;
using PortableDgradCall = DgradCallOf<true>;

template <bool kPortable>
struct GateUpCallOf : MatmulCall<MatmulKind::kGateUp, kPortable> {
  using Base = MatmulCall<MatmulKind::kGateUp, kPortable>;
  static constexpr const char* kTarget = kPortable ? "ep_portable_gate_up" : "ep_gate_up";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {Dim::N, Dim::A}, &MatmulStep::a),
                 Arg<Token>("matrices", {Dim::G, Dim::A, Dim::Z, Dim::B}, &MatmulStep::b),
                 Arg<Token>("up", {Dim::G, Dim::A, Dim::B}, &MatmulStep::b_up).Shows(kWithUp),
                 Base::kGroupSizes, Base::kGateUpBias);
  static constexpr auto kResults = std::tuple(
      Ret<Token>("h", {Dim::N, Dim::B}, &MatmulStep::d),
      Ret<Token>("gate_up_rows", {Dim::N, 2, Dim::B}, &MatmulStep::gate_up_rows).When(kKeep));
  static constexpr auto kAttributes =
      WithExact<kPortable>(std::tuple_cat(std::tuple(kKeep), kActivationOptions));
};
using GateUpCall = GateUpCallOf<false>;
using PortableGateUpCall = GateUpCallOf<true>;

template <bool kPortable>
struct DownDgradCallOf : MatmulCall<MatmulKind::kDownDgrad, kPortable> {
  static constexpr const char* kTarget = kPortable ? "ep_portable_down_dgrad" : "ep_down_dgrad";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("cotangents", {Dim::N, Dim::A}, &MatmulStep::a),
                 Arg<Token>("matrices", {Dim::G, Dim::B, Dim::A}, &MatmulStep::b),
                 Arg<Token>("gate_up_rows", {Dim::N, 2, Dim::B}, &MatmulStep::gate_up_rows),
                 MatmulCall<MatmulKind::kDownDgrad, kPortable>::kGroupSizes);
  static constexpr auto kResults =
      std::tuple(Ret<Token>("to_gate_up_rows", {Dim::N, 2, Dim::B}, &MatmulStep::to_gate_up_rows)
                     .InPlaceOf("gate_up_rows"));
  static constexpr auto kAttributes = WithExact<kPortable>(kActivationOptions);
};
using DownDgradCall = DownDgradCallOf<false>;
using PortableDownDgradCall = DownDgradCallOf<true>;

// Takes one side of the cotangents, or all of them if `side` is -1.
template <bool kPortable>
struct WgradCallOf : MatmulCall<MatmulKind::kWgrad, kPortable> {
  static constexpr const char* kTarget = kPortable ? "ep_portable_wgrad" : "ep_wgrad";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {Dim::N, Dim::A}, &MatmulStep::a),
                 Arg<Token>("cotangents", {Dim::N, Dim::Z, Dim::B}, &MatmulStep::b),
                 MatmulCall<MatmulKind::kWgrad, kPortable>::kGroupSizes);
  static constexpr auto kResults =
      std::tuple(Ret<Output>("out", {Dim::G, Dim::A, Dim::B}, &MatmulStep::d));
  static constexpr auto kAttributes = WithExact<kPortable>(std::tuple(kOutDtype, kSide));

  void Finish() {
    MatmulStep& step = this->step;
    step.b_sides = this->sizes[Dim::Z];
    const int64_t before = this->side > 0 ? step.n * ElementBytes(step.element) : 0;
    step.b = static_cast<const uint8_t*>(step.b) + before;
  }
};
using WgradCall = WgradCallOf<false>;
using PortableWgradCall = WgradCallOf<true>;

// ---- Of fp8 -------------------------------------------------------------------------------------

// The kernels contract the last dimension of the matrices, so fprop gets the weights transposed,
// and dgrad as they are. Scales always lie in the order of the weights.
template <bool kFprop>
struct Fp8MatmulCall : MatmulCall<MatmulKind::kFp8Matmul> {
  static constexpr auto kScales = Arg<F32>(
      "matrix_scales", kFprop ? Shape{Dim::G, Dim::X, Dim::Y} : Shape{Dim::G, Dim::Y, Dim::X},
      &Step::b_scales);
  static constexpr auto kResults = std::tuple(Ret<Output>("out", {Dim::N, Dim::B}, &Step::d));
  static constexpr auto kAttributes = std::tuple(kOutDtype);

  void Size(Checker& check) {
    MatmulCall::Size(check);
    step.SetScales(kFprop);
  }
};

struct Fp8FpropCall : Fp8MatmulCall<true> {
  static constexpr const char* kTarget = "ep_fp8_fprop";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {N, A}, &Step::a), Arg<F32>("row_scales", {N, X}, &Step::a_scales),
      Arg<Code>("matrices", {G, B, A}, &Step::b), kScales, kGroupSizes, kBias);
};

struct Fp8DgradCall : Fp8MatmulCall<false> {
  static constexpr const char* kTarget = "ep_fp8_dgrad";
  static constexpr auto kOperands =
      std::tuple(Arg<Code>("cotangents", {N, A}, &Step::a),
                 Arg<F32>("cotangent_scales", {N, X}, &Step::a_scales),
                 Arg<Code>("matrices", {G, B, A}, &Step::b), kScales, kGroupSizes);
};

struct Fp8GateUpCall : MatmulCall<MatmulKind::kFp8GateUp> {
  static constexpr const char* kTarget = "ep_fp8_gate_up";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {N, A}, &Step::a), Arg<F32>("row_scales", {N, X}, &Step::a_scales),
      Arg<Code>("matrices", {G, 2, B, A}, &Step::b),
      Arg<F32>("matrix_scales", {G, X, 2, Y}, &Step::b_scales), kGroupSizes, kGateUpBias);
  static constexpr auto kResults =
      std::tuple(Ret<Code>("h", {N, B}, &Step::d), Ret<F32>("h_scales", {N, Y}, &Step::d_scales),
                 Ret<Output>("gate_up_rows", {N, 2, B}, &Step::gate_up_rows).When(kKeep));
  static constexpr auto kAttributes =
      std::tuple_cat(std::tuple(kKeep, kOutDtype), kActivationOptions);

  void Size(Checker& check) {
    MatmulCall::Size(check);
    step.SetGateUpScales();
  }
};

struct Fp8DownDgradCall : MatmulCall<MatmulKind::kFp8DownDgrad> {
  static constexpr const char* kTarget = "ep_fp8_down_dgrad";
  static constexpr auto kOperands =
      std::tuple(Arg<Code>("cotangents", {N, A}, &Step::a),
                 Arg<F32>("cotangent_scales", {N, X}, &Step::a_scales),
                 Arg<Code>("matrices", {G, B, A}, &Step::b),
                 Arg<F32>("matrix_scales", {G, Y, X}, &Step::b_scales),
                 Arg<Output>("gate_up_rows", {N, 2, B}, &Step::gate_up_rows), kGroupSizes);
  static constexpr auto kResults = std::tuple(
      Ret<Code>("codes", {N, 2, B}, &Step::d), Ret<F32>("scales", {N, 2, Y}, &Step::d_scales),
      Ret<Output>("to_gate_up_rows", {N, 2, B}, &Step::to_gate_up_rows).InPlaceOf("gate_up_rows"));
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kOutDtype), kActivationOptions);

  void Size(Checker& check) {
    MatmulCall::Size(check);
    step.SetScales(false);
  }
};

// Rows and cotangents are results of ep_transpose_rows or ep_transpose_codes; N is their P.
struct Fp8WgradCall : MatmulCall<MatmulKind::kFp8Wgrad> {
  static constexpr const char* kTarget = "ep_fp8_wgrad";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {A, N}, &Step::a), Arg<F32>("row_scales", {S, X}, &Step::a_scales),
      Arg<Code>("cotangents", {Z, B, N}, &Step::b),
      Arg<F32>("cotangent_scales", {S, Z, Y}, &Step::b_scales),
      Arg<I32>("padded_sizes", {G}, &Step::sizes));
  static constexpr auto kResults = std::tuple(Ret<Output>("out", {G, A, B}, &Step::d));
  static constexpr auto kAttributes = std::tuple(kOutDtype, kSide);

  void Infer(Checker& check) {
    MatmulCall::Infer(check);
    RequireMultiple(check, *this, Dim::N, kMatrixBlock);
    sizes.Set(Dim::S, sizes[Dim::N] / kMatrixBlock);
  }
  void Finish() {
    const int64_t before = side > 0 ? 1 : 0;
    step.b = static_cast<const uint8_t*>(step.b) + before * step.n * step.m;
    step.b_scales += before * sizes[Dim::Y];
    step.scales_per_k = sizes[Dim::Z] * sizes[Dim::Y], step.scales_per_n = 1;
  }
};

// ---- Both matmuls of experts --------------------------------------------------------------------

// A is H and B is F.
template <MatmulKind kFirst>
struct BothMatmulsCall : Call<ExpertsStep> {
  static constexpr auto kGroupSizes = Arg<I32>("group_sizes", {Dim::G}, &Step::sizes);
  static constexpr auto kGateUpBias =
      Arg<F32>("gate_up_bias", {Dim::G, 2, Dim::B}, &Step::gate_up_bias).Optional();
  static constexpr auto kDownBias =
      Arg<F32>("down_bias", {Dim::G, Dim::A}, &Step::down_bias).Optional();

  void Infer(Checker& check) {
    CheckSizes(check, *this, true);
    if (sizes.known(Dim::Z)) {
      check.Require(sizes[Dim::Z] == (with_up ? 1 : 2), "Z must be the sides that `up` leaves");
    }
    RequireMultiple(check, *this, ColumnsAlign(kFirst));
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] / kMatrixBlock);
  }
  void Size(Checker& check) {
    step.fp8 = IsFp8(kFirst);
    step.m = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.hidden = sizes[Dim::A];
    step.inner = sizes[Dim::B];
    const bool is_float = step.out_element == ElementType::kFloat32;
    if (step.fp8) {
      step.element = is_float ? ElementType::kBFloat16 : step.out_element;
    } else {
      check.Require(step.element != ElementType::kFloat32, "operands must have 16 bits");
    }
  }
};

struct ExpertsCall : BothMatmulsCall<MatmulKind::kGateUp> {
  static constexpr const char* kTarget = "ep_experts";
  static constexpr auto kOperands = std::tuple(
      Arg<Token>("rows", {N, A}, &Step::a), Arg<Token>("gate_up", {G, A, Z, B}, &Step::gate_up),
      Arg<Token>("up", {G, A, B}, &Step::up).Shows(kWithUp),
      Arg<Token>("down", {G, B, A}, &Step::down), kGroupSizes, kGateUpBias, kDownBias);
  static constexpr auto kResults =
      std::tuple(Ret<Token>("h", {N, B}, &Step::h), Ret<Token>("out", {N, A}, &Step::d));
  static constexpr auto kAttributes = kActivationOptions;
};

struct Fp8ExpertsCall : BothMatmulsCall<MatmulKind::kFp8GateUp> {
  static constexpr const char* kTarget = "ep_fp8_experts";
  static constexpr auto kOperands = std::tuple(
      Arg<Code>("rows", {N, A}, &Step::a), Arg<F32>("row_scales", {N, X}, &Step::a_scales),
      Arg<Code>("gate_up", {G, 2, B, A}, &Step::gate_up),
      Arg<F32>("gate_up_scales", {G, X, 2, Y}, &Step::gate_up_scales),
      Arg<Code>("down", {G, A, B}, &Step::down),
      Arg<F32>("down_scales", {G, Y, X}, &Step::down_scales), kGroupSizes, kGateUpBias, kDownBias);
  static constexpr auto kResults =
      std::tuple(Ret<Code>("h", {N, B}, &Step::h), Ret<F32>("h_scales", {N, Y}, &Step::h_scales),
                 Ret<Output>("out", {N, A}, &Step::d));
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kOutDtype), kActivationOptions);
};

// ---- Of mxfp4 -----------------------------------------------------------------------------------

// Rows are bfloat16, and `scaled` says whether they have scales. With two sides, gate and up, the
// activation is applied.
template <int64_t kSides>
struct Mxfp4Call : Call<Mxfp4Step> {
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {Dim::N, Dim::A}, &Mxfp4Step::a),
                 Arg<F32>("row_scales", {Dim::N, Dim::X}, &Mxfp4Step::a_scales).When(kScaled),
                 Arg<U8>("tiles", {Dim::G, Dim::Y, Dim::Z, kMxfp4AtomBytes}, &Mxfp4Step::b),
                 Arg<I32>("group_sizes", {Dim::G}, &Mxfp4Step::sizes),
                 Arg<F32>("bias", {Dim::G, kSides, Dim::B}, &Mxfp4Step::bias).Optional());
  static constexpr auto kResults = std::tuple(Ret<Output>("out", {Dim::N, Dim::B}, &Mxfp4Step::d));
  static constexpr auto kAttributes =
      std::tuple_cat(std::tuple(kScaled, kOutDtype), kActivationOptions);

  void Infer(Checker& check) {
    CheckSizes(check, *this, true);
    RequireMultiple(check, *this, scaled ? kMxfp4BlockN / kSides : 8);
    check.Require(sizes[Dim::A] % (scaled ? kMxfp4Align : kMxfp4AtomK) == 0,
                  "A must be a multiple of 32, with scales of 128");
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, (sizes[Dim::B] * kSides + kMxfp4BlockN - 1) / kMxfp4BlockN);
    sizes.Set(Dim::Z, Mxfp4Atoms(sizes[Dim::A]));
  }
  void Size(Checker& check) {
    step.gate_up = kSides == 2;
    step.m = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.k = sizes[Dim::A];
    step.n = sizes[Dim::B];
    check.Require(element == ElementType::kBFloat16, "rows must be bfloat16");
    check.Require(step.out_element != ElementType::kFloat16, "out must be bfloat16 or float32");
  }
};
struct Mxfp4FpropCall : Mxfp4Call<1> {
  static constexpr const char* kTarget = "ep_mxfp4_fprop";
};
struct Mxfp4GateUpCall : Mxfp4Call<2> {
  static constexpr const char* kTarget = "ep_mxfp4_gate_up";
};

// ---- Their weights ------------------------------------------------------------------------------

struct QuantizeMatricesCall : Call<QuantizeMatricesStep> {
  static constexpr const char* kTarget = "ep_quantize_matrices";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("matrices", {G, A, Z, B}, &Step::matrices),
                 Arg<Token>("up", {G, A, B}, &Step::up).Shows(kWithUp));
  static constexpr auto kResults =
      std::tuple(Ret<Code>("codes", {G, A, C, B}, &Step::codes),
                 Ret<F32>("scales", {G, X, C, Y}, &Step::scales),
                 Ret<Code>("transposed", {G, C, B, A}, &Step::transposed).When(kTransposed));
  static constexpr auto kAttributes = std::tuple(kTransposed);

  void Infer(Checker& check) {
    CheckSizes(check, *this, false);
    check.Require(sizes[Dim::Z] == 1 || (sizes[Dim::Z] == 2 && !with_up),
                  "matrices must have one side or two, and one beside up");
    sizes.Set(Dim::C, with_up ? 2 : sizes[Dim::Z]);
    RequireMultiple(check, *this, kMatrixBlock);
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
    sizes.Set(Dim::Y, sizes[Dim::B] / kMatrixBlock);
  }
  void Size(Checker&) {
    step.groups = sizes[Dim::G];
    step.rows = sizes[Dim::A];
    step.sides = sizes[Dim::C];
    step.columns = sizes[Dim::B];
  }
};

struct Fp8OfMxfp4Call : Call<Fp8OfMxfp4Step> {
  static constexpr const char* kTarget = "ep_fp8_of_mxfp4";
  static constexpr auto kOperands =
      std::tuple(Arg<U8>("codes", {G, P, Z, B}, &Step::codes),
                 Arg<U8>("code_scales", {G, S, Z, B}, &Step::code_scales));
  static constexpr auto kResults =
      std::tuple(Ret<Code>("transposed", {G, Z, B, A}, &Step::transposed),
                 Ret<F32>("scales", {G, X, Z, Y}, &Step::scales));
  static constexpr auto kAttributes = std::tuple();

  void Infer(Checker& check) {
    CheckSizes(check, *this, false);
    check.Require(sizes[Dim::Z] == 1 || sizes[Dim::Z] == 2, "codes must have one side or two");
    RequireMultiple(check, *this, kMatrixBlock);
    sizes.Set(Dim::P, sizes[Dim::A] / 2);
    sizes.Set(Dim::S, sizes[Dim::A] / kMxfp4AtomK);
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

// ---- Rows for the gradients of weights ----------------------------------------------------------

template <bool kCodes>
struct TransposeCall : Call<TransposeRowsStep> {
  static constexpr auto kGroupSizes = Arg<I32>("group_sizes", {Dim::G}, &Step::sizes);
  static constexpr auto kResults =
      std::tuple(Ret<Code>("codes", {Dim::A, Dim::P}, &Step::codes),
                 Ret<F32>("scales", {Dim::S, Dim::X}, &Step::scales),
                 Ret<I32>("padded_sizes", {Dim::G}, &Step::padded_sizes));
  static constexpr auto kAttributes = std::tuple();

  void Infer(Checker& check) {
    CheckSize(check, *this, Dim::G, 1);
    CheckSize(check, *this, Dim::A, 1);
    CheckSize(check, *this, Dim::N, 0);
    RequireMultiple(check, *this, Dim::A, kMatrixBlock);
    sizes.Set(Dim::P, PaddedRows(sizes[Dim::N], sizes[Dim::G]));
    sizes.Set(Dim::S, sizes[Dim::P] / kMatrixBlock);
    sizes.Set(Dim::X, sizes[Dim::A] / kMatrixBlock);
  }
  void Size(Checker& check) {
    step.m = sizes[Dim::N];
    step.groups = sizes[Dim::G];
    step.columns = sizes[Dim::A];
    step.padded = sizes[Dim::P];
    check.Require(kCodes || element == ElementType::kBFloat16, "rows must be bfloat16");
  }
};
struct TransposeRowsCall : TransposeCall<false> {
  static constexpr const char* kTarget = "ep_transpose_rows";
  static constexpr auto kOperands =
      std::tuple(Arg<Token>("rows", {N, A}, &Step::values), kGroupSizes);
};
struct TransposeCodesCall : TransposeCall<true> {
  static constexpr const char* kTarget = "ep_transpose_codes";
  static constexpr auto kOperands =
      std::tuple(Arg<Code>("rows", {N, A}, &Step::values),
                 Arg<F32>("row_scales", {N, X}, &Step::value_scales), kGroupSizes);
};

}  // namespace jax_ep::ffi_layer
