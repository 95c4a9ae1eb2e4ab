// Stands in for CUDA's header of this name, as far as elements.cuh uses it.
#pragma once

#include "cuda_runtime.h"
#include "formats/numbers.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  uint16_t low, high;
};

namespace jax_ep::emulator {

// Every NaN becomes the NaN that the hardware's conversions return.
template <typename Element>
uint16_t RoundedBits(float value) {
  return value != value ? uint16_t{0x7FFF} : FromFloat<Element>(value).bits;
}

}  // namespace jax_ep::emulator

inline __half2 __floats2half2_rn(float low, float high) {
  using namespace ::jax_ep;
  return {emulator::RoundedBits<Float16>(low), emulator::RoundedBits<Float16>(high)};
}
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half value) { return ::jax_ep::ToFloat(::jax_ep::Float16{value.bits}); }
