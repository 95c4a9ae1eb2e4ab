// "bf16": the payload is the token as it is, whatever its dtype.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/token_format.h"
#include "protocol/platform.h"

namespace jax_ep {

struct Bf16Format {
  static constexpr const char* kName = "bf16";
  static constexpr int64_t kBlock = 1;
  static constexpr const char* kPayloadDtype = nullptr;
  static constexpr const char* kScaleDtype = nullptr;

  JAX_EP_HOST_DEVICE static constexpr int64_t PayloadBytes(int64_t hidden, int64_t element_bytes) {
    return hidden * element_bytes;
  }
  JAX_EP_HOST_DEVICE static constexpr int64_t ScaleBytes(int64_t) { return 0; }

  static void EncodeToken(const void* token, int64_t hidden, int64_t element_bytes,
                          uint8_t* payload, uint8_t*) {
    std::memcpy(payload, token, static_cast<size_t>(hidden * element_bytes));
  }
};

static_assert(TokenFormat<Bf16Format>);

}  // namespace jax_ep
