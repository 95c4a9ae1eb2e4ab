// Custom calls made by hand, for tests of decoders: operands and attributes in the order of the
// parameters of a decoder, and the buffers of XLA's FFI that it is given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "ffi/decode.h"

namespace jax_ep::ffi_layer {

inline constexpr int64_t kMostBytes = int64_t{1} << 20;  // of an operand that has its memory

struct Operand {
  std::vector<int64_t> dims;
  ffi::DataType dtype = ffi::S32;

  bool SameType(const Operand& other) const { return dims == other.dims && dtype == other.dtype; }
};
using Attribute = std::variant<int64_t, bool, std::string>;

struct Call {
  std::vector<Operand> operands;
  std::vector<Attribute> attributes;
  // Operands and the results that XLA gives their memory, by place; both of one type.
  std::vector<std::pair<size_t, size_t>> aliases;

  void Add(ffi::DataType dtype, std::vector<int64_t> dims) {
    operands.push_back({std::move(dims), dtype});
  }
};

// -1 where no array can be so large, which XLA has refused before a handler sees it.
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

// Gives a decoder its arguments, in order. `fill(buffer)` writes the operands' contents.
class Arguments {
 public:
  template <typename Fill>
  Arguments(Call call, Fill fill) : call_(std::move(call)) {
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
  // Whether every operand has its memory.
  bool small() const { return small_; }
  // Whether XLA had refused the call: a typed buffer is of another dtype.
  bool refused() const { return refused_; }
  bool taken() const { return buffer_ == buffers_.size() && attribute_ == call_.attributes.size(); }

  template <typename T>
  T Next() {
    if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, bool>) {
      return std::get<T>(call_.attributes[attribute_++]);
    } else if constexpr (std::is_same_v<T, std::string_view>) {
      return std::get<std::string>(call_.attributes[attribute_++]);
    } else {
      return NextBuffer(static_cast<T*>(nullptr));
    }
  }

 private:
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

  Call call_;
  std::deque<Buffer> memory_;
  std::vector<XLA_FFI_Buffer> buffers_;
  size_t buffer_ = 0, attribute_ = 0;
  bool small_ = true, refused_ = false;
};

}  // namespace jax_ep::ffi_layer
