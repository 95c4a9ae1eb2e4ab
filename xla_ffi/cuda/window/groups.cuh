// The receiving rank's tables of a dispatch: where the rows of each (source, expert) start, and
// what lies between and behind the real rows.
#pragma once

#include <cstdint>

#include "cuda/common/groups.cuh"
#include "cuda/window/call.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// Zeros in shared memory, from which ranges of rows are cleared.
inline constexpr uint32_t kZeroBytes = 2048;

// Called by all lanes: bulk stores of zeros over [begin, end). Addresses are multiples of 16.
__device__ inline void StoreZeros(uint8_t* begin, uint8_t* end, const uint8_t* zeros) {
  JAX_EP_NO_UNROLL
  for (uint8_t* to = begin + Lane() * int64_t{kZeroBytes}; to < end;
       to += kWarpSize * int64_t{kZeroBytes}) {
    BulkStore(to, zeros, static_cast<uint32_t>(Min<int64_t>(kZeroBytes, end - to)));
  }
  // Close the group, because waits cover closed groups only.
  BulkCommit();
}

// In shared memory, one per block.
class GroupTable {
 public:
  __host__ __device__ static int64_t Bytes(const EpShape& shape, int64_t warps) {
    return warps * static_cast<int64_t>(sizeof(int64_t)) +
           (shape.experts() + shape.local_experts + shape.ranks + 1) * kIndexBytes;
  }
  __device__ GroupTable(const EpShape& shape, int64_t warps, uint8_t* memory)
      : shape_(shape),
        totals_(reinterpret_cast<int64_t*>(memory)),
        base_(reinterpret_cast<int32_t*>(totals_ + warps)),
        rows_(base_ + shape.experts()),
        end_(rows_ + shape.local_experts),
        slots_(end_ + 1) {}

  // Called by the whole team: waits for the counts of all sources. `arrived` is shared by the team
  // and must be true before; it becomes false if a wait fails. `first` is what this thread has
  // already read of its first cell, or nullptr.
  __device__ void Build(const WindowCall& call, const Divisor& cells, const Team& team,
                        bool& arrived, const CountCell* first = nullptr) {
    const int64_t entries = shape_.tokens * shape_.top_k;
    const uint32_t local_experts = static_cast<uint32_t>(shape_.local_experts);
    JAX_EP_NO_UNROLL
    for (uint32_t i = team.thread; i < cells.value * call.ranks(); i += team.threads) {
      uint32_t cell;
      const uint32_t source = cells.Divide(i, cell);
      CountCell counts = first != nullptr && i == team.thread ? *first : CountCell{};
      if (!call.HasCounts(cell, counts) && !call.AwaitCounts(source, cell, counts)) {
        StoreSame(&arrived, false);
        break;
      }
      if (cell == 0) {
        slots_[source] = static_cast<int32_t>(Clamp(counts.counts[0], shape_.tokens));
        continue;
      }
      // A source cannot have more rows than entries. Clamping keeps corrupt counts from moving a
      // group out of [0, N].
      const uint32_t first = (cell - 1) * static_cast<uint32_t>(kCountsPerCell);
#pragma unroll
      for (uint32_t j = 0; j < kCountsPerCell; ++j) {
        if (first + j >= local_experts) continue;
        base_[source * local_experts + first + j] =
            static_cast<int32_t>(Clamp(counts.counts[j], entries));
      }
    }
    team.Sync();
    if (!arrived) return;
    const auto count_of = [&](int64_t source, int64_t expert) -> int64_t {
      return base_[source * local_experts + expert];
    };
    const int64_t end = ForEachGroup(
        team, shape_, totals_, count_of, [&](int64_t expert, int64_t start, int64_t rows) {
          // Turns counts into first rows, in place.
          int64_t base = start;
          JAX_EP_NO_UNROLL
          for (int64_t source = 0; source < shape_.ranks; ++source) {
            const int64_t count = count_of(source, expert);
            base_[source * local_experts + expert] = static_cast<int32_t>(Min(base, kMaxIndex));
            base += count;
          }
          rows_[expert] = static_cast<int32_t>(rows);
        });
    if (team.thread == team.threads - 1) *end_ = static_cast<int32_t>(Min(end, kMaxIndex));
    team.Sync();
  }

