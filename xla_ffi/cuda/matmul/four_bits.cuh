// Each block works on tiles of 128 columns and up to kRows rows of a group. Its eight warps share
// the contracted dimension in units of 128, each by itself: it brings weights and rows to stages of
// its own in shared memory, several ahead and into the next tile, and multiplies them with the
// columns as wgmma's counterpart for a warp has rows. Only the sums of a tile meet, in shared
// memory.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/four_bits.h"
#include "cuda/matmul/group_pieces.cuh"
#include "cuda/matmul/warp_products.cuh"
#include "formats/e4m3.h"

namespace jax_ep::cuda {

inline constexpr int kFourBitWarps = 8;
inline constexpr int kFourBitThreads = kFourBitWarps * kWarpSize;
inline constexpr int kAtomsOfStage = 2;
inline constexpr int kStageSteps = kAtomsOfStage * kFourBitSteps;  // 64 of K
inline constexpr int kStagesOfUnit = kFourBitAlign / kStageSteps;
inline constexpr int kColumnTiles = kFourBitColumns / 16;
inline constexpr uint32_t kWeightBytes = kAtomsOfStage * kFourBitAtomBytes;

// kRowTiles: eights of rows. kCodes: whether rows are codes.
template <int kRowTiles, bool kCodes>
struct FourBitPlan {
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr uint32_t kRowBytes = kStageSteps * (kCodes ? 1 : 2);
  // What a lane reads of a row in an atom, and has copied itself: pieces lie by atom, tile, lane.
  static constexpr uint32_t kPieceBytes = kCodes ? 8 : 16;
  static constexpr uint32_t kStageBytes =
      kWeightBytes + kAtomsOfStage * kRowTiles * kWarpSize * kPieceBytes;
  // Sums of half of a tile's columns, of half of the warps; padded against bank conflicts.
  static constexpr uint32_t kSumColumns = kFourBitColumns / 2;
  static constexpr uint32_t kSumStride = kSumColumns + 4;
  static constexpr uint32_t kSlots = kFourBitWarps / 2;
  static constexpr uint32_t kSumBytes = kSlots * kRows * kSumStride * 4;
  static constexpr uint32_t kMostSharedBytes = 227 * 1024;
  static constexpr uint32_t kFit =
      (kMostSharedBytes - kSumBytes) / (kFourBitWarps * (kStageBytes + sizeof(uint64_t)));
  static constexpr uint32_t kStages = kFit < 4 ? kFit : 4;
  static_assert(kStages >= 2);
  static constexpr uint32_t kSharedBytes =
      kFourBitWarps * kStages * (kStageBytes + sizeof(uint64_t)) + kSumBytes;

  // Where a lane's piece of a row is in a stage.
  __device__ static uint32_t PieceAt(int atom, int tile) {
    return kWeightBytes + ((atom * kRowTiles + tile) * kWarpSize + Lane()) * kPieceBytes;
  }
};

struct FewRowsTile {
  int32_t group;  // negative: no more tiles
  int32_t row;
  int32_t rows;
  int32_t column_tile;
};

// Finds this block's tiles, one after the other. Called by a whole warp.
class FewRowsWalk {
 public:
  __device__ FewRowsWalk(const FourBitStep& step, int32_t tile_rows, int32_t column_tiles)
      : pieces_(step), tile_rows_(tile_rows), column_tiles_(column_tiles), next_(blockIdx.x) {
    Load();
  }

  __device__ FewRowsTile Next() {
    while (next_ >= pieces_.end()) {
      if (!pieces_.Advance()) return {-1, 0, 0, 0};
      Load();
    }
    const GroupPiece tile = pieces_.Find(next_);
    // Tiles of the same columns follow each other: weights come from L2 after the first.
    const int32_t row_tiles = RowTiles(tile.size);
    const int32_t row = tile.index % row_tiles * tile_rows_;
    next_ += gridDim.x;
    return {tile.group, tile.start + row, Min(tile.size - row, tile_rows_), tile.index / row_tiles};
  }

 private:
  __device__ int32_t RowTiles(int32_t rows) const { return (rows + tile_rows_ - 1) / tile_rows_; }

  __device__ void Load() {
    pieces_.Load([&](int32_t, int32_t size) { return RowTiles(size) * column_tiles_; });
  }

