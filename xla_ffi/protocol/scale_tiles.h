// The layouts of scales besides rows. "columns" has one line per block of columns, which holds the
// scales of all rows, padded to whole vectors.
//
// "tiled_128x4" is the layout that block-scaled matmuls take. A tile holds 128 rows of a group and
// 4 columns, a word the 4 columns of one row. Every group begins with a new tile.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep {

inline constexpr int64_t kTileRows = 128;
inline constexpr int64_t kTileColumns = 4;

enum class ScaleLayout : int32_t { kRows, kTiled128x4, kColumns };

// The length of a line of "columns", in scales of 4 bytes.
JAX_EP_HOST_DEVICE constexpr int64_t ScaleLine(int64_t rows) { return RoundUp(rows, 4); }

struct ScaleTiles {
  int64_t column_words;  // columns / 4
  int64_t tiles;         // of 128 rows

  // Room for `rows` rows in `groups` groups, however long each group is.
  JAX_EP_HOST_DEVICE static constexpr ScaleTiles Of(int64_t rows, int64_t groups, int64_t columns) {
    return {columns / kTileColumns, (rows + kTileRows * groups + kTileRows - 1) / kTileRows};
  }

  // Offset in words; `row` is counted within the tile.
  JAX_EP_HOST_DEVICE constexpr int64_t Word(int64_t tile, int64_t row, int64_t column_word) const {
    return ((tile * column_words + column_word) * 32 + row % 32) * 4 + row / 32;
  }
};

JAX_EP_HOST_DEVICE constexpr int32_t TilesOfGroup(int32_t rows) {
  return static_cast<int32_t>((int64_t{rows} + kTileRows - 1) / kTileRows);
}

// The stored offset of a group whose first tile is `first_tile`.
JAX_EP_HOST_DEVICE constexpr int32_t ScalesOffset(int32_t first_tile, int32_t row_offset) {
  return first_tile - row_offset / static_cast<int32_t>(kTileRows);
}

// The rows of a tile: `count` rows from `first` on. Tiles past the last group have none.
struct RowsOfTile {
  int32_t first;
  int32_t count;
};

JAX_EP_HOST_DEVICE RowsOfTile FindRowsOfTile(int64_t tile, const int32_t* row_offsets,
                                             const int32_t* scales_offsets, int64_t groups) {
  const auto first_tile = [&](int64_t group) {
    return row_offsets[group] / kTileRows + scales_offsets[group];
  };
  // Finds the last group that begins at or before the tile. Earlier groups that begin at the same
  // tile are empty.
  int64_t low = 0;
  for (int64_t high = groups; high - low > 1;) {
    const int64_t middle = (low + high) / 2;
    if (first_tile(middle) <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = row_offsets[low] + (tile - first_tile(low)) * kTileRows;
  const int64_t left = row_offsets[low + 1] - first;
  return {static_cast<int32_t>(first), static_cast<int32_t>(left < 0 ? 0 : Min(left, kTileRows))};
}

}  // namespace jax_ep