  // Called by the whole team after Build: computes the first tile of each group's scales, and the
  // end of the last one.
  __device__ void BuildTiles(const Team& team, int32_t* first_tiles) const {
    const int64_t groups = shape_.local_experts, length = DivideUp(groups, team.threads);
    const int64_t begin = Min(team.thread * length, groups), end = Min(begin + length, groups);
    const auto tiles_of = [&](int64_t group) {
      return TilesOfGroup(Offset(group + 1) - Offset(group));
    };
    int64_t tiles = 0;
    JAX_EP_NO_UNROLL
    for (int64_t group = begin; group < end; ++group) tiles += tiles_of(group);
    int64_t first = ExclusiveSum(team, tiles, totals_);
    JAX_EP_NO_UNROLL
    for (int64_t group = begin; group < end; ++group) {
      first_tiles[group] = static_cast<int32_t>(first);
      first += tiles_of(group);
    }
    if (team.thread == team.threads - 1) first_tiles[groups] = static_cast<int32_t>(first);
    team.Sync();
  }

  // Returns the row of an entry from `source`, or -1.
  __device__ int32_t RowOf(uint32_t source, int32_t expert, int32_t position) const {
    if (expert < 0 || expert >= shape_.local_experts) return -1;
    const int64_t base = base_[source * shape_.local_experts + expert];
    return RowOrDropped(base + position, shape_.recv_rows);
  }

  // Rows from here on belong to no group.
  __device__ int64_t End() const { return Min<int64_t>(*end_, shape_.recv_rows); }
  __device__ int32_t Slots(int64_t source) const { return slots_[source]; }
  // Where a group begins, or where the last one ends, clamped to N.
  __device__ int32_t Offset(int64_t group) const {
    return static_cast<int32_t>(Min<int64_t>(Start(group), shape_.recv_rows));
  }

  // Rows [begin, end).
  struct Range {
    int64_t begin;
    int64_t end;
  };
  __device__ Range PaddingOf(int64_t expert) const {
    return {Min(int64_t{Start(expert)} + rows_[expert], shape_.recv_rows),
            Min<int64_t>(Start(expert + 1), shape_.recv_rows)};
  }

  // Called by one warp.
  __device__ void Write(const DispatchStep& step) const {
    unsigned dropped = 0;
    JAX_EP_NO_UNROLL
    for (int64_t expert = Lane(); expert < shape_.local_experts; expert += kWarpSize) {
      const int32_t next = static_cast<int32_t>(Min<int64_t>(Start(expert + 1), shape_.recv_rows));
      step.expert_counts[expert] = rows_[expert];
      step.expert_ids[expert] = static_cast<int32_t>(expert);
      step.row_offsets[expert + 1] = next;
      step.group_sizes[expert] =
          next - static_cast<int32_t>(Min<int64_t>(Start(expert), shape_.recv_rows));
      dropped += static_cast<unsigned>(DroppedRows(Start(expert), rows_[expert], shape_.recv_rows));
    }
    dropped = __reduce_add_sync(kFullWarp, dropped);
    if (Lane() < shape_.ranks) step.slot_counts[Lane()] = slots_[Lane()];
    if (Lane() == 0) {
      step.row_offsets[0] = 0;
      *step.num_dropped = static_cast<int32_t>(dropped);
    }
  }

 private:
  __device__ static int64_t Clamp(int64_t count, int64_t limit) {
    return count < 0 ? 0 : Min(count, limit);
  }
  __device__ int32_t Start(int64_t expert) const {
    return expert < shape_.local_experts ? base_[expert] : *end_;
  }

  const EpShape& shape_;
  int64_t* totals_;  // [warps] scratch
  int32_t* base_;    // [R, L] first row of each (source, expert), not clamped to N
  int32_t* rows_;    // [L] real rows
  int32_t* end_;     // end of the last group, not clamped to N
  int32_t* slots_;   // [R]
};

}  // namespace jax_ep::cuda
