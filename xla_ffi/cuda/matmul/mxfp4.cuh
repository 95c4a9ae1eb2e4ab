// Each block works on tiles of 128 columns and up to 32 rows of a group, along all of K. A load
// warp fills stages in shared memory with weights and rows. Four math warps multiply 32 columns
// each; columns of the matrix are the rows of WarpMultiply's `a`. Several blocks share a
// multiprocessor, because the instructions that decode wait for each other.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/activations.cuh"
#include "cuda/matmul/group_pieces.cuh"
#include "cuda/matmul/hopper.cuh"
#include "cuda/matmul/mxfp4.h"
#include "cuda/matmul/scheduler.cuh"
#include "cuda/matmul/warp_products.cuh"

namespace jax_ep::cuda {

inline constexpr int kMxfp4MathWarps = 4;
inline constexpr int kMxfp4MathThreads = kMxfp4MathWarps * kWarpSize;
inline constexpr int kMxfp4Threads = kMxfp4MathThreads + kWarpSize;
inline constexpr int kMxfp4RowTiles = 4;  // of 8 rows
inline constexpr int kMxfp4BlockM = 8 * kMxfp4RowTiles;
// All rows of a group that has few, so that weights come from L2 after the first tile.
inline constexpr int32_t kMxfp4Band = 1 << 10;
inline constexpr int kAtomsOfStage = 4;
inline constexpr int kMxfp4BlockK = kAtomsOfStage * kMxfp4AtomK;
static_assert(kMxfp4BlockK == kMxfp4Align && kMxfp4BlockK == 128);  // as row scales are
inline constexpr int kColumnTiles = 2;                              // per warp, of kMxfp4Run
inline constexpr uint32_t kWeightBytes = kAtomsOfStage * kMxfp4AtomBytes;

// Some rows of a group, and some columns of its matrix.
struct Mxfp4Tile {
  int32_t group;  // negative: no more tiles
  int32_t row;
  int32_t rows;
  int32_t n_tile;
};

// Shared memory. kScaled: whether rows have scales.
template <bool kScaled>
struct Mxfp4Layout {
  // Per multiprocessor. Scales of rows take more registers.
  static constexpr int kBlocks = kScaled ? 3 : 4;
  static constexpr uint32_t kStages = 3;
  static constexpr uint32_t kRowBytes = kMxfp4BlockK * 2;
  // Of a row in an atom. Pieces are ordered by atom, tile, piece of the row, and row.
  static constexpr uint32_t kPieceBytes = 16;
  static constexpr uint32_t kStageBytes =
      kWeightBytes + kAtomsOfStage * kMxfp4RowTiles * kWarpSize * kPieceBytes;
  static constexpr uint32_t kBytes =
      kStages * (kStageBytes + 2 * sizeof(uint64_t) + sizeof(Mxfp4Tile));
  static_assert(kBlocks * (kBytes + 1024) <= 228 * 1024);

  // Returns where a piece of a row of a tile is in a stage.
  __device__ static uint32_t PieceAt(int atom, int tile, int piece, int row) {
    return kWeightBytes +
           ((atom * kMxfp4RowTiles + tile) * kWarpSize + piece * 8 + row) * kPieceBytes;
  }
};

template <bool kScaled>
struct Mxfp4Memory {
  using Layout = Mxfp4Layout<kScaled>;

  uint8_t* stages;
  uint64_t* full;    // per stage: ends when weights and rows are there
  uint64_t* empty;   // per stage: ends when all math warps have read it
  Mxfp4Tile* tiles;  // per stage: the tile that it belongs to

