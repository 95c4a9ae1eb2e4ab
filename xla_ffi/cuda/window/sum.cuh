// Sums pieces of rows in a warp's registers, with the loads of the next rows in flight while one is
// added.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/common/divisor.h"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/window/columns.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// The terms of a batch of 32 / K sums: lane j * K + i may hold a term of sum j, and lanes of a sum
// are in the order of addition. A sum without terms gets a term of zeros.
class TermLanes {
 public:
  // `batch` is 32 / top_k.
  __device__ TermLanes(const Divisor& top_k, int32_t batch) {
    uint32_t place;
    const int32_t sum = static_cast<int32_t>(top_k.Divide(static_cast<uint32_t>(Lane()), place));
    sum_ = sum < batch ? sum : kNoSum;
    of_sum_ = (top_k.value < kWarpSize ? LanesBelow(top_k.int_value()) : kFullWarp)
              << (Lane() - static_cast<int>(place));
  }

  // Whether this lane's sum is among the first `count`.
  __device__ bool In(int32_t count) const { return sum_ < count; }
  // The lanes of this lane's sum that come before it.
  __device__ unsigned before() const { return of_sum_ & LanesBelow(Lane()); }
  __device__ int place() const { return __popc(before()); }

  // Called by the whole warp: starts a batch of `count` sums; `present` is true in lanes that hold
  // a term.
  __device__ void Start(int32_t count, bool present) {
    const unsigned given = __ballot_sync(kFullWarp, present);
    left_ = given | __ballot_sync(kFullWarp, In(count) && before() == 0 && (given & of_sum_) == 0);
    const unsigned after = of_sum_ & ~LanesBelow(Lane()) & ~(1u << Lane());
    last_ = __ballot_sync(kFullWarp, (left_ & after) == 0);
  }
  __device__ bool empty() const { return left_ == 0; }
  // Returns the lane of the next term.
  __device__ int Pop(bool& last) {
    const int lane = __ffs(static_cast<int>(left_)) - 1;
    last = (last_ >> lane & 1) != 0;
    left_ &= left_ - 1;
    return lane;
  }

 private:
  static constexpr int32_t kNoSum = INT32_MAX;

  int32_t sum_;  // of this lane
  unsigned of_sum_;
  unsigned left_ = 0;
  unsigned last_ = 0;
};

// Called by the whole warp: returns, in the first lanes of each sum, the lanes that hold its
// distinct numbers in ascending order, and -1 in the rest. Negative numbers are ignored.
__device__ inline int SortedDistinct(const TermLanes& lanes, int32_t top_k, int32_t number) {
  // The first of equal numbers stands for all.
  const unsigned equal = __match_any_sync(kFullWarp, number);
  const bool first = number >= 0 && (equal & lanes.before()) == 0;
  const unsigned distinct = __ballot_sync(kFullWarp, first);
  const int base = Lane() - lanes.place();
  int place = base;
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    const int lane = (base + k) % kWarpSize;
    const int32_t other = __shfl_sync(kFullWarp, number, lane);
    place += (distinct >> lane & 1) != 0 && other < number ? 1 : 0;
  }
  place = first ? place : -1;
  int from = -1;
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    const int lane = (base + k) % kWarpSize;
    if (__shfl_sync(kFullWarp, place, lane) == Lane()) from = lane;
  }
  return from;
}

// Columns of a whole piece that are summed at a time, and registers per lane for rows in flight:
// those that a limit of 128 leaves beside the sums.
inline constexpr int kColumnsAtOnce = 4;
inline constexpr int kWordsInFlight = 48;
inline constexpr int kWordsWhileEncoding = 32;
inline constexpr int kWordsWhileDecoding = 36;

// The sums of some columns and the rows to be added next. Each row has its own registers, so that
// it can be loaded while others are added; hence no row's index may depend on run-time values.
template <typename From, int kCount, int kColumns, int kRows, bool kWeighted>
class RowSum {
 public:
  // `column` is the first one; `in_row` is false in lanes past the row's end.
  __device__ __forceinline__ RowSum(int column, bool in_row) : column_(column), in_row_(in_row) {}

  template <typename Job>
  __device__ __forceinline__ void Run(Job& job) {
    [&]<int... kRow>(std::integer_sequence<int, kRow...>) __attribute__((always_inline)) {
      while ((Step<kRow>(job) && ...)) {
      }
    }(std::make_integer_sequence<int, kRows>{});
  }

 private:
  // Adds a row and loads the next one in its place.
  template <int kRow, typename Job>
  __device__ __forceinline__ bool Step(Job& job) {
    constexpr unsigned kBit = 1u << kRow;
    if ((ended_ & kBit) != 0) return false;
    if ((loaded_ & kBit) != 0) rows_[kRow].template AddTo<kWeighted>(sums_, weights_[kRow]);
    const bool last = (last_ & kBit) != 0;
    last_ &= ~kBit;
    Term term;
    if (job.Next(term)) {
      loaded_ |= kBit;
      if (term.last) last_ |= kBit;
      weights_[kRow] = term.weight;
      if (term.present && in_row_) {
        rows_[kRow].Load(term, column_);
      } else {
        rows_[kRow].Clear();
      }
    } else {
      ended_ |= kBit;
    }
    if (last) {
      job.Store(sums_, column_, in_row_);
#pragma unroll
      for (auto& vector : sums_) {
#pragma unroll
        for (float& sum : vector) sum = 0.0f;
      }
    }
    return true;
  }

  using Row = Columns<From, kCount, kColumns>;

  int column_;
  bool in_row_;
  ColumnSums<kCount, kColumns> sums_ = {};
  Row rows_[kRows];
  float weights_[kRows];
  // One bit per row.
  unsigned loaded_ = 0;  // holds a term, or held one
  unsigned last_ = 0;    // holds the last term of its sum
  unsigned ended_ = 0;   // gets no more terms
};

// Called by the whole warp: sums a piece of rows of `hidden` elements. For each group of columns it
// calls job.Start(first), then job.Next(term) until that returns false, which must then stay false,
// and job.Store(sums, column, in_row) after the last term of each sum. Job::kWords is the number of
// registers for rows in flight.
template <typename From, int kCount, bool kWeighted, typename Job>
__device__ __forceinline__ void SumPiece(int64_t hidden, uint32_t piece, Job& job) {
  const int32_t elements =
      static_cast<int32_t>(Min(kPieceElements, hidden - piece * kPieceElements));
  constexpr int kColumns = kColumnsAtOnce;
  constexpr int kRows = Job::kWords / Columns<From, kCount, kColumns>::kWords;
  if (elements == kPieceElements) {
#pragma unroll 1
    for (int column = 0; column < kPieceColumns<kCount>; column += kColumns) {
      job.Start(column == 0);
      RowSum<From, kCount, kColumns, kRows, kWeighted>(column, true).Run(job);
    }
  } else {
#pragma unroll 1
    for (int column = 0; column * kWarpSize * kCount < elements; ++column) {
      job.Start(column == 0);
      RowSum<From, kCount, 1, 1, kWeighted>(column,
                                            (column * kWarpSize + Lane()) * kCount < elements)
          .Run(job);
    }
  }
}

}  // namespace jax_ep::cuda
