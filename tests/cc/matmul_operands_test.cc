// Tests of the decoders of the grouped matmuls: a call as Python makes it passes and becomes the
// step that it describes. A call in which any operand has another size, rank or dtype is refused
// with a message.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ffi/matmul_calls.h"
#include "ffi_calls.h"
#include "ffi_refusals.h"

namespace jax_ep::ffi_layer {
namespace {

constexpr int64_t N = 6, G = 3, A = 384, B = 256, X = A / 128, Y = B / 128;

void CheckStep(const MatmulStep& step, MatmulKind kind, ElementType element) {
  CHECK(step.kind == kind && step.element == element);
  CHECK(step.m == N && step.groups == G && step.k == A && step.n == B);
  CHECK(step.sizes != nullptr && step.a != nullptr && step.b != nullptr);
}

template <typename Call>
void CheckOnlyIn16Bits(CustomCall made) {
  for (Operand& operand : made.operands) {
    if (operand.dtype == ffi::BF16) operand.dtype = ffi::F32;
  }
  CHECK(Refusal<Call>(made).find("16 bits") != std::string::npos);
}

void TestFprop() {
  for (const bool bias : {false, true}) {
    CustomCall made;
    made.Add("rows", ffi::BF16, {N, A});
    made.Add("matrices", ffi::BF16, {G, A, B});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("bias", ffi::F32, {bias ? G : 0, B});
    made.Add("-> out", ffi::BF16, {N, B});
    const MatmulStep step = Passes<FpropCall>(made).step;
    CheckStep(step, MatmulKind::kFprop, ElementType::kBFloat16);
    CHECK((step.bias != nullptr) == bias);
    CheckOnlyIn16Bits<FpropCall>(made);
  }
}

void TestDgrad() {
  for (const bool pair : {false, true}) {
    CustomCall made;
    made.Add("cotangents", ffi::BF16, {N, pair ? 2 : 1, A});
    made.Add("matrices", ffi::BF16, {G, B, A});
    made.Add("up", ffi::BF16, {pair ? G : 0, B, A});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> out", ffi::BF16, {N, B});
    const MatmulStep step = Passes<DgradCall>(made).step;
    CheckStep(step, MatmulKind::kDgrad, ElementType::kBFloat16);
    CHECK((step.b_up != nullptr) == pair);
    CheckOnlyIn16Bits<DgradCall>(made);
  }
}

using Attributes = std::vector<std::pair<std::string, Attribute>>;

// The attributes of calls with an activation, after others.
Attributes Activated(const std::string& word, Attributes attributes = {}) {
  for (const auto& each : Attributes{{"activation", word}, {"alpha", 1.5f}, {"limit", 7.0f}}) {
    attributes.push_back(each);
  }
  return attributes;
}

void CheckActivation(const ActivationOptions& options, Activation activation) {
  CHECK(options.activation == activation && options.alpha == 1.5f && options.limit == 7.0f);
}

void TestGateUp() {
  for (const bool keep : {false, true}) {
    CustomCall made;
    made.Add("rows", ffi::F16, {N, A});
    made.Add("matrices", ffi::F16, {G, A, keep ? 1 : 2, B});
    made.Add("up", ffi::F16, {keep ? G : 0, A, B});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("bias", ffi::F32, {keep ? G : 0, 2, B});
    made.Add("-> h", ffi::F16, {N, B});
    made.Add("-> gate_up_rows", ffi::F16, {keep ? N : 0, 2, B});
    made.attributes = Activated("geglu", {{"keep", keep}});
    const MatmulStep step = Passes<GateUpCall>(made).step;
    CheckStep(step, MatmulKind::kGateUp, ElementType::kFloat16);
    CheckActivation(step, Activation::kGeGlu);
    CHECK(step.d != nullptr && (step.gate_up_rows != nullptr) == keep);
    CHECK((step.b_up != nullptr) == keep && (step.bias != nullptr) == keep);
    made.attributes[1].second = std::string("tanh");
    CHECK(Refusal<GateUpCall>(made).find("unknown activation tanh") != std::string::npos);
  }
}

void TestDownDgrad() {
  CustomCall made;
  made.Add("cotangents", ffi::BF16, {N, A});
  made.Add("matrices", ffi::BF16, {G, B, A});
  made.Add("gate_up_rows", ffi::BF16, {N, 2, B});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> to_gate_up_rows", ffi::BF16, {N, 2, B});
  made.attributes = Activated("swiglu_clamped");
  CHECK(Refusal<DownDgradCall>(made).find("gate_up_rows must be given as its own result") !=
        std::string::npos);
  made.aliases = {{2, 4}};
  const MatmulStep step = Passes<DownDgradCall>(made).step;
  CheckStep(step, MatmulKind::kDownDgrad, ElementType::kBFloat16);
  CheckActivation(step, Activation::kSwiGluClamped);
  CHECK(step.gate_up_rows == step.to_gate_up_rows);
}

void TestWgrad() {
  for (const bool is_float : {false, true}) {
    CustomCall made;
    made.Add("rows", ffi::BF16, {N, A});
    made.Add("cotangents", ffi::BF16, {N, is_float ? 2 : 1, B});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> out", is_float ? ffi::F32 : ffi::BF16, {G, A, B});
    const auto set = [&](const char* dtype, int64_t side) {
      made.attributes = {{"out_dtype", std::string(dtype)}, {"side", side}};
    };
    const int64_t side = is_float ? 1 : -1;
    set(is_float ? "float32" : "bfloat16", side);
    const MatmulStep step = Passes<WgradCall>(made).step;
    CheckStep(step, MatmulKind::kWgrad, ElementType::kBFloat16);
    CHECK(step.out_element == (is_float ? ElementType::kFloat32 : ElementType::kBFloat16));
    CHECK(step.b_sides == (is_float ? 2 : 1));
    for (const int64_t other : {int64_t{-2}, is_float ? int64_t{-1} : int64_t{0}, int64_t{2}}) {
      set(is_float ? "float32" : "bfloat16", other);
      CHECK(!Refusal<WgradCall>(made).empty());
    }
    made.operands.back().dtype = ffi::F16;
    set("float16", side);
    CHECK(!Refusal<WgradCall>(made).empty());
    set("float64", side);
    CHECK(Refusal<WgradCall>(made).find("unknown out_dtype") != std::string::npos);
  }
}

// The index of side s's scale for block k of K and block n of N.
int64_t ScaleAt(const MatmulStep& step, int64_t group, int64_t k, int64_t s, int64_t n) {
  return group * step.scales_per_group + k * step.scales_per_k + s * step.scales_per_side +
         n * step.scales_per_n;
}

template <typename Call>
void TestFp8Matmul(const std::string& rows, bool fprop) {
  for (const bool is_float : {false, true}) {
    CustomCall made;
    made.Add(rows + "s", kCode, {N, A});
    made.Add(rows + "_scales", ffi::F32, {N, X});
    made.Add("matrices", kCode, {G, B, A});
    made.Add("matrix_scales", ffi::F32, {G, fprop ? X : Y, fprop ? Y : X});
    made.Add("group_sizes", ffi::S32, {G});
    if (fprop) made.Add("bias", ffi::F32, {is_float ? G : 0, B});
    made.Add("-> out", is_float ? ffi::F32 : ffi::F16, {N, B});
    made.attributes = {{"out_dtype", std::string(is_float ? "float32" : "float16")}};
    const MatmulStep step = Passes<Call>(made).step;
    CheckStep(step, MatmulKind::kFp8Matmul,
              is_float ? ElementType::kBFloat16 : ElementType::kFloat16);
    CHECK(step.a_scales != nullptr && step.b_scales != nullptr);
    CHECK((step.bias != nullptr) == (fprop && is_float));
    for (int64_t k = 0; k < X; ++k) {
      for (int64_t n = 0; n < Y; ++n) {
        CHECK(ScaleAt(step, 2, k, 0, n) == 2 * X * Y + (fprop ? k * Y + n : n * X + k));
      }
    }
  }
}

void TestFp8GateUp() {
  for (const bool keep : {false, true}) {
    CustomCall made;
    made.Add("rows", kCode, {N, A});
    made.Add("row_scales", ffi::F32, {N, X});
    made.Add("matrices", kCode, {G, 2, B, A});
    made.Add("matrix_scales", ffi::F32, {G, X, 2, Y});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("bias", ffi::F32, {keep ? G : 0, 2, B});
    made.Add("-> h", kCode, {N, B});
    made.Add("-> h_scales", ffi::F32, {N, Y});
    made.Add("-> gate_up_rows", ffi::BF16, {keep ? N : 0, 2, B});
    made.attributes =
        Activated("relu_squared", {{"keep", keep}, {"out_dtype", std::string("bfloat16")}});
    const MatmulStep step = Passes<Fp8GateUpCall>(made).step;
    CheckStep(step, MatmulKind::kFp8GateUp, ElementType::kBFloat16);
    CheckActivation(step, Activation::kReluSquared);
    CHECK((step.bias != nullptr) == keep);
    CHECK(step.d_scales != nullptr && (step.gate_up_rows != nullptr) == keep);
    for (int64_t k = 0; k < X; ++k) {
      for (int64_t s = 0; s < 2; ++s) {
        for (int64_t b = 0; b < Y; ++b) {
          CHECK(ScaleAt(step, 1, k, s, b) == ((X + k) * 2 + s) * Y + b);
        }
      }
    }
    made.operands.back().dtype = ffi::F32;
    made.attributes[1].second = std::string("float32");
    CHECK(Refusal<Fp8GateUpCall>(made).find("16 bits") != std::string::npos);
  }
}

void TestFp8DownDgrad() {
  CustomCall made;
  made.Add("cotangents", kCode, {N, A});
  made.Add("cotangent_scales", ffi::F32, {N, X});
  made.Add("matrices", kCode, {G, B, A});
  made.Add("matrix_scales", ffi::F32, {G, Y, X});
  made.Add("gate_up_rows", ffi::BF16, {N, 2, B});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> codes", kCode, {N, 2, B});
  made.Add("-> scales", ffi::F32, {N, 2, Y});
  made.Add("-> to_gate_up_rows", ffi::BF16, {N, 2, B});
  made.attributes = Activated("swiglu", {{"out_dtype", std::string("bfloat16")}});
  made.aliases = {{4, 8}};
  const MatmulStep step = Passes<Fp8DownDgradCall>(made).step;
  CheckStep(step, MatmulKind::kFp8DownDgrad, ElementType::kBFloat16);
  CheckActivation(step, Activation::kSwiGlu);
  CHECK(step.gate_up_rows == step.to_gate_up_rows && step.d_scales != nullptr);
  CHECK(ScaleAt(step, 1, 2, 0, 1) == X * Y + X + 2);
}

// Both matmuls of a call; D of the first one is A of the second.
void CheckExperts(const ExpertsStep& step, bool fp8, ElementType element) {
  const MatmulStep up = step.GateUp(), down = step.Down();
  CheckStep(up, fp8 ? MatmulKind::kFp8GateUp : MatmulKind::kGateUp, element);
  CHECK(down.kind == (fp8 ? MatmulKind::kFp8Matmul : MatmulKind::kFprop));
  CHECK(down.element == element && down.m == N && down.groups == G);
  CHECK(down.k == B && down.n == A && down.sizes == up.sizes);
  CHECK(up.d != nullptr && down.a == up.d && down.a_scales == up.d_scales);
  CHECK(up.a == step.a && up.b == step.gate_up && down.b == step.down);
  CHECK(up.b_up == step.up && up.bias == step.gate_up_bias && down.bias == step.down_bias);
  CheckActivation(up, Activation::kGeGlu);
  CHECK(up.gate_up_rows == nullptr && down.d == step.d && down.out_element == step.out_element);
  if (!fp8) return;
  CHECK(up.a_scales == step.a_scales && up.d_scales != nullptr);
  CHECK(up.b_scales == step.gate_up_scales && down.b_scales == step.down_scales);
  for (int64_t x = 0; x < X; ++x) {
    for (int64_t y = 0; y < Y; ++y) {
      for (int64_t side = 0; side < 2; ++side) {
        CHECK(ScaleAt(up, 1, x, side, y) == ((X + x) * 2 + side) * Y + y);
      }
      CHECK(ScaleAt(down, 1, y, 0, x) == (Y + y) * X + x);
    }
  }
}

void TestExperts() {
  for (const bool pair : {false, true}) {
    CustomCall made;
    made.Add("rows", ffi::BF16, {N, A});
    made.Add("gate_up", ffi::BF16, {G, A, pair ? 1 : 2, B});
    made.Add("up", ffi::BF16, {pair ? G : 0, A, B});
    made.Add("down", ffi::BF16, {G, B, A});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("gate_up_bias", ffi::F32, {pair ? G : 0, 2, B});
    made.Add("down_bias", ffi::F32, {pair ? 0 : G, A});
    made.Add("-> h", ffi::BF16, {N, B});
    made.Add("-> out", ffi::BF16, {N, A});
    made.attributes = Activated("geglu");
    const ExpertsStep step = Passes<ExpertsCall>(made).step;
    CheckExperts(step, false, ElementType::kBFloat16);
    CHECK((step.up != nullptr) == pair && (step.gate_up_bias != nullptr) == pair);
    CHECK((step.down_bias != nullptr) != pair);
    CheckOnlyIn16Bits<ExpertsCall>(made);
  }
}

void TestFp8Experts() {
  for (const bool is_float : {false, true}) {
    CustomCall made;
    made.Add("rows", kCode, {N, A});
    made.Add("row_scales", ffi::F32, {N, X});
    made.Add("gate_up", kCode, {G, 2, B, A});
    made.Add("gate_up_scales", ffi::F32, {G, X, 2, Y});
    made.Add("down", kCode, {G, A, B});
    made.Add("down_scales", ffi::F32, {G, Y, X});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("gate_up_bias", ffi::F32, {is_float ? G : 0, 2, B});
    made.Add("down_bias", ffi::F32, {is_float ? 0 : G, A});
    made.Add("-> h", kCode, {N, B});
    made.Add("-> h_scales", ffi::F32, {N, Y});
    made.Add("-> out", is_float ? ffi::F32 : ffi::F16, {N, A});
    made.attributes =
        Activated("geglu", {{"out_dtype", std::string(is_float ? "float32" : "float16")}});
    const ExpertsStep step = Passes<Fp8ExpertsCall>(made).step;
    CheckExperts(step, true, is_float ? ElementType::kBFloat16 : ElementType::kFloat16);
    CHECK(step.out_element == (is_float ? ElementType::kFloat32 : ElementType::kFloat16));
  }
}

void TestQuantizeMatrices() {
  for (const int64_t sides : {int64_t{1}, int64_t{2}}) {
    for (const bool transposed : {false, true}) {
      const bool apart = sides == 2 && transposed;
      CustomCall made;
      made.Add("matrices", ffi::F32, {G, A, apart ? 1 : sides, B});
      made.Add("up", ffi::F32, {apart ? G : 0, A, B});
      made.Add("-> codes", kCode, {G, A, sides, B});
      made.Add("-> scales", ffi::F32, {G, X, sides, Y});
      made.Add("-> transposed", kCode, {transposed ? G : 0, sides, B, A});
      made.attributes = {{"transposed", transposed}};
      CurrentCase() = QuantizeMatricesCall::kTarget;
      QuantizeMatricesCall call;
      CHECK(Refusal(made, call).empty());
      const QuantizeMatricesStep& step = call.step;
      CHECK(step.element == ElementType::kFloat32 && step.groups == G && step.rows == A &&
            step.sides == sides && step.columns == B &&
            (step.transposed != nullptr) == transposed && (step.up != nullptr) == apart);
      for (size_t i = 0; i < made.operands.size(); ++i) {
        for (size_t dim = 0; dim < made.operands[i].dims.size(); ++dim) {
          CustomCall other = made;
          other.operands[i].dims[dim] += 1;
          CHECK(!Refusal<QuantizeMatricesCall>(other).empty());
        }
      }
    }
  }
}

void TestFp8OfMxfp4() {
  for (const int64_t sides : {int64_t{1}, int64_t{2}}) {
    CustomCall made;
    made.Add("codes", ffi::U8, {G, A / 2, sides, B});
    made.Add("code_scales", ffi::U8, {G, A / 32, sides, B});
    made.Add("-> transposed", kCode, {G, sides, B, A});
    made.Add("-> scales", ffi::F32, {G, X, sides, Y});
    const Fp8OfMxfp4Step step = Passes<Fp8OfMxfp4Call>(made).step;
    CHECK(step.groups == G && step.rows == A && step.sides == sides && step.columns == B);
    CHECK(step.codes != nullptr && step.code_scales != nullptr && step.transposed != nullptr &&
          step.scales != nullptr);
  }
}

void TestFp8Wgrad() {
  constexpr int64_t kPadded = 384, S = kPadded / 128;
  for (const bool both : {false, true}) {
    const int64_t sides = both ? 2 : 1;
    CustomCall made;
    made.Add("rows", kCode, {A, kPadded});
    made.Add("row_scales", ffi::F32, {S, X});
    made.Add("cotangents", kCode, {sides, B, kPadded});
    made.Add("cotangent_scales", ffi::F32, {S, sides, Y});
    made.Add("padded_sizes", ffi::S32, {G});
    made.Add("-> out", ffi::F32, {G, A, B});
    made.attributes = {{"out_dtype", "float32"}, {"side", int64_t{both ? 1 : -1}}};
    const MatmulStep step = Passes<Fp8WgradCall>(made).step;
    CHECK(step.kind == MatmulKind::kFp8Wgrad && step.m == kPadded && step.groups == G);
    CHECK(step.k == A && step.n == B && step.out_element == ElementType::kFloat32);
    CHECK(step.scales_per_k == sides * Y && step.scales_per_n == 1);
    made.attributes = {{"out_dtype", "float32"}, {"side", int64_t{both ? -1 : 0}}};
    CHECK(!Refusal<Fp8WgradCall>(made).empty());
  }
}

void TestTranspose() {
  const int64_t padded = PaddedRows(N, G), S = padded / 128;
  for (const bool coded : {false, true}) {
    CustomCall made;
    made.Add("rows", coded ? kCode : ffi::BF16, {N, A});
    if (coded) made.Add("row_scales", ffi::F32, {N, X});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> codes", kCode, {A, padded});
    made.Add("-> scales", ffi::F32, {S, X});
    made.Add("-> padded_sizes", ffi::S32, {G});
    // Other numbers of rows may take as many blocks.
    const TransposeRowsStep step = coded ? Passes<TransposeCodesCall>(made).step
                                         : Passes<TransposeRowsCall>(made, {"rows", ""}).step;
    CHECK(step.m == N && step.groups == G && step.columns == A && step.padded == padded);
    CHECK((step.value_scales != nullptr) == coded && step.values != nullptr);
    CHECK(step.codes != nullptr && step.scales != nullptr && step.padded_sizes != nullptr);
  }
  CHECK(PaddedRows(0, 5) == 0 && PaddedRows(1, 5) == 128 && PaddedRows(256, 1) == 384);
}

// Unaligned columns are refused even if all operands agree.
void TestAlignment() {
  CustomCall made;
  made.Add("rows", ffi::BF16, {N, 12});
  made.Add("matrices", ffi::BF16, {G, 12, 16});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("bias", ffi::F32, {0, 16});
  made.Add("-> out", ffi::BF16, {N, 16});
  CHECK(Refusal<FpropCall>(made) == "ep_fprop: A must be a multiple of 8, got 12");
  for (const int64_t rows : {int64_t{0}, int64_t{1}}) {
    CustomCall fits;
    fits.Add("rows", ffi::BF16, {rows, 8});
    fits.Add("matrices", ffi::BF16, {G, 8, 16});
    fits.Add("group_sizes", ffi::S32, {G});
    fits.Add("bias", ffi::F32, {0, 16});
    fits.Add("-> out", ffi::BF16, {rows, 16});
    CHECK(Refusal<FpropCall>(fits).empty());
  }
}

}  // namespace
}  // namespace jax_ep::ffi_layer

int main() {
  using namespace jax_ep::ffi_layer;
  TestFprop();
  TestDgrad();
  TestGateUp();
  TestDownDgrad();
  TestWgrad();
  TestFp8Matmul<Fp8FpropCall>("row", true);
  TestFp8Matmul<Fp8DgradCall>("cotangent", false);
  TestFp8GateUp();
  TestFp8DownDgrad();
  TestExperts();
  TestFp8Experts();
  TestQuantizeMatrices();
  TestFp8OfMxfp4();
  TestFp8Wgrad();
  TestTranspose();
  TestAlignment();
  std::printf("all matmul operands passed\n");
  return 0;
}
