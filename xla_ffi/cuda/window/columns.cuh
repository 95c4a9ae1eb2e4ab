// A lane's share of a piece of a row in registers, as elements or as codes with their scales. It is
// loaded from expert_out, windows and residuals and stored to windows and outputs.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/quantize.cuh"
#include "formats/token_format.h"
#include "protocol/layout.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Bytes of an element, or of its code.
template <typename T>
inline constexpr int64_t kElementBytes = static_cast<int64_t>(sizeof(T));
template <QuantizedFormat Format>
inline constexpr int64_t kElementBytes<Format> = Format::Code::kBits / 8;

// Elements per vector: one access suffices in either type, and the accesses of a warp leave no
// gaps.
template <typename A, typename B>
inline constexpr int kVectorElements = static_cast<int>(
    kVectorBytes / (kElementBytes<A> > kElementBytes<B> ? kElementBytes<A> : kElementBytes<B>));

// A piece consists of columns, each of which has one vector per lane.
template <int kCount>
inline constexpr int kPieceColumns = static_cast<int>(kPieceElements) / (kWarpSize * kCount);

template <int kCount, int kColumns>
using ColumnSums = float[kColumns][kCount];

// PieceBytes leads from the start of a row to a piece, LaneBytes from there to this lane's first
// vector.
template <typename T>
__device__ int64_t PieceBytes(uint32_t piece) {
  return piece * (kPieceElements * kElementBytes<T>);
}
template <typename T, int kCount>
__device__ uint32_t LaneBytes() {
  return static_cast<uint32_t>(Lane() * kCount) * static_cast<uint32_t>(kElementBytes<T>);
}

// Bypasses L1, which may still hold an earlier call's data.
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

// A row to be added. Equal in all lanes except for the lane's offset in `from`.
struct Term {
  bool last;     // of its sum
  bool present;  // if false, the term is zero
  const uint8_t* from;
  float weight = 1.0f;
  int32_t to_scale = 0;  // offset from `from`; for codes
};

// A lane's vectors of some columns. Pointers refer to its first vector. Partial pieces are
// processed one column at a time, of which a lane may have no vector.
template <typename T, int kCount, int kColumns>
struct Columns {
  using Vector = Elements<T, kCount>;
  static constexpr int kColumnBytes = kWarpSize * Vector::kBytes;
  static constexpr int kWords = kColumns * Vector::kWords;

  Vector vectors[kColumns];

  __device__ __forceinline__ void Load(const Term& term, int column) {
    Load(term.from + column * kColumnBytes);
  }

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

  // Two vectors at a time, because rows in flight occupy the other registers. So does AddAndStore.
  __device__ __forceinline__ static void AddRow(ColumnSums<kCount, kColumns>& sums,
                                                const uint8_t* row) {
    constexpr int kTogether = kColumns < 2 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < kColumns; i += kTogether) {
      Columns<T, kCount, kTogether> some;
      some.Load(row + i * kColumnBytes);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) AddVector<false>(sums[i + j], some.vectors[j], 1.0f);
    }
  }

  // Like Store, after adding a row if `row` is not nullptr.
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

// The offset from this lane's first code of a piece to the scale of that code.
template <QuantizedFormat Format, int kCount>
__device__ __forceinline__ int32_t ScaleFromCode(const CombineMessage& message, uint32_t piece) {
  using Scale = typename Format::Scale;
  constexpr int64_t kScales = kPieceElements / Format::kBlock;
  const int64_t blocks = piece * kScales + Lane() / CodedVector<Format, kCount>::kLanes;
  return static_cast<int32_t>(message.scales + blocks * static_cast<int64_t>(sizeof(Scale)) -
                              message.row - PieceBytes<Format>(piece)) -
         static_cast<int32_t>(LaneBytes<Format, kCount>());
}

// The same for codes, each with its scale.
template <QuantizedFormat Format, int kCount, int kColumns>
struct Columns<Format, kCount, kColumns> {
  using Codes = CodedVector<Format, kCount>;
  static_assert(sizeof(typename Format::Scale) == sizeof(float));
  static_assert(kWarpSize % Codes::kLanes == 0 && (Codes::kBytes == 8 || Codes::kBytes == 4));
  static constexpr int kColumnBytes = kWarpSize * Codes::kBytes;
  static constexpr int kColumnScaleBytes =
      kWarpSize / Codes::kLanes * static_cast<int>(sizeof(float));
  static constexpr int kWords = kColumns * (Codes::kBytes / 4 + 1);

  Codes codes[kColumns];
  float scales[kColumns];

  __device__ __forceinline__ void Load(const Term& term, int column) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const uint8_t* from = term.from + (column + i) * kColumnBytes;
      if constexpr (Codes::kBytes == 8) {
        const uint2 v = LoadAroundL1(reinterpret_cast<const uint2*>(from));
        codes[i].words[0] = v.x, codes[i].words[1] = v.y;
      } else {
        codes[i].words[0] =
            static_cast<uint32_t>(LoadAroundL1(reinterpret_cast<const int32_t*>(from)));
      }
      scales[i] = LoadAroundL1(reinterpret_cast<const float*>(term.from + term.to_scale +
                                                              (column + i) * kColumnScaleBytes));
    }
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) codes[i] = {}, scales[i] = 0.0f;
  }

  template <bool kWeighted>
  __device__ __forceinline__ void AddTo(ColumnSums<kCount, kColumns>& sums, float weight) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float scale = Format::ScaleValue(scales[i]);
      float values[kCount];
      codes[i].Decode(values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float value = Format::Restored(values[j], scale, kNoInputScale);
        sums[i][j] =
            kWeighted ? MultiplyThenAdd(sums[i][j], weight, value) : Add(sums[i][j], value);
      }
    }
  }

  // Called by the whole warp; lanes with `in_row` false store nothing.
  __device__ __forceinline__ static void Store(const ColumnSums<kCount, kColumns>& sums,
                                               float input_scale, uint8_t* to, int32_t to_scale,
                                               int column, bool in_row) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const auto encoded = EncodedVector<Format, kCount>::Of(sums[i], input_scale);
      if (!in_row) continue;
      encoded.codes.Store(to, (column + i) * kWarpSize);
      if (Lane() % Codes::kLanes != 0) continue;
      *FloatAt(to, to_scale + (column + i) * kColumnScaleBytes) = encoded.scale;
    }
  }
};

}  // namespace jax_ep::cuda
