// Decodes XLA's buffers and attributes into a call's step, by its table.
//
// A dimension gets its size from the first row whose shape has it by itself, and all rows are
// checked against it. No size is multiplied before Validate has bounded it. Kernels of every back
// end trust what has been decoded.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ffi/operand_table.h"
#include "formats/combine_wire.h"
#include "protocol/scale_tiles.h"

namespace jax_ep::ffi_layer {

// A buffer, of any type.
struct View {
  ffi::DataType dtype{};
  Dims dims;
  void* data = nullptr;
  std::array<int64_t, 2> counted{};  // memory of `dims` where several dimensions count as one
  bool omitted = false;
};

// Returns -1, which is no size, if the product overflows.
inline int64_t CountOf(Dims dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    if (__builtin_mul_overflow(count, dim, &count)) return -1;
  }
  return count;
}

// Checks the buffers of a call against its rows; both have the same order.
class TableDecoder {
 public:
  TableDecoder(Checker& check, CallState& call, std::span<const BufferRow> rows,
               std::span<View> views)
      : check_(check), call_(call), rows_(rows), views_(views) {}

  // Checks the dtypes and ranks of the first `count` and infers flags and sizes from them.
  void Infer(size_t count) {
    for (size_t i = 0; i < count && check_.ok(); ++i) {
      if (CheckDtype(rows_[i], views_[i].dtype)) InferSizes(rows_[i], views_[i]);
    }
  }
  // Checks the shapes of the first `count`, once all sizes are known. The pointers of omitted
  // buffers become null.
  void Hold(size_t count) {
    for (size_t i = 0; i < count && check_.ok(); ++i) HoldShape(rows_[i], views_[i]);
  }
  // Finds the buffers of the rows from `first` on, which lie one after the other in `all`.
  void Unpack(size_t first, const View& all);

 private:
  bool CheckDtype(const BufferRow& row, ffi::DataType dtype);
  bool CheckElement(const BufferRow& row, ffi::DataType dtype);
  bool CheckOutput(const BufferRow& row, ffi::DataType dtype);
  void InferSizes(const BufferRow& row, View& view);
  void HoldShape(const BufferRow& row, View& view);

