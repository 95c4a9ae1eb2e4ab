// Writes the scales of a dispatch's rows, by row, in tiles or in columns (protocol/scale_tiles.h),
// and zeros where there is no row.
#pragma once

#include <cstdint>

#include "cuda/window/coded.cuh"
#include "cuda/window/groups.cuh"
#include "formats/token_format.h"
#include "protocol/scale_tiles.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

struct ScalePlan {
  int64_t row_bytes;
  ScaleTiles tiles;  // none if scales do not lie in tiles
  int64_t line;      // of scales in columns, else 0

  template <typename Format>
  static ScalePlan Of(const DispatchStep& step) {
    const EpShape& shape = step.shape;
    const bool tiled = step.scale_layout == ScaleLayout::kTiled128x4;
    const int64_t bytes = ScaleBytesOf<Format>(step);
    const int64_t columns = bytes / static_cast<int64_t>(sizeof(typename Format::Scale));
    return {
        bytes,
        tiled ? ScaleTiles::Of(shape.recv_rows, shape.local_experts, columns) : ScaleTiles{0, 0},
        step.scale_layout == ScaleLayout::kColumns ? ScaleLine(shape.recv_rows) : 0};
  }
  JAX_EP_HOST_DEVICE int64_t TileBytes() const {
    return tiles.column_words * kTileRows * kTileColumns;
  }
  JAX_EP_HOST_DEVICE bool tiled() const { return tiles.tiles != 0; }
  // Returns the number of scales per block of columns if they do not lie in tiles.
  template <typename Scale>
  JAX_EP_HOST_DEVICE int64_t Line(int64_t rows) const {
    return sizeof(Scale) == 4 && line != 0 ? line : rows;
  }
};

// For formats without scales.
struct NoScales {
  template <typename... Ignored>
  __device__ explicit NoScales(const Ignored&...) {}
};

// `first_tiles` [L + 1] is shared by the block. All functions except Build are for one warp.
template <typename Format>
class ScaleWriter {
  // The unit in which scales are stored where bulk stores are impossible.
  using Unit = typename Format::Scale;
  static constexpr bool kMayTile = sizeof(Unit) == 1;
  static constexpr bool kMayHaveColumns = sizeof(Unit) == 4;

 public:
  __device__ ScaleWriter(const DispatchStep& step, const ScalePlan& plan, const GroupTable& groups,
                         int32_t* first_tiles, const uint8_t* zeros)
      : step_(step), plan_(plan), groups_(groups), first_tiles_(first_tiles), zeros_(zeros) {}

  // Called by the whole team after the groups are built.
  __device__ void Build(const Team& team) {
    if (tiled()) groups_.BuildTiles(team, first_tiles_);
  }

  // Called once per call: writes what belongs to no row.
  __device__ void WriteOnce() const {
    if (columns()) return ClearColumns({step_.shape.recv_rows, plan_.line});
    if (!tiled()) return;
    JAX_EP_NO_UNROLL
    for (int64_t group = Lane(); group < step_.shape.local_experts; group += kWarpSize) {
      step_.scales_offsets[group] = ScalesOffset(first_tiles_[group], groups_.Offset(group));
    }
  }

  // Clears the scales of rows [range.begin, range.end), which hold no token.
  __device__ void Clear(const GroupTable::Range& range) const {
    if (tiled()) return;
    if (columns()) return ClearColumns(range);
    uint8_t* begin = step_.scales + range.begin * plan_.row_bytes;
    uint8_t* end = step_.scales + range.end * plan_.row_bytes;
    if (InBulk()) {
      StoreZeros(begin, end, zeros_);
      return;
    }
    JAX_EP_NO_UNROLL
    for (auto* to = reinterpret_cast<Unit*>(begin) + Lane(); to < reinterpret_cast<Unit*>(end);
         to += kWarpSize) {
      *to = Unit{};
    }
  }

  // Clears what no row of the group fills in the group's tiles.
  __device__ void ClearTilesOf(int64_t group) const {
    if (!tiled()) return;
    const int32_t rows =
        static_cast<int32_t>(groups_.PaddingOf(group).begin) - groups_.Offset(group);
    const int32_t tiles = first_tiles_[group + 1] - first_tiles_[group];
    constexpr int32_t kRows = static_cast<int32_t>(kTileRows);
    JAX_EP_NO_UNROLL
    for (int32_t tile = rows / kRows; tile < tiles; ++tile) {
      // Four rows, 32 apart, are adjacent in a tile.
      const int32_t rows_here = rows - tile * kRows, full = rows_here - Lane();
      const int32_t first = full <= 0 ? 0 : (full + kWarpSize - 1) / kWarpSize;
      uint32_t* to = WordsOf(first_tiles_[group] + tile, Lane());
      JAX_EP_NO_UNROLL
      for (int64_t word = 0; word < plan_.tiles.column_words; ++word, to += kRows) {
        if (first == 0) {
          *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
          continue;
        }
        JAX_EP_NO_UNROLL
        for (int32_t i = first; i < kRows / kWarpSize; ++i) to[i] = 0;
      }
    }
  }

  // Clears this item's equal share of the tiles behind the last group.
  __device__ void ClearTailTiles(int64_t item, int64_t items) const {
    if (!tiled()) return;
    const int64_t end = plan_.tiles.tiles, used = first_tiles_[step_.shape.local_experts];
    const int64_t share = DivideUp(end - used, items), first = Min(used + item * share, end);
    StoreZeros(step_.scales + first * plan_.TileBytes(),
               step_.scales + Min(first + share, end) * plan_.TileBytes(), zeros_);
  }

