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
  CHECK(step.rows == N && step.groups == G && step.left_columns == A && step.columns == B);
  CHECK(step.sizes != nullptr && step.left != nullptr && step.right != nullptr);
}

template <typename Call>
void TestRows(MatmulKind kind, std::vector<int64_t> matrices) {
  CustomCall made;
  made.Add("rows", ffi::BF16, {N, A});
  made.Add("matrices", ffi::BF16, std::move(matrices));
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> out", ffi::BF16, {N, B});
  CheckStep(Passes<Call>(made).step, kind, ElementType::kBFloat16);
  for (Operand& operand : made.operands) {
    if (operand.dtype == ffi::BF16) operand.dtype = ffi::F32;
  }
  CHECK(Refusal<Call>(made).find("16 bits") != std::string::npos);
}

void TestGateUp() {
  for (const bool keep : {false, true}) {
    CustomCall made;
    made.Add("rows", ffi::F16, {N, A});
    made.Add("matrices", ffi::F16, {G, A, 2, B});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> h", ffi::F16, {N, B});
    made.Add("-> both", ffi::F16, {keep ? N : 0, 2, B});
    made.attributes = {{"keep", keep}};
    const MatmulStep step = Passes<GateUpCall>(made).step;
    CheckStep(step, MatmulKind::kGateUp, ElementType::kFloat16);
    CHECK(step.out != nullptr && (step.both != nullptr) == keep);
  }
}

void TestDownBack() {
  CustomCall made;
  made.Add("cotangents", ffi::BF16, {N, A});
  made.Add("matrices", ffi::BF16, {G, B, A});
  made.Add("both", ffi::BF16, {N, 2, B});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> to_both", ffi::BF16, {N, 2, B});
  CHECK(Refusal<DownBackCall>(made).find("both must be given as its own result") !=
        std::string::npos);
  made.aliases = {{2, 4}};
  const MatmulStep step = Passes<DownBackCall>(made).step;
  CheckStep(step, MatmulKind::kDownBack, ElementType::kBFloat16);
  CHECK(step.both == step.to_both);
}

void TestOuter() {
  for (const bool is_float : {false, true}) {
    CustomCall made;
    made.Add("left", ffi::BF16, {N, A});
    made.Add("right", ffi::BF16, {N, B});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> out", is_float ? ffi::F32 : ffi::BF16, {G, A, B});
    made.attributes = {{"out_dtype", std::string(is_float ? "float32" : "bfloat16")}};
    const MatmulStep step = Passes<OuterCall>(made).step;
    CheckStep(step, MatmulKind::kOuter, ElementType::kBFloat16);
    CHECK(step.out_element == (is_float ? ElementType::kFloat32 : ElementType::kBFloat16));
    made.operands.back().dtype = ffi::F16;
    made.attributes = {{"out_dtype", std::string("float16")}};
    CHECK(!Refusal<OuterCall>(made).empty());
    made.attributes = {{"out_dtype", std::string("float64")}};
    CHECK(Refusal<OuterCall>(made).find("unknown out_dtype") != std::string::npos);
  }
}

// The index of side s's scale for block k of the contracted dimension and block b of the other.
int64_t ScaleAt(const MatmulStep& step, int64_t group, int64_t k, int64_t s, int64_t b) {
  return group * step.scales_per_group + k * step.scales_per_k + s * step.scales_per_side +
         b * step.scales_per_b;
}

void TestCodeRows() {
  for (const bool turned : {false, true}) {
    for (const bool is_float : {false, true}) {
      CustomCall made;
      made.Add("rows", kCode, {N, A});
      made.Add("row_scales", ffi::F32, {N, X});
      made.Add("matrices", kCode, {G, B, A});
      made.Add("matrix_scales", ffi::F32, {G, turned ? X : Y, turned ? Y : X});
      made.Add("group_sizes", ffi::S32, {G});
      made.Add("-> out", is_float ? ffi::F32 : ffi::F16, {N, B});
      made.attributes = {{"turned", turned},
                         {"out_dtype", std::string(is_float ? "float32" : "float16")}};
      const MatmulStep step = Passes<CodeRowsCall>(made).step;
      CheckStep(step, MatmulKind::kCodeRows,
                is_float ? ElementType::kBFloat16 : ElementType::kFloat16);
      CHECK(step.left_scales != nullptr && step.right_scales != nullptr);
      for (int64_t k = 0; k < X; ++k) {
        for (int64_t b = 0; b < Y; ++b) {
          CHECK(ScaleAt(step, 2, k, 0, b) == 2 * X * Y + (turned ? k * Y + b : b * X + k));
        }
      }
    }
  }
}