  GroupPieces<FourBitStep> pieces_;
  const int32_t tile_rows_;
  const int32_t column_tiles_;
  uint32_t next_;
};

// ---- Numbers ------------------------------------------------------------------------------------

// Turns scale bytes into factors of codes as TwoOfCodes makes them, which are 2^-126 of their
// values.
struct CodeFactor {
  uint32_t first;   // two bfloat16
  uint32_t second;  // 1, if `first` is all

  // Powers that bfloat16 cannot hold at once, and NaN, take two factors.
  __device__ static bool NeedsTwo(uint32_t scale) { return scale > 128; }

  // Of scales of which none needs two.
  __device__ static uint32_t OnlyOf(uint32_t scale) { return (scale + 126) * 0x00800080u; }

  __device__ explicit CodeFactor(uint32_t scale) {
    constexpr uint32_t kOne = 0x3F80, kMost = 0x7E80 /* 2^126 */, kNan = 0x7FC0;
    const bool two = NeedsTwo(scale);
    const uint32_t one = two ? kMost : (scale + 126) << 7;
    const uint32_t other = !two ? kOne : scale == 255 ? kNan : scale << 7;
    first = one << 16 | one;
    second = other << 16 | other;
  }
};

// Pair `pair` of a word's codes, as two bfloat16 of 2^-126 of their values: exponent and mantissa
// go to the lowest bits of the exponent and the highest one of the mantissa, where denormals are
// right, too.
template <int kPair>
__device__ __forceinline__ uint32_t TwoOfCodes(uint32_t word) {
  constexpr int kBits = 6 - 4 * kPair, kSign = 12 - 4 * kPair;
  const uint32_t bits =
      kBits >= 0 ? word << (kBits >= 0 ? kBits : 0) : word >> (kBits < 0 ? -kBits : 0);
  return (bits & 0x01C001C0) | (word << kSign & 0x80008000);
}

// Four words of bfloat16 from eight codes of e4m3.
__device__ __forceinline__ void RowsOfCodes(uint2 codes, uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    E4M3::DecodeTwo((i < 2 ? codes.x : codes.y) >> i % 2 * 16, low, high);
    words[i] = RoundTwo<BFloat16>(low, high);
  }
}

// ---- A warp's stages ----------------------------------------------------------------------------

template <typename Plan, bool kCodes>
class FewRowsStages {
 public:
  // Called by the whole warp.
  __device__ FewRowsStages(const FourBitStep& step, uint8_t* memory, int32_t column_tiles)
      : step_(step),
        walk_(step, Plan::kRows, column_tiles),
        column_tiles_(column_tiles),
        stages_(memory + Warp() * Plan::kStages * Plan::kStageBytes),
        barriers_(reinterpret_cast<uint64_t*>(memory +
                                              kFourBitWarps * Plan::kStages * Plan::kStageBytes) +
                  Warp() * Plan::kStages),
        half_units_(static_cast<int32_t>(step.left_columns / kStageSteps)) {
    if (Lane() == 0) {
      for (uint32_t stage = 0; stage < Plan::kStages; ++stage) MbarrierInit(&barriers_[stage], 1);
    }
    FenceProxyAsyncShared();
    __syncwarp();
    ahead_ = walk_.Next();
    part_ = First();
    for (uint32_t stage = 0; stage < Plan::kStages; ++stage) Issue();
  }

  // The first of this warp's parts of K, in stages; units of all warps take turns.
  __device__ static int32_t First() { return Warp() * kStagesOfUnit; }
  __device__ static int32_t After(int32_t part) {
    return part % kStagesOfUnit != kStagesOfUnit - 1
               ? part + 1
               : part + 1 + (kFourBitWarps - 1) * kStagesOfUnit;
  }

  // Waits for the oldest stage.
  __device__ const uint8_t* Await() {
    while (!MbarrierTryWait(&barriers_[used_ % Plan::kStages], used_ / Plan::kStages % 2)) {
    }
    // Of every stage there is a group of the lane's own copies.
    AsyncWait<Plan::kStages - 1>();
    return stages_ + used_ % Plan::kStages * Plan::kStageBytes;
  }
  // Gives it back, and loads the next part there.
  __device__ void Release() {
    ++used_;
    // The lanes' reads come before the bulk copies that overwrite them.
    FenceProxyAsyncShared();
    __syncwarp();
    Issue();
  }

