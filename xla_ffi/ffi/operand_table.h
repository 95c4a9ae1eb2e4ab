// One table per custom call: a row for each operand, result and attribute, with its name, type,
// symbolic shape and place in the step of protocol/steps.h. The table makes the binding whose arity
// and types XLA checks (Bind), the decoder (decode.h) and what Python is told (table_export.h):
//
//   struct DispatchPackCall : Call<DispatchPackStep> {
//     static constexpr const char* kTarget = "ep_dispatch_pack";
//     static constexpr auto kOperands = std::tuple(Arg<Token>("tokens", {n, H}, &Step::tokens),
//                                                  Arg<I32>("topk_ids", {n, K}, &Step::ids));
//     static constexpr auto kResults = std::tuple(Ret<I32>("slot_of", {n, K}, &Step::slot_of));
//     static constexpr auto kAttributes = std::tuple(kKey, kFormat);
//   };
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ffi/checker.h"
#include "ffi/encoding.h"
#include "protocol/matmul_steps.h"
#include "protocol/options.h"

namespace jax_ep::ffi_layer {

// ---- Shapes -------------------------------------------------------------------------------------

// The letters of docs/api/index.md, and: P columns of a payload, S scales of a row, W words of a
// region, V tiles of scales and C their column words, A lines of B scales where there are no tiles,
// I input scales, E experts. In matmuls A is the contracted dimension and B the other one of a
// matrix, X and Y are their blocks of 128, Z is the sides of a matrix and C those of its codes;
// with matrices in mxfp4 Y are tiles of columns and Z the blocks of 32 along A, or P are their
// bytes along A and S their scales. kOne is no dimension.
enum class Dim : int8_t { kOne, n, K, H, R, G, N, P, S, W, V, C, A, B, I, X, Y, Z, E };
inline constexpr const char* kDimNames[] = {"1", "n", "K", "H", "R", "G", "N", "P", "S", "W",
                                            "V", "C", "A", "B", "I", "X", "Y", "Z", "E"};

// A size in a shape: first * second + plus.
struct Term {
  Dim first = Dim::kOne, second = Dim::kOne;
  int64_t plus = 0;

  constexpr Term() = default;
  constexpr Term(int64_t size) : plus(size - 1) {}  // NOLINT: shapes are written as {n, 3}
  constexpr Term(Dim dim) : first(dim) {}           // NOLINT
  constexpr Term(Dim a, Dim b, int64_t more) : first(a), second(b), plus(more) {}

  constexpr bool is_dim() const { return first != Dim::kOne && second == Dim::kOne && plus == 0; }
};
constexpr Term operator*(Dim a, Dim b) { return {a, b, 0}; }
constexpr Term operator+(Dim a, int64_t more) { return {a, Dim::kOne, more}; }

struct Shape {
  size_t rank = 0;
  std::array<Term, 5> terms{};

  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<Term> list) : rank(list.size()) {
    for (size_t i = 0; i < rank; ++i) terms[i] = list.begin()[i];
  }
};

class Sizes {
 public:
  bool known(Dim dim) const { return (known_ >> static_cast<int>(dim) & 1) != 0; }
  int64_t operator[](Dim dim) const { return sizes_[static_cast<size_t>(dim)]; }
  int64_t Of(const Term& term) const {
    return (*this)[term.first] * (*this)[term.second] + term.plus;
  }
  void Set(Dim dim, int64_t size) {
    sizes_[static_cast<size_t>(dim)] = size;
    known_ |= 1u << static_cast<int>(dim);
  }

 private:
  std::array<int64_t, std::size(kDimNames)> sizes_{1};  // 0 where unknown
  uint32_t known_ = 0;
};

// ---- Calls and their attributes -----------------------------------------------------------------

// What a call has besides its step: attributes, and what follows from them and from the buffers.
// FillStep copies options into the step.
struct CallState : DispatchOptions, CombineOptions, ActivationOptions {
  int64_t key = 0, site = 0, num_experts = 0, expert_alignment = 1;
  bool in_halves = false;
  bool gradients = false;   // the rows that a combine sends are gradients
  bool coded = false;       // tokens come as codes and scales
  bool scaled = false;      // rows have scales
  bool keep = false;        // gate and up are a result
  bool exact = false;       // float32 is multiplied as such, not as TF32
  bool transposed = false;  // the transposed codes of matrices are a result
  bool with_up = false;     // the matrices of up are an operand of their own
  int64_t side = -1;        // which side of rows a matmul takes; -1: they have only one
  std::string_view format, combine_dtype, out_dtype;
  // Of a router.
  bool with_bias = false;
  int64_t num_groups = 1, top_groups = 1, best_of_group = 1;
  float least_sum = 0.0f, scale = 1.0f;
  std::string_view score;

