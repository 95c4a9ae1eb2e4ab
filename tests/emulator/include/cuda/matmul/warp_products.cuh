// Takes the place of xla_ffi/cuda/matmul/warp_products.cuh on the include path.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_runtime.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

inline float HalfOfWord(uint32_t word, uint32_t half) {
  return ToFloat(BFloat16{static_cast<uint16_t>(word >> half % 2 * 16)});
}

inline void WarpMultiply(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  uint64_t words[3][emulator::kWarpLanes];
  const uint64_t own[3] = {uint64_t{left[1]} << 32 | left[0], uint64_t{left[3]} << 32 | left[2],
                           uint64_t{right[1]} << 32 | right[0]};
  for (int i = 0; i < 3; ++i) {
    std::copy_n(emulator::Exchange(~0u, own[i], "mma.sync"), emulator::kWarpLanes, words[i]);
  }
  const uint32_t lane = emulator::Lane();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t quarter = k % 8 / 2;
      const uint64_t of_left = words[k / 8][row % 8 * 4 + quarter] >> row / 8 * 32;
      const uint64_t of_right = words[2][column * 4 + quarter] >> k / 8 * 32;
      sums[i] += HalfOfWord(static_cast<uint32_t>(of_left), k) *
                 HalfOfWord(static_cast<uint32_t>(of_right), k);
    }
  }
}

inline uint32_t MultiplyTwo(uint32_t a, uint32_t b) {
  const auto half = [&](uint32_t i) -> uint32_t {
    return FromFloat<BFloat16>(HalfOfWord(a, i) * HalfOfWord(b, i)).bits;
  };
  return half(1) << 16 | half(0);
}

}  // namespace jax_ep::cuda
