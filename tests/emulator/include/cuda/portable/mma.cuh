// Takes the place of xla_ffi/cuda/portable/mma.cuh on the include path.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_runtime.h"
#include "formats/numbers.h"

namespace jax_ep::cuda::portable {

using emulator::SharedAddress;

inline void CopyOrZero(uint32_t to, const uint8_t* from, uint32_t bytes) {
  emulator::OwnCopy(emulator::SharedPointer(to), bytes == 0 ? nullptr : from, 16);
}
inline void EndCopies() { emulator::EndOwnCopies(); }
template <int kLeft>
void AwaitCopies() {
  emulator::AwaitOwnCopies(kLeft);
}

// The addresses that the lanes of a warp passed.
inline const std::array<uint32_t, 6>* Addresses(uint32_t from, const char* kind) {
  return emulator::ExchangeWords({from}, kind);
}
template <typename T>
T SharedAt(uint32_t address) {
  T value;
  std::memcpy(&value, emulator::SharedPointer(address), sizeof value);
  return value;
}

inline void LoadFragments(uint32_t (&to)[4], uint32_t from) {
  const auto* all = Addresses(from, "ldmatrix");
  const uint32_t lane = emulator::Lane();
  for (uint32_t i = 0; i < 4; ++i) {
    to[i] = SharedAt<uint32_t>(all[8 * i + lane / 4][0] + 4 * (lane % 4));
  }
}
inline void LoadFragmentsTransposed(uint32_t (&to)[4], uint32_t from) {
  const auto* all = Addresses(from, "ldmatrix.trans");
  const uint32_t lane = emulator::Lane();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = 8 * i + lane % 4 * 2, at = lane / 4 * 2;
    to[i] = SharedAt<uint16_t>(all[row][0] + at) |
            uint32_t{SharedAt<uint16_t>(all[row + 1][0] + at)} << 16;
  }
}
inline uint32_t LoadShared(uint32_t from) { return SharedAt<uint32_t>(from); }

// Element `i` of those in a word.
template <typename Element>
float OneOf(uint32_t word, uint32_t i) {
  if constexpr (std::is_same_v<Element, float>) {
    return BitsFloat(word & 0xFFFFE000u);  // tensor cores ignore what TF32 has not
  } else {
    return ToFloat(Element{static_cast<uint16_t>(word >> i % 2 * 16)});
  }
}

// Rounds as tensor cores do.
inline float TowardsZero(double sum) {
  const float nearest = static_cast<float>(sum);
  return std::isfinite(sum) && std::abs(static_cast<double>(nearest)) > std::abs(sum)
             ? std::nextafter(nearest, 0.0f)
             : nearest;
}

template <typename Element>
void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto* all = emulator::ExchangeWords({a[0], a[1], a[2], a[3], b0, b1}, "mma.sync");
  constexpr uint32_t kOfWord = 4 / sizeof(Element), kHalf = 4 * kOfWord;
  const uint32_t lane = emulator::Lane();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (uint32_t k = 0; k < 2 * kHalf; ++k) {
      const uint32_t quad = k % kHalf / kOfWord, further = k / kHalf;
      sum +=
          static_cast<double>(OneOf<Element>(all[row % 8 * 4 + quad][2 * further + row / 8], k)) *
          OneOf<Element>(all[column * 4 + quad][4 + further], k);
    }
    d[i] = TowardsZero(sum);
  }
}

inline void AddInOrder(float (&to)[4], const float (&with)[4]) {
  for (int i = 0; i < 4; ++i) to[i] += with[i];
}

inline uint32_t RoundToTf32(uint32_t bits) {
  return (bits & 0x7F800000u) == 0x7F800000u ? bits : (bits + 0x1000u) & 0xFFFFE000u;
}

}  // namespace jax_ep::cuda::portable
