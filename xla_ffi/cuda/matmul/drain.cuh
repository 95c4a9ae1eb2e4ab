// A warp's way from sums in registers to rows in memory, and from rows to where the sums are:
// through 2 KB of shared memory, 16 lines of 128 bytes, so that a lane's accesses to memory are 16
// bytes and the warp's are whole lines.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/matmul/hopper.cuh"

namespace jax_ep::cuda {

inline constexpr uint32_t kWarpRows = 16;
inline constexpr uint32_t kDrainBytes = 2048;
inline constexpr uint32_t kLineBytes = 128;

// A lane's view of a warp's 16 rows of a matrix: of every fourth row 16 bytes of 128.
struct DrainRows {
  // `first`: row 0, of which and of whose followers `rows` exist; any number.
  __device__ DrainRows(uint8_t* first, int64_t stride, int32_t rows)
      : at(first + Lane() / 8 * stride + Lane() % 8 * 16),
        step(4 * stride),
        rows(rows - static_cast<int32_t>(Lane() / 8)) {}

  uint8_t* at;
  int64_t step;
  int32_t rows;
};

class Drain {
 public:
  // `buffer`: kDrainBytes of this warp, aligned to 128.
  __device__ explicit Drain(uint8_t* buffer) : buffer_(buffer), lane_(Lane()) {}

  // 64 columns of 16 bits from `byte` on; those from `end` on do not exist. `word(c, r)` is the
  // lane's two elements of columns 8 * c and on, of its row (r = 0) or the one 8 further. With
  // kWordsFromHere, `word` calls Word(c, r).
  template <bool kWordsFromHere = false, typename Word>
  __device__ void Store16(const DrainRows& to, int64_t byte, int64_t end, Word word) {
    __syncwarp();
    const uint32_t row = lane_ % 16, right = lane_ / 16;
#pragma unroll
    for (uint32_t c = 0; c < 8; c += 2) {
      const uint32_t words[4] = {word(c, 0), word(c, 1), word(c + 1, 0), word(c + 1, 1)};
      if constexpr (kWordsFromHere) __syncwarp();
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

  // 64 columns of 16 bits on their way from memory: zeros where there are none.
  struct Lines {
    uint4 units[kWarpRows / 4];
  };
  __device__ Lines Load(const DrainRows& from, int64_t byte, int64_t end) const {
    Lines lines;
    const uint8_t* at = from.at + byte;
    const bool has_columns = byte + lane_ % 8 * 16 < end;
#pragma unroll
    for (int i = 0; i < static_cast<int>(kWarpRows) / 4; ++i, at += from.step) {
      lines.units[i] = make_uint4(0, 0, 0, 0);
      if (has_columns && 4 * i < from.rows) lines.units[i] = *reinterpret_cast<const uint4*>(at);
    }
    return lines;
  }
  // Puts them where Word finds them.
  __device__ void Put(const Lines& lines) {
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kWarpRows / 4; ++i) {
      *reinterpret_cast<uint4*>(At(4 * i + lane_ / 8, lane_ % 8)) = lines.units[i];
    }
    __syncwarp();
  }
  // The lane's two elements of columns 8 * c and on.
  __device__ uint32_t Word(uint32_t c, uint32_t r) const {
    return *reinterpret_cast<const uint32_t*>(At(lane_ / 4 + 8 * r, c) + lane_ % 4 * 4);
  }

 private:
  // Units of 16 bytes are swizzled, so that neither side meets bank conflicts.
  __device__ uint8_t* At(uint32_t row, uint32_t unit) const {
    return buffer_ + row * kLineBytes + (unit ^ row % 8) * 16;
  }

  __device__ void Copy(const DrainRows& to, int64_t byte, int64_t end) const {
    __syncwarp();
    if (byte + lane_ % 8 * 16 >= end) return;
    uint8_t* at = to.at + byte;
#pragma unroll
    for (int i = 0; i < static_cast<int>(kWarpRows) / 4; ++i, at += to.step) {
      const uint4 value = *reinterpret_cast<const uint4*>(At(4 * i + lane_ / 8, lane_ % 8));
      if (4 * i < to.rows) *reinterpret_cast<uint4*>(at) = value;
    }
  }

  uint8_t* buffer_;
  uint32_t lane_;
};

}  // namespace jax_ep::cuda