  __device__ explicit Mxfp4Memory(uint8_t* memory)
      : stages(memory),
        full(reinterpret_cast<uint64_t*>(memory + Layout::kStages * Layout::kStageBytes)),
        empty(full + Layout::kStages),
        tiles(reinterpret_cast<Mxfp4Tile*>(empty + Layout::kStages)) {}
};

// Waits for the end of a phase, which depends only on this block's own copies and warps.
__device__ __forceinline__ void AwaitStage(uint64_t* barrier, uint32_t parity) {
  while (!MbarrierTryWait(barrier, parity)) {
  }
}

// With scales K consists of whole blocks.
template <bool kScaled>
__device__ __forceinline__ int32_t Mxfp4Blocks(const Mxfp4Step& step) {
  const int64_t more = kScaled ? 0 : kMxfp4BlockK - 1;
  return static_cast<int32_t>((step.k + more) / kMxfp4BlockK);
}

// Finds this block's tiles, one after the other. Called by a whole warp.
class Mxfp4Scheduler {
 public:
  // A group's tiles are taken in bands of so many rows of tiles, column by column.
  __device__ Mxfp4Scheduler(const Mxfp4Step& step, int32_t block_m, int32_t band, int32_t n_tiles)
      : pieces_(step), block_m_(block_m), band_(band), n_tiles_(n_tiles), next_(blockIdx.x) {
    Load();
  }

  __device__ Mxfp4Tile Next() {
    while (next_ >= pieces_.end()) {
      if (!pieces_.Advance()) return {-1, 0, 0, 0};
      Load();
    }
    const GroupPiece tile = pieces_.Find(next_);
    const int32_t first = tile.index / (band_ * n_tiles_) * band_;  // row of tiles of the band
    const int32_t within = tile.index - first * n_tiles_;
    const int32_t width = Min(band_, RowTiles(tile.size) - first);
    const int32_t row = (first + within % width) * block_m_;
    next_ += gridDim.x;
    return {tile.group, tile.start + row, Min(tile.size - row, block_m_), within / width};
  }

 private:
  __device__ int32_t RowTiles(int32_t rows) const { return (rows + block_m_ - 1) / block_m_; }

  __device__ void Load() {
    pieces_.Load([&](int32_t, int32_t size) { return RowTiles(size) * n_tiles_; });
  }

  GroupPieces<Mxfp4Step> pieces_;
  const int32_t block_m_;
  const int32_t band_;
  const int32_t n_tiles_;
  uint32_t next_;
};

// ---- Numbers ------------------------------------------------------------------------------------

// Turns scale bytes into factors for codes from TwoOfCodes, which are 2^-126 times their values.
struct CodeFactor {
  uint32_t first;   // two bfloat16
  uint32_t second;  // 1 if `first` suffices

  // Powers too large for one bfloat16, and NaN, take two factors.
  __device__ static bool NeedsTwo(uint32_t scale) { return scale > 128; }
  // Whether any of the four scales may need two factors.
  __device__ static bool MayNeedTwo(uint32_t scales) { return (scales & 0x80808080u) != 0; }

  // Returns the only factors of scales `i` and `i + 1` of four. None of them may need two.
  __device__ static uint32_t OnlyOf(uint32_t scales, int i) {
    constexpr uint32_t kExponent = 0x80, kBoth = 0x00010001;
    const uint32_t two = __byte_perm(scales, 0, 0x4040 | (i + 1) << 8 | i);
    return two * kExponent + 126 * kExponent * kBoth;
  }

