// How a warp moves sums from registers to rows in memory, and rows to where its sums are: through
// 16 lines of 128 bytes in shared memory. From there tensor copies store whole boxes while the warp
// goes on. If fewer than 16 rows are left at a tile's end, another group's rows follow them, so
// lanes copy those that are left, 16 bytes at a time.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/matmul/hopper.cuh"

namespace jax_ep::cuda {

inline constexpr uint32_t kWarpRows = 16;
inline constexpr uint32_t kLineBytes = 128;
inline constexpr uint32_t kDrainBytes = kWarpRows * kLineBytes;
inline constexpr uint32_t kDrains = 2;  // per warp: one is filled while the other is copied from

// A matrix of results [rows, sides, columns].
struct ResultMatrix {
  uint8_t* base;
  const CUtensorMap* map;  // its boxes are a warp's rows and 128 bytes
  int32_t columns;
  int64_t row_bytes;
};

// A warp's 16 rows of a ResultMatrix.
struct DrainRows {
  // The rows from `row` on. `rows` of them exist; it may be any number.
  __device__ DrainRows(const ResultMatrix& matrix, int64_t row, int32_t rows)
      : map(matrix.map),
        columns(matrix.columns),
        row(static_cast<int32_t>(row)),
        at(matrix.base + (row + Lane() / 8) * matrix.row_bytes + Lane() % 8 * 16),
        step(4 * matrix.row_bytes),
        rows(rows - static_cast<int32_t>(Lane() / 8)),
        all(rows >= static_cast<int32_t>(kWarpRows)) {}

  // Returns the lane's 16 bytes of its first row, within the elements from `column` of a side on.
  template <int kElementBytes>
  __device__ uint8_t* At(int32_t side, int32_t column) const {
    return at + (int64_t{side} * columns + column) * kElementBytes;
  }
  template <int kElementBytes>
  __device__ bool Has(int32_t column) const {
    return column + static_cast<int32_t>(Lane()) % 8 * (16 / kElementBytes) < columns;
  }

  const CUtensorMap* map;
  int32_t columns;  // of a side
  int32_t row;
  // A lane's view: 16 of the 128 bytes of every fourth row.
  uint8_t* at;
  int64_t step;
  int32_t rows;
  bool all;  // whether all of the warp's rows exist
};

class Drain {
 public:
  // `buffers`: kDrains * kDrainBytes of this warp, aligned to 1024.
  __device__ explicit Drain(uint8_t* buffers)
      : buffer_(buffers), address_(Uniform(SharedAddress(buffers))), lane_(Lane()) {}

  // Waits until the buffer may be written.
  __device__ void Take() {
    if (IsElected()) BulkWaitRead<kDrains - 1>();
    __syncwarp();
  }
  // Waits until all copies have read shared memory. The block may end then.
  __device__ void End() {
    if (IsElected()) BulkWaitRead<0>();
  }

  // Stores 64 columns of 16-bit elements from `column` of a side on, but none past the side's last
  // one. `word(c, r)` is the lane's two elements of columns 8 * c and on, of its row (r = 0) or of
  // the one 8 further. With kWordsFromHere, `word` calls Word(c, r), and the buffer is already
  // taken.
  template <bool kWordsFromHere = false, typename Word>
  __device__ void Store16(const DrainRows& to, int32_t side, int32_t column, Word word) {
    if constexpr (!kWordsFromHere) Take();
    const uint32_t row = lane_ % 16, right = lane_ / 16;
#pragma unroll
    for (uint32_t c = 0; c < 8; c += 2) {
      const uint32_t words[4] = {word(c, 0), word(c, 1), word(c + 1, 0), word(c + 1, 1)};
      if constexpr (kWordsFromHere) __syncwarp();
      StoreMatrices(At(row, c + right), words);
    }
    Copy<2>(to, side, column);
  }

  // Stores 32 columns of float32. `sum(c, r, i)` is element i of the lane's two.
  template <typename Sum>
  __device__ void Store32(const DrainRows& to, int32_t column, Sum sum) {
    Take();
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
    Copy<4>(to, 0, column);
  }

  // Stores 128 columns of 8 bits. `pair(c, r)` is the lane's two codes of columns 8 * c and on.
  template <typename Pair>
  __device__ void Store8(const DrainRows& to, int32_t side, int32_t column, Pair pair) {
    Take();
#pragma unroll
    for (uint32_t c = 0; c < 16; ++c) {
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        uint8_t* at = At(lane_ / 4 + 8 * r, c / 2) + c % 2 * 8 + lane_ % 4 * 2;
        *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(pair(c, r));
      }
    }
    Copy<1>(to, side, column);
  }

  // 64 columns of 16-bit elements on their way from memory; zeros where there are none.
  struct Lines {
    uint4 units[kWarpRows / 4];
  };
  __device__ Lines Load(const DrainRows& from, int32_t side, int32_t column) const {
    Lines lines;
    const uint8_t* at = from.At<2>(side, column);
    const bool has_columns = from.Has<2>(column);
#pragma unroll
    for (int i = 0; i < static_cast<int>(kWarpRows) / 4; ++i, at += from.step) {
      lines.units[i] = make_uint4(0, 0, 0, 0);
      if (has_columns && 4 * i < from.rows) lines.units[i] = *reinterpret_cast<const uint4*>(at);
    }
    return lines;
  }
  // Puts `lines` where Word finds them. The buffer must have been taken.
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
  // Units of 16 bytes are swizzled as the map says, so that neither side has bank conflicts.
  __device__ uint8_t* At(uint32_t row, uint32_t unit) const {
    return buffer_ + row * kLineBytes + (unit ^ row % 8) * 16;
  }

  template <int kElementBytes>
  __device__ void Copy(const DrainRows& to, int32_t side, int32_t column) {
    if (to.all) FenceProxyAsyncShared();
    __syncwarp();
    if (to.all) {
      if (IsElected()) TensorStore(to.map, {{column, side, to.row, 0}}, address_);
    } else {
      uint8_t* at = to.At<kElementBytes>(side, column);
      const bool has_columns = to.Has<kElementBytes>(column);
#pragma unroll
      for (int i = 0; i < static_cast<int>(kWarpRows) / 4; ++i, at += to.step) {
        const uint4 value = *reinterpret_cast<const uint4*>(At(4 * i + lane_ / 8, lane_ % 8));
        if (has_columns && 4 * i < to.rows) *reinterpret_cast<uint4*>(at) = value;
      }
    }
    // Commits even if nothing was copied, because Take counts groups.
    if (IsElected()) BulkCommit();
    buffer_ += to_other_;
    address_ += to_other_;
    to_other_ = -to_other_;
  }

  uint8_t* buffer_;
  uint32_t address_;  // of buffer_
  int32_t to_other_ = kDrainBytes;
  uint32_t lane_;
};

}  // namespace jax_ep::cuda