  bool IsSet(const Flag& flag) const { return flag.name != nullptr && call_.*flag.target; }
  const Shape& ShapeOf(const BufferRow& row, const View& view) const {
    return view.omitted ? row.omitted : IsSet(row.when) ? row.other : row.shape;
  }
  std::string ShapeText(const Shape& shape) const {
    std::array<int64_t, std::tuple_size_v<decltype(shape.terms)>> sizes{};
    for (size_t d = 0; d < shape.rank; ++d) sizes[d] = call_.sizes.Of(shape.terms[d]);
    return DimsText(Dims(sizes.data(), shape.rank));
  }

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

inline bool TableDecoder::CheckOutput(const BufferRow& row, ffi::DataType dtype) {
  ElementType wanted{}, element{};
  if (!DecodeElement(call_.out_dtype, wanted)) {
    check_.Fail("unknown out_dtype " + std::string(call_.out_dtype));
  } else if (!DecodeElement(dtype, element) || element != wanted) {
    check_.Fail(row.title() + " must have the out_dtype " + std::string(call_.out_dtype) +
                ", got " + DtypeText(dtype));
  }
  return check_.ok();
}

inline bool TableDecoder::CheckDtype(const BufferRow& row, ffi::DataType dtype) {
  const Kind kind = IsSet(row.when) ? row.other_kind : row.kind;
  const bool is_scale = kind == Kind::kScale;
  if (kind == Kind::kToken) return CheckElement(row, dtype);
  if (kind == Kind::kOutput) return CheckOutput(row, dtype);
  if (kind == Kind::kCode) {
    if (dtype != ffi::F8E4M3FN) {
      check_.Fail(row.title() + " must be " + DtypeText(ffi::F8E4M3FN) + ", got " +
                  DtypeText(dtype));
    }
    return check_.ok();
  }
  if (kind != Kind::kPayload && !is_scale) return true;  // XLA has checked it
  if (!call_.quantized) return is_scale || CheckElement(row, dtype);
  const ffi::DataType own = is_scale ? call_.encoding.scale_dtype : call_.encoding.payload_dtype;
  if (dtype == own) return true;
  check_.Fail(row.title() + " must be " + DtypeText(own) + " in this format, got " +
              DtypeText(dtype));
  return false;
}

inline void TableDecoder::InferSizes(const BufferRow& row, View& view) {
  if (row.form == Form::kAny) return;
  if (row.form == Form::kLeading) {
    if (view.dims.size() == 0) return check_.Fail(row.title() + " must have a dimension");
    view.counted = {CountOf(Dims(view.dims.begin(), view.dims.size() - 1)), view.dims.back()};
    view.dims = Dims(view.counted.data(), 2);
  } else if (row.form == Form::kFlat) {
    view.counted[0] = CountOf(view.dims);
    view.dims = Dims(view.counted.data(), 1);
  }
  if (row.shown_by < 0) {
    view.omitted = row.given.name != nullptr && !IsSet(row.given);
  } else if (view.dims.size() == row.shape.rank) {
    view.omitted = view.dims[static_cast<size_t>(row.shown_by)] == 0;
    if (row.given.target != nullptr) call_.*row.given.target = !view.omitted;
  }
  const Shape& shape = ShapeOf(row, view);
  if (view.dims.size() != shape.rank) {
    return check_.Fail(row.title() + " must have " + std::to_string(shape.rank) +
                       " dimensions, got " + DimsText(view.dims));
  }
  for (size_t d = 0; d < shape.rank; ++d) {
    const Term& term = shape.terms[d];
    if (term.is_dim() && !call_.sizes.known(term.first)) call_.sizes.Set(term.first, view.dims[d]);
  }
}

inline void TableDecoder::HoldShape(const BufferRow& row, View& view) {
  if (row.form == Form::kAny) {
    if (CountOf(view.dims) <= 0) check_.Fail(row.title() + " must have an element, got none");
    return;
  }
  const Shape& shape = ShapeOf(row, view);
  for (size_t d = 0; d < shape.rank; ++d) {
    const int64_t size = call_.sizes.Of(shape.terms[d]);
    const bool may_be_longer = row.form == Form::kLonger && d + 1 == shape.rank;
    if (view.dims[d] == size || (may_be_longer && view.dims[d] > size)) continue;
    return check_.Fail(row.title() + " must have shape " + ShapeText(shape) +
                       (row.form == Form::kLonger ? " or longer" : "") + ", got " +
                       DimsText(view.dims));
  }
  if (view.omitted) view.data = nullptr;
  if (row.in_place_of == nullptr || CountOf(view.dims) == 0) return;
  for (size_t i = 0; i < rows_.size() && !rows_[i].result; ++i) {
    if (std::string_view(rows_[i].name) != row.in_place_of || views_[i].data == view.data) continue;
    check_.Fail(row.in_place_of + std::string(" must be given as its own result"));
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
  if (all.dims.size() != 2 || all.dims[0] != 1 || all.dims[1] != total) {
    return check_.Fail("the results must have shape [1, " + std::to_string(total) + "], got " +
                       DimsText(all.dims));
  }
  auto* data = static_cast<int32_t*>(all.data);
  for (size_t i = first; i < rows_.size(); ++i) {
    views_[i].data = data;
    data += count_of(rows_[i]);
  }
}

// ---- Shapes and steps ---------------------------------------------------------------------------

// Looks up the format, which chooses among shapes as `scale_layout` does.
inline void LookUpFormat(Checker& check, CallState& call) {
  call.encoding = Encoding::Of(check, call.format);
  call.quantized = call.encoding.quantized;
  call.plain = !call.quantized;
  call.tiled = call.scale_layout == ScaleLayout::kTiled128x4;
  call.columns = call.scale_layout == ScaleLayout::kColumns;
  check.Require(!call.tiled || call.encoding.tiles, "the format must have scales that tiles take");
  check.Require(!call.columns || call.encoding.columns,
                "the format must have scales that columns take");
  check.Require(!call.coded || call.quantized, "the format of tokens with scales must have some");
}

// Sets the dimensions that the format determines. The shape must be valid.
inline void SizeFormat(Checker& check, CallState& call) {
  Encoding& encoding = call.encoding;
  encoding.Size(check, call.sizes[Dim::H], call.shape.element_bytes);
  call.sizes.Set(Dim::P, encoding.payload_columns);
  call.sizes.Set(Dim::S, encoding.scales);
  const int64_t rows = call.shape.recv_rows;
  call.sizes.Set(Dim::A, call.columns ? encoding.scales : rows);
  call.sizes.Set(Dim::B, call.columns ? ScaleLine(rows) : encoding.scales);
  if (!call.tiled) return;
  check.Require(encoding.scales % kTileColumns == 0,
                "tiled scales must be a multiple of 4 per row");
  const auto tiles = ScaleTiles::Of(rows, call.shape.local_experts, encoding.scales);
  call.sizes.Set(Dim::V, tiles.tiles);
  call.sizes.Set(Dim::C, tiles.column_words);
}

// Dimensions that the call does not have are unknown; they become 0 or 1.
inline EpShape ShapeOf(const CallState& call) {
  const Sizes& sizes = call.sizes;
  const auto or_one = [&](Dim dim) { return sizes.known(dim) ? sizes[dim] : 1; };
  return {.ranks = or_one(Dim::R),
          .local_experts = or_one(Dim::G),
          .tokens = sizes[Dim::n],
          .top_k = or_one(Dim::K),
          .hidden = sizes[Dim::H],
          .element_bytes = call.shape.element_bytes,
          .recv_rows = sizes[Dim::N],
          .expert_alignment = call.expert_alignment};
}

// Sets what a combine's sums travel as, by the name of a dtype or a format.
template <typename Step>
void SetWire(Checker& check, const CallState& call, Step& step) {
  const std::string_view name = call.combine_dtype;
  if constexpr (requires { step.input_scale; }) {
    step.input_scale = call.gradients ? kOfGradients : kNoInputScale;
  }
  step.quantized = WireFormatNumber(name);
  step.wire = name == "bfloat16"  ? ElementType::kBFloat16
              : name == "float16" ? ElementType::kFloat16
                                  : ElementType::kFloat32;
  if (step.quantized == 0) {
    if (step.wire == ElementType::kFloat32 && name != "float32") {
      check.Fail("unknown combine_dtype " + std::string(name));
    }
    return;
  }
  VisitWireFormat(step.quantized, [&]<typename Format>(Format) {
    if (step.shape.hidden % Format::kBlock == 0) return;
    check.Fail("hidden_size must be a multiple of " + std::to_string(Format::kBlock) +
               " where sums are quantised");
  });
}

// Fills in what a step has besides pointers.
template <typename Step>
void FillStep(Checker& check, const CallState& call, Step& step) {
  if constexpr (requires { step.shape; }) step.shape = call.shape;
  if constexpr (requires { step.element; }) step.element = call.element;
  if constexpr (requires { step.out_element; }) DecodeElement(call.out_dtype, step.out_element);
  if constexpr (requires { step.site; }) step.site = call.site;
  if constexpr (requires { step.num_weights; }) step.num_weights = call.num_weights();
  if constexpr (std::is_base_of_v<DispatchOptions, Step>) {
    static_cast<DispatchOptions&>(step) = call;
  }
  if constexpr (std::is_base_of_v<CombineOptions, Step>) static_cast<CombineOptions&>(step) = call;
  if constexpr (std::is_base_of_v<ActivationOptions, Step>) {
    static_cast<ActivationOptions&>(step) = call;
  }
  if constexpr (requires { step.wire; }) SetWire(check, call, step);
}

template <typename Call, typename Member>
void StorePointer(Call& call, Member member, void* data) {
  const auto store = [&](auto& pointer) {
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(data);
  };
  if constexpr (requires { call.step.*member; }) {
    store(call.step.*member);
  } else if constexpr (requires { call.*member; }) {
    store(call.*member);
  }
}

// ---- The decoder of a call ----------------------------------------------------------------------

template <typename B>
View ViewOf(const B& buffer) {
  return {buffer.element_type(), buffer.dimensions(), buffer.untyped_data(), {}};
}
template <typename B>
View ViewOf(Out<B>& result) {
  return ViewOf(*result);
}

// Calls visit.operator()<i>() for i from 0 to kCount - 1.
template <size_t kCount, typename Visit>
void ForEachIndex(Visit visit) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (visit.template operator()<I>(), ...);
  }(std::make_index_sequence<kCount>());
}

