// One table per custom call: a row for each operand, result and attribute. From it come the binding
// whose arity and types XLA checks, the decoder that fills the step of protocol/steps.h, and what
// Python is told (table_export.h). A call is a struct:
//
//   struct PackCall : Call<PackStep> {
//     static constexpr const char* kTarget = "ep_pack";
//     static constexpr auto kOperands = std::tuple(Arg<Token>("tokens", {n, H}, &PackStep::tokens),
//                                                  Arg<I32>("topk_ids", {n, K}, &PackStep::ids));
//     static constexpr auto kResults = std::tuple(Ret<I32>("slot_of", {n, K}, &PackStep::slot_of));
//     static constexpr auto kAttributes = std::tuple(kKey, kFormat);
//     void Size(Checker& check);
//   };
//
// A dimension gets its size from the first row that has it as it is; all other rows are held
// against it. No size is multiplied before Validate has bounded it. Kernels on each back end trust
// what has been decoded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ffi/decode.h"
#include "ffi/encoding.h"
#include "formats/combine_wire.h"
#include "protocol/scale_tiles.h"

namespace jax_ep::ffi_layer {

// ---- Shapes -------------------------------------------------------------------------------------

// The letters of docs/api.md, and P payload columns, S scales of a row, W words of a region, V
// tiles of scales and their C column words, I input scales. kOne is no dimension.
enum class Dim : int8_t { kOne, n, K, H, R, G, N, P, S, W, V, C, I };
inline constexpr size_t kNumDims = 13;
inline constexpr const char* kDimNames[kNumDims] = {"1", "n", "K", "H", "R", "G", "N",
                                                    "P", "S", "W", "V", "C", "I"};

// A size in a shape: first * second + plus.
struct Term {
  Dim first = Dim::kOne;
  Dim second = Dim::kOne;
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
  static constexpr size_t kMaxRank = 5;
  size_t rank = 0;
  std::array<Term, kMaxRank> terms{};

  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<Term> list) : rank(list.size()) {
    for (size_t i = 0; i < rank; ++i) terms[i] = list.begin()[i];
  }
  constexpr Shape With(size_t i, Term term) const {
    Shape shape = *this;
    shape.terms[i] = term;
    return shape;
  }
};

class Sizes {
 public:
  bool known(Dim dim) const { return (known_ >> static_cast<int>(dim) & 1) != 0; }
  int64_t operator[](Dim dim) const { return sizes_[static_cast<size_t>(dim)]; }
  void Set(Dim dim, int64_t size) {
    sizes_[static_cast<size_t>(dim)] = size;
    known_ |= 1u << static_cast<int>(dim);
  }
  // Where the dimension has a size, else `otherwise`.
  int64_t Or(Dim dim, int64_t otherwise) const { return known(dim) ? (*this)[dim] : otherwise; }
  int64_t Of(const Term& term) const {
    return (*this)[term.first] * (*this)[term.second] + term.plus;
  }

 private:
  std::array<int64_t, kNumDims> sizes_{1};  // 0 where unknown
  uint32_t known_ = 0;
};

// ---- What a call is besides its step ------------------------------------------------------------

// Attributes, and what they and the buffers say of the call. Rows name its flags.
struct CallState {
  int64_t key = 0;
  int64_t site = 0;
  int64_t num_experts = 0;
  int64_t expert_alignment = 1;
  bool in_halves = false;
  bool zero_tail = false;
  bool weighted = false;
  bool with_weight_grads = false;
  bool with_residual = false;
  bool by_entry = false;
  bool with_entry_weights = false;
  bool with_shared = false;
  std::string_view format;
  std::string_view scale_layout = "rows";
  std::string_view combine_dtype;

  bool with_weights = false;  // of a dispatch along a route
  bool quantized = false;     // the format has scales
  bool plain = false;         // or not
  bool tiled = false;         // scales lie in tiles

  Encoding encoding;
  ElementType element{};
  const char* first_of_element = nullptr;  // the row that the element is from
  Sizes sizes;
  EpShape shape;

  int64_t num_weights() const { return with_weights || with_weight_grads ? shape.top_k : 0; }
};
using Flag = bool CallState::*;

