// Custom calls made by hand, for tests of decoders: operands, results and attributes by name, and
// the XLA FFI buffers that a decoder takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "ffi/decode.h"

namespace jax_ep::ffi_layer {

inline constexpr int64_t kMostBytes = int64_t{1} << 20;  // larger operands get no memory

struct Operand {
  std::string name;  // a result's begins with "-> "
  ffi::DataType dtype = ffi::S32;
  std::vector<int64_t> dims;

  bool SameType(const Operand& other) const { return dims == other.dims && dtype == other.dtype; }
};
using Attribute = std::variant<int64_t, bool, float, std::string>;

struct CustomCall {
  std::vector<Operand> operands;  // followed by results
  std::vector<std::pair<std::string, Attribute>> attributes;
  // Indices of operands and of the results that share their memory; both have the same type.
  std::vector<std::pair<size_t, size_t>> aliases;

  void Add(std::string name, ffi::DataType dtype, std::vector<int64_t> dims) {
    operands.push_back({std::move(name), dtype, std::move(dims)});
  }
  size_t Find(std::string_view name) const {
    const auto at = std::ranges::find(operands, name, &Operand::name);
    CHECK(at != operands.end());
    return static_cast<size_t>(at - operands.begin());
  }
  const Attribute& AttributeOf(std::string_view name) const {
    const auto at =
        std::ranges::find(attributes, name, [](const auto& pair) { return pair.first; });
    CHECK(at != attributes.end());
    return at->second;
  }
};

// Checks that names and their order are those of the table, which Python uses.
template <typename Call>
void CheckNames(const CustomCall& made) {
  size_t buffer = 0, attribute = 0;
  const auto visit = [&]<typename Row>(const Row& row) {
    if constexpr (requires { row.row; }) {
      const std::string name = (row.row.result ? "-> " : "") + std::string(row.row.name);
      CHECK(buffer < made.operands.size() && made.operands[buffer++].name == name);
    } else {
      CHECK(attribute < made.attributes.size() && made.attributes[attribute++].first == row.name);
    }
  };
  std::apply([&](const auto&... rows) { (visit(rows), ...); }, BoundRows<Call>());
  CHECK(buffer == made.operands.size() && attribute == made.attributes.size());
}

// -1 if no array can be so large; XLA refuses it before a handler sees it.
inline int64_t BytesOf(const Operand& operand) {
  __int128 bytes = static_cast<__int128>(ffi::ByteWidth(operand.dtype));
  __int128 others = bytes;
  for (const int64_t dim : operand.dims) {
    bytes *= dim;
    others *= std::max<int64_t>(dim, 1);
    if (others > (int64_t{1} << 45)) return -1;
  }
  return static_cast<int64_t>(bytes);
}

// Passes arguments to a decoder. `fill(buffer)` writes the operands' contents.
class Arguments {
 public:
  template <typename Fill>
  Arguments(CustomCall call, Fill fill) : call_(std::move(call)) {
    for (Operand& operand : call_.operands) {
      const int64_t bytes = BytesOf(operand);
      small_ = small_ && bytes <= kMostBytes;
      memory_.emplace_back(bytes <= kMostBytes ? bytes : 0);
      fill(memory_.back());
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                          static_cast<XLA_FFI_DataType>(operand.dtype), memory_.back().data(),
                          static_cast<int64_t>(operand.dims.size()), operand.dims.data()});
    }
    for (const auto& [from, to] : call_.aliases) {
      if (!call_.operands[from].SameType(call_.operands[to])) continue;
      buffers_[to].data = buffers_[from].data;
    }
  }
  // Whether every operand has memory.
  bool small() const { return small_; }

  // nullopt if XLA would refuse the call, because a typed buffer has another dtype.
  template <typename Call>
  std::optional<ffi::Error> DecodeTo(Call& call) {
    return DecodeTo(call, static_cast<ValuesOf<Call>*>(nullptr));
  }

 private:
  template <typename Call, typename... Values>
  std::optional<ffi::Error> DecodeTo(Call& call, std::tuple<Values...>*) {
    CheckNames<Call>(call_);
    // Braces guarantee the order of evaluation.
    std::tuple<Values...> values{Next<Values>()...};
    if (refused_) return std::nullopt;
    return std::apply([&](auto&... value) { return Decode(call, value...); }, values);
  }

  template <typename T>
  T Next() {
    if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, bool> ||
                  std::is_same_v<T, float>) {
      return std::get<T>(call_.attributes[attribute_++].second);
    } else if constexpr (std::is_same_v<T, std::string_view>) {
      return std::get<std::string>(call_.attributes[attribute_++].second);
    } else {
      return NextBuffer(static_cast<T*>(nullptr));
    }
  }
  AnyBuffer NextBuffer(AnyBuffer*) { return AnyBuffer(&buffers_[buffer_++]); }
  template <ffi::DataType dtype>
  ffi::Buffer<dtype> NextBuffer(ffi::Buffer<dtype>*) {
    if (call_.operands[buffer_].dtype != dtype) refused_ = true;
    return ffi::Buffer<dtype>(&buffers_[buffer_++]);
  }
  template <typename B>
  Out<B> NextBuffer(Out<B>*) {
    return Out<B>(Next<B>());
  }

  CustomCall call_;
  std::deque<Buffer> memory_;
  std::vector<XLA_FFI_Buffer> buffers_;
  size_t buffer_ = 0, attribute_ = 0;
  bool small_ = true, refused_ = false;
};

}  // namespace jax_ep::ffi_layer