  bool with_weights = false;              // weights travel along a route
  bool with_weight_grads = false;         // weight gradients travel with a combine's rows
  bool with_entry_weights = false;        // a combine weights rows at the source
  bool with_shared = false;               // it adds a shared expert's rows
  bool quantized = false, plain = false;  // whether the format has scales, or not
  bool tiled = false;                     // scales lie in tiles
  bool columns = false;                   // scales lie in columns
  Encoding encoding;
  ElementType element{};                   // of tokens
  const char* first_of_element = nullptr;  // the first row with that type
  Sizes sizes;
  EpShape shape;

  // Weights or weight gradients per message.
  int64_t num_weights() const { return with_weights || with_weight_grads ? shape.top_k : 0; }
};

template <typename StepType>
struct Call : CallState {
  using Step = StepType;
  using enum Dim;
  static constexpr bool kFormatted = false;  // whether a format is among the attributes
  // Whether the results are one int32 array `[1, all of their elements]`, in the same order.
  static constexpr bool kPacked = false;

  Step step{};

  // Calls hide these with their own. Infer runs before the shape is validated and sets dimensions
  // that follow from others.
  void Infer(Checker&) {}
  // Runs with a valid shape: sets sizes of messages and checks what must hold besides shapes.
  void Size(Checker&) {}
  // Runs when the step is otherwise complete.
  void Finish() {}
};

// `Target` is a member of CallState, or the dimension whose size the attribute is. The attribute of
// an enumeration is one of its words.
template <typename ValueType, typename Target>
struct AttributeRow {
  using Value = ValueType;

  const char* name = nullptr;
  Target target{};

  template <typename Binding>
  auto Bind(Binding&& binding) const {
    return std::move(binding).template Attr<Value>(name);
  }
  void Store(Checker& check, CallState& call, Value value) const {
    if constexpr (std::is_same_v<Target, Dim>) {
      call.sizes.Set(target, value);
    } else if constexpr (requires { call.*target = value; }) {
      call.*target = value;
    } else {
      using Member = std::remove_reference_t<decltype(call.*target)>;
      const auto& words = kWordsOf<Member>;
      const auto word = std::find(words.begin(), words.end(), value);
      if (word == words.end()) return check.Fail("unknown " + (name + (" " + std::string(value))));
      call.*target = static_cast<Member>(word - words.begin());
    }
  }
};
// `State` is CallState or a struct of options.
template <typename Member, typename State>
constexpr auto Attr(const char* name, Member State::* member) {
  using Value = std::conditional_t<std::is_enum_v<Member>, std::string_view, Member>;
  return AttributeRow<Value, Member CallState::*>{name, member};
}
constexpr auto Attr(const char* name, Dim dim) { return AttributeRow<int64_t, Dim>{name, dim}; }

inline constexpr auto kKey = Attr("key", &CallState::key);
inline constexpr auto kSite = Attr("site", &CallState::site);
inline constexpr auto kInHalves = Attr("in_halves", &CallState::in_halves);
inline constexpr auto kNumExperts = Attr("num_experts", &CallState::num_experts);
inline constexpr auto kRanks = Attr("ranks", Dim::R);
inline constexpr auto kLocalExperts = Attr("local_experts", Dim::G);
inline constexpr auto kExpertAlignment = Attr("expert_alignment", &CallState::expert_alignment);
inline constexpr auto kZeroTail = Attr("zero_tail", &CallState::zero_tail);
inline constexpr auto kFormat = Attr("format", &CallState::format);
inline constexpr auto kCoded = Attr("coded", &CallState::coded);
inline constexpr auto kScaled = Attr("scaled", &CallState::scaled);
inline constexpr auto kKeep = Attr("keep", &CallState::keep);
inline constexpr auto kExact = Attr("exact", &CallState::exact);
inline constexpr auto kTransposed = Attr("transposed", &CallState::transposed);
inline constexpr auto kSide = Attr("side", &CallState::side);
inline constexpr auto kOutDtype = Attr("out_dtype", &CallState::out_dtype);
inline constexpr auto kCombineDtype = Attr("combine_dtype", &CallState::combine_dtype);
inline constexpr auto kGradients = Attr("gradients", &CallState::gradients);