template <typename StepType>
struct Call : CallState {
  using Step = StepType;
  using enum Dim;
  // The results are one int32 array `[1, all of their elements]`, in the same order.
  static constexpr bool kPacked = false;

  Step step{};

  // Before the shape is validated: dimensions that follow from others.
  void Infer(Checker&) {}
  // Of a valid shape: further dimensions, and what must hold besides shapes.
  void Size(Checker&) {}
  // Of a step whose pointers are filled in.
  void Finish() {}
};

// ---- Rows ---------------------------------------------------------------------------------------

enum class Kind : int8_t { kInt32, kFloat32, kWord, kToken, kPayload, kScale };
// Elements whose dtype the call determines: that of tokens, and those of its format.
struct Token {};
struct Payload {};
struct Scale {};

template <typename T>
consteval Kind KindOf() {
  if constexpr (std::is_same_v<T, I32>) return Kind::kInt32;
  if constexpr (std::is_same_v<T, F32>) return Kind::kFloat32;
  if constexpr (std::is_same_v<T, Wire>) return Kind::kWord;
  if constexpr (std::is_same_v<T, Payload>) return Kind::kPayload;
  if constexpr (std::is_same_v<T, Scale>) return Kind::kScale;
  return Kind::kToken;
}
template <typename T>
using BufferOf = std::conditional_t<std::is_empty_v<T>, AnyBuffer, T>;

// How dimensions of a buffer count.
enum class Form : int8_t {
  kExact,
  kAny,      // it only has to have an element
  kLonger,   // the last one may be larger
  kLeading,  // all but the last one are one, their product
  kFlat,     // all are one, their product
};

// What decoding needs of a row; the same type for all rows.
struct BufferRow {
  const char* name;
  Kind kind;
  Shape shape;
  bool result = false;
  Form form = Form::kExact;
  // An operand or result that may be omitted: whether it is there, else its shape, of no elements.
  Flag given = nullptr;
  Shape omitted{};
  int8_t shown_by = -1;  // the dimension that is 0 where it is omitted, if that sets the flag
  // Another shape where a flag is set.
  Flag when = nullptr;
  Shape other{};
  // Of a result: the operand whose memory it has.
  const char* in_place_of = nullptr;
  int8_t in_place = -1;

  std::string title() const { return (result ? "the result " : "") + std::string(name); }
};

// `Member` points into the step, or the call, to where the buffer's memory goes.
template <typename ValueType, typename Member>
struct Row {
  using Value = ValueType;

  BufferRow row;
  Member member;

  // A zero-size placeholder, of which dimension `dim` is 0, stands for it where the flag is unset.
  constexpr Row When(Flag flag, size_t dim = 0) const { return When(flag, row.shape.With(dim, 0)); }
  constexpr Row When(Flag flag, Shape omitted) const {
    Row made = *this;
    made.row.given = flag;
    made.row.omitted = omitted;
    return made;
  }
  // The same, and no attribute sets the flag: the placeholder itself does.
  constexpr Row Shows(Flag flag, size_t dim = 0) const {
    Row made = When(flag, dim);
    made.row.shown_by = static_cast<int8_t>(dim);
    return made;
  }
  constexpr Row If(Flag flag, Shape other) const {
    Row made = *this;
    made.row.when = flag;
    made.row.other = other;
    return made;
  }
  constexpr Row As(Form form) const {
    Row made = *this;
    made.row.form = form;
    return made;
  }
  constexpr Row InPlaceOf(const char* operand) const {
    Row made = *this;
    made.row.in_place_of = operand;
    return made;
  }

  template <typename Binding>
  auto Bind(Binding&& binding) const {
    if constexpr (requires(Value& value) { value->dimensions(); }) {
      return std::move(binding)
          .template Ret<std::remove_cvref_t<decltype(*std::declval<Value&>())>>();
    } else {
      return std::move(binding).template Arg<Value>();
    }
  }
};

template <typename T, typename Member>
constexpr auto Arg(const char* name, Shape shape, Member member) {
  return Row<BufferOf<T>, Member>{{name, KindOf<T>(), shape}, member};
}
template <typename T, typename Member>
constexpr auto Ret(const char* name, Shape shape, Member member) {
  return Row<Out<BufferOf<T>>, Member>{{name, KindOf<T>(), shape, true}, member};
}

