// Sums of pieces of rows in the registers of a warp, with the loads of the next rows on their way
// while one is added. Used by window_combine.cu.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/divisor.h"
#include "cuda/elements.cuh"
#include "cuda/launch.h"
#include "cuda/primitives.cuh"
#include "cuda/ptx.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Elements of a vector: one access in either type, and the lanes' accesses leave no gaps.
template <typename A, typename B>
inline constexpr int kVectorElements =
    static_cast<int>(kVectorBytes / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B)));

// A piece is columns of one vector a lane.
template <int kCount>
inline constexpr int kPieceColumns = static_cast<int>(kPieceElements) / (kWarpSize * kCount);

template <int kCount, int kColumns>
using ColumnSums = float[kColumns][kCount];

// From the start of a row of T to a piece, and from there to this lane's first vector.
template <typename T>
__device__ int64_t PieceBytes(uint32_t piece) {
  return piece * (kPieceElements * static_cast<int64_t>(sizeof(T)));
}
template <typename T, int kCount>
__device__ uint32_t LaneBytes() {
  return static_cast<uint32_t>(Lane() * kCount) * static_cast<uint32_t>(sizeof(T));
}

// Around L1, which may hold what lay there in an earlier call.
template <typename Vector>
__device__ __forceinline__ void LoadVector(Vector& vector, const uint8_t* from) {
  uint32_t* words = vector.words;
  if constexpr (Vector::kBytes == 8) {
    const uint2 v = LoadAroundL1(reinterpret_cast<const uint2*>(from));
    words[0] = v.x, words[1] = v.y;
  } else {
    const uint4 v = LoadAroundL1(reinterpret_cast<const uint4*>(from));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
}

template <bool kWeighted, typename Vector, int kCount>
__device__ __forceinline__ void AddVector(float (&sums)[kCount], const Vector& vector,
                                          float weight) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    sums[j] =
        kWeighted ? MultiplyThenAdd(sums[j], weight, vector.Get(j)) : Add(sums[j], vector.Get(j));
  }
}

// A lane's vectors of some columns. Pointers are to its first one; a piece that is not whole is
// taken by single columns, of which a lane may have none.
template <typename T, int kCount, int kColumns>
struct Columns {
  using Vector = Elements<T, kCount>;
  static constexpr int kColumnBytes = kWarpSize * Vector::kBytes;

  Vector vectors[kColumns];

  __device__ __forceinline__ void Load(const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) LoadVector(vectors[i], from + i * kColumnBytes);
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (Vector& vector : vectors) vector = {};
  }

  template <bool kWeighted>
  __device__ __forceinline__ void AddTo(ColumnSums<kCount, kColumns>& sums, float weight) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) AddVector<kWeighted>(sums[i], vectors[i], weight);
  }

  __device__ __forceinline__ static void Store(const ColumnSums<kCount, kColumns>& sums,
                                               uint8_t* to) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      Vector::Round(sums[i]).Store(to + i * kColumnBytes);
    }
  }

  // As Store, after the addition of a row that may be nullptr; two vectors at a time, because rows
  // in flight have the other registers.
  __device__ __forceinline__ static void AddAndStore(ColumnSums<kCount, kColumns>& sums,
                                                     const uint8_t* row, uint8_t* to) {
    constexpr int kTogether = kColumns < 2 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < kColumns; i += kTogether) {
      if (row != nullptr) {
        Columns<T, kCount, kTogether> some;
        some.Load(row + i * kColumnBytes);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) AddVector<false>(sums[i + j], some.vectors[j], 1.0f);
      }
#pragma unroll
      for (int j = i; j < i + kTogether; ++j) {
        Vector::Round(sums[j]).Store(to + j * kColumnBytes);
      }
    }
  }
};

// Equal in all lanes but for the lane's offset in `from`.
struct Term {
  bool last;     // of its sum
  bool present;  // else zeros
  const uint8_t* from;
  float weight = 1.0f;
};

// The terms of a batch of 32 / K sums: lane j * K + i may hold one of sum j's, and within a sum
// lanes are in the order of addition. A sum without terms gets one of zeros.
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
  // The lanes of this lane's sum before this lane.
  __device__ unsigned before() const { return of_sum_ & LanesBelow(Lane()); }
  __device__ int place() const { return __popc(before()); }

  // Whole warp: a batch of the first `count` sums; `present` in lanes that hold a term.
  __device__ void Start(int32_t count, bool present) {
    const unsigned given = __ballot_sync(kFullWarp, present);
    left_ = given | __ballot_sync(kFullWarp, In(count) && before() == 0 && (given & of_sum_) == 0);
    const unsigned after = of_sum_ & ~LanesBelow(Lane()) & ~(1u << Lane());
    last_ = __ballot_sync(kFullWarp, (left_ & after) == 0);
  }
  __device__ bool empty() const { return left_ == 0; }
  // The lane of the next term.
  __device__ int Pop(bool& last) {
    const int lane = __ffs(static_cast<int>(left_)) - 1;
    last = (last_ >> lane & 1) != 0;
    left_ &= left_ - 1;
    return lane;
  }

 private:
  static constexpr int32_t kNoSum = INT32_MAX;

  int32_t sum_;  // this lane's
  unsigned of_sum_;
  unsigned left_ = 0;
  unsigned last_ = 0;
};

// Whole warp: in the first of each sum's lanes those that hold its distinct numbers, ascending; -1
// in the lanes behind. Negative numbers are none.
__device__ inline int SortedDistinct(const TermLanes& lanes, int32_t top_k, int32_t number) {
  // The first of equal ones stands for all.
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

// Columns of a whole piece that are taken at a time, and the registers of a lane for rows in
// flight: what 128 hold beside the sums.
inline constexpr int kColumnsAtOnce = 4;
inline constexpr int kWordsInFlight = 48;

// The sums of some columns, and the rows that come next. Each row has registers of its own, so that
// a load into them is under way while others are added: no index of a row may be computed at run
// time.
template <typename From, int kCount, int kColumns, int kRows, bool kWeighted>
class RowSum {
 public:
  // `column` is the first; `in_row` is false in lanes past the row's end.
  __device__ __forceinline__ RowSum(int column, bool in_row) : column_(column), in_row_(in_row) {}

  template <typename Job>
  __device__ __forceinline__ void Run(Job& job) {
    [&]<int... kRow>(std::integer_sequence<int, kRow...>) __attribute__((always_inline)) {
      while ((Step<kRow>(job) && ...)) {
      }
    }(std::make_integer_sequence<int, kRows>{});
  }

 private:
  // Adds a row and loads the next one into its place.
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
        rows_[kRow].Load(term.from + column_ * Row::kColumnBytes);
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
  // A bit a row.
  unsigned loaded_ = 0;  // holds a term, or has held one
  unsigned last_ = 0;    // holds the last term of its sum
  unsigned ended_ = 0;   // gets no more terms
};

// Whole warp: the sums of a piece of rows of `hidden`. As often as its columns take, calls
// job.Start(first), then job.Next(term) until it is false, from then on always, and
// job.Store(sums, column, in_row) after the last term of each sum.
template <typename From, int kCount, bool kWeighted, typename Job>
__device__ __forceinline__ void SumPiece(int64_t hidden, uint32_t piece, Job& job) {
  const int32_t elements =
      static_cast<int32_t>(Min(kPieceElements, hidden - piece * kPieceElements));
  constexpr int kColumns = kColumnsAtOnce;
  constexpr int kRows = kWordsInFlight / (kColumns * Elements<From, kCount>::kWords);
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
