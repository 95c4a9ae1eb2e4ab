// Stands in for CUDA's header of this name, as far as elements.cuh uses it.
#pragma once

#include "cuda_fp16.h"

struct __nv_bfloat162 {
  uint16_t low, high;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  using namespace ::jax_ep;
  return {emulator::RoundedBits<BFloat16>(low), emulator::RoundedBits<BFloat16>(high)};
}