// `after` is a result of the group's call before, or anything in a first call. It only orders the
// two calls and is not read, so its shape does not matter. Never empty: XLA may make it a parameter
// of a program, and an empty parameter has no buffer on GPUs.
inline constexpr auto kAfter = Arg<I32>("after", {1}, nullptr).As(Form::kAny);

template <typename ValueType, typename Target>
struct AttributeRow {
  using Value = ValueType;

  const char* name;
  Target target;

  template <typename Binding>
  auto Bind(Binding&& binding) const {
    return std::move(binding).template Attr<Value>(name);
  }
  void Store(CallState& call, Value value) const {
    if constexpr (std::is_same_v<Target, Dim>) {
      call.sizes.Set(target, value);
    } else {
      call.*target = value;
    }
  }
};
template <typename Value>
constexpr auto Attr(const char* name, Value CallState::* member) {
  return AttributeRow<Value, Value CallState::*>{name, member};
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
inline constexpr auto kScaleLayout = Attr("scale_layout", &CallState::scale_layout);
inline constexpr auto kWeighted = Attr("weighted", &CallState::weighted);
inline constexpr auto kWithWeightGrads = Attr("with_weight_grads", &CallState::with_weight_grads);
inline constexpr auto kWithResidual = Attr("with_residual", &CallState::with_residual);
inline constexpr auto kByEntry = Attr("by_entry", &CallState::by_entry);
inline constexpr auto kWithEntryWeights =
    Attr("with_entry_weights", &CallState::with_entry_weights);
inline constexpr auto kWithShared = Attr("with_shared", &CallState::with_shared);
inline constexpr auto kCombineDtype = Attr("combine_dtype", &CallState::combine_dtype);

// ---- Tables -------------------------------------------------------------------------------------

template <typename Call>
inline constexpr size_t kNumOperands = std::tuple_size_v<decltype(Call::kOperands)>;
template <typename Call>
inline constexpr size_t kNumResults = std::tuple_size_v<decltype(Call::kResults)>;
template <typename Call>
inline constexpr size_t kNumAttributes = std::tuple_size_v<decltype(Call::kAttributes)>;

template <typename Call>
inline constexpr auto kBuffers = std::tuple_cat(Call::kOperands, Call::kResults);
// What decoding needs of them.
template <typename Call>
inline constexpr auto kBufferRows = std::apply(
    [](const auto&... rows) {
      std::array<BufferRow, sizeof...(rows)> all{rows.row...};
      for (BufferRow& result : all) {
        for (int8_t i = 0; result.in_place_of != nullptr && result.in_place < 0; ++i) {
          if (std::string_view(all[static_cast<size_t>(i)].name) == result.in_place_of) {
            result.in_place = i;
          }
        }
      }
      return all;
    },
    kBuffers<Call>);

// What XLA hands a handler: rows as they are, but results that are packed.
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
  // A binding cannot be moved out of here.
  if constexpr (kFirst + 1 == std::tuple_size_v<ValuesOf<Call>>) {
    return kRow.Bind(std::move(binding));
  } else {
    return Bind<Call, kFirst + 1>(kRow.Bind(std::move(binding)));
  }
}

// ---- Decoding -----------------------------------------------------------------------------------

// A buffer, of any type.
struct View {
  ffi::DataType dtype{};
  Dims dims;
  void* data = nullptr;
  std::array<int64_t, 2> counted{};  // what dims are where several count as one
};

// Buffers against rows, and what they say of the call.
class TableDecoder {
 public:
  TableDecoder(Checker& check, CallState& call, std::span<const BufferRow> rows,
               std::span<View> views)
      : check_(check), call_(call), rows_(rows), views_(views) {}

  // Of the first `count`: dtypes and ranks, and the sizes of dimensions.
  void Infer(size_t count);
  // Of as many: sizes, all of which are known by now. The pointers of omitted buffers become null.
  void Hold(size_t count);
  // As Hold of results that lie in a row in one array: views become those of its parts.
  void Unpack(size_t first, const View& all);

