// The tile scheduler: which tiles of D a cluster computes, in which order, and how its two blocks
// share operands.
//
// A unit is what both blocks of a cluster do together: two tiles, one per block. Either they have
// the same columns, and each block loads half of B for both; or they have the same rows, and each
// block loads half of A for both. Tails of up to kHalfBlockM rows are units of their own, with one
// warpgroup per block. Clusters take tails and other units in turns, a group's tails after its
// other units, when part of B may still be in L2. The two kinds are dealt out from opposite ends of
// the clusters, so that clusters with one unit more of one kind have one less of the other.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/matmul/group_pieces.cuh"
#include "cuda/matmul/hopper.cuh"

namespace jax_ep::cuda {

// Rows and columns of a tile.
inline constexpr int kBlockM = 128;
inline constexpr int kHalfBlockM = 64;
inline constexpr int kMostBlockN = 256;  // of all sides together

// What the blocks of a cluster share.
enum class Sharing : int32_t { kB, kA, kAHalf };

// One block's part of a unit.
struct Tile {
  int32_t group;
  int32_t row;         // the first one, of M or in kWgrad of the group's matrix
  int32_t rows;        // up to kBlockM
  int32_t column;      // the first column of each side; past the last one there is nothing to do
  int32_t k_blocks;    // blocks of the contracted dimension; negative: no more tiles
  int32_t first;       // kWgrad: the first row of M to sum over
  int32_t contracted;  // kWgrad: how many rows to sum over
  Sharing sharing;
  uint32_t warpgroup;  // of a half: which multiplies; they take turns, so one can write meanwhile
  uint32_t stage;      // how many stages the block's earlier tiles went through

  __device__ bool half() const { return sharing == Sharing::kAHalf; }
};

// What the units are made from.
struct SchedulerArguments {
  const int32_t* sizes;
  int32_t groups;
  int32_t m;
  int32_t d_rows;    // kWgrad: rows of each group's matrix in D
  int32_t n_tiles;   // tiles that have the same rows
  int32_t block_n;   // columns of a tile, of each side
  int32_t k_blocks;  // except in kWgrad
};

// Finds the units of this block's cluster, one after the other. With kFew all tiles are halves, of
// up to kHalfBlockM rows. All methods are called by a whole warp.
template <bool kWgrad, bool kFew>
class TileScheduler {
 public:
  __device__ TileScheduler(const SchedulerArguments& arguments, uint32_t block_k)
      : arguments_(arguments),
        whole_pieces_(arguments),
        half_pieces_(arguments),
        block_k_(block_k),
        clusters_(gridDim.x / 2),
        whole_(blockIdx.x / 2),
        half_(clusters_ - 1 - whole_) {}

