// Matmuls of many rows by matrices in "mxfp4" on Hopper. Columns of the matrix are the first
// operand of wgmma and come from registers, where math warps have decoded them, while the products
// before run. Rows come from shared memory. A block works on two tiles of columns, one per math
// warpgroup, and up to 128 rows of a group, along all of K. Warp 0 fills the stages, and warp 1
// finds what sums must be multiplied by where rows have scales.
#pragma once

#include <cstdint>

#include "cuda/matmul/few_rows.cuh"
#include "cuda/matmul/mxfp4.cuh"

namespace jax_ep::cuda {

inline constexpr int kManyThreads = 384;
inline constexpr int32_t kManyBlockM = 128;
inline constexpr int32_t kManyBlockK = 64;
// Rows of tiles that share their rows and weights in L2.
inline constexpr int32_t kManyBand = 8;
inline constexpr int kManyAtoms = kManyBlockK / kMxfp4AtomK;  // per stage
inline constexpr uint32_t kManyStages = 7;
inline constexpr uint32_t kManyRowsBytes = kManyBlockM * kLineBytes;
inline constexpr uint32_t kManyTileBytes = kManyAtoms * kMxfp4AtomBytes;  // of a tile of columns
inline constexpr uint32_t kManyFactorsAt = kManyRowsBytes + 2 * kManyTileBytes;
inline constexpr uint32_t kManyStageBytes = kManyFactorsAt + kManyBlockM * sizeof(float);
static_assert(kManyBlockK * 2 == kLineBytes && kManyStageBytes % kAtomBytes == 0);
inline constexpr uint32_t kManyDrainsBytes = kMathWarps * kDrains * kDrainBytes;
static_assert(kDrains * kDrainBytes >= kManyBlockM * kMxfp4Run * 2);

struct ManyShared {
  uint64_t full[kManyStages];    // end when rows, weights and factors are there
  uint64_t empty[kManyStages];   // end when all math warps have read the stage
  Mxfp4Tile tiles[kManyStages];  // the tile that the stage belongs to
};
// The stages come first, since they are aligned to atoms.
inline constexpr uint32_t kManyBytes =
    kManyStages * kManyStageBytes + kManyDrainsBytes + static_cast<uint32_t>(sizeof(ManyShared));

struct ManyMemory {
  uint8_t* stages;
  uint8_t* drains;
  ManyShared& shared;

  __device__ explicit ManyMemory(uint8_t* memory)
      : stages(memory),
        drains(memory + kManyStages * kManyStageBytes),
        shared(*reinterpret_cast<ManyShared*>(drains + kManyDrainsBytes)) {}

  __device__ uint8_t* stage(uint32_t slot) const { return stages + slot * kManyStageBytes; }
  __device__ float* factors(uint32_t slot) const {
    return reinterpret_cast<float*>(stage(slot) + kManyFactorsAt);
  }
};

__device__ __forceinline__ int32_t ManyBlocks(const Mxfp4Step& step) {
  return static_cast<int32_t>(Mxfp4Atoms(step.k)) / kManyAtoms;
}

using ManyCursor = RingCursor<kManyStages>;

// ---- Loading ------------------------------------------------------------------------------------

// Called by a warp. `n_tile` of these tiles counts pairs of tiles of columns.
__device__ __forceinline__ void LoadMany(const CUtensorMap* rows, const Mxfp4Step& step,
                                         int32_t n_tiles, const ManyMemory& memory) {
  const int32_t k_blocks = ManyBlocks(step);
  const int64_t matrix_bytes = Mxfp4Atoms(step.k) * kMxfp4AtomBytes;
  Mxfp4Scheduler scheduler(step, kManyBlockM, kManyBand, (n_tiles + 1) / 2);
  ManyCursor at;
  for (bool more = true; more;) {
    const Mxfp4Tile tile = scheduler.Next();
    more = tile.group >= 0;
    const int64_t first = int64_t{max(tile.group, 0)} * n_tiles + tile.n_tile * 2;
    const uint8_t* weights = step.b + first * matrix_bytes;
    const bool both = tile.n_tile * 2 + 1 < n_tiles;
    const uint32_t bytes = kManyRowsBytes + (both ? 2 : 1) * kManyTileBytes;
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < (more ? k_blocks : 1); ++k_block, ++at.passed) {
      uint64_t* full = &memory.shared.full[at.slot()];
      AwaitStage(&memory.shared.empty[at.slot()], at.parity() ^ 1);
      __syncwarp();
      if (IsElected()) {
        memory.shared.tiles[at.slot()] = tile;
        // Release of the tile; pairs with the math warps' wait.
        MbarrierExpect(full, more ? bytes : 0);
        if (more) {
          uint8_t* stage = memory.stage(at.slot());
          TensorLoad(SharedAddress(stage), rows, {{k_block * kManyBlockK, 0, tile.row, 0}},
                     SharedAddress(full));
          BulkLoad(stage + kManyRowsBytes, weights, kManyTileBytes, full);
          if (both) {
            BulkLoad(stage + kManyRowsBytes + kManyTileBytes, weights + matrix_bytes,
                     kManyTileBytes, full);
          }
        }
      }
      __syncwarp();
      weights += kManyTileBytes;
    }
  }
}

