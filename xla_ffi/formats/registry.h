// Every token format, one line each. Python reads its list from here through the native module.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "formats/bf16.h"
#include "formats/fp8_block128.h"
#include "formats/fp8_block128_e8m0.h"
#include "formats/mxfp4.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"

#define JAX_EP_TOKEN_FORMATS(FORMAT) \
  FORMAT(Bf16Format)                 \
  JAX_EP_QUANTIZED_FORMATS(FORMAT)
#define JAX_EP_QUANTIZED_FORMATS(FORMAT) \
  JAX_EP_WIRE_FORMATS(FORMAT)            \
  FORMAT(MxFp8Format)                    \
  FORMAT(MxFp4Format)                    \
  FORMAT(Fp8Block128E8M0Format)          \
  FORMAT(NvFp4Format)
// The formats that combine_format and grad_format take as well, without an input_scale. GPU kernels
// assert what they rely on: codes of 8 bits in blocks of 128, and scales of 4 bytes.
#define JAX_EP_WIRE_FORMATS(FORMAT) FORMAT(Fp8Block128Format)

namespace jax_ep {

#define JAX_EP_NAME(Format) Format::kName,
inline constexpr const char* kFormatNames[] = {JAX_EP_TOKEN_FORMATS(JAX_EP_NAME)};
#undef JAX_EP_NAME

// Calls `visit(Format{})` for the format named `name`; returns false if there is none.
template <typename Visit>
bool VisitFormat(std::string_view name, Visit&& visit) {
#define JAX_EP_VISIT(Format)   \
  if (name == Format::kName) { \
    visit(Format{});           \
    return true;               \
  }
  JAX_EP_TOKEN_FORMATS(JAX_EP_VISIT)
#undef JAX_EP_VISIT
  return false;
}

template <typename Visit>
void ForEachFormat(Visit&& visit) {
#define JAX_EP_VISIT(Format) visit(Format{});
  JAX_EP_TOKEN_FORMATS(JAX_EP_VISIT)
#undef JAX_EP_VISIT
}

template <typename Visit>
void ForEachWireFormat(Visit&& visit) {
#define JAX_EP_VISIT(Format) visit(Format{});
  JAX_EP_WIRE_FORMATS(JAX_EP_VISIT)
#undef JAX_EP_VISIT
}

#define JAX_EP_IS(Format) || std::is_same_v<Candidate, Format>
template <typename Candidate>
inline constexpr bool kIsWireFormat = false JAX_EP_WIRE_FORMATS(JAX_EP_IS);
#undef JAX_EP_IS

}  // namespace jax_ep
