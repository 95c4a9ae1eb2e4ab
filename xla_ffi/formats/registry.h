// Every token format, one line each. Python reads its list from here through the native module.
#pragma once

#include <string_view>

#include "formats/bf16.h"
#include "formats/fp8_block128.h"
#include "formats/mxfp4.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"

#define JAX_EP_TOKEN_FORMATS(FORMAT) \
  FORMAT(Bf16Format)                 \
  JAX_EP_QUANTIZED_FORMATS(FORMAT)
#define JAX_EP_QUANTIZED_FORMATS(FORMAT) \
  FORMAT(Fp8Block128Format)              \
  FORMAT(MxFp8Format)                    \
  FORMAT(MxFp4Format)                    \
  FORMAT(NvFp4Format)

namespace jax_ep {

// Calls `visit(Format{})` for the format named `name`; false where there is none.
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

}  // namespace jax_ep
