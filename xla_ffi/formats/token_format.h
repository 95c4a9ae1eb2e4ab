// What a token format is: how a token becomes payload and scales in a message. One header a format;
// registry.h lists them.
#pragma once

#include <concepts>
#include <cstdint>

namespace jax_ep {

template <typename F>
concept TokenFormat = requires(const void* token, int64_t hidden, int64_t element_bytes,
                               uint8_t* payload, uint8_t* scales) {
  // The name in SPEC.md section 5.
  { F::kName } -> std::convertible_to<const char*>;
  // Elements that share a scale; hidden_size must be a multiple of it. 1 without scales.
  { F::kBlock } -> std::convertible_to<int64_t>;
  // dtype names of `tokens` and `scales`; nullptr: the token's own dtype, and no scales.
  { F::kPayloadDtype } -> std::convertible_to<const char*>;
  { F::kScaleDtype } -> std::convertible_to<const char*>;
  { F::PayloadBytes(hidden, element_bytes) } -> std::same_as<int64_t>;
  { F::ScaleBytes(hidden) } -> std::same_as<int64_t>;
  // Host: encodes one token of `hidden` elements.
  { F::EncodeToken(token, hidden, element_bytes, payload, scales) } -> std::same_as<void>;
};

}  // namespace jax_ep