void TestCodeGateUp() {
  for (const bool keep : {false, true}) {
    CustomCall made;
    made.Add("rows", kCode, {N, A});
    made.Add("row_scales", ffi::F32, {N, X});
    made.Add("matrices", kCode, {G, 2, B, A});
    made.Add("matrix_scales", ffi::F32, {G, X, 2, Y});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> h", kCode, {N, B});
    made.Add("-> h_scales", ffi::F32, {N, Y});
    made.Add("-> both", ffi::BF16, {keep ? N : 0, 2, B});
    made.attributes = {{"keep", keep}, {"out_dtype", std::string("bfloat16")}};
    const MatmulStep step = Passes<CodeGateUpCall>(made).step;
    CheckStep(step, MatmulKind::kCodeGateUp, ElementType::kBFloat16);
    CHECK(step.out_scales != nullptr && (step.both != nullptr) == keep);
    for (int64_t k = 0; k < X; ++k) {
      for (int64_t s = 0; s < 2; ++s) {
        for (int64_t b = 0; b < Y; ++b) {
          CHECK(ScaleAt(step, 1, k, s, b) == ((X + k) * 2 + s) * Y + b);
        }
      }
    }
    made.operands.back().dtype = ffi::F32;
    made.attributes[1].second = std::string("float32");
    CHECK(Refusal<CodeGateUpCall>(made).find("16 bits") != std::string::npos);
  }
}

void TestCodeDownBack() {
  CustomCall made;
  made.Add("cotangents", kCode, {N, A});
  made.Add("cotangent_scales", ffi::F32, {N, X});
  made.Add("matrices", kCode, {G, B, A});
  made.Add("matrix_scales", ffi::F32, {G, Y, X});
  made.Add("both", ffi::BF16, {N, 2, B});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> codes", kCode, {N, 2, B});
  made.Add("-> code_scales", ffi::F32, {N, 2, Y});
  made.Add("-> to_both", ffi::BF16, {N, 2, B});
  made.attributes = {{"out_dtype", std::string("bfloat16")}};
  made.aliases = {{4, 8}};
  const MatmulStep step = Passes<CodeDownBackCall>(made).step;
  CheckStep(step, MatmulKind::kCodeDownBack, ElementType::kBFloat16);
  CHECK(step.both == step.to_both && step.out_scales != nullptr);
  CHECK(ScaleAt(step, 1, 2, 0, 1) == X * Y + X + 2);
}

// Both products of a call, the second of which has the first one's result on its left.
void CheckExperts(const ExpertsStep& step, bool codes, ElementType element) {
  const MatmulStep up = step.GateUp(), down = step.Down();
  CheckStep(up, codes ? MatmulKind::kCodeGateUp : MatmulKind::kGateUp, element);
  CHECK(down.kind == (codes ? MatmulKind::kCodeRows : MatmulKind::kRows));
  CHECK(down.element == element && down.rows == N && down.groups == G);
  CHECK(down.left_columns == B && down.columns == A && down.sizes == up.sizes);
  CHECK(up.out != nullptr && down.left == up.out && down.left_scales == up.out_scales);
  CHECK(up.left == step.left && up.right == step.gate_up && down.right == step.down);
  CHECK(up.both == nullptr && down.out == step.out && down.out_element == step.out_element);
  if (!codes) return;
  CHECK(up.left_scales == step.left_scales && up.out_scales != nullptr);
  CHECK(up.right_scales == step.gate_up_scales && down.right_scales == step.down_scales);
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
  CustomCall made;
  made.Add("rows", ffi::F16, {N, A});
  made.Add("gate_up", ffi::F16, {G, A, 2, B});
  made.Add("down", ffi::F16, {G, B, A});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> h", ffi::F16, {N, B});
  made.Add("-> out", ffi::F16, {N, A});
  CheckExperts(Passes<ExpertsCall>(made).step, false, ElementType::kFloat16);
  for (Operand& operand : made.operands) {
    if (operand.dtype == ffi::F16) operand.dtype = ffi::F32;
  }
  CHECK(Refusal<ExpertsCall>(made).find("16 bits") != std::string::npos);
}

