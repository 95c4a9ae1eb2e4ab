// Elements of a row in a lane's registers, to be summed or encoded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/launch.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

// Rounds two floats to nearest even; `low` goes to the low half.
template <typename T>
__device__ __forceinline__ uint32_t RoundTwo(float low, float high) {
  using Pair = std::conditional_t<std::is_same_v<T, Float16>, __half2, __nv_bfloat162>;
  Pair pair;
  if constexpr (std::is_same_v<T, Float16>) {
    pair = __floats2half2_rn(low, high);
  } else {
    pair = __floats2bfloat162_rn(low, high);
  }
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// kCount consecutive elements of a row, loaded and stored in accesses of at most 16 bytes.
template <typename T, int kCount>
struct Elements {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes / 4;
  static_assert(kBytes % 4 == 0);

  uint32_t words[kWords];

  __device__ void Load(const uint8_t* from) {
    static_assert(kBytes == 8 || kBytes % kVectorBytes == 0);
    if constexpr (kBytes == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 v = reinterpret_cast<const uint4*>(from)[i / 4];
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      }
    }
  }
  __device__ void Store(uint8_t* to) const {
    if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        reinterpret_cast<uint4*>(to)[i / 4] =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    }
  }
  __device__ float Get(int i) const {
    if constexpr (sizeof(T) == 4) {
      return ToFloat(BitsFloat(words[i]));
    } else {
      const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      if constexpr (std::is_same_v<T, Float16>) return __half2float(__ushort_as_half(bits));
      return ToFloat(T{bits});
    }
  }
  // Returns the float32 bits of the largest absolute value. A NaN gives at least 0x7F800000.
  __device__ uint32_t AmaxBits() const {
    if constexpr (sizeof(T) == 4) {
      uint32_t amax = 0;
#pragma unroll
      for (uint32_t word : words) amax = max(amax, word & 0x7FFFFFFFu);
      return amax;
    } else {
      // Without their signs, the bits of 16-bit floats also have the order of the floats.
      uint32_t pair = 0;
#pragma unroll
      for (uint32_t word : words) pair = __vmaxu2(pair, word & 0x7FFF7FFFu);
      const uint32_t amax = max(pair & 0xFFFFu, pair >> 16);
      if constexpr (std::is_same_v<T, BFloat16>) return amax << 16;
      return FloatBits(__half2float(__ushort_as_half(static_cast<uint16_t>(amax))));
    }
  }
  __device__ static Elements Round(const float (&sum)[kCount]) {
    Elements rounded;
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) nan |= sum[i] != sum[i];
    // The hardware's conversions agree with FromFloat except in the bits of a NaN.
    if constexpr (sizeof(T) == 2) {
      if (!nan) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          rounded.words[i] = RoundTwo<T>(sum[2 * i], sum[2 * i + 1]);
        }
        return rounded;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        rounded.words[i] = FloatBits(FromFloat<T>(sum[i]));
      } else {
        rounded.words[i] = static_cast<uint32_t>(FromFloat<T>(sum[2 * i]).bits) |
                           static_cast<uint32_t>(FromFloat<T>(sum[2 * i + 1]).bits) << 16;
      }
    }
    return rounded;
  }
};

// Elements per lane: as many of the element type as one vector holds. The accesses in the other
// type follow from that, since both rows have the same number of elements.
template <typename Element>
inline constexpr int kLaneElements = static_cast<int>(kVectorBytes / sizeof(Element));

}  // namespace jax_ep::cuda
