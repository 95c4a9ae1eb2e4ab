// Checks which custom calls made by hand a decoder passes, and that it refuses slightly different
// ones with a message.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "check.h"
#include "ffi_calls.h"

namespace jax_ep::ffi_layer {

inline constexpr ffi::DataType kCode = ffi::F8E4M3FN;
inline constexpr ffi::DataType kTypes[] = {ffi::S32, ffi::U32, ffi::F32, ffi::F16, ffi::BF16,
                                           ffi::U8,  ffi::S64, kCode,    ffi::F64, ffi::F8E5M2};

// "" if the call passes, or why it does not.
template <typename Call>
std::string Refusal(const CustomCall& made, Call& call) {
  Arguments arguments(made, [](const Buffer&) {});
  const std::optional<ffi::Error> error = arguments.DecodeTo(call);
  if (!error) return "XLA";
  if (error->success()) return "";
  CHECK(error->message().starts_with(std::string(Call::kTarget) + ": "));
  return error->message();
}

template <typename Call>
std::string Refusal(const CustomCall& made) {
  Call call;
  return Refusal(made, call);
}

// Names of operands that alone determine something, so that it may change.
struct Free {
  std::string_view sizes;    // its dimensions
  std::string_view element;  // which of the element types tokens have
};

// Checks that the call passes, and that no similar call does.
template <typename Call>
Call Passes(const CustomCall& made, const Free& free = {}) {
  CurrentCase() = Call::kTarget;
  Call passed;
  const std::string message = Refusal(made, passed);
  if (!message.empty()) std::printf("%s\n", message.c_str());
  CHECK(message.empty());
  for (size_t i = 0; i < made.operands.size(); ++i) {
    const Operand& operand = made.operands[i];
    CurrentCase() = std::string(Call::kTarget) + " " + operand.name;
    for (const ffi::DataType dtype : kTypes) {
      ElementType element{};
      if (operand.name == free.element && DecodeElement(dtype, element)) continue;
      if (dtype == operand.dtype) continue;
      CustomCall other = made;
      other.operands[i].dtype = dtype;
      other.aliases.clear();
      CHECK(!Refusal<Call>(other).empty());
    }
    const size_t dims = operand.name == free.sizes ? 0 : operand.dims.size();
    for (size_t dim = 0; dim < dims; ++dim) {
      for (const int64_t change : {int64_t{-1}, int64_t{1}, int64_t{128}, int64_t{1} << 34}) {
        CustomCall other = made;
        other.operands[i].dims[dim] += change;
        if (BytesOf(other.operands[i]) < 0) continue;
        CHECK(!Refusal<Call>(other).empty());
      }
    }
    CustomCall flat = made;
    flat.operands[i].dims.push_back(1);
    CHECK(!Refusal<Call>(flat).empty());
  }
  return passed;
}

}  // namespace jax_ep::ffi_layer
