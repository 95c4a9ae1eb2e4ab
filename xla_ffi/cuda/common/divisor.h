// Division by a number that the host knows. An integer division takes some thirty instructions on a
// GPU, and in a short call each of them must first be fetched from memory.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep::cuda {

// Divides numbers below 2^31 with one multiplication.
struct Divisor {
  uint32_t value;
  uint32_t multiplier;
  uint32_t shift;

  // Values below 1 count as 1.
  static constexpr Divisor Of(int64_t value) {
    Divisor divisor{static_cast<uint32_t>(value < 1 ? 1 : value), 0, 31};
    while (uint64_t{1} << (divisor.shift - 31) < divisor.value) ++divisor.shift;
    // Rounding up keeps the error below 1 / value for all numbers below 2^31.
    divisor.multiplier =
        static_cast<uint32_t>(((uint64_t{1} << divisor.shift) + divisor.value - 1) / divisor.value);
    return divisor;
  }
  JAX_EP_HOST_DEVICE constexpr uint32_t Divide(uint32_t number, uint32_t& rest) const {
    const uint32_t quotient = static_cast<uint32_t>(uint64_t{number} * multiplier >> shift);
    rest = number - quotient * value;
    return quotient;
  }
  JAX_EP_HOST_DEVICE constexpr uint32_t Quotient(uint32_t number) const {
    uint32_t rest;
    return Divide(number, rest);
  }
  JAX_EP_HOST_DEVICE constexpr uint32_t Rest(uint32_t number) const {
    uint32_t rest;
    Divide(number, rest);
    return rest;
  }
  JAX_EP_HOST_DEVICE constexpr int32_t int_value() const { return static_cast<int32_t>(value); }
};

}  // namespace jax_ep::cuda