  __device__ explicit CodeFactor(uint32_t scale) {
    constexpr uint32_t kOne = 0x3F80, kMost = 0x7E80 /* 2^126 */, kNan = 0x7FC0;
    const bool two = NeedsTwo(scale);
    const uint32_t one = two ? kMost : (scale + 126) << 7;
    const uint32_t other = !two ? kOne : scale == 255 ? kNan : scale << 7;
    first = one << 16 | one;
    second = other << 16 | other;
  }
};

// Returns pair kPair of a word's codes (protocol/matmul_steps.h) as two bfloat16 that are 2^-126
// times their values. A code's exponent becomes the lowest bits of the exponent, and its mantissa
// the highest bit of the mantissa. This is right for denormals, too.
template <int kPair>
__device__ __forceinline__ uint32_t TwoOfCodes(uint32_t word) {
  constexpr uint32_t kSigns = 0x80008000, kRest = 0x01C001C0;
  if constexpr (kPair == 0) return word & (kSigns | kRest);
  if constexpr (kPair == 1) return word << 3 & (kSigns | kRest);
  if constexpr (kPair == 2) return word << 6 & (kSigns | kRest);
  // The bits of the last pair are apart. The product holds them three times, rotated by 8, 13 and
  // 18 bits, and no two copies meet. Each bit is taken from the copy in which it has come to its
  // place.
  const uint64_t copies = uint64_t{word & 0x6C006C00} * (1 << 8 | 1 << 13 | 1 << 18);
  return (static_cast<uint32_t>(copies) | static_cast<uint32_t>(copies >> 32)) & (kSigns | kRest);
}

// ---- Loading ------------------------------------------------------------------------------------

// Called by a warp. After the last tile comes a stage that says that there are no more.
template <bool kScaled>
__device__ __forceinline__ void LoadMxfp4(const Mxfp4Step& step, int32_t n_tiles,
                                          const Mxfp4Memory<kScaled>& memory) {
  using Layout = Mxfp4Layout<kScaled>;
  const int32_t k_blocks = Mxfp4Blocks<kScaled>(step);
  const int64_t row_bytes = step.k * 2;
  Mxfp4Scheduler scheduler(step, kMxfp4BlockM, kMxfp4Band, n_tiles);
  RingCursor<Layout::kStages> at;
  for (bool more = true; more;) {
    const Mxfp4Tile tile = scheduler.Next();
    more = tile.group >= 0;
    const int64_t matrix = static_cast<int64_t>(max(tile.group, 0)) * n_tiles + tile.n_tile;
    const uint8_t* weights = step.b + matrix * Mxfp4Atoms(step.k) * kMxfp4AtomBytes;
    const uint8_t* rows = static_cast<const uint8_t*>(step.a) +
                          (tile.row + Lane() / 4) * row_bytes + Lane() % 4 * Layout::kPieceBytes;
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < (more ? k_blocks : 1); ++k_block, ++at.passed) {
      AwaitStage(&memory.empty[at.slot()], at.parity() ^ 1);
      __syncwarp();
      uint8_t* stage = memory.stages + at.slot() * Layout::kStageBytes;
      if (IsElected()) {
        memory.tiles[at.slot()] = tile;
        // Release of the tile; pairs with the math warps' wait.
        MbarrierExpect(&memory.full[at.slot()], more ? kWeightBytes : 0);
        if (more) BulkLoad(stage, weights, kWeightBytes, &memory.full[at.slot()]);
      }
      // No bulk copies here: rows would take many short ones.
#pragma unroll
      for (int row_tile = 0; row_tile < kMxfp4RowTiles; ++row_tile) {
        if (8 * row_tile + Lane() / 4 >= tile.rows) break;
#pragma unroll
        for (int atom = 0; atom < kAtomsOfStage; ++atom) {
          uint8_t* to = stage + Layout::PieceAt(atom, row_tile, Lane() % 4, Lane() / 4);
          const uint8_t* from =
              rows + 8 * row_tile * row_bytes + atom * (Layout::kRowBytes / kAtomsOfStage);
          if constexpr (kScaled) {
            AsyncCopy<Layout::kPieceBytes>(to, from);
          } else {
            // What lies past K belongs to other rows.
            AsyncCopyOrZero(to, from, k_block * kMxfp4BlockK + atom * kMxfp4AtomK < step.k);
          }
        }
      }
      AsyncArrive(&memory.full[at.slot()]);
      weights += kWeightBytes;
      rows += Layout::kRowBytes;
    }
  }
}

// ---- Multiplying --------------------------------------------------------------------------------

template <int kRowTiles>
using Mxfp4Sums = float[kColumnTiles][kRowTiles][4];

