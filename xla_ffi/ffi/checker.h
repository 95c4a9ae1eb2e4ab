// XLA's types as handlers use them, and the checks of a call that yield its error.
#pragma once

#include <sstream>
#include <string>
#include <string_view>

#include "protocol/steps.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

namespace ffi = xla::ffi;
using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using U8 = ffi::Buffer<ffi::U8>;
using Wire = ffi::Buffer<ffi::U32>;
using AnyBuffer = ffi::AnyBuffer;
template <typename B>
using Out = ffi::Result<B>;
using Dims = ffi::Span<const int64_t>;

// The wire travels as 32-bit words: XLA copies those faster than bytes, and every field is aligned
// to them.
inline constexpr int64_t kWireWordBytes = 4;

inline std::string DimsText(Dims dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline std::string DtypeText(ffi::DataType dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

// Collects the first violation, so that checks read as a list of what must hold.
class Checker {
 public:
  explicit Checker(const char* target) : target_(target) {}

  // Every call gets here, so strings are made only for failures.
  void Require(bool holds, const char* what) {
    if (!holds) Fail(what);
  }
  void Shape(const EpShape& shape) {
    if (const char* message = Validate(shape)) Fail(message);
  }
  void Fail(std::string message) {
    if (message_.empty()) message_ = std::move(message);
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const {
    return ok() ? ffi::Error::Success()
                : ffi::Error::InvalidArgument(std::string(target_) + ": " + message_);
  }

 private:
  const char* target_;
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

// The same, by Python's name for the dtype.
inline bool DecodeElement(std::string_view name, ElementType& element) {
  const ffi::DataType dtype = name == "float32"    ? ffi::F32
                              : name == "bfloat16" ? ffi::BF16
                              : name == "float16"  ? ffi::F16
                                                   : ffi::DataType::INVALID;
  return DecodeElement(dtype, element);
}

}  // namespace jax_ep::ffi_layer