 private:
  __device__ void Issue() {
    Load();
    AsyncCommit();
  }

  __device__ void Load() {
    while (ahead_.group >= 0 && part_ >= half_units_) {
      ahead_ = walk_.Next();
      part_ = First();
      if (First() >= half_units_) return;  // nothing in any tile
    }
    if (ahead_.group < 0) return;
    const uint32_t slot = issued_ % Plan::kStages;
    uint8_t* stage = stages_ + slot * Plan::kStageBytes;
    if (Lane() == 0) {
      uint64_t* barrier = &barriers_[slot];
      MbarrierExpect(barrier, kWeightBytes);
      const int64_t tile = static_cast<int64_t>(ahead_.group) * column_tiles_ + ahead_.column_tile;
      const int64_t atom = tile * (step_.left_columns / kFourBitSteps) + part_ * kAtomsOfStage;
      BulkLoad(stage, step_.right + atom * kFourBitAtomBytes, kWeightBytes, barrier);
    }
    __syncwarp();
    // Not by bulk copies: those of rows are short, and there would be many.
    const int64_t row_bytes = step_.left_columns * (kCodes ? 1 : 2);
    const uint8_t* from = static_cast<const uint8_t*>(step_.left) +
                          (ahead_.row + Lane() / 4) * row_bytes + part_ * Plan::kRowBytes +
                          Lane() % 4 * Plan::kPieceBytes;
#pragma unroll
    for (int tile = 0; tile < Plan::kRows / 8; ++tile, from += 8 * row_bytes) {
      if (8 * tile + Lane() / 4 >= ahead_.rows) break;
#pragma unroll
      for (int atom = 0; atom < kAtomsOfStage; ++atom) {
        AsyncCopy<Plan::kPieceBytes>(stage + Plan::PieceAt(atom, tile),
                                     from + atom * (Plan::kRowBytes / kAtomsOfStage));
      }
    }
    ++issued_;
    part_ = After(part_);
  }

  const FourBitStep& step_;
  FewRowsWalk walk_;
  const int32_t column_tiles_;
  uint8_t* stages_;
  uint64_t* barriers_;
  const int32_t half_units_;
  FewRowsTile ahead_;  // of the next part to load
  int32_t part_;
  uint32_t issued_ = 0;
  uint32_t used_ = 0;
};

// ---- Multiplying --------------------------------------------------------------------------------

template <int kRowTiles>
using FewRowsSums = float[kColumnTiles][kRowTiles][4];

// One atom with rows that are loaded. kTwo: whether any of its scales takes two factors.
template <bool kTwo, int kRowTiles>
__device__ __forceinline__ void MultiplyAtom(FewRowsSums<kRowTiles>& sums, const uint8_t* codes,
                                             const uint32_t (&rows)[kRowTiles][4],
                                             const uint32_t (&scale_words)[4]) {
  const uint32_t lane = Lane();
#pragma unroll
  for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
    const uint4 four = *reinterpret_cast<const uint4*>(codes + 512 * pair + 16 * lane);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column_tile = 2 * pair + odd;
      uint32_t left[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = words[2 * odd + half];
        const uint32_t scale = scale_words[pair] >> (2 * odd + half) * 8 & 0xFF;
        const uint32_t codes_of[4] = {TwoOfCodes<0>(word), TwoOfCodes<1>(word), TwoOfCodes<2>(word),
                                      TwoOfCodes<3>(word)};
        if constexpr (kTwo) {
          const CodeFactor factor(scale);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            left[i / 2][i % 2 * 2 + half] =
                MultiplyTwo(MultiplyTwo(codes_of[i], factor.first), factor.second);
          }
        } else {
          const uint32_t factor = CodeFactor::OnlyOf(scale);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            left[i / 2][i % 2 * 2 + half] = MultiplyTwo(codes_of[i], factor);
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
          const uint32_t right[2] = {rows[tile][2 * k16], rows[tile][2 * k16 + 1]};
          WarpMultiply(sums[column_tile][tile], left[k16], right);
        }
      }
    }
  }
}