// Decodes an atom of one of a warp's tiles of 16 columns, as WarpMultiply and WgmmaOfRegisters take
// it, for both halves of K. kTwo: whether its scales may need two factors.
template <bool kTwo>
__device__ __forceinline__ void DecodeTile(uint32_t (&to)[2][4], const uint32_t (&words)[4],
                                           uint32_t scales, int column_tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int which = 2 * column_tile + half;
    const uint32_t word = words[which];
    const uint32_t codes_of[4] = {TwoOfCodes<0>(word), TwoOfCodes<1>(word), TwoOfCodes<2>(word),
                                  TwoOfCodes<3>(word)};
    if constexpr (kTwo) {
      const CodeFactor factor(scales >> which * 8 & 0xFF);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i / 2][i % 2 * 2 + half] =
            MultiplyTwo(MultiplyTwo(codes_of[i], factor.first), factor.second);
      }
    } else {
      const uint32_t factors = CodeFactor::OnlyOf(scales, 2 * column_tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i / 2][i % 2 * 2 + half] = half == 0 ? MultiplyTwoBy<0>(codes_of[i], factors)
                                                : MultiplyTwoBy<1>(codes_of[i], factors);
      }
    }
  }
}

// Multiplies one atom with rows that are loaded.
template <bool kTwo, int kRowTiles>
__device__ __forceinline__ void MultiplyAtom(Mxfp4Sums<kRowTiles>& sums, const uint32_t (&words)[4],
                                             const uint32_t (&rows)[kRowTiles][4],
                                             uint32_t scales) {
#pragma unroll
  for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
    uint32_t a[2][4];
    DecodeTile<kTwo>(a, words, scales, column_tile);
#pragma unroll
    for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint32_t b[2] = {rows[tile][2 * k16], rows[tile][2 * k16 + 1]};
        WarpMultiply(sums[column_tile][tile], a[k16], b);
      }
    }
  }
}

template <bool kTwo, int kRowTiles, bool kScaled>
__device__ __forceinline__ void MultiplyAtoms(Mxfp4Sums<kRowTiles>& sums, const uint8_t* stage,
                                              const uint32_t (&scales)[kAtomsOfStage]) {
  using Layout = Mxfp4Layout<kScaled>;
#pragma unroll
  for (int atom = 0; atom < kAtomsOfStage; ++atom) {
    const uint4 four = *reinterpret_cast<const uint4*>(stage + atom * kMxfp4AtomBytes +
                                                       512 * Warp() + 16 * Lane());
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
    uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      LoadMatrices(rows[tile], stage + Layout::PieceAt(atom, tile, Lane() / 8, Lane() % 8));
    }
    MultiplyAtom<kTwo, kRowTiles>(sums, words, rows, scales[atom]);
  }
}

template <int kRowTiles, bool kScaled>
__device__ __forceinline__ void MultiplyStage(Mxfp4Sums<kRowTiles>& sums, const uint8_t* stage) {
  uint32_t scales[kAtomsOfStage], any = 0;
#pragma unroll
  for (int atom = 0; atom < kAtomsOfStage; ++atom) {
    scales[atom] = *reinterpret_cast<const uint32_t*>(stage + atom * kMxfp4AtomBytes + 2048 +
                                                      Lane() / 4 * 16 + Warp() * 4);
    any |= scales[atom];
  }
  // A branch, because with choices in its place every code would be multiplied twice.
  if (__any_sync(kFullWarp, CodeFactor::MayNeedTwo(any))) {
    MultiplyAtoms<true, kRowTiles, kScaled>(sums, stage, scales);
  } else {
    MultiplyAtoms<false, kRowTiles, kScaled>(sums, stage, scales);
  }
}

// The scales of the rows that are this lane's columns of the sums, for 128 of K. Sums are kept in
// units of the last 128's scale. This costs one more product per sum for every 128, but no
// registers.
template <int kRowTiles>
struct RowScales {
  float scale[kRowTiles][2];

