// Which tiles of a result a cluster computes, in which order, and how its two blocks share
// operands.
//
// A unit is what both blocks of a cluster do together. It has two row tiles with the same columns,
// and each block loads half of the right operand for both; or it has one row tile and two column
// tiles, and each block loads half of the left operand for both. Tails of up to kHalfRows rows are
// units of their own, with one warpgroup per block. Clusters take tails and other units in turns, a
// group's tails after its other units, when part of the right operand may still be in L2. The two
// kinds are dealt out from opposite ends of the clusters, so that clusters with one unit more of
// one kind have one less of the other.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/matmul/group_pieces.cuh"
#include "cuda/matmul/hopper.cuh"

namespace jax_ep::cuda {

inline constexpr int kTileRows = 128;
inline constexpr int kHalfRows = 64;
inline constexpr int kTileColumns = 256;  // at most, of all sides together

enum class Sharing : int32_t { kRight, kLeft, kLeftHalf };

// One block's part of a unit.
struct Tile {
  int32_t group;
  int32_t row;         // the first row of N, or in kOuter of the group's matrix
  int32_t rows;        // up to kTileRows
  int32_t column;      // the first column of each side; past the last one there is nothing to do
  int32_t steps;       // of the contracted dimension; negative: no more tiles
  int32_t first;       // kOuter: the first row of N to sum over
  int32_t contracted;  // kOuter: how many rows to sum over
  Sharing sharing;
  uint32_t warpgroup;  // of a half: which multiplies; they take turns, so one can write meanwhile
  uint32_t stage;      // how many stages the block's earlier tiles went through

  __device__ bool half() const { return sharing == Sharing::kLeftHalf; }
};

// What the units are made from.
struct UnitPlan {
  const int32_t* sizes;
  int32_t groups;
  int32_t rows;          // N
  int32_t outer_rows;    // kOuter: of each result matrix
  int32_t column_tiles;  // of a result matrix
  int32_t tile_columns;  // of a side
  int32_t steps;         // except in kOuter
};

// Finds the units of this block's cluster, one after the other. With kFew all tiles are halves, of
// up to kHalfRows rows. All methods are called by a whole warp.
template <bool kOuter, bool kFew>
class UnitWalk {
 public:
  __device__ UnitWalk(const UnitPlan& plan, uint32_t step_rows)
      : plan_(plan),
        whole_pieces_(plan),
        half_pieces_(plan),
        step_rows_(step_rows),
        clusters_(gridDim.x / 2),
        whole_(blockIdx.x / 2),
        half_(clusters_ - 1 - whole_) {}

  // Returns the next tile, with negative steps if there is none.
  __device__ Tile Next() {
    Tile tile{};
    tile.steps = -1;
    bool has_whole, has_half;
    while (true) {
      if (stale_) {
        whole_pieces_.Load([&](int32_t group, int32_t size) {
          return group < plan_.groups ? WholeUnits(RowsOf(size)) : 0;
        });
        half_pieces_.Load([&](int32_t group, int32_t size) {
          return group < plan_.groups ? HalfUnits(RowsOf(size)) : 0;
        });
        stale_ = false;
      }
      has_whole = whole_ < whole_pieces_.end();
      has_half = half_ < half_pieces_.end();
      if (has_whole || has_half) break;
      if (!whole_pieces_.Advance()) return tile;
      half_pieces_.Advance();
      stale_ = true;
    }
    GroupPiece unit{};
    if (has_whole) unit = whole_pieces_.Find(whole_);
    bool is_half = false;
    if (has_half) {
      const GroupPiece half = half_pieces_.Find(half_);
      is_half = !has_whole || half.group < unit.group;
      if (is_half) unit = half;
    }
    (is_half ? half_ : whole_) += clusters_;
    Place(tile, unit, is_half);
    tile.warpgroup = taken_++ % 2;
    tile.stage = stage_;
    stage_ += static_cast<uint32_t>(tile.steps);
    return tile;
  }

 private:
  __device__ static int32_t Whole(int32_t rows) {
    return kFew ? 0 : rows / kTileRows + (rows % kTileRows > kHalfRows);
  }
  __device__ static int32_t Halves(int32_t rows) {
    if (kFew) return (rows + kHalfRows - 1) / kHalfRows;
    return rows % kTileRows != 0 && rows % kTileRows <= kHalfRows;
  }
  __device__ int32_t RowsOf(int32_t size) const { return kOuter ? plan_.outer_rows : size; }
  __device__ int32_t ColumnPairs() const { return (plan_.column_tiles + 1) / 2; }
  __device__ int32_t WholeUnits(int32_t rows) const {
    const int32_t whole = Whole(rows);
    return whole / 2 * plan_.column_tiles + whole % 2 * ColumnPairs();
  }
  __device__ int32_t HalfUnits(int32_t rows) const { return Halves(rows) * ColumnPairs(); }

  __device__ void Place(Tile& tile, const GroupPiece& unit, bool is_half) const {
    const int32_t rank = static_cast<int32_t>(ClusterRank());
    const int32_t rows = RowsOf(unit.size);
    const int32_t index = unit.index;
    const int32_t pairs = Whole(rows) / 2;
    int32_t first, column_tile;  // the first row
    if (!is_half && index < pairs * plan_.column_tiles) {
      // Neighbouring clusters share columns, so that the right operand is read from L2.
      tile.sharing = Sharing::kRight;
      first = kTileRows * (2 * (index % pairs) + rank);
      column_tile = index / pairs;
    } else {
      tile.sharing = is_half ? Sharing::kLeftHalf : Sharing::kLeft;
      const int32_t halves = kFew ? Halves(rows) : 1;
      first = is_half && kFew ? kHalfRows * (index % halves)
              : is_half       ? rows / kTileRows * kTileRows
                              : kTileRows * 2 * pairs;
      column_tile = 2 * (is_half ? index / halves : index - pairs * plan_.column_tiles) + rank;
    }
    tile.group = unit.group;
    tile.row = (kOuter ? 0 : unit.start) + first;
    tile.rows = min(rows - first, kFew ? kHalfRows : kTileRows);
    tile.column = column_tile * plan_.tile_columns;
    tile.first = unit.start;
    tile.contracted = unit.size;
    tile.steps = kOuter ? (unit.size + step_rows_ - 1) / step_rows_ : plan_.steps;
  }