void TestCodeExperts() {
  for (const bool is_float : {false, true}) {
    CustomCall made;
    made.Add("rows", kCode, {N, A});
    made.Add("row_scales", ffi::F32, {N, X});
    made.Add("gate_up", kCode, {G, 2, B, A});
    made.Add("gate_up_scales", ffi::F32, {G, X, 2, Y});
    made.Add("down", kCode, {G, A, B});
    made.Add("down_scales", ffi::F32, {G, Y, X});
    made.Add("group_sizes", ffi::S32, {G});
    made.Add("-> h", kCode, {N, B});
    made.Add("-> h_scales", ffi::F32, {N, Y});
    made.Add("-> out", is_float ? ffi::F32 : ffi::F16, {N, A});
    made.attributes = {{"out_dtype", std::string(is_float ? "float32" : "float16")}};
    const ExpertsStep step = Passes<CodeExpertsCall>(made).step;
    CheckExperts(step, true, is_float ? ElementType::kBFloat16 : ElementType::kFloat16);
    CHECK(step.out_element == (is_float ? ElementType::kFloat32 : ElementType::kFloat16));
  }
}

void TestQuantizeMatrices() {
  for (const int64_t sides : {int64_t{1}, int64_t{2}}) {
    for (const bool turned : {false, true}) {
      CustomCall made;
      made.Add("matrices", ffi::F32, {G, A, sides, B});
      made.Add("-> codes", kCode, {G, A, sides, B});
      made.Add("-> scales", ffi::F32, {G, X, sides, Y});
      made.Add("-> turned", kCode, {turned ? G : 0, sides, B, A});
      made.attributes = {{"turned", turned}};
      CurrentCase() = QuantizeMatricesCall::kTarget;
      QuantizeMatricesCall call;
      CHECK(Refusal(made, call).empty());
      const QuantizeMatricesStep& step = call.step;
      CHECK(step.element == ElementType::kFloat32 && step.groups == G && step.rows == A &&
            step.sides == sides && step.columns == B && (step.turned != nullptr) == turned);
      for (size_t i = 0; i < made.operands.size(); ++i) {
        for (size_t dim = 0; dim < 4; ++dim) {
          CustomCall other = made;
          other.operands[i].dims[dim] += 1;
          CHECK(!Refusal<QuantizeMatricesCall>(other).empty());
        }
      }
    }
  }
}

// Unaligned columns are refused even if all operands agree.
void TestAlignment() {
  CustomCall made;
  made.Add("rows", ffi::BF16, {N, 12});
  made.Add("matrices", ffi::BF16, {G, 12, 16});
  made.Add("group_sizes", ffi::S32, {G});
  made.Add("-> out", ffi::BF16, {N, 16});
  CHECK(Refusal<RowsCall>(made) == "ep_rows: A must be a multiple of 8, got 12");
  for (const int64_t rows : {int64_t{0}, int64_t{1}}) {
    CustomCall fits;
    fits.Add("rows", ffi::BF16, {rows, 8});
    fits.Add("matrices", ffi::BF16, {G, 8, 16});
    fits.Add("group_sizes", ffi::S32, {G});
    fits.Add("-> out", ffi::BF16, {rows, 16});
    CHECK(Refusal<RowsCall>(fits).empty());
  }
}

}  // namespace
}  // namespace jax_ep::ffi_layer

int main() {
  using namespace jax_ep::ffi_layer;
  using jax_ep::MatmulKind;
  TestRows<RowsCall>(MatmulKind::kRows, {G, A, B});
  TestRows<RowsTransposedCall>(MatmulKind::kRowsTransposed, {G, B, A});
  TestGateUp();
  TestDownBack();
  TestOuter();
  TestCodeRows();
  TestCodeGateUp();
  TestCodeDownBack();
  TestExperts();
  TestCodeExperts();
  TestQuantizeMatrices();
  TestAlignment();
  std::printf("all matmul operands passed\n");
  return 0;
}