// What all dispatches that route take, and all combines.
#define JAX_EP_ATTRIBUTE(Type, name) , Attr(#name, &CallState::name)
inline constexpr auto kDispatchOptions =
    std::tuple(kExpertAlignment JAX_EP_DISPATCH_OPTIONS(JAX_EP_ATTRIBUTE));
inline constexpr auto kCombineOptions =
    std::tuple(kCombineDtype, kGradients JAX_EP_COMBINE_OPTIONS(JAX_EP_ATTRIBUTE));
#undef JAX_EP_ATTRIBUTE
// What matmuls take whose results go through an activation.
inline constexpr auto kActivationOptions =
    std::tuple(Attr("activation", &CallState::activation), Attr("alpha", &CallState::alpha),
               Attr("limit", &CallState::limit));

// Shapes may depend on a flag: a bool among the attributes, or one of these, which follow from
// others.
using Flag = AttributeRow<bool, bool CallState::*>;
inline constexpr Flag kByEntry = Attr("by_entry", &CallState::by_entry);
inline constexpr Flag kWithWeightGrads = Attr("with_weight_grads", &CallState::with_weight_grads);
inline constexpr Flag kWithEntryWeights =
    Attr("with_entry_weights", &CallState::with_entry_weights);
inline constexpr Flag kWithShared = Attr("with_shared", &CallState::with_shared);
inline constexpr Flag kWithWeights = Attr("with_weights", &CallState::with_weights);
inline constexpr Flag kWithUp = Attr("with_up", &CallState::with_up);
inline constexpr Flag kQuantized = Attr("quantized", &CallState::quantized);
inline constexpr Flag kPlain = Attr("plain", &CallState::plain);
inline constexpr Flag kTiled = Attr("tiled", &CallState::tiled);

// ---- Operands and results -----------------------------------------------------------------------

enum class Kind : int8_t {
  kInt32,
  kFloat32,
  kByte,
  kWord,
  kCode,
  kToken,
  kOutput,
  kPayload,
  kScale
};

// The buffer types of rows: I32, F32, U8 and Wire; e4m3 codes, for which XLA has no buffer type;
// and those whose dtype the call determines: that of tokens, its `out_dtype`, and those of its
// format.
struct Code {};
struct Token {};
struct Output {};
struct Payload {};
struct Scale {};
template <typename T>
inline constexpr Kind kKindOf = std::is_same_v<T, I32>       ? Kind::kInt32
                                : std::is_same_v<T, F32>     ? Kind::kFloat32
                                : std::is_same_v<T, U8>      ? Kind::kByte
                                : std::is_same_v<T, Wire>    ? Kind::kWord
                                : std::is_same_v<T, Code>    ? Kind::kCode
                                : std::is_same_v<T, Output>  ? Kind::kOutput
                                : std::is_same_v<T, Payload> ? Kind::kPayload
                                : std::is_same_v<T, Scale>   ? Kind::kScale
                                                             : Kind::kToken;

// How a buffer must match its row's shape.
enum class Form : int8_t {
  kExact,
  kAny,      // not at all, but it must have an element
  kLonger,   // the last dimension may be larger
  kLeading,  // dimensions before the last count as one, their product
  kFlat,     // all dimensions count as one
};

// What decoding needs to know of a row, in one type for all rows.
struct BufferRow {
  const char* name;
  Kind kind;
  bool result;
  Shape shape;
  Form form = Form::kExact;
  // For a buffer that may be omitted: what says that it is given, and the shape, without elements,
  // of the buffer that is passed in its place. XLA requires as many buffers in every call. Without
  // a target the flag is only a name, for Python.
  Flag given{};
  Shape omitted{};
  // If no attribute but the buffer itself sets `given`: the dimension that is 0 in an omitted one.
  int8_t shown_by = -1;
  // A flag that changes the shape and perhaps the kind.
  Flag when{};
  Shape other{};
  Kind other_kind = kind;
  const char* in_place_of = nullptr;  // the operand whose memory a result takes

  std::string title() const { return (result ? "the result " : "") + std::string(name); }
};

// `member`, of the step or the call, gets the buffer's address. It is nullptr if nothing reads it.
template <typename Buffer, bool kResult, typename Member>
struct Row {
  using Value = std::conditional_t<kResult, Out<Buffer>, Buffer>;

  BufferRow row;
  Member member;