 private:
  const Shape& ShapeOf(const BufferRow& row) const {
    if (row.given != nullptr && !(call_.*row.given)) return row.omitted;
    return row.when != nullptr && call_.*row.when ? row.other : row.shape;
  }
  bool CheckType(const BufferRow& row, ffi::DataType dtype);
  bool CheckElement(const BufferRow& row, ffi::DataType dtype);
  void RequireShape(const BufferRow& row, const View& view, const Shape& shape);

  Checker& check_;
  CallState& call_;
  std::span<const BufferRow> rows_;
  std::span<View> views_;
};

inline bool TableDecoder::CheckElement(const BufferRow& row, ffi::DataType dtype) {
  ElementType element{};
  if (!DecodeElement(dtype, element)) {
    check_.Fail(row.title() + " must be bfloat16, float16 or float32, got " + DtypeText(dtype));
  } else if (call_.first_of_element == nullptr) {
    call_.first_of_element = row.name;
    call_.element = element;
    call_.shape.element_bytes = ElementBytes(element);
  } else if (element != call_.element) {
    check_.Fail(row.title() + " must have the dtype of " + call_.first_of_element + ", got " +
                DtypeText(dtype));
  }
  return check_.ok();
}

inline bool TableDecoder::CheckType(const BufferRow& row, ffi::DataType dtype) {
  switch (row.kind) {
    case Kind::kToken:
      return CheckElement(row, dtype);
    case Kind::kPayload:
    case Kind::kScale: {
      if (!call_.quantized) return row.kind == Kind::kScale || CheckElement(row, dtype);
      const Encoding& encoding = call_.encoding;
      const ffi::DataType own =
          row.kind == Kind::kScale ? encoding.scale_dtype : encoding.payload_dtype;
      if (dtype != own) {
        check_.Fail(row.title() + " must be " + DtypeText(own) + " in this format, got " +
                    DtypeText(dtype));
      }
      return check_.ok();
    }
    default:
      return true;  // XLA's to check
  }
}

// -1 where the product does not fit, which no size is.
inline int64_t CountOf(Dims dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    if (__builtin_mul_overflow(count, dim, &count)) return -1;
  }
  return count;
}

inline void TableDecoder::Infer(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const BufferRow& row = rows_[i];
    View& view = views_[i];
    if (!CheckType(row, view.dtype)) return;
    if (row.form == Form::kAny) continue;
    if (row.form == Form::kLeading) {
      if (view.dims.size() == 0) return check_.Fail(row.title() + " must have a dimension");
      view.counted = {CountOf(Dims(view.dims.begin(), view.dims.size() - 1)), view.dims.back()};
      view.dims = Dims(view.counted.data(), 2);
    } else if (row.form == Form::kFlat) {
      view.counted[0] = CountOf(view.dims);
      view.dims = Dims(view.counted.data(), 1);
    }
    if (row.shown_by >= 0 && view.dims.size() == row.shape.rank) {
      call_.*row.given = view.dims[static_cast<size_t>(row.shown_by)] != 0;
    }
    const Shape& shape = ShapeOf(row);
    if (view.dims.size() != shape.rank) {
      return check_.Fail(row.title() + " must have " + std::to_string(shape.rank) +
                         " dimensions, got " + DimsText(view.dims));
    }
    for (size_t d = 0; d < shape.rank; ++d) {
      const Term& term = shape.terms[d];
      if (term.is_dim() && !call_.sizes.known(term.first)) {
        call_.sizes.Set(term.first, view.dims[d]);
      }
    }
  }
}

inline void TableDecoder::RequireShape(const BufferRow& row, const View& view, const Shape& shape) {
  bool same = true;
  for (size_t d = 0; d < shape.rank; ++d) {
    const int64_t size = call_.sizes.Of(shape.terms[d]);
    const bool longer = row.form == Form::kLonger && d + 1 == shape.rank && view.dims[d] > size;
    same = same && (view.dims[d] == size || longer);
  }
  if (same) return;
  std::array<int64_t, Shape::kMaxRank> sizes{};
  for (size_t d = 0; d < shape.rank; ++d) sizes[d] = call_.sizes.Of(shape.terms[d]);
  check_.Fail(row.title() + " must have shape " + DimsText(Dims(sizes.data(), shape.rank)) +
              (row.form == Form::kLonger ? " or longer" : "") + ", got " + DimsText(view.dims));
}

