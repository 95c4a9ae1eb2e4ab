// "bf16": the payload is the token as it is, whatever its dtype.
#pragma once

#include <cstdint>

#include "formats/token_format.h"
#include "protocol/platform.h"

namespace jax_ep {

struct Bf16Format {
  static constexpr const char* kName = "bf16";
  static constexpr int64_t kBlock = 1;
  static constexpr const char* kPayloadDtype = nullptr;
  static constexpr const char* kScaleDtype = nullptr;
  static constexpr bool kTakesInputScale = false;

  JAX_EP_HOST_DEVICE static constexpr int64_t PayloadBytes(int64_t hidden, int64_t element_bytes) {
    return hidden * element_bytes;
  }
  JAX_EP_HOST_DEVICE static constexpr int64_t ScaleBytes(int64_t) { return 0; }
};

static_assert(TokenFormat<Bf16Format>);

}  // namespace jax_ep
