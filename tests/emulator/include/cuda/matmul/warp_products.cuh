// Takes the place of xla_ffi/cuda/matmul/warp_products.cuh on the include path.
#pragma once

#include <cstdint>

#include "cuda_bf16.h"
#include "cuda_runtime.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

// Element `i` of two bfloat16.
inline float OneOfTwo(uint32_t words, uint32_t i) {
  return ToFloat(BFloat16{static_cast<uint16_t>(words >> i % 2 * 16)});
}

inline void WarpMultiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto* all = emulator::ExchangeWords({a[0], a[1], a[2], a[3], b[0], b[1]}, "mma.m16n8k16");
  const uint32_t lane = emulator::Lane();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t quad = k % 8 / 2, further = k / 8;
      sums[i] += OneOfTwo(all[row % 8 * 4 + quad][2 * further + row / 8], k) *
                 OneOfTwo(all[column * 4 + quad][4 + further], k);
    }
  }
}

inline void LoadMatrices(uint32_t (&to)[4], const uint8_t* from) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  const auto* all = emulator::ExchangeWords(
      {static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)}, "ldmatrix");
  const uint32_t lane = emulator::Lane();
  for (uint32_t i = 0; i < 4; ++i) {
    const auto& of_row = all[8 * i + lane / 4];
    const uintptr_t row = of_row[0] | uintptr_t{of_row[1]} << 32;
    to[i] = *reinterpret_cast<const uint32_t*>(row + 4 * (lane % 4));
  }
}

inline uint32_t MultiplyTwo(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    const float value = OneOfTwo(a, i) * OneOfTwo(b, i);
    product |= uint32_t{emulator::RoundedBits<BFloat16>(value)} << i * 16;
  }
  return product;
}

template <int kHalf>
uint32_t MultiplyTwoBy(uint32_t a, uint32_t b) {
  const uint32_t half = b >> 16 * kHalf & 0xFFFF;
  return MultiplyTwo(a, half << 16 | half);
}

}  // namespace jax_ep::cuda