inline void TableDecoder::Hold(size_t count) {
  for (size_t i = 0; i < count && check_.ok(); ++i) {
    const BufferRow& row = rows_[i];
    View& view = views_[i];
    if (row.form == Form::kAny) {
      if (CountOf(view.dims) <= 0) check_.Fail(row.title() + " must have an element, got none");
      continue;
    }
    RequireShape(row, view, ShapeOf(row));
    if (row.in_place >= 0 && CountOf(view.dims) != 0 &&
        view.data != views_[static_cast<size_t>(row.in_place)].data) {
      check_.Fail(std::string(row.in_place_of) + " must be given as its own result");
    }
    if (row.given != nullptr && !(call_.*row.given)) view.data = nullptr;
  }
}

inline void TableDecoder::Unpack(size_t first, const View& all) {
  if (!check_.ok()) return;
  const auto count_of = [&](const BufferRow& row) {
    int64_t count = 1;
    for (size_t d = 0; d < row.shape.rank; ++d) count *= call_.sizes.Of(row.shape.terms[d]);
    return count;
  };
  int64_t total = 0;
  for (const BufferRow& row : rows_.subspan(first)) total += count_of(row);
  const std::array<int64_t, 2> expected{1, total};
  if (all.dims.size() != 2 || all.dims[0] != 1 || all.dims[1] != total) {
    return check_.Fail("the results must have shape " + DimsText(Dims(expected.data(), 2)) +
                       ", got " + DimsText(all.dims));
  }
  auto* data = static_cast<int32_t*>(all.data);
  for (size_t i = first; i < rows_.size(); ++i) {
    views_[i].data = data;
    data += count_of(rows_[i]);
  }
}

// What the type of a combine's sums is called: a dtype or the name of their format.
template <typename Step>
void SetWire(Checker& check, std::string_view name, Step& step) {
  step.quantized = WireFormatNumber(name);
  if (name == "float32" || step.quantized != 0) {
    step.wire = ElementType::kFloat32;
  } else if (name == "bfloat16") {
    step.wire = ElementType::kBFloat16;
  } else if (name == "float16") {
    step.wire = ElementType::kFloat16;
  } else {
    return check.Fail("unknown combine_dtype " + std::string(name));
  }
  if (step.quantized == 0) return;
  VisitWireFormat(step.quantized, [&]<typename Format>(Format) {
    if (step.shape.hidden % Format::kBlock == 0) return;
    check.Fail("hidden_size must be a multiple of " + std::to_string(Format::kBlock) +
               " where sums are quantised");
  });
}

// What a step has besides pointers.
template <typename Step>
void FillStep(Checker& check, const CallState& call, Step& step) {
  if constexpr (requires { step.shape; }) step.shape = call.shape;
  if constexpr (requires { step.element; }) step.element = call.element;
  if constexpr (requires { step.site; }) step.site = call.site;
  if constexpr (requires { step.zero_tail; }) step.zero_tail = call.zero_tail;
  if constexpr (requires { step.by_entry; }) step.by_entry = call.by_entry;
  if constexpr (requires { step.num_weights; }) step.num_weights = call.num_weights();
  if constexpr (requires { step.scale_layout; }) {
    step.scale_layout = call.tiled ? ScaleLayout::kTiled128x4 : ScaleLayout::kRows;
  }
  if constexpr (requires { step.wire; }) SetWire(check, call.combine_dtype, step);
}

inline EpShape ShapeOf(const CallState& call) {
  const Sizes& sizes = call.sizes;
  return {.ranks = sizes.Or(Dim::R, 1),
          .local_experts = sizes.Or(Dim::G, 1),
          .tokens = sizes[Dim::n],
          .top_k = sizes.Or(Dim::K, 1),
          .hidden = sizes[Dim::H],
          .element_bytes = call.shape.element_bytes,
          .recv_rows = sizes[Dim::N],
          .expert_alignment = call.expert_alignment};
}

// Of the format and the layout of scales, which choose among shapes.
inline void LookUpFormat(Checker& check, CallState& call) {
  call.encoding = Encoding::Of(check, call.format);
  call.quantized = call.encoding.quantized;
  call.plain = !call.quantized;
  call.tiled = call.scale_layout == "tiled_128x4";
  if (!call.tiled && call.scale_layout != "rows") {
    check.Fail("unknown scale_layout " + std::string(call.scale_layout));
  }
  check.Require(!call.tiled || call.quantized, "a format without scales has none to tile");
}