  // Returns the next tile, with negative k_blocks if there is none.
  __device__ Tile Next() {
    Tile tile{};
    tile.k_blocks = -1;
    bool has_whole, has_half;
    while (true) {
      if (stale_) {
        whole_pieces_.Load([&](int32_t group, int32_t size) {
          return group < arguments_.groups ? WholeUnits(RowsOf(size)) : 0;
        });
        half_pieces_.Load([&](int32_t group, int32_t size) {
          return group < arguments_.groups ? HalfUnits(RowsOf(size)) : 0;
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
    stage_ += static_cast<uint32_t>(tile.k_blocks);
    return tile;
  }

 private:
  __device__ static int32_t Whole(int32_t rows) {
    return kFew ? 0 : rows / kBlockM + (rows % kBlockM > kHalfBlockM);
  }
  __device__ static int32_t Halves(int32_t rows) {
    if (kFew) return (rows + kHalfBlockM - 1) / kHalfBlockM;
    return rows % kBlockM != 0 && rows % kBlockM <= kHalfBlockM;
  }
  __device__ int32_t RowsOf(int32_t size) const { return kWgrad ? arguments_.d_rows : size; }
  __device__ int32_t ColumnPairs() const { return (arguments_.n_tiles + 1) / 2; }
  __device__ int32_t WholeUnits(int32_t rows) const {
    const int32_t whole = Whole(rows);
    return whole / 2 * arguments_.n_tiles + whole % 2 * ColumnPairs();
  }
  __device__ int32_t HalfUnits(int32_t rows) const { return Halves(rows) * ColumnPairs(); }

  __device__ void Place(Tile& tile, const GroupPiece& unit, bool is_half) const {
    const int32_t rank = static_cast<int32_t>(ClusterRank());
    const int32_t rows = RowsOf(unit.size);
    const int32_t index = unit.index;
    const int32_t pairs = Whole(rows) / 2;
    int32_t first, n_tile;  // the first row
    if (!is_half && index < pairs * arguments_.n_tiles) {
      // Neighbouring clusters share columns, so that B is read from L2.
      tile.sharing = Sharing::kB;
      first = kBlockM * (2 * (index % pairs) + rank);
      n_tile = index / pairs;
    } else {
      tile.sharing = is_half ? Sharing::kAHalf : Sharing::kA;
      const int32_t halves = kFew ? Halves(rows) : 1;
      first = is_half && kFew ? kHalfBlockM * (index % halves)
              : is_half       ? rows / kBlockM * kBlockM
                              : kBlockM * 2 * pairs;
      n_tile = 2 * (is_half ? index / halves : index - pairs * arguments_.n_tiles) + rank;
    }
    tile.group = unit.group;
    tile.row = (kWgrad ? 0 : unit.start) + first;
    tile.rows = min(rows - first, kFew ? kHalfBlockM : kBlockM);
    tile.column = n_tile * arguments_.block_n;
    tile.first = unit.start;
    tile.contracted = unit.size;
    tile.k_blocks = kWgrad ? (unit.size + block_k_ - 1) / block_k_ : arguments_.k_blocks;
  }

  const SchedulerArguments& arguments_;
  GroupPieces<SchedulerArguments> whole_pieces_;
  GroupPieces<SchedulerArguments> half_pieces_;
  const int32_t block_k_;
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
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
  uint32_t taken[kWarps];  // by each warp
  uint32_t given_up;  // whether a thread of this block waited too long, so that results are wrong
};

inline constexpr uint32_t kMathWarps = 8;

// Called by one thread.
__device__ __forceinline__ void InitTileRing(TileRing& ring, uint32_t readers) {
  ring.given_up = 0;
  for (uint32_t slot = 0; slot < TileRing::kSlots; ++slot) {
    MbarrierInit(&ring.full[slot], 1);
    MbarrierInit(&ring.empty[slot], readers);
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

// Called by a whole warp.
template <bool kWgrad, bool kFew>
__device__ __forceinline__ void ScheduleTiles(const SchedulerArguments& arguments, uint32_t block_k,
                                              TileRing& ring) {
  TileScheduler<kWgrad, kFew> scheduler(arguments, block_k);
  RingCursor<TileRing::kSlots> at;
  for (bool more = true; more; ++at.passed) {
    const Tile tile = scheduler.Next();
    more = tile.k_blocks >= 0;
    Await(&ring.empty[at.slot()], at.parity() ^ 1, &ring.given_up);
    // All lanes meet here: one that still waits might miss the phase's end once lane 0 has let the
    // readers go on.
    if (HasGivenUp(ring)) return;
    if (Lane() == 0) {
      ring.tiles[at.slot()] = tile;
      // Release; pairs with the wait in TileReader.
      MbarrierArrive(&ring.full[at.slot()]);
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
    Await(&ring_.full[at.slot()], at.parity(), &ring_.given_up);
    Tile tile = ring_.tiles[at.slot()];
    // All lanes have read the tile after this. If its wait was given up, nobody may have written
    // it.
    if (HasGivenUp(ring_)) tile.k_blocks = -1;
    if (Lane() == 0) {
      *taken() = at.passed + 1;
      // Release; pairs with the wait in ScheduleTiles.
      MbarrierArrive(&ring_.empty[at.slot()]);
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
            Uniform(tile.k_blocks),
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