  // If the flag is unset, a buffer whose dimension `dim` is 0 is passed instead.
  constexpr Row When(Flag flag, size_t dim = 0) const {
    Shape omitted = row.shape;
    omitted.terms[dim] = 0;
    return When(flag, omitted);
  }
  constexpr Row When(Flag flag, Shape omitted) const {
    return With([&](BufferRow& made) { made.given = flag, made.omitted = omitted; });
  }
  // The same if no attribute sets the flag: dimension `dim` itself shows whether it was omitted.
  constexpr Row Shows(Flag flag, size_t dim = 0) const {
    return When(flag, dim).With([&](BufferRow& made) { made.shown_by = static_cast<int8_t>(dim); });
  }
  // The same if nothing else asks whether the buffer is given.
  constexpr Row Optional(size_t dim = 0) const { return Shows(Flag{row.name, nullptr}, dim); }
  constexpr Row If(Flag flag, Shape other) const { return If(flag, other, row.kind); }
  constexpr Row If(Flag flag, Shape other, Kind kind) const {
    return With(
        [&](BufferRow& made) { made.when = flag, made.other = other, made.other_kind = kind; });
  }
  constexpr Row As(Form form) const {
    return With([&](BufferRow& made) { made.form = form; });
  }
  constexpr Row InPlaceOf(const char* operand) const {
    return With([&](BufferRow& made) { made.in_place_of = operand; });
  }
  template <typename Change>
  constexpr Row With(Change change) const {
    Row made = *this;
    change(made.row);
    return made;
  }

  template <typename Binding>
  auto Bind(Binding&& binding) const {
    if constexpr (kResult) {
      return std::move(binding).template Ret<Buffer>();
    } else {
      return std::move(binding).template Arg<Buffer>();
    }
  }
};

template <bool kResult, typename T, typename Member>
constexpr auto MakeRow(const char* name, Shape shape, Member member) {
  using Buffer = std::conditional_t<std::is_empty_v<T>, AnyBuffer, T>;
  return Row<Buffer, kResult, Member>{{name, kKindOf<T>, kResult, shape}, member};
}
template <typename T, typename Member>
constexpr auto Arg(const char* name, Shape shape, Member member) {
  return MakeRow<false, T>(name, shape, member);
}
template <typename T, typename Member>
constexpr auto Ret(const char* name, Shape shape, Member member) {
  return MakeRow<true, T>(name, shape, member);
}

// `after` is a result of the group's previous call, or anything in the first call. It only orders
// the two calls and is not read, so its shape does not matter. Never empty: XLA may make it a
// parameter of a program, and an empty parameter has no buffer on GPUs.
inline constexpr auto kAfter = Arg<I32>("after", {1}, nullptr).As(Form::kAny);

// ---- Tables -------------------------------------------------------------------------------------

template <const auto& kRows>
inline constexpr size_t kSize = std::tuple_size_v<std::remove_cvref_t<decltype(kRows)>>;

template <typename Call>
inline constexpr auto kBuffers = std::tuple_cat(Call::kOperands, Call::kResults);
template <typename Call>
inline constexpr auto kBufferRows =
    std::apply([](const auto&... rows) { return std::array{rows.row...}; }, kBuffers<Call>);

// What XLA hands a handler: all rows, with packed results as a single one.
template <typename Call>
constexpr auto BoundRows() {
  if constexpr (Call::kPacked) {
    return std::tuple_cat(Call::kOperands, std::tuple(Ret<I32>("results", {1, 1}, nullptr)),
                          Call::kAttributes);
  } else {
    return std::tuple_cat(Call::kOperands, Call::kResults, Call::kAttributes);
  }
}
template <typename... Rows>
std::tuple<typename Rows::Value...> ValuesOfRows(const std::tuple<Rows...>&);
// The types of a handler's parameters.
template <typename Call>
using ValuesOf = decltype(ValuesOfRows(BoundRows<Call>()));

// Adds the rows of a call to a binding of its context.
template <typename Call, size_t kFirst = 0, typename Binding>
auto Bind(Binding&& binding) {
  constexpr auto kRow = std::get<kFirst>(BoundRows<Call>());
  // A binding can be returned as it is made, but it cannot be moved.
  if constexpr (kFirst + 1 == std::tuple_size_v<ValuesOf<Call>>) {
    return kRow.Bind(std::move(binding));
  } else {
    return Bind<Call, kFirst + 1>(kRow.Bind(std::move(binding)));
  }
}

}  // namespace jax_ep::ffi_layer