// Sums are kept in units of the scale of the last 128 of K. Finds what they must be multiplied by
// before each, and for the last stage the scale itself. Called by a warp.
__device__ __forceinline__ void LoadManyFactors(const Mxfp4Step& step, int32_t n_tiles,
                                                const ManyMemory& memory) {
  constexpr int kPerLane = kManyBlockM / kWarpSize;
  const int32_t k_blocks = ManyBlocks(step);
  const int64_t stride = step.k / kMxfp4Align;
  Mxfp4Scheduler scheduler(step, kManyBlockM, kManyBand, (n_tiles + 1) / 2);
  ManyCursor at;
  for (bool more = true; more;) {
    const Mxfp4Tile tile = scheduler.Next();
    more = tile.group >= 0;
    const float* from[kPerLane];
    float before[kPerLane], next[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      // Rows past the last one have no results.
      const int32_t row = Min(static_cast<int32_t>(Lane()) + i * kWarpSize, tile.rows - 1);
      from[i] = step.a_scales + (tile.row + max(row, 0)) * stride;
      next[i] = more ? *from[i] : 1.0f;
      before[i] = next[i];
    }
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < (more ? k_blocks : 1); ++k_block, ++at.passed) {
      AwaitStage(&memory.shared.empty[at.slot()], at.parity() ^ 1);
      float* to = memory.factors(at.slot()) + Lane();
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (k_block % 2 == 0) {
          // 1 where the scale stays the same, as it does in the first block of K.
          to[i * kWarpSize] = Divide(before[i], next[i]);
          before[i] = next[i];
          if (k_block + 2 < k_blocks) next[i] = from[i][k_block / 2 + 1];
        } else if (k_block + 1 == k_blocks) {
          to[i * kWarpSize] = before[i];
        }
      }
      __syncwarp();
      // Release; pairs with the math warps' wait.
      if (Lane() == 0) MbarrierArrive(&memory.shared.full[at.slot()]);
    }
  }
}

// ---- Multiplying --------------------------------------------------------------------------------

// A lane's sums of its warp's two tiles of 16 columns. Elements are those of WgmmaFewRows.
using ManySums = float[kColumnTiles][kManyBlockM / 2];
// An atom of a warp's columns, decoded: for both tiles and both halves of K.
using ManyColumns = uint32_t[kColumnTiles][2][4];

__device__ __forceinline__ void DecodeMany(ManyColumns& to, const uint8_t* atom) {
  const uint32_t warp = Warp() % 4;
  const uint4 four = *reinterpret_cast<const uint4*>(atom + 512 * warp + 16 * Lane());
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
  const uint32_t scales =
      *reinterpret_cast<const uint32_t*>(atom + 2048 + Lane() / 4 * 16 + warp * 4);
  // A branch, because with choices in its place every code would be multiplied twice.
  if (__any_sync(kFullWarp, CodeFactor::MayNeedTwo(scales))) {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) DecodeTile<true>(to[tile], words, scales, tile);
  } else {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      DecodeTile<false>(to[tile], words, scales, tile);
    }
  }
}

