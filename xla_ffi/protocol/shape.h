// The sizes of one call and their constraints. Handlers fill an EpShape from buffers and attributes
// and validate it once; kernels on every back end then trust it.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep {

inline constexpr int64_t kMaxTopK = 32;
inline constexpr int64_t kMaxExperts = 2048;
// Every table and message indexes rows, slots and entries by int32.
inline constexpr int64_t kMaxIndex = INT32_MAX;
// Keeps the bytes of all messages of a call, and of a window, within 64 bits.
inline constexpr int64_t kMaxHidden = int64_t{1} << 26;
// Bulk copies (TMA, SIMD) move 16-byte units.
inline constexpr int64_t kRowAlignBytes = 16;

struct EpShape {
  int64_t ranks = 1;          // R
  int64_t local_experts = 1;  // L
  int64_t tokens = 0;         // n, of this call
  int64_t top_k = 1;          // K
  int64_t hidden = 0;         // H
  int64_t element_bytes = 2;  // of the token dtype
  int64_t recv_rows = 0;      // N
  int64_t expert_alignment = 1;

  JAX_EP_HOST_DEVICE int64_t experts() const { return ranks * local_experts; }
  JAX_EP_HOST_DEVICE int64_t row_bytes() const { return hidden * element_bytes; }
  JAX_EP_HOST_DEVICE int64_t slots() const { return ranks * tokens; }
};

// Returns nullptr if `shape` is valid, else what must hold.
constexpr const char* Validate(const EpShape& shape) {
  if (shape.ranks < 1) return "the number of ranks must be positive";
  if (shape.local_experts < 1) return "the number of local experts must be positive";
  // A division, because the product could overflow.
  if (shape.ranks > kMaxExperts / shape.local_experts) {
    return "num_experts must be at most kMaxExperts";
  }
  if (shape.top_k < 1 || shape.top_k > kMaxTopK) return "top_k must be in [1, kMaxTopK]";
  if (shape.tokens < 0) return "the number of tokens must not be negative";
  if (shape.tokens > kMaxIndex / (shape.ranks * shape.top_k)) {
    return "ranks * tokens * top_k must fit in int32";
  }
  if (shape.hidden < 1 || shape.hidden > kMaxHidden) {
    return "hidden_size must be in [1, kMaxHidden]";
  }
  if (shape.element_bytes != 2 && shape.element_bytes != 4) {
    return "tokens must have 2 or 4 bytes an element";
  }
  if (shape.row_bytes() % kRowAlignBytes != 0) return "a token must be a multiple of 16 bytes";
  if (shape.recv_rows < 0 || shape.recv_rows > kMaxIndex) return "recv_capacity must fit in int32";
  if (shape.expert_alignment < 1 || shape.expert_alignment > kMaxIndex) {
    return "expert_alignment must be positive and fit in int32";
  }
  return nullptr;
}

}  // namespace jax_ep
