// Tests of the decoders of passes over rows and of routers: a call as Python makes it passes and
// becomes the step that it describes. A call in which any operand has another size, rank or dtype
// is refused with a message.
#include <cstdint>
#include <cstdio>
#include <string>

#include "ffi/router_calls.h"
#include "ffi/row_calls.h"
#include "ffi_calls.h"
#include "ffi_refusals.h"

namespace jax_ep::ffi_layer {
namespace {

constexpr int64_t N = 6, G = 3, A = 384, H = 24;

struct Named {
  ffi::DataType dtype;
  ElementType element;
  const char* name;
};
constexpr Named kElements[] = {{ffi::F32, ElementType::kFloat32, "float32"},
                               {ffi::BF16, ElementType::kBFloat16, "bfloat16"},
                               {ffi::F16, ElementType::kFloat16, "float16"}};

bool Says(const std::string& message, const char* what) {
  return message.find(what) != std::string::npos;
}

CustomCall MadeCombineBack(ffi::DataType dtype, int64_t rows, int64_t hidden) {
  CustomCall made;
  made.Add("cotangents", dtype, {rows, hidden});
  made.Add("expert_out", dtype, {rows, hidden});
  made.Add("router_weights", ffi::F32, {rows});
  made.Add("row_slot", ffi::S32, {rows});
  made.Add("-> to_rows", dtype, {rows, hidden});
  made.Add("-> to_weights", ffi::F32, {rows});
  made.aliases = {{0, 4}};
  return made;
}

void TestCombineBack() {
  for (const Named& element : kElements) {
    CustomCall made = MadeCombineBack(element.dtype, N, H);
    const CombineBackStep step = Passes<CombineBackCall>(made).step;
    CHECK(step.element == element.element && step.rows == N && step.hidden == H);
    CHECK(step.cotangents != nullptr && step.to_rows == step.cotangents);
    CHECK(step.expert_out != nullptr && step.expert_out != step.cotangents);
    CHECK(step.router_weights != nullptr && step.row_slot != nullptr && step.to_weights != nullptr);
    // The kernel reads the buffer that it writes, so it must be aliased.
    made.aliases.clear();
    CHECK(Refusal<CombineBackCall>(made) ==
          "ep_combine_back: cotangents must be given as its own result");
    CHECK(Refusal<CombineBackCall>(MadeCombineBack(element.dtype, 0, H)).empty());
  }
  CHECK(Refusal<CombineBackCall>(MadeCombineBack(ffi::BF16, N, 8)).empty());
  CHECK(Refusal<CombineBackCall>(MadeCombineBack(ffi::BF16, N, 12)) ==
        "ep_combine_back: a row must be a positive multiple of 16 bytes, got 24");
  CHECK(!Refusal<CombineBackCall>(MadeCombineBack(ffi::BF16, N, 0)).empty());
  CHECK(Refusal<CombineBackCall>(MadeCombineBack(ffi::F32, N, 12)).empty());
  CHECK(Says(Refusal<CombineBackCall>(MadeCombineBack(ffi::F64, N, H)),
             "must be bfloat16, float16 or float32"));
}

CustomCall MadeQuantize(ffi::DataType dtype, int64_t rows, int64_t columns, int64_t groups) {
  CustomCall made;
  made.Add("values", dtype, {rows, columns});
  made.Add("group_sizes", ffi::S32, {groups});
  made.Add("-> codes", kCode, {rows, columns});
  made.Add("-> scales", ffi::F32, {rows, columns / 128});
  return made;
}

void TestQuantizeCotangents() {
  for (const Named& element : kElements) {
    const CustomCall made = MadeQuantize(element.dtype, N, A, G);
    const Free free{.sizes = "group_sizes", .element = "values"};
    const QuantizeCotangentsStep step = Passes<QuantizeCotangentsCall>(made, free).step;
    CHECK(step.element == element.element);
    CHECK(step.rows == N && step.groups == G && step.columns == A);
    CHECK(step.sizes != nullptr && step.values != nullptr);
    CHECK(step.codes != nullptr && step.scales != nullptr);
  }
}

CustomCall MadeDequantize(const Named& out, int64_t rows, int64_t columns, int64_t groups) {
  CustomCall made;
  made.Add("codes", kCode, {rows, columns});
  made.Add("scales", ffi::F32, {rows, columns / 128});
  made.Add("group_sizes", ffi::S32, {groups});
  made.Add("-> out", out.dtype, {rows, columns});
  made.attributes = {{"out_dtype", std::string(out.name)}};
  return made;
}

void TestDequantizeRows() {
  for (const Named& out : kElements) {
    CustomCall made = MadeDequantize(out, N, A, G);
    const DequantizeRowsStep step = Passes<DequantizeRowsCall>(made, {"group_sizes", {}}).step;
    CHECK(step.out_element == out.element);
    CHECK(step.rows == N && step.groups == G && step.columns == A);
    CHECK(step.sizes != nullptr && step.codes != nullptr);
    CHECK(step.scales != nullptr && step.out != nullptr);
    made.attributes = {{"out_dtype", std::string("float64")}};
    CHECK(Refusal<DequantizeRowsCall>(made) == "ep_dequantize_rows: unknown out_dtype float64");
  }
}

// Any number of groups and of rows passes, but columns must be whole blocks.
void TestSizes() {
  const Named& out = kElements[1];
  for (const int64_t groups : {int64_t{0}, int64_t{1}, int64_t{1000}}) {
    QuantizeCotangentsCall quantize;
    CHECK(Refusal(MadeQuantize(ffi::BF16, N, A, groups), quantize).empty());
    CHECK(quantize.step.groups == groups);
    DequantizeRowsCall dequantize;
    CHECK(Refusal(MadeDequantize(out, N, A, groups), dequantize).empty());
    CHECK(dequantize.step.groups == groups);
  }
  CHECK(Refusal<QuantizeCotangentsCall>(MadeQuantize(ffi::F32, 0, A, G)).empty());
  CHECK(Refusal<DequantizeRowsCall>(MadeDequantize(out, 0, A, G)).empty());
  for (const int64_t columns : {int64_t{0}, int64_t{64}, int64_t{200}}) {
    const std::string why =
        ": A must be a positive multiple of 128, got " + std::to_string(columns);
    CHECK(Refusal<QuantizeCotangentsCall>(MadeQuantize(ffi::BF16, N, columns, G)) ==
          QuantizeCotangentsCall::kTarget + why);
    CHECK(Refusal<DequantizeRowsCall>(MadeDequantize(out, N, columns, G)) ==
          DequantizeRowsCall::kTarget + why);
  }
}

// ---- Routers ------------------------------------------------------------------------------------

CustomCall MadeRouter(int64_t experts, int64_t top_k, bool with_bias) {
  CustomCall made;
  made.Add("logits", ffi::F32, {N, experts});
  made.Add("bias", ffi::F32, {with_bias ? experts : 0});
  made.Add("-> ids", ffi::S32, {N, top_k});
  made.Add("-> weights", ffi::F32, {N, top_k});
  made.attributes = {{"with_bias", with_bias},
                     {"score", std::string("sigmoid")},
                     {"num_groups", int64_t{4}},
                     {"top_groups", int64_t{2}},
                     {"best_of_group", int64_t{3}},
                     {"least_sum", 0.5f},
                     {"scale", 2.5f}};
  return made;
}

void Set(CustomCall& made, std::string_view name, Attribute value) {
  for (auto& [known, attribute] : made.attributes) {
    if (known == name) attribute = std::move(value);
  }
}

void TestRouter() {
  const RouterStep step = Passes<RouterCall>(MadeRouter(64, 8, true)).step;
  CHECK(step.tokens == N && step.experts == 64 && step.top_k == 8);
  CHECK(step.score == RouterScore::kSigmoid);
  CHECK(step.num_groups == 4 && step.top_groups == 2 && step.best_of_group == 3);
  CHECK(step.least_sum == 0.5f && step.scale == 2.5f);
  CHECK(step.logits != nullptr && step.bias != nullptr);
  CHECK(step.ids != nullptr && step.weights != nullptr);
  CustomCall made = MadeRouter(64, 8, false);
  Set(made, "score", std::string("softmax"));
  RouterCall plain;
  CHECK(Refusal(made, plain).empty() && plain.step.bias == nullptr &&
        plain.step.score == RouterScore::kSoftmax);

  const auto refused = [](std::string_view name, Attribute value, int64_t experts = 64,
                          int64_t top_k = 8) {
    CustomCall other = MadeRouter(experts, top_k, true);
    Set(other, name, std::move(value));
    return Refusal<RouterCall>(other);
  };
  CHECK(refused("score", std::string("tanh")) ==
        "ep_router: score must be softmax, sigmoid or sqrtsoftplus, got tanh");
  for (const int64_t wrong : {int64_t{-1}, int64_t{0}, int64_t{33}, int64_t{1} << 40}) {
    CHECK(Says(refused("num_groups", wrong), "num_groups must be in [1, 32], got "));
    CHECK(Says(refused("top_groups", wrong), "top_groups must be in [1, 4], got "));
    CHECK(Says(refused("best_of_group", wrong), "best_of_group must be in [1, 16], got "));
  }
  CHECK(Says(refused("num_groups", int64_t{5}), "num_groups must divide E, 64, got 5"));
  // The groups that are kept have too few experts.
  CHECK(Says(refused("top_groups", int64_t{1}, 16), "K must be in [1, 4], got 8"));
  // If all groups are kept, their scores do not matter.
  CustomCall all = MadeRouter(8, 2, true);
  Set(all, "top_groups", int64_t{4});
  CHECK(Refusal<RouterCall>(all).empty());
  CHECK(Says(Refusal<RouterCall>(MadeRouter(2048, 8, true)), "E must be in [1, 1024], got 2048"));
  CHECK(Says(Refusal<RouterCall>(MadeRouter(0, 8, false)), "E must be in [1, 1024], got 0"));
  for (const int64_t top_k : {int64_t{0}, int64_t{33}}) {
    CHECK(Says(Refusal<RouterCall>(MadeRouter(1024, top_k, true)), "K must be in [1, 32], got "));
  }
}

}  // namespace
}  // namespace jax_ep::ffi_layer

int main() {
  using namespace jax_ep::ffi_layer;
  TestCombineBack();
  TestQuantizeCotangents();
  TestDequantizeRows();
  TestSizes();
  TestRouter();
  std::printf("all row operands passed\n");
  return 0;
}