  __device__ void Load(const Mxfp4Step& step, const Mxfp4Tile& tile, int32_t k_block) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int32_t row = 8 * i + 2 * (Lane() % 4) + j;
        // Rows past the last one have no results.
        const int64_t at = tile.row + Min(row, tile.rows - 1);
        scale[i][j] = step.a_scales[at * (step.k / 128) + k_block];
      }
    }
  }
};

template <int kRowTiles>
__device__ __forceinline__ void ScaleSums(Mxfp4Sums<kRowTiles>& sums,
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

template <int kRowTiles, bool kScaled>
__device__ __forceinline__ void MultiplyMxfp4Tile(Mxfp4Sums<kRowTiles>& sums, const Mxfp4Step& step,
                                                  const Mxfp4Tile& tile,
                                                  RingCursor<Mxfp4Layout<kScaled>::kStages>& at,
                                                  const Mxfp4Memory<kScaled>& memory) {
#pragma unroll
  for (auto& column_tile : sums) {
#pragma unroll
    for (auto& of_rows : column_tile) {
#pragma unroll
      for (float& sum : of_rows) sum = 0.0f;
    }
  }
  const int32_t k_blocks = Mxfp4Blocks<kScaled>(step);
  RowScales<kRowTiles> scales{}, next{};
  if constexpr (kScaled) {
    scales.Load(step, tile, 0);
    next = scales;
  }
  JAX_EP_NO_UNROLL
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block, ++at.passed) {
    if constexpr (kScaled) {
      // The factor is 1 where the scale stays the same, as it does in the first block of K.
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
      if (k_block + 1 < k_blocks) next.Load(step, tile, k_block + 1);
    }
    AwaitStage(&memory.full[at.slot()], at.parity());
    MultiplyStage<kRowTiles, kScaled>(
        sums, memory.stages + at.slot() * Mxfp4Layout<kScaled>::kStageBytes);
    __syncwarp();
    // Release; pairs with the load warp's wait.
    if (IsElected()) MbarrierArrive(&memory.empty[at.slot()]);
  }
  if constexpr (kScaled) ScaleSums<kRowTiles>(sums, scales.scale);
}

// ---- Storing ------------------------------------------------------------------------------------

// Stores two neighbouring results, if there are such columns. kWhole: they exist in any case.
template <bool kWhole>
__device__ __forceinline__ void StoreTwo(const Mxfp4Step& step, int64_t row, int64_t column,
                                         float low, float high) {
  if (!kWhole && column >= step.n) return;
  const int64_t at = row * step.n + column;
  if (step.out_element == ElementType::kFloat32) {
    *reinterpret_cast<uint2*>(static_cast<float*>(step.d) + at) =
        make_uint2(FloatBits(low), FloatBits(high));
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(step.d) + at) =
        RoundTwo<BFloat16>(low, high);
  }
}

// Stores one column tile of one row tile, from `column` on. A lane's sums are of one column; by an
// exchange with its neighbour it gets two columns of one row.
template <bool kWhole>
__device__ __forceinline__ void StoreSumsOf(const Mxfp4Step& step, const Mxfp4Tile& tile,
                                            int row_tile, int64_t column, const float (&sums)[4]) {
  const int odd = Lane() / 4 % 2;
  const int row = 8 * row_tile + Lane() % 4 * 2 + odd;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float even = sums[2 * half], next = sums[2 * half + 1];
    const float own = odd ? next : even;
    const float other = __shfl_xor_sync(kFullWarp, odd ? even : next, 4);
    if (row >= tile.rows) continue;
    StoreTwo<kWhole>(step, tile.row + row, column + half * 8 + Lane() / 4 - odd, odd ? other : own,
                     odd ? own : other);
  }
}