  // Returns where the scales of a row of a group begin, for StoreWord.
  __device__ uint8_t* At(int32_t row, int32_t group) const {
    if (columns()) return step_.scales + row * int64_t{sizeof(Unit)};
    if (!tiled()) return step_.scales + row * plan_.row_bytes;
    constexpr int32_t kRows = static_cast<int32_t>(kTileRows);
    const int32_t in_group = row - groups_.Offset(group);
    return reinterpret_cast<uint8_t*>(
        WordsOf(first_tiles_[group] + in_group / kRows, in_group % kRows));
  }
  // Called by one thread: stores a word of a row's scales, which begin at `scales`.
  __device__ void StoreWord(uint8_t* scales, uint32_t word, uint32_t value) const {
    if (columns()) {
      reinterpret_cast<uint32_t*>(scales)[word * plan_.line] = value;
      return;
    }
    if (tiled()) {
      reinterpret_cast<uint32_t*>(scales)[int64_t{word} * kTileRows] = value;
      return;
    }
    if (plan_.row_bytes % 4 == 0) {
      reinterpret_cast<uint32_t*>(scales)[word] = value;
      return;
    }
    JAX_EP_NO_UNROLL
    for (int64_t i = 0; i < 4 && word * 4 + i < plan_.row_bytes; ++i) {
      scales[word * 4 + i] = static_cast<uint8_t>(value >> (8 * i));
    }
  }

  // Copies scales from a stage to the row of each lane that has one.
  __device__ void Place(int32_t row, int32_t group, const uint8_t* scales) const {
    if (tiled()) {
      PlaceInTiles(row, group, reinterpret_cast<const uint32_t*>(scales));
    } else if (columns()) {
      PlaceInColumns(row, reinterpret_cast<const uint32_t*>(scales));
    } else if (InBulk()) {
      if (row < 0) return;
      BulkStore(step_.scales + row * plan_.row_bytes, scales,
                static_cast<uint32_t>(plan_.row_bytes));
    } else {
      const uint32_t units = static_cast<uint32_t>(plan_.row_bytes / sizeof(Unit));
      JAX_EP_NO_UNROLL
      for (unsigned left = __ballot_sync(kFullWarp, row >= 0); left != 0; left &= left - 1) {
        auto* to = reinterpret_cast<Unit*>(step_.scales + FromLowest(left, row) * plan_.row_bytes);
        JAX_EP_NO_UNROLL
        for (uint32_t i = static_cast<uint32_t>(Lane()); i < units; i += kWarpSize) {
          to[i] = reinterpret_cast<const Unit*>(scales)[i];
        }
      }
    }
  }

 private:
  __device__ bool tiled() const { return kMayTile && plan_.tiled(); }
  __device__ bool columns() const { return kMayHaveColumns && plan_.line != 0; }
  __device__ bool InBulk() const { return plan_.row_bytes % kVectorBytes == 0; }
  __device__ uint32_t* WordsOf(int32_t tile, int32_t row_in_tile) const {
    return reinterpret_cast<uint32_t*>(step_.scales) + plan_.tiles.Word(tile, row_in_tile, 0);
  }

  __device__ void PlaceInTiles(int32_t row, int32_t group, const uint32_t* words) const {
    constexpr int32_t kRows = static_cast<int32_t>(kTileRows);
    const uint64_t place = row < 0 ? 0 : reinterpret_cast<uint64_t>(At(row, group));
    JAX_EP_NO_UNROLL
    for (unsigned left = __ballot_sync(kFullWarp, row >= 0); left != 0; left &= left - 1) {
      auto* to = reinterpret_cast<uint32_t*>(FromLowest(left, place));
      JAX_EP_NO_UNROLL
      for (int64_t word = Lane(); word < plan_.tiles.column_words; word += kWarpSize) {
        to[word * kRows] = words[word];
      }
    }
  }

  __device__ uint32_t lines() const { return static_cast<uint32_t>(plan_.row_bytes / 4); }
  __device__ void PlaceInColumns(int32_t row, const uint32_t* words) const {
    JAX_EP_NO_UNROLL
    for (unsigned left = __ballot_sync(kFullWarp, row >= 0); left != 0; left &= left - 1) {
      auto* to = reinterpret_cast<uint32_t*>(step_.scales) + FromLowest(left, row);
      JAX_EP_NO_UNROLL
      for (uint32_t i = static_cast<uint32_t>(Lane()); i < lines(); i += kWarpSize) {
        to[i * plan_.line] = words[i];
      }
    }
  }
  __device__ void ClearColumns(const GroupTable::Range& range) const {
    JAX_EP_NO_UNROLL
    for (uint32_t i = 0; i < lines(); ++i) {
      auto* to = reinterpret_cast<uint32_t*>(step_.scales) + i * plan_.line;
      JAX_EP_NO_UNROLL
      for (int64_t row = range.begin + Lane(); row < range.end; row += kWarpSize) to[row] = 0;
    }
  }

  const DispatchStep& step_;
  const ScalePlan& plan_;
  GroupTable groups_;
  int32_t* first_tiles_;
  const uint8_t* zeros_;
};

}  // namespace jax_ep::cuda
