// Which tiles of a result a cluster computes, in which order, and how its two blocks share
// operands.
//
// A unit is what both blocks of a cluster do together: two row tiles with the same columns, of
// whose right operand each block loads half for both, or one row tile and two column tiles, of
// whose left operand each loads half. Tails of up to kHalfRows rows are units of their own, with
// one warpgroup per block; they follow the other units of their group, whose right operand is then
// in L2. A unit goes to the cluster that is estimated to be ready first.
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
  int32_t row;         // the first row: of N, or in kOuter of the group's matrix
  int32_t rows;        // up to kTileRows
  int32_t column;      // the first column of each side; past the last one there is nothing to do
  int32_t steps;       // of the contracted dimension; negative: no more tiles
  int32_t first;       // kOuter: the first row of N to sum over
  int32_t contracted;  // kOuter: how many
  Sharing sharing;
  uint32_t warpgroup;  // of a half: who multiplies; they take turns, so that one writes meanwhile
  uint32_t stage;      // how many stages the block's earlier tiles have passed

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
  int32_t steps;         // but in kOuter
};

// Which cluster takes the next unit: the one that has done its units first, if they take as long as
// is estimated. Every block computes the same. All methods are called by a whole warp.
class UnitQueue {
 public:
  static constexpr uint32_t kMostClusters = 128;

  __device__ explicit UnitQueue(uint32_t clusters) {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) ends_[i] = Cluster(i) < clusters ? Cluster(i) : ~0u;
  }

  // The cluster that takes a unit.
  __device__ uint32_t Take(uint32_t cost) {
    uint32_t first = ends_[0];
#pragma unroll
    for (uint32_t i = 1; i < kPerLane; ++i) first = min(first, ends_[i]);
    first = __reduce_min_sync(kFullWarp, first);
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      if (ends_[i] == first) ends_[i] += cost * kMostClusters;
    }
    return first % kMostClusters;
  }

  // The same for units of one cost that clusters [begin, end) take, each its first.
  __device__ void TakeFirst(uint32_t begin, uint32_t end, uint32_t cost) {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      const uint32_t cluster = Cluster(i);
      if (cluster >= begin && cluster < end) ends_[i] = cost * kMostClusters + cluster;
    }
  }

 private:
  static constexpr uint32_t kPerLane = kMostClusters / kWarpSize;

  __device__ static uint32_t Cluster(uint32_t i) { return Lane() + i * kWarpSize; }

  // When clusters have done their units, times kMostClusters, plus the cluster. It may overflow:
  // all blocks would still agree.
  uint32_t ends_[kPerLane];
};

// Finds the units of this block's cluster, one after the other. All methods are called by a
// whole warp.
template <bool kOuter>
class UnitWalk {
 public:
  __device__ UnitWalk(const UnitPlan& plan, uint32_t step_rows)
      : plan_(plan),
        pieces_(plan),
        queue_(gridDim.x / 2),
        step_rows_(step_rows),
        cluster_(blockIdx.x / 2),
        clusters_(gridDim.x / 2) {}

  // The next tile; with negative steps when there is none.
  __device__ Tile Next() {
    Tile tile{};
    tile.steps = -1;
    uint32_t unit;
    do {
      while (unit_ == run_end_) {
        if (stale_) {
          pieces_.Load([&](int32_t group, int32_t size) {
            const int32_t rows = RowsOf(size);
            return group < plan_.groups ? WholeUnits(rows) + HalfUnits(rows) : 0;
          });
          stale_ = false;
        }
        if (unit_ < pieces_.end()) {
          BeginRun(pieces_.Find(unit_));
        } else if (pieces_.Advance()) {
          stale_ = true;
        } else {
          return tile;
        }
      }
    } while (!Take(unit));
    Place(tile, pieces_.Find(unit));
    tile.warpgroup = taken_++ % 2;
    tile.stage = stage_;
    stage_ += static_cast<uint32_t>(tile.steps);
    return tile;
  }

 private:
  // How long units take, in steps of a quarter of what a step of a whole tile takes. A half
  // multiplies half as much, and loads more for it.
  __device__ static uint32_t CostOf(int32_t steps, bool half) {
    return static_cast<uint32_t>(half ? 3 * steps + 10 : 4 * steps + 16);
  }

  __device__ static int32_t Whole(int32_t rows) {
    return rows / kTileRows + (rows % kTileRows > kHalfRows);
  }
  __device__ int32_t RowsOf(int32_t size) const { return kOuter ? plan_.outer_rows : size; }
  __device__ int32_t StepsOf(int32_t size) const {
    return kOuter ? (size + step_rows_ - 1) / step_rows_ : plan_.steps;
  }
  __device__ int32_t ColumnPairs() const { return (plan_.column_tiles + 1) / 2; }

  // Of a group.
  __device__ int32_t WholeUnits(int32_t rows) const {
    const int32_t whole = Whole(rows);
    return whole / 2 * plan_.column_tiles + whole % 2 * ColumnPairs();
  }
  __device__ int32_t HalfUnits(int32_t rows) const {
    return rows % kTileRows != 0 && rows % kTileRows <= kHalfRows ? ColumnPairs() : 0;
  }