  const UnitPlan& plan_;
  GroupPieces<UnitPlan> whole_pieces_;
  GroupPieces<UnitPlan> half_pieces_;
  const int32_t step_rows_;
  const uint32_t clusters_;
  // The next unit of each kind.
  uint32_t whole_;
  uint32_t half_;
  uint32_t taken_ = 0;
  uint32_t stage_ = 0;
  bool stale_ = true;  // groups must be loaded
};

// Tiles on their way from the warp that finds them to those that work on them.
struct TileRing {
  static constexpr uint32_t kSlots = 4;
  static constexpr uint32_t kWarps = 12;

  Tile tiles[kSlots];
  uint64_t filled[kSlots];
  uint64_t read[kSlots];
  uint32_t taken[kWarps];  // by each warp
  uint32_t given_up;  // whether a thread of this block waited too long, so that results are wrong
};

inline constexpr uint32_t kWarpsOfMath = 8;

// Called by one thread.
__device__ __forceinline__ void InitTileRing(TileRing& ring, uint32_t readers) {
  ring.given_up = 0;
  for (uint32_t slot = 0; slot < TileRing::kSlots; ++slot) {
    MbarrierInit(&ring.filled[slot], 1);
    MbarrierInit(&ring.read[slot], readers);
  }
}

// Waits for the end of a phase. The threads of a cluster wait only for each other and for copies,
// so a long wait means that one of them is at fault. After seconds of spinning a thread gives up
// and says so in `given_up`, a word of the block's shared memory. That ends all of the block's
// waits, which then return false.
__device__ __forceinline__ bool Await(uint64_t* barrier, uint32_t parity,
                                      volatile uint32_t* given_up) {
  constexpr uint32_t kMostTries = 1 << 22;
  for (uint32_t tries = 0; !MbarrierTryWait(barrier, parity); ++tries) {
    if (tries == kMostTries) *given_up = 1;
    if (*given_up != 0) return false;
  }
  return true;
}

// Where a thread is in a ring of kCount barriers. It takes one register and is cheap if kCount is a
// power of two.
template <uint32_t kCount>
struct RingCursor {
  uint32_t passed = 0;

  __device__ uint32_t slot() const { return passed % kCount; }
  __device__ uint32_t parity() const { return passed / kCount % 2; }
};

// Returns the same in all lanes, which meet here as in __syncwarp.
__device__ __forceinline__ bool HasGivenUp(const TileRing& ring) {
  __syncwarp();
  return __any_sync(kFullWarp, *static_cast<const volatile uint32_t*>(&ring.given_up) != 0);
}

// Finds all tiles of this block. Called by a whole warp.
template <bool kOuter, bool kFew>
__device__ __forceinline__ void FindTiles(const UnitPlan& plan, uint32_t step_rows,
                                          TileRing& ring) {
  UnitWalk<kOuter, kFew> walk(plan, step_rows);
  RingCursor<TileRing::kSlots> at;
  for (bool more = true; more; ++at.passed) {
    const Tile tile = walk.Next();
    more = tile.steps >= 0;
    Await(&ring.read[at.slot()], at.parity() ^ 1, &ring.given_up);
    // All lanes meet here: one that still waits might miss the phase's end once lane 0 has let the
    // readers go on.
    if (HasGivenUp(ring)) return;
    if (Lane() == 0) {
      ring.tiles[at.slot()] = tile;
      // Release; pairs with the wait in TileReader.
      MbarrierArrive(&ring.filled[at.slot()]);
    }
    __syncwarp();
  }
}

// Called by a whole warp, which counts as one reader. Its place in the ring is kept in shared
// memory, because a register that lives as long as this would be spilled.
class TileReader {
 public:
  __device__ explicit TileReader(TileRing& ring) : ring_(ring) {
    if (Lane() == 0) *taken() = 0;
    __syncwarp();
  }

  __device__ Tile Next() {
    const RingCursor<TileRing::kSlots> at{*taken()};
    Await(&ring_.filled[at.slot()], at.parity(), &ring_.given_up);
    Tile tile = ring_.tiles[at.slot()];
    // All lanes have read the tile after this. If its wait was given up, nobody may have written
    // it.
    if (HasGivenUp(ring_)) tile.steps = -1;
    if (Lane() == 0) {
      *taken() = at.passed + 1;
      // Release; pairs with the wait in FindTiles.
      MbarrierArrive(&ring_.read[at.slot()]);
    }
    __syncwarp();
    return tile;
  }

  // The same, but the compiler knows that all lanes have the same tile.
  __device__ Tile NextUniform() {
    const Tile tile = Next();
    return {Uniform(tile.group),
            Uniform(tile.row),
            Uniform(tile.rows),
            Uniform(tile.column),
            Uniform(tile.steps),
            Uniform(tile.first),
            Uniform(tile.contracted),
            static_cast<Sharing>(Uniform(static_cast<uint32_t>(tile.sharing))),
            Uniform(tile.warpgroup),
            Uniform(tile.stage)};
  }

 private:
  __device__ uint32_t* taken() const { return &ring_.taken[threadIdx.x / kWarpSize]; }

  TileRing& ring_;
};

}  // namespace jax_ep::cuda