// Adds a group's bias of a side to the sums of a row tile, in 16 columns from `column` on.
template <bool kWhole>
__device__ __forceinline__ void AddBiasOf(const Mxfp4Step& step, int64_t side, int64_t column,
                                          float (&sums)[4]) {
  if (step.bias == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = column + half * 8 + Lane() / 4;
    const float own = kWhole || at < step.n ? step.bias[side * step.n + at] : 0.0f;
    sums[2 * half] = Add(sums[2 * half], own);
    sums[2 * half + 1] = Add(sums[2 * half + 1], own);
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

template <int kRowTiles, bool kScaled, bool kGateUp>
__device__ __forceinline__ void Mxfp4TileOf(const Mxfp4Step& step, const Mxfp4Tile& tile,
                                            RingCursor<Mxfp4Layout<kScaled>::kStages>& at,
                                            const Mxfp4Memory<kScaled>& memory) {
  Mxfp4Sums<kRowTiles> sums;
  MultiplyMxfp4Tile<kRowTiles, kScaled>(sums, step, tile, at, memory);
  if constexpr (kGateUp) {
    // The warp's first column tile is of gate, and the second of up.
    static_assert(kColumnTiles == 2);
    // Computed again where it is used, because registers are scarce.
    const auto column = [&] {
      return int64_t{tile.n_tile} * (kMxfp4BlockN / 2) + Warp() * kMxfp4Run;
    };
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      AddBiasOf<kScaled>(step, 2 * int64_t{tile.group}, column(), sums[0][row_tile]);
      AddBiasOf<kScaled>(step, 2 * int64_t{tile.group} + 1, column(), sums[1][row_tile]);
    }
    WithActivation(step, [&](auto activation) {
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& h = sums[0][row_tile][i];
          h = Multiply(activation.OfGate(h), activation.OfUp(sums[1][row_tile][i]));
        }
      }
    });
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      StoreSumsOf<kScaled>(step, tile, row_tile, column(), sums[0][row_tile]);
    }
  } else {
#pragma unroll
    for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
        const int64_t column = static_cast<int64_t>(tile.n_tile) * kMxfp4BlockN +
                               (Warp() * kColumnTiles + column_tile) * kMxfp4Run;
        AddBiasOf<kScaled>(step, tile.group, column, sums[column_tile][row_tile]);
        StoreSumsOf<kScaled>(step, tile, row_tile, column, sums[column_tile][row_tile]);
      }
    }
  }
}

template <bool kScaled, bool kGateUp>
__global__ void __launch_bounds__(kMxfp4Threads, Mxfp4Layout<kScaled>::kBlocks)
    Mxfp4Kernel(const __grid_constant__ Mxfp4Step step) {
  using Layout = Mxfp4Layout<kScaled>;
  const int32_t n_tiles = static_cast<int32_t>(step.n_tiles());
  const Mxfp4Memory<kScaled> memory(SharedBytes());
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < Layout::kStages; ++stage) {
      // One arrival for the bulk copy, and one for each lane's own copies.
      MbarrierInit(&memory.full[stage], 1 + kWarpSize);
      MbarrierInit(&memory.empty[stage], kMxfp4MathWarps);
    }
    FenceProxyAsyncShared();
  }
  __syncthreads();
  if (Warp() == kMxfp4MathWarps) {
    LoadMxfp4<kScaled>(step, n_tiles, memory);
    return;
  }
  RingCursor<Layout::kStages> at;
  while (true) {
    AwaitStage(&memory.full[at.slot()], at.parity());
    const Mxfp4Tile tile = memory.tiles[at.slot()];
    if (tile.group < 0) break;
    switch ((tile.rows + 7) / 8) {
      case 1:
        Mxfp4TileOf<1, kScaled, kGateUp>(step, tile, at, memory);
        break;
      case 2:
        Mxfp4TileOf<2, kScaled, kGateUp>(step, tile, at, memory);
        break;
      case 3:
        Mxfp4TileOf<3, kScaled, kGateUp>(step, tile, at, memory);
        break;
      default:
        Mxfp4TileOf<4, kScaled, kGateUp>(step, tile, at, memory);
    }
  }
}

}  // namespace jax_ep::cuda
