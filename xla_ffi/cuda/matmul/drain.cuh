// A warp's way from sums in registers to rows in memory: through 2 KB of shared memory, 16 lines of
// 128 bytes, so that stores are 16 bytes per lane and whole lines.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/matmul/hopper.cuh"

namespace jax_ep::cuda {

inline constexpr uint32_t kWarpRows = 16;
inline constexpr uint32_t kDrainBytes = 2048;
inline constexpr uint32_t kLineBytes = 128;

// Rows [0, rows) of 16 that a warp stores, of a matrix whose rows are `stride` bytes.
struct DrainRows {
  uint8_t* first;
  int64_t stride;
  int32_t rows;  // any number
};

class Drain {
 public:
  // `buffer`: kDrainBytes of this warp, aligned to 128.
  __device__ explicit Drain(uint8_t* buffer) : buffer_(buffer), lane_(Lane()) {}

  // 64 columns of 16 bits from `byte` on; those from `end` on do not exist. `word(c, r)` is the
  // lane's two elements of columns 8 * c and on, of its row (r = 0) or the one 8 further.
  template <typename Word>
  __device__ void Store16(const DrainRows& to, int64_t byte, int64_t end, Word word) {
    __syncwarp();
    const uint32_t row = lane_ % 16, right = lane_ / 16;
#pragma unroll
    for (uint32_t c = 0; c < 8; c += 2) {
      const uint32_t words[4] = {word(c, 0), word(c, 1), word(c + 1, 0), word(c + 1, 1)};
      StoreMatrices(At(row, c + right), words);
    }
    Copy(to, byte, end);
  }

  // 32 columns of float32: `sum(c, r, i)` is element i of two.
  template <typename Sum>
  __device__ void Store32(const DrainRows& to, int64_t byte, int64_t end, Sum sum) {
    __syncwarp();
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) {
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        const uint32_t row = lane_ / 4 + 8 * r;
        uint8_t* at = At(row, 2 * c + lane_ % 4 / 2) + lane_ % 2 * 8;
        *reinterpret_cast<uint2*>(at) =
            make_uint2(FloatBits(sum(c, r, 0)), FloatBits(sum(c, r, 1)));
      }
    }
    Copy(to, byte, end);
  }

  // 128 columns of 8 bits: `pair(c, r)` is the lane's two codes of columns 8 * c and on.
  template <typename Pair>
  __device__ void Store8(const DrainRows& to, int64_t byte, int64_t end, Pair pair) {
    __syncwarp();
#pragma unroll
    for (uint32_t c = 0; c < 16; ++c) {
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        uint8_t* at = At(lane_ / 4 + 8 * r, c / 2) + c % 2 * 8 + lane_ % 4 * 2;
        *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(pair(c, r));
      }
    }
    Copy(to, byte, end);
  }

 private:
  // Units of 16 bytes are swizzled, so that neither side meets bank conflicts.
  __device__ uint8_t* At(uint32_t row, uint32_t unit) const {
    return buffer_ + row * kLineBytes + (unit ^ row % 8) * 16;
  }

  __device__ void Copy(const DrainRows& to, int64_t byte, int64_t end) const {
    __syncwarp();
    const uint32_t unit = lane_ % 8;
    if (byte + unit * 16 >= end) return;
#pragma unroll
    for (uint32_t i = 0; i < kWarpRows; i += 4) {
      const uint32_t row = i + lane_ / 8;
      const uint4 value = *reinterpret_cast<const uint4*>(At(row, unit));
      if (static_cast<int32_t>(row) < to.rows) {
        *reinterpret_cast<uint4*>(to.first + row * to.stride + byte + unit * 16) = value;
      }
    }
  }

  uint8_t* buffer_;
  uint32_t lane_;
};

}  // namespace jax_ep::cuda