// With kHalf only the first half of the rows and sums take part.
template <bool kHalf>
__device__ __forceinline__ void MultiplyMany(ManySums& sums, const ManyColumns& columns,
                                             uint32_t rows) {
  constexpr int kRows = kHalf ? kManyBlockM / 2 : kManyBlockM;
  WgmmaFence();
#pragma unroll
  for (uint32_t k16 = 0; k16 < 2; ++k16) {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      WgmmaOfRegisters<kRows>(reinterpret_cast<float (&)[kRows / 2]>(sums[tile]),
                              columns[tile][k16], OperandAt<false>(rows + k16 * 2), true);
    }
  }
  WgmmaCommit();
}

__device__ __forceinline__ void HoldMany(ManySums& sums) {
#pragma unroll
  for (auto& of_tile : sums) HoldSums(of_tile);
}

__device__ __forceinline__ void ScaleMany(ManySums& sums, const float* factors) {
#pragma unroll
  for (int c = 0; c < kManyBlockM / 8; ++c) {
    const float2 two = *reinterpret_cast<const float2*>(factors + 8 * c + 2 * (Lane() % 4));
#pragma unroll
    for (auto& of_tile : sums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        of_tile[4 * c + 2 * r] = Multiply(of_tile[4 * c + 2 * r], two.x);
        of_tile[4 * c + 2 * r + 1] = Multiply(of_tile[4 * c + 2 * r + 1], two.y);
      }
    }
  }
}

// Tells the warps that load that this one has read a stage.
__device__ __forceinline__ void ReleaseMany(const ManyMemory& memory, uint32_t slot) {
  __syncwarp();
  // Release; pairs with the loading warps' wait.
  if (IsElected()) MbarrierArrive(&memory.shared.empty[slot]);
}

template <bool kScaled, bool kHalf>
__device__ __forceinline__ void MultiplyManyTile(ManySums& sums, int32_t k_blocks,
                                                 uint32_t warpgroup, ManyCursor& at,
                                                 const ManyMemory& memory) {
  // Decoded while products of the other one run.
  ManyColumns columns[kManyAtoms];
  uint32_t before = 0;
  JAX_EP_NO_UNROLL
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block, ++at.passed) {
    const uint32_t slot = Uniform(at.slot());
    AwaitStage(&memory.shared.full[slot], at.parity());
    const uint8_t* stage = memory.stage(slot);
    const uint32_t rows = Uniform(OperandUnits(SharedAddress(stage)));
    const uint8_t* weights = stage + kManyRowsBytes + warpgroup * kManyTileBytes;
    if (kScaled && k_block % 2 == 0 && k_block > 0) {
      WgmmaWait<0>();
      HoldMany(sums);
      ScaleMany(sums, memory.factors(slot));
    }
#pragma unroll
    for (int atom = 0; atom < kManyAtoms; ++atom) {
      DecodeMany(columns[atom], weights + atom * kMxfp4AtomBytes);
      MultiplyMany<kHalf>(sums, columns[atom], rows + atom * 4);
      // The atom before has been multiplied, so that its registers can be written.
      WgmmaWait<1>();
      if (atom == 0 && k_block > 0) ReleaseMany(memory, before);
    }
    before = slot;
  }
  WgmmaWait<0>();
  HoldMany(sums);
  if constexpr (kScaled) ScaleMany(sums, memory.factors(before));
  ReleaseMany(memory, before);
}

// ---- Storing ------------------------------------------------------------------------------------

