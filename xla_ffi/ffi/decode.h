// From XLA's buffers and attributes to the steps of protocol/steps.h: every size is checked here,
// so that kernels on each back end may trust it.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "protocol/steps.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

namespace ffi = xla::ffi;
using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using Wire = ffi::Buffer<ffi::U32>;
using AnyBuffer = ffi::AnyBuffer;
template <typename B>
using Out = ffi::Result<B>;

inline ffi::Error Invalid(std::string_view target, std::string_view message) {
  return ffi::Error::InvalidArgument(std::string(target) + ": " + std::string(message));
}

inline std::string DimsText(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// Collects the first violation, so that a decoder reads as a list of what must hold.
class Checker {
 public:
  explicit Checker(std::string_view target) : target_(target) {}

  template <typename B>
  void Dims(const char* name, const B& buffer, std::initializer_list<int64_t> expected) {
    const auto dims = buffer.dimensions();
    bool same = dims.size() == expected.size();
    for (size_t i = 0; same && i < dims.size(); ++i) same = dims[i] == expected.begin()[i];
    if (same) return;
    Fail(std::string(name) + " must have shape " +
         DimsText(ffi::Span<const int64_t>(expected.begin(), expected.size())) + ", got " +
         DimsText(dims));
  }
  template <typename B>
  void Rank(const char* name, const B& buffer, size_t rank) {
    if (buffer.dimensions().size() == rank) return;
    Fail(std::string(name) + " must have " + std::to_string(rank) + " dimensions, got " +
         DimsText(buffer.dimensions()));
  }
  void Shape(const EpShape& shape) {
    if (const char* message = Validate(shape)) Fail(message);
  }
  void Require(bool holds, const std::string& message) {
    if (!holds) Fail(message);
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return Invalid(target_, message_); }

 private:
  void Fail(std::string message) {
    if (message_.empty()) message_ = std::move(message);
  }
  std::string_view target_;
  std::string message_;
};

inline bool DecodeElement(ffi::DataType dtype, ElementType& element) {
  switch (dtype) {
    case ffi::F32:
      element = ElementType::kFloat32;
      return true;
    case ffi::BF16:
      element = ElementType::kBFloat16;
      return true;
    case ffi::F16:
      element = ElementType::kFloat16;
      return true;
    default:
      return false;
  }
}

inline int64_t Dim(const AnyBuffer& buffer, size_t i) { return buffer.dimensions()[i]; }
template <ffi::DataType dtype>
int64_t Dim(const ffi::Buffer<dtype>& buffer, size_t i) {
  return buffer.dimensions()[i];
}

// The wire travels as 32-bit words: XLA copies those faster than bytes, and every field is aligned
// to them.
inline constexpr int64_t kWireWordBytes = 4;

inline void CheckWire(Checker& check, const Wire& wire, int64_t ranks, int64_t region_bytes) {
  check.Dims("the wire buffer", wire, {ranks, region_bytes / kWireWordBytes});
}

// Of a wire buffer that has been checked.
inline int64_t RegionBytes(const Wire& wire) { return Dim(wire, 1) * kWireWordBytes; }

inline uint8_t* Bytes(const Wire& wire) { return reinterpret_cast<uint8_t*>(wire.typed_data()); }

// Reads n, H and the element type off a [n, H] float buffer.
inline void CheckTokens(Checker& check, const char* name, const AnyBuffer& tokens, EpShape& shape,
                        ElementType& element) {
  check.Rank(name, tokens, 2);
  check.Require(DecodeElement(tokens.element_type(), element),
                std::string(name) + " must be bfloat16, float16 or float32");
  if (!check.ok()) return;
  shape.tokens = Dim(tokens, 0);
  shape.hidden = Dim(tokens, 1);
  shape.element_bytes = ElementBytes(element);
}

}  // namespace jax_ep::ffi_layer