template <typename Plan, int kRowTiles, bool kCodes>
__device__ __forceinline__ void MultiplyAtoms(FewRowsSums<kRowTiles>& sums, const uint8_t* stage) {
  JAX_EP_NO_UNROLL
  for (int atom = 0; atom < kAtomsOfStage; ++atom) {
    const uint8_t* codes = stage + atom * kFourBitAtomBytes;
    uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint8_t* row = stage + Plan::PieceAt(atom, tile);
      if constexpr (kCodes) {
        RowsOfCodes(*reinterpret_cast<const uint2*>(row), rows[tile]);
      } else {
        const uint4 words = *reinterpret_cast<const uint4*>(row);
        rows[tile][0] = words.x, rows[tile][1] = words.y;
        rows[tile][2] = words.z, rows[tile][3] = words.w;
      }
    }
    const uint4 scales = *reinterpret_cast<const uint4*>(codes + 2048 + Lane() / 4 * 16);
    const uint32_t scale_words[4] = {scales.x, scales.y, scales.z, scales.w};
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, scale_words[i / 4] >> i % 4 * 8 & 0xFF);
    // A branch: with choices in its place every code would be multiplied twice.
    if (__any_sync(kFullWarp, CodeFactor::NeedsTwo(largest))) {
      MultiplyAtom<true, kRowTiles>(sums, codes, rows, scale_words);
    } else {
      MultiplyAtom<false, kRowTiles>(sums, codes, rows, scale_words);
    }
  }
}

// The scales of this lane's columns of the sums, that is of rows, for 128 of K. Sums of codes are
// kept in units of the scale of the last 128, which costs a product for every 128 and no registers.
template <int kRowTiles>
struct RowScales {
  float scale[kRowTiles][2];

  __device__ void Load(const FourBitStep& step, const FewRowsTile& tile, int32_t block) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int32_t row = 8 * i + 2 * (Lane() % 4) + j;
        // Others have no results.
        const int64_t at = tile.row + Min(row, tile.rows - 1);
        scale[i][j] = step.left_scales[at * (step.left_columns / 128) + block];
      }
    }
  }
};

template <int kRowTiles>
__device__ __forceinline__ void ScaleSums(FewRowsSums<kRowTiles>& sums,
                                          const float (&factors)[kRowTiles][2]) {
#pragma unroll
  for (auto& column_tile : sums) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        column_tile[tile][i] = Multiply(column_tile[tile][i], factors[tile][i % 2]);
      }
    }
  }
}

template <typename Plan, int kRowTiles, bool kCodes>
__device__ __forceinline__ void MultiplyFewRows(FewRowsSums<kRowTiles>& sums,
                                                const FourBitStep& step, const FewRowsTile& tile,
                                                FewRowsStages<Plan, kCodes>& stages) {
  using Stages = FewRowsStages<Plan, kCodes>;
#pragma unroll
  for (auto& column_tile : sums) {
#pragma unroll
    for (auto& of_rows : column_tile) {
#pragma unroll
      for (float& sum : of_rows) sum = 0.0f;
    }
  }
  const int32_t parts = static_cast<int32_t>(step.left_columns / kStageSteps);
  RowScales<kRowTiles> scales{}, next{};
  if (kCodes && Stages::First() < parts) {
    scales.Load(step, tile, Stages::First() / kStagesOfUnit);
    next = scales;
  }
  JAX_EP_NO_UNROLL
  for (int32_t part = Stages::First(); part < parts; part = Stages::After(part)) {
    const uint8_t* stage = stages.Await();
    if (kCodes && part % kStagesOfUnit == 0) {
      // Where the scale is the same, as at first, the factor is 1.
      float factors[kRowTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          factors[i][j] = Divide(scales.scale[i][j], next.scale[i][j]);
        }
      }
      ScaleSums<kRowTiles>(sums, factors);
      scales = next;
      const int32_t after = part + kFourBitWarps * kStagesOfUnit;
      if (after < parts) next.Load(step, tile, after / kStagesOfUnit);
    }
    MultiplyAtoms<Plan, kRowTiles, kCodes>(sums, stage);
    stages.Release();
  }
  if constexpr (kCodes) ScaleSums<kRowTiles>(sums, scales.scale);
}

// ---- Sums of all warps --------------------------------------------------------------------------

// Half of the columns: those of column tiles 4 * half and on.
template <typename Plan, int kRowTiles>
class SumsOfWarps {
 public:
  __device__ explicit SumsOfWarps(float* slots) : slots_(slots) {}

