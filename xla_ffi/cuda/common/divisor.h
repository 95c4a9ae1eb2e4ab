// Division by numbers that the host knows: on the device an integer division takes some thirty
// instructions, and in a short call every one of them is fetched for the first time.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep::cuda {

// Of numbers below 2^31, with a multiplication.
struct Divisor {
  uint32_t value;
  uint32_t multiplier;
  uint32_t shift;

  // Divisors below 1 become 1.
  static constexpr Divisor Of(int64_t value) {
    Divisor divisor{static_cast<uint32_t>(value < 1 ? 1 : value), 0, 31};
    while (uint64_t{1} << (divisor.shift - 31) < divisor.value) ++divisor.shift;
    // Rounded up: the error stays below 1 / value for all such numbers.
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
