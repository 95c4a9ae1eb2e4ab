// Finds the rows of each group, and the group of each piece of work.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"

namespace jax_ep::cuda {

struct GroupPiece {
  int32_t group;
  int32_t start;  // the first row of the group
  int32_t size;   // the rows of the group
  int32_t index;  // of the piece within its group
};

// Numbers pieces of work on groups of rows: first all pieces of the first group, then those of the
// next. All methods are called by a whole warp; each lane looks after one of 32 neighbouring
// groups. `Groups` has their `sizes`, the number of `groups`, and the number of all rows, `m`.
template <typename Groups>
class GroupPieces {
 public:
  __device__ explicit GroupPieces(const Groups& groups) : groups_(groups) {}

  // Reads the sizes of 32 groups. A group of `size` rows has pieces(group, size) pieces, which must
  // be 0 past the last group. Whatever the sizes are, no row past the last one is in a group.
  template <typename Pieces>
  __device__ void Load(const Pieces& pieces) {
    const int32_t group = base_ + Lane();
    const uint32_t all_rows = static_cast<uint32_t>(groups_.m);
    const int32_t given = group < groups_.groups ? groups_.sizes[group] : 0;
    uint32_t rows_end = given < 0 ? 0 : min(static_cast<uint32_t>(given), all_rows);
#pragma unroll
    for (int by = 1; by < kWarpSize; by *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, rows_end, by);
      if (Lane() >= by) rows_end = min(rows_end + other, all_rows);
    }
    rows_end = min(rows_end + rows_before_, all_rows);
    uint32_t rows_start = __shfl_up_sync(kFullWarp, rows_end, 1);
    if (Lane() == 0) rows_start = rows_before_;
    rows_loaded_ = __shfl_sync(kFullWarp, rows_end, kWarpSize - 1);
    start_ = static_cast<int32_t>(rows_start);
    size_ = static_cast<int32_t>(rows_end - rows_start);
    pieces_ = static_cast<uint32_t>(pieces(group, size_));
    pieces_end_ = pieces_;
#pragma unroll
    for (int by = 1; by < kWarpSize; by *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, pieces_end_, by);
      if (Lane() >= by) pieces_end_ += other;
    }
    pieces_loaded_ = __shfl_sync(kFullWarp, pieces_end_, kWarpSize - 1);
  }

  // Calls visit(group, end of its rows, end of its pieces) for this lane's group of those that were
  // loaded last, if there is one.
  template <typename Visit>
  __device__ void AtLane(const Visit& visit) const {
    const int32_t group = base_ + Lane();
    if (group < groups_.groups) visit(group, start_ + size_, before_ + pieces_end_);
  }

  // Returns the number of pieces of all groups up to those that were loaded last.
  __device__ uint32_t end() const { return before_ + pieces_loaded_; }

  // Goes on to the next 32 groups, which must then be loaded. Returns false if there are none.
  __device__ bool Advance() {
    if (base_ + kWarpSize >= groups_.groups) return false;
    before_ += pieces_loaded_;
    rows_before_ = rows_loaded_;
    base_ += kWarpSize;
    return true;
  }

  // Returns a piece of the groups that were loaded last.
  __device__ GroupPiece Find(uint32_t piece) const {
    const uint32_t within = piece - before_;
    const int lane = __ffs(static_cast<int>(__ballot_sync(kFullWarp, within < pieces_end_))) - 1;
    const uint32_t first = __shfl_sync(kFullWarp, pieces_end_ - pieces_, lane);
    return {base_ + lane, __shfl_sync(kFullWarp, start_, lane), __shfl_sync(kFullWarp, size_, lane),
            static_cast<int32_t>(within - first)};
  }

 private:
  const Groups& groups_;
  int32_t base_ = 0;            // the first group that is loaded
  uint32_t before_ = 0;         // pieces of the groups before it
  uint32_t rows_before_ = 0;    // and their rows
  uint32_t pieces_loaded_ = 0;  // of the 32 groups
  uint32_t rows_loaded_ = 0;    // up to the last of them
  // This lane's group.
  int32_t start_ = 0;
  int32_t size_ = 0;
  uint32_t pieces_ = 0;
  uint32_t pieces_end_ = 0;
};

}  // namespace jax_ep::cuda