  // Begins a run of units of one group and one cost.
  __device__ void BeginRun(const GroupPiece& first) {
    const int32_t rows = RowsOf(first.size), whole = WholeUnits(rows);
    const bool half = first.index >= whole;
    const int32_t end = half ? whole + HalfUnits(rows) : whole;
    run_end_ = unit_ + static_cast<uint32_t>(end - first.index);
    cost_ = CostOf(StepsOf(first.size), half);
  }

  // Goes on by one unit or more of the run. Whether this cluster takes one of them, then `unit`.
  __device__ bool Take(uint32_t& unit) {
    if (unit_ >= clusters_) {
      unit = unit_++;
      return queue_.Take(cost_) == cluster_;
    }
    const uint32_t end = min(run_end_, clusters_);
    queue_.TakeFirst(unit_, end, cost_);
    const bool mine = cluster_ >= unit_ && cluster_ < end;
    unit = cluster_;
    unit_ = end;
    return mine;
  }

  __device__ void Place(Tile& tile, const GroupPiece& unit) const {
    const int32_t rank = static_cast<int32_t>(ClusterRank());
    const int32_t rows = RowsOf(unit.size);
    const int32_t pairs = Whole(rows) / 2, paired = pairs * plan_.column_tiles;
    const int32_t whole = WholeUnits(rows);
    int32_t row_tile, column_tile;
    if (unit.index < paired) {
      // Neighbouring clusters share columns, so that the right operand is read from L2.
      tile.sharing = Sharing::kRight;
      row_tile = 2 * (unit.index % pairs) + rank;
      column_tile = unit.index / pairs;
    } else {
      const bool half = unit.index >= whole;
      tile.sharing = half ? Sharing::kLeftHalf : Sharing::kLeft;
      row_tile = half ? rows / kTileRows : 2 * pairs;
      column_tile = 2 * (unit.index - (half ? whole : paired)) + rank;
    }
    tile.group = unit.group;
    tile.row = (kOuter ? 0 : unit.start) + row_tile * kTileRows;
    tile.rows = min(rows - row_tile * kTileRows, kTileRows);
    tile.column = column_tile * plan_.tile_columns;
    tile.first = unit.start;
    tile.contracted = unit.size;
    tile.steps = StepsOf(unit.size);
  }

  const UnitPlan& plan_;
  GroupPieces<UnitPlan> pieces_;
  UnitQueue queue_;
  const int32_t step_rows_;
  const uint32_t cluster_;
  const uint32_t clusters_;
  uint32_t unit_ = 0;     // the next one of all clusters
  uint32_t run_end_ = 0;  // of like units
  uint32_t cost_ = 0;     // of each of them
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

// Waits for the end of a phase. The threads of one cluster wait for each other and for copies
// alone, so only a fault of theirs could make it long. After seconds of spinning a thread gives up
// and says so in `given_up`, a word of the block's shared memory that ends all the block's waits.
__device__ __forceinline__ void Await(uint64_t* barrier, uint32_t parity,
                                      volatile uint32_t* given_up) {
  constexpr uint32_t kMostTries = 1 << 22;
  for (uint32_t tries = 0; !MbarrierTryWait(barrier, parity); ++tries) {
    if (tries == kMostTries) *given_up = 1;
    if (*given_up != 0) return;
  }
}

// Where a thread is in a ring of kCount barriers; one register, as kCount is a power of two.
template <uint32_t kCount>
struct RingCursor {
  static_assert((kCount & (kCount - 1)) == 0);

  uint32_t passed = 0;

  __device__ uint32_t slot() const { return passed % kCount; }
  __device__ uint32_t parity() const { return passed / kCount % 2; }
};

// The same in all lanes, which meet here as in __syncwarp.
__device__ __forceinline__ bool HasGivenUp(const TileRing& ring) {
  __syncwarp();
  return __any_sync(kFullWarp, *static_cast<const volatile uint32_t*>(&ring.given_up) != 0);
}

// Called by a whole warp: finds all tiles of this block.
template <bool kOuter>
__device__ __forceinline__ void FindTiles(const UnitPlan& plan, uint32_t step_rows,
                                          TileRing& ring) {
  UnitWalk<kOuter> walk(plan, step_rows);
  RingCursor<TileRing::kSlots> at;
  for (bool more = true; more; ++at.passed) {
    const Tile tile = walk.Next();
    more = tile.steps >= 0;
    Await(&ring.read[at.slot()], at.parity() ^ 1, &ring.given_up);
    // Lanes that still wait might miss the phase's end, once lane 0 has let the readers go on: all
    // meet here.
    if (HasGivenUp(ring)) return;
    if (Lane() == 0) {
      ring.tiles[at.slot()] = tile;
      // Release; pairs with the wait in TileReader.
      MbarrierArrive(&ring.filled[at.slot()]);
    }
    __syncwarp();
  }
}

// Called by a whole warp, which counts as one reader. Where it is in the ring is kept in shared
// memory: a register that lives as long as this would be spilled.
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
    // All lanes have read it. Nobody may have written it if there was no end to wait for.
    if (HasGivenUp(ring_)) tile.steps = -1;
    if (Lane() == 0) {
      *taken() = at.passed + 1;
      // Release; pairs with the wait in FindTiles.
      MbarrierArrive(&ring_.read[at.slot()]);
    }
    __syncwarp();
    return tile;
  }

 private:
  __device__ uint32_t* taken() const { return &ring_.taken[threadIdx.x / kWarpSize]; }

  TileRing& ring_;
};

}  // namespace jax_ep::cuda