template <bool kGateUp>
__device__ __forceinline__ void StoreMany(ManySums& sums, const Mxfp4Step& step,
                                          const Mxfp4Tile& tile, int32_t n_tile,
                                          const FewRowsMemory& memory) {
  constexpr int32_t kSides = kGateUp ? 2 : 1;
  const int32_t columns = static_cast<int32_t>(step.n);
  FewRowsPlace place{tile.row, tile.rows, 0, tile.group};
  place.column = n_tile * static_cast<int32_t>(kMxfp4BlockN / kSides) +
                 static_cast<int32_t>(memory.warp % 4 * kMxfp4Run) * (kColumnTiles / kSides);
  const auto store = [&](float (&values)[kManyBlockM / 2]) {
    if (step.out_element == ElementType::kFloat32) {
      StoreColumns32<kManyBlockM>(values, place, static_cast<float*>(step.d), columns);
    } else {
      StoreColumns16<kManyBlockM>(ElementType::kBFloat16, values, place,
                                  static_cast<uint8_t*>(step.d), columns, memory);
    }
  };
  const auto add_bias = [&](float (&values)[kManyBlockM / 2], int32_t side) {
    if (step.bias == nullptr) return;
    const int64_t of_side = int64_t{tile.group} * kSides + side;
    AddBiasOfColumns<kManyBlockM>(values, place, step.bias + of_side * columns, columns);
  };
  if constexpr (kGateUp) {
    add_bias(sums[0], 0);
    add_bias(sums[1], 1);
    WithActivation(step, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kManyBlockM / 2; ++i) {
        const float of_gate = activation.OfGate(sums[0][i]);
        sums[0][i] = Multiply(of_gate, activation.OfUp(sums[1][i]));
      }
    });
    store(sums[0]);
  } else {
#pragma unroll
    for (auto& of_tile : sums) {
      add_bias(of_tile, 0);
      store(of_tile);
      place.column += static_cast<int32_t>(kMxfp4Run);
    }
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

template <bool kScaled, bool kGateUp>
__device__ __forceinline__ void MultiplyManyTiles(const Mxfp4Step& step, int32_t n_tiles,
                                                  uint32_t warpgroup, const ManyMemory& memory) {
  const FewRowsMemory few{memory.drains, nullptr, nullptr,
                          Uniform(threadIdx.x / kWarpSize) - kManyThreads / kWarpSize / 3, 0};
  const int32_t k_blocks = ManyBlocks(step);
  ManyCursor at;
  while (true) {
    AwaitStage(&memory.shared.full[at.slot()], at.parity());
    const Mxfp4Tile tile = memory.shared.tiles[at.slot()];
    if (tile.group < 0) break;
    const int32_t n_tile = tile.n_tile * 2 + static_cast<int32_t>(warpgroup);
    if (n_tile >= n_tiles) {
      JAX_EP_NO_UNROLL
      for (int32_t k_block = 0; k_block < k_blocks; ++k_block, ++at.passed) {
        AwaitStage(&memory.shared.full[at.slot()], at.parity());
        ReleaseMany(memory, at.slot());
      }
      continue;
    }
    // If the first products set them, in either of two loops, ptxas would wait after every one.
    ManySums sums = {};
    if (tile.rows <= kManyBlockM / 2) {
      MultiplyManyTile<kScaled, true>(sums, k_blocks, warpgroup, at, memory);
    } else {
      MultiplyManyTile<kScaled, false>(sums, k_blocks, warpgroup, at, memory);
    }
    StoreMany<kGateUp>(sums, step, tile, n_tile, few);
  }
}

template <bool kScaled, bool kGateUp>
__global__ void __launch_bounds__(kManyThreads, 1)
    Mxfp4ManyKernel(const __grid_constant__ CUtensorMap rows,
                    const __grid_constant__ Mxfp4Step step) {
  const ManyMemory memory(SharedAtoms());
  const int32_t n_tiles = static_cast<int32_t>(step.n_tiles());
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&rows);
    for (uint32_t stage = 0; stage < kManyStages; ++stage) {
      MbarrierInit(&memory.shared.full[stage], kScaled ? 2 : 1);
      MbarrierInit(&memory.shared.empty[stage], kMathWarps);
    }
    FenceMbarrierInit();
    FenceProxyAsyncShared();
  }
  __syncthreads();
  const uint32_t warpgroup = Uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup == 0) {
    ShrinkRegisters<kLoadRegisters>();
    const uint32_t warp = threadIdx.x / kWarpSize;
    if (warp == 0) LoadMany(&rows, step, n_tiles, memory);
    if (kScaled && warp == 1) LoadManyFactors(step, n_tiles, memory);
  } else {
    GrowRegisters<kMathRegisters>();
    MultiplyManyTiles<kScaled, kGateUp>(step, n_tiles, warpgroup - 1, memory);
  }
}

}  // namespace jax_ep::cuda