// Fills `call` from what XLA hands over.
template <typename Call, typename... Values>
ffi::Error Decode(Call& call, Values&... values) {
  static_assert(std::is_same_v<std::tuple<Values...>, ValuesOf<Call>>);
  constexpr size_t kOperands = kSize<Call::kOperands>;
  constexpr size_t kRows = kOperands + kSize<Call::kResults>;
  constexpr size_t kOwnViews = Call::kPacked ? kOperands : kRows;
  constexpr size_t kFirstAttribute = Call::kPacked ? kOperands + 1 : kRows;
  const std::tuple<Values&...> given(values...);
  Checker check(Call::kTarget);

  ForEachIndex<kSize<Call::kAttributes>>([&]<size_t i>() {
    std::get<i>(Call::kAttributes).Store(check, call, std::get<kFirstAttribute + i>(given));
  });
  if constexpr (Call::kFormatted) LookUpFormat(check, call);
  if (!check.ok()) return check.error();

  std::array<View, kRows> views;
  ForEachIndex<kOwnViews>([&]<size_t i>() { views[i] = ViewOf(std::get<i>(given)); });
  TableDecoder table(check, call, kBufferRows<Call>, views);
  table.Infer(kOwnViews);
  if (!check.ok()) return check.error();

  call.Infer(check);
  if (!check.ok()) return check.error();
  if constexpr (requires { call.step.shape; }) {
    call.shape = ShapeOf(call);
    check.Shape(call.shape);
    if (!check.ok()) return check.error();
  }
  if constexpr (Call::kFormatted) SizeFormat(check, call);
  if (!check.ok()) return check.error();

  FillStep(check, call, call.step);
  call.Size(check);
  table.Hold(kOwnViews);
  if constexpr (Call::kPacked) table.Unpack(kOperands, ViewOf(std::get<kOperands>(given)));
  if (!check.ok()) return check.error();
  ForEachIndex<kRows>(
      [&]<size_t i>() { StorePointer(call, std::get<i>(kBuffers<Call>).member, views[i].data); });
  call.Finish();
  return ffi::Error::Success();
}

}  // namespace jax_ep::ffi_layer