// Dimensions of a call's format.
inline void SizeFormat(Checker& check, CallState& call) {
  Sizes& sizes = call.sizes;
  Encoding& encoding = call.encoding;
  encoding.Size(check, sizes[Dim::H], call.shape.element_bytes);
  sizes.Set(Dim::P, encoding.payload_columns);
  sizes.Set(Dim::S, encoding.scales);
  if (!call.tiled) return;
  check.Require(encoding.tiles && encoding.scales % kTileColumns == 0,
                "tiled scales must be bytes of 16 or 32 elements, in multiples of 4 per row");
  const auto tiles =
      ScaleTiles::Of(call.shape.recv_rows, call.shape.local_experts, encoding.scales);
  sizes.Set(Dim::V, tiles.tiles);
  sizes.Set(Dim::C, tiles.column_words);
}

template <typename B>
View ViewOf(const B& buffer) {
  return {buffer.element_type(), buffer.dimensions(), buffer.untyped_data(), {}};
}
template <typename B>
View ViewOf(Out<B>& result) {
  return ViewOf(*result);
}

template <typename Call, typename Member>
void Store(Call& call, Member member, void* data) {
  if constexpr (std::is_same_v<Member, std::nullptr_t>) return;
  if constexpr (requires { call.step.*member; }) {
    call.step.*member = static_cast<std::remove_cvref_t<decltype(call.step.*member)>>(data);
  } else if constexpr (requires { call.*member; }) {
    call.*member = static_cast<std::remove_cvref_t<decltype(call.*member)>>(data);
  }
}

// Fills a call from what XLA hands over; `values` are of ValuesOf<Call>.
template <typename Call, typename... Values>
ffi::Error Decode(Call& call, Values&... values) {
  static_assert(std::is_same_v<std::tuple<Values...>, ValuesOf<Call>>);
  constexpr size_t kOperands = kNumOperands<Call>, kResults = kNumResults<Call>;
  constexpr size_t kBound = kOperands + (Call::kPacked ? 1 : kResults);
  constexpr size_t kAttributes = kNumAttributes<Call>;
  constexpr bool kFormatted = requires { requires Call::kFormatted; };
  const std::tuple<Values&...> given(values...);
  Checker check(Call::kTarget);

  [&]<size_t... I>(std::index_sequence<I...>) {
    (std::get<I>(Call::kAttributes).Store(call, std::get<kBound + I>(given)), ...);
  }(std::make_index_sequence<kAttributes>());
  if constexpr (kFormatted) LookUpFormat(check, call);
  if (!check.ok()) return check.error();
  std::array<View, kOperands + kResults> views;
  [&]<size_t... I>(std::index_sequence<I...>) {
    ((views[I] = ViewOf(std::get<I>(given))), ...);
  }(std::make_index_sequence<Call::kPacked ? kOperands : kBound>());
  constexpr size_t kHeld = Call::kPacked ? kOperands : kOperands + kResults;
  TableDecoder table(check, call, kBufferRows<Call>, views);
  table.Infer(kHeld);
  if (!check.ok()) return check.error();
  call.Infer(check);
  if (!check.ok()) return check.error();
  if constexpr (requires { call.step.shape; }) {
    call.shape = ShapeOf(call);
    check.Shape(call.shape);
    if (!check.ok()) return check.error();
  }
  if constexpr (kFormatted) SizeFormat(check, call);
  FillStep(check, call, call.step);
  if (!check.ok()) return check.error();
  call.Size(check);
  table.Hold(kHeld);
  if constexpr (Call::kPacked) table.Unpack(kOperands, ViewOf(std::get<kOperands>(given)));
  if (!check.ok()) return check.error();
  [&]<size_t... I>(std::index_sequence<I...>) {
    (Store(call, std::get<I>(kBuffers<Call>).member, views[I].data), ...);
  }(std::make_index_sequence<kOperands + kResults>());
  call.Finish();
  return ffi::Error::Success();
}

}  // namespace jax_ep::ffi_layer