  // Called by the whole block; afterwards Get is the sum. Another call must follow a barrier.
  __device__ void Add(FewRowsSums<kRowTiles>& sums, int half) {
    const int warp = Warp(), slot = warp % Plan::kSlots;
    if (warp >= static_cast<int>(Plan::kSlots)) Put(sums, half, slot, false);
    __syncthreads();
    if (warp < static_cast<int>(Plan::kSlots)) Put(sums, half, slot, true);
    __syncthreads();
  }
  __device__ float Get(int row, int column) const {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t slot = 0; slot < Plan::kSlots; ++slot) sum = Add(sum, *At(slot, row, column));
    return sum;
  }

 private:
  __device__ static float Add(float a, float b) { return jax_ep::Add(a, b); }
  __device__ float* At(uint32_t slot, int row, int column) const {
    return slots_ + (slot * Plan::kRows + row) * Plan::kSumStride + column;
  }

  __device__ void Put(FewRowsSums<kRowTiles>& sums, int half, int slot, bool add) {
#pragma unroll
    for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
      if (column_tile / (kColumnTiles / 2) != half) continue;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = column_tile % (kColumnTiles / 2) * 16 + Lane() / 4 + i / 2 * 8;
          float* at = At(slot, 8 * tile + Lane() % 4 * 2 + i % 2, column);
          *at = add ? Add(*at, sums[column_tile][tile][i]) : sums[column_tile][tile][i];
        }
      }
    }
  }

  float* slots_;
};

// ---- The kernel ---------------------------------------------------------------------------------

// Two neighbouring results.
__device__ __forceinline__ void StoreTwo(const FourBitStep& step, int64_t row, int64_t column,
                                         float low, float high) {
  const int64_t at = row * step.columns + column;
  if (step.out_element == ElementType::kFloat32) {
    *reinterpret_cast<uint2*>(static_cast<float*>(step.out) + at) =
        make_uint2(FloatBits(low), FloatBits(high));
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(step.out) + at) =
        RoundTwo<BFloat16>(low, high);
  }
}

template <int kRowTiles, bool kCodes, bool kGateUp>
__global__ void __launch_bounds__(kFourBitThreads, 1)
    FourBitKernel(const __grid_constant__ FourBitStep step) {
  using Plan = FourBitPlan<kRowTiles, kCodes>;
  constexpr int kSides = kGateUp ? 2 : 1;
  constexpr int kHalf = Plan::kSumColumns, kPairs = kHalf / 2;
  // Pairs of columns of half a tile per thread.
  constexpr int kOwn = Plan::kRows * kPairs / kFourBitThreads;
  static_assert(kOwn * kFourBitThreads == Plan::kRows * kPairs);
  const int32_t column_tiles = static_cast<int32_t>(step.columns * kSides / kFourBitColumns);
  uint8_t* memory = SharedBytes();
  FewRowsStages<Plan, kCodes> stages(step, memory, column_tiles);
  SumsOfWarps<Plan, kRowTiles> all(reinterpret_cast<float*>(
      memory + kFourBitWarps * Plan::kStages * (Plan::kStageBytes + sizeof(uint64_t))));
  FewRowsWalk walk(step, Plan::kRows, column_tiles);
  JAX_EP_NO_UNROLL
  for (FewRowsTile tile = walk.Next(); tile.group >= 0; tile = walk.Next()) {
    FewRowsSums<kRowTiles> sums;
    MultiplyFewRows<Plan, kRowTiles, kCodes>(sums, step, tile, stages);
    float gates[kOwn][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      all.Add(sums, half);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int at = i * kFourBitThreads + static_cast<int>(threadIdx.x);
        const int row = at / kPairs, column = at % kPairs * 2;
        const float low = all.Get(row, column), high = all.Get(row, column + 1);
        const int64_t first = static_cast<int64_t>(tile.column_tile) * (kFourBitColumns / kSides);
        if constexpr (!kGateUp) {
          if (row < tile.rows) {
            StoreTwo(step, tile.row + row, first + half * kHalf + column, low, high);
          }
        } else if (half == 0) {
          gates[i][0] = low, gates[i][1] = high;
        } else if (row < tile.rows) {
          float h[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float gate = gates[i][j];
            const float silu = Divide(gate, Add(1.0f, expf(-gate)));
            h[j] = Multiply(silu, j == 0 ? low : high);
          }
          StoreTwo(step, tile.row + row, first + column, h[0], h[1]);
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace jax_ep::cuda
