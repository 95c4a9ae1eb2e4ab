// The matmul kernel. A cluster of two blocks works on units (scheduler.cuh), each block on a tile
// of 128 x 256 of D. In a block, one warpgroup works for two others: load warp 0 copies A to stages
// in shared memory, load warp 3 copies B, load warp 2 copies the scales of fp8, and warp 1 is the
// tile scheduler. The two math warpgroups multiply 64 rows each and write D; for few rows they do
// what few_rows.cuh says.
//
// Each stage has two barriers. `full` ends when the stage's operands are there. `empty` ends when
// the math warps of both blocks have read the stage, because half of what a block loads goes to
// both. Each math warpgroup goes from tile to tile on its own, so that one multiplies while the
// other writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/few_rows.cuh"
#include "cuda/matmul/stages.cuh"

namespace jax_ep::cuda {

// ---- Loading ------------------------------------------------------------------------------------

// The addresses of a stage that is being filled.
struct StageAddresses {
  uint32_t operands;
  uint32_t full;
};

// Where a block of K begins.
struct KPlace {
  int32_t side;  // kDgrad: 1 in the matrices of up
  int32_t k;
};

template <typename Traits>
__device__ __forceinline__ KPlace FindK(int32_t k_block, int32_t side_blocks) {
  const bool is_up = Traits::kKind == MatmulKind::kDgrad && k_block >= side_blocks;
  return {is_up, (is_up ? k_block - side_blocks : k_block) * static_cast<int32_t>(Traits::kBlockK)};
}

// Loads a block of K of A. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void LoadA(const CUtensorMap* map, const Tile& tile, int32_t k_block,
                                      const KPlace& at, uint32_t rank,
                                      const StageAddresses& stage) {
  const auto load = [&](uint32_t box, bool multicast) {
    const int32_t row = tile.row + static_cast<int32_t>(box) * 64;
    BoxPlace place{{(Traits::kWgrad ? tile.first : 0) + at.k, at.side, row, 0}};
    if constexpr (Traits::kAMnMajor) place = {{row, 0, tile.first + at.k, 0}};
    const uint32_t to = stage.operands + box * kBoxBytes;
    multicast ? TensorLoadMulticast(to, map, place, stage.full)
              : TensorLoad(to, map, place, stage.full);
  };
  MbarrierExpectAt(stage.full, (tile.half() ? 1 : kABoxes) * kBoxBytes);
  if (tile.sharing == Sharing::kB) {
    load(0, false);
    load(1, false);
  } else if (!tile.half()) {
    load(rank, true);
  } else if (static_cast<uint32_t>(k_block) % 2 == rank) {
    // The blocks take turns to load the only box of a half.
    load(0, true);
  }
}

// Loads a block of K of B. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void LoadB(const MatmulMaps& maps, const Tile& tile, const KPlace& at,
                                      uint32_t rank, const StageAddresses& stage) {
  const auto load = [&](uint32_t box, bool multicast) {
    constexpr uint32_t kPerSide = Traits::kBBoxes / Traits::kSides;
    const int32_t side = static_cast<int32_t>(box / kPerSide);
    const int32_t column = tile.column + static_cast<int32_t>(box % kPerSide) * 64;
    const CUtensorMap* map = &maps.b;
    if (Traits::kHasUpMap && side + at.side > 0) map = &maps.b_up;
    const int32_t k = at.k, of_map = Traits::kHasUpMap ? 0 : side;
    BoxPlace place{{k, column, of_map, tile.group}};
    if constexpr (Traits::kBMnMajor) place = {{column, of_map, k, tile.group}};
    if constexpr (Traits::kWgrad) {
      place = {{tile.first + k, column, 0, 0}};
      if constexpr (Traits::kBMnMajor) place = {{column, 0, tile.first + k, 0}};
    }
    const uint32_t to = stage.operands + (kABoxes + box) * kBoxBytes;
    multicast ? TensorLoadMulticast(to, map, place, stage.full)
              : TensorLoad(to, map, place, stage.full);
  };
  MbarrierExpectAt(stage.full, Traits::kBBoxes * kBoxBytes);
  if (tile.sharing == Sharing::kB) {
#pragma unroll
    for (uint32_t box = 0; box < Traits::kBBoxes / 2; ++box) {
      load(rank * (Traits::kBBoxes / 2) + box, true);
    }
  } else {
#pragma unroll
    for (uint32_t box = 0; box < Traits::kBBoxes; ++box) load(box, false);
  }
}

// Called by one warp for A and by another for B. The previous kernel may write A; B is there before
// it begins (ApplyExperts).
template <typename Traits, bool kIsB>
__device__ __forceinline__ void LoadOperands(const MatmulMaps& maps, int32_t side_blocks,
                                             const MatmulMemory& memory) {
  MatmulShared& shared = memory.shared;
  TileReader tiles(shared.ring);
  const uint32_t rank = Uniform(ClusterRank());
  const uint32_t operands = Uniform(SharedAddress(memory.stages));
  const uint32_t full = Uniform(SharedAddress(shared.full));
  if constexpr (!kIsB) AwaitPreviousKernel();
  while (true) {
    const Tile tile = tiles.NextUniform();
    if (tile.k_blocks < 0) break;
    StageCursor at{tile.stage};
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < tile.k_blocks; ++k_block, ++at.passed) {
      const bool is_empty = Await(&shared.empty[at.slot()], at.parity() ^ 1, &shared.ring.given_up);
      // After a wait was given up, this block or the other one may still be reading the stage.
      // Nothing more is loaded, so that the other block gives up as well.
      if (!__all_sync(kFullWarp, is_empty)) break;
      if (IsElected()) {
        const StageAddresses stage{operands + at.slot() * kStageBytes,
                                   full + at.slot() * static_cast<uint32_t>(sizeof(uint64_t))};
        const KPlace k = FindK<Traits>(k_block, side_blocks);
        if constexpr (kIsB) {
          LoadB<Traits>(maps, tile, k, rank, stage);
        } else {
          LoadA<Traits>(&maps.a, tile, k_block, k, rank, stage);
        }
      }
      __syncwarp();
    }
  }
}

// Loads the scales of fp8, which it reads from memory two blocks of K ahead. Called by a warp.
template <typename Traits>
__device__ __forceinline__ void LoadScales(const ScaleArguments& scales, int32_t all_rows,
                                           int64_t columns, const MatmulMemory& memory) {
  constexpr bool sides = Traits::kGateUp;
  MatmulShared& shared = memory.shared;
  constexpr int kPerLane = kBlockM / kWarpSize;
  constexpr int kAhead = 2;
  TileReader tiles(shared.ring);
  const int32_t lane = static_cast<int32_t>(Lane());
  AwaitPreviousKernel();
  while (true) {
    const Tile tile = tiles.Next();
    if (tile.k_blocks < 0) break;
    StageCursor at{tile.stage};
    const int32_t first = Traits::kWgrad ? tile.first / kBlockM : 0;  // the first block of K
    const uint32_t a_step = Traits::kWgrad ? scales.a_stride : 1;     // between blocks of K
    uint32_t rows[kPerLane];                                          // in elements
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      // Rows past the last one have no results.
      const int32_t row = min(tile.row + lane + i * static_cast<int32_t>(kWarpSize), all_rows - 1);
      rows[i] = static_cast<uint32_t>(row) * scales.a_stride;
      if constexpr (Traits::kWgrad)
        rows[i] = static_cast<uint32_t>(first) * a_step + tile.row / kBlockM;
    }
    // Lanes 0 and 1 load the scales of gate and of up, or of 128 columns each.
    const int32_t column = tile.column + (sides ? 0 : lane * 128);
    const bool has_b = lane < 2 && column < columns;
    const float* b_scales =
        scales.b + (Traits::kWgrad ? first * scales.per_k : tile.group * scales.per_group) +
        (sides ? lane * scales.per_side : 0) + column / 128 * scales.per_n;
    const int32_t k_blocks = tile.k_blocks;
    float ahead[kAhead][kPerLane + 1];
    const auto load = [&](float (&to)[kPerLane + 1], int32_t k_block) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        to[i] = k_block < k_blocks ? scales.a[rows[i] + k_block * a_step] : 0.0f;
      to[kPerLane] = has_b && k_block < k_blocks ? b_scales[k_block * scales.per_k] : 0.0f;
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i], i);
    const auto store = [&](float (&from)[kPerLane + 1], int32_t k_block) {
      Await(&shared.empty[at.slot()], at.parity() ^ 1, &shared.ring.given_up);
      StageScales& to = memory.scales[at.slot()];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) to.a[lane + i * kWarpSize] = from[i];
      if (lane < 2) to.b[lane] = from[kPerLane];
      load(from, k_block + kAhead);
      __syncwarp();
      // Release; pairs with the math warps' wait.
      if (lane == 0) MbarrierArrive(&shared.full[at.slot()]);
      ++at.passed;
    };
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < k_blocks; k_block += kAhead) {
      store(ahead[0], k_block);
      if (k_block + 1 < k_blocks) store(ahead[1], k_block + 1);
    }
  }
}

// ---- Multiplying --------------------------------------------------------------------------------

template <typename Traits>
__device__ __forceinline__ void MultiplyStage(float (&sums)[128], const Stages& stages,
                                              uint32_t a_box, bool add) {
  // From one wgmma to the next: sixteen elements of a line, or sixteen lines.
  constexpr uint32_t kAStep = (Traits::kAMnMajor ? 16 * kLineBytes : 32) >> 4;
  constexpr uint32_t kBStep = (Traits::kBMnMajor ? 16 * kLineBytes : 32) >> 4;
  const uint32_t at = stages.units();
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wgmma<typename Traits::Element, Traits::kAMnMajor, Traits::kBMnMajor>(
        sums, stages.Operand<Traits::kAMnMajor>(a_box, at + i * kAStep),
        stages.Operand<Traits::kBMnMajor>(kABoxes, at + i * kBStep), add || i > 0);
  }
  WgmmaCommit();
}

// Zeros lines [first, end) of the warpgroup's box of A and of all boxes of B: the last rows of a
// group are followed by other groups' rows, which may hold NaN. Both warpgroups write the same
// zeros to the boxes of B.
__device__ __forceinline__ void ZeroLines(uint8_t* operands, uint32_t a_box, uint32_t first,
                                          uint32_t end, uint32_t warpgroup) {
  constexpr uint32_t kUnits = kLineBytes / 16;
  const uint32_t count = (end - first) * kUnits;
  const uint32_t thread = threadIdx.x % kWarpgroupThreads;
  JAX_EP_NO_UNROLL
  for (uint32_t box = 0; box <= kMostBBoxes; ++box) {
    uint8_t* at = operands + (box == 0 ? a_box : kABoxes + box - 1) * kBoxBytes;
    for (uint32_t unit = thread; unit < count; unit += kWarpgroupThreads) {
      StoreZeros(at + first * kLineBytes + unit * 16);
    }
  }
  FenceProxyAsyncShared();
  NamedBarrier(1 + warpgroup, kWarpgroupThreads);
}

// Sums over whole blocks of K. Returns the last stage, which a wgmma may still be reading.
template <typename Traits>
__device__ __forceinline__ uint32_t MultiplyBlocks(float (&sums)[128], int32_t k_blocks,
                                                   Stages& stages, uint32_t a_box) {
  uint32_t before = 0;
  JAX_EP_NO_UNROLL
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
    stages.Await();
    MultiplyStage<Traits>(sums, stages, a_box, Traits::kWgrad || k_block > 0);
    // The block of K before has been read.
    WgmmaWait<1>();
    if (k_block > 0) stages.Release(before);
    before = stages.stage();
    stages.Next();
  }
  return before;
}

template <typename Traits>
__device__ __forceinline__ void MultiplyTile(float (&sums)[128], const Tile& tile, Stages& stages,
                                             uint32_t a_box) {
  const uint32_t last = MultiplyBlocks<Traits>(sums, tile.k_blocks, stages, a_box);
  WgmmaWait<0>();
  HoldSums(sums);
  stages.Release(last);
}

// For kWgrad: sums over all rows of a group, the last ones in sixteens. Sums begin as zeros: if the
// first wgmma, in either of two loops, set them, ptxas would wait after every wgmma.
template <typename Traits>
__device__ __forceinline__ void MultiplyRows(float (&sums)[128], const Tile& tile, Stages& stages,
                                             uint32_t a_box, uint32_t warpgroup) {
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const int32_t whole = tile.contracted / 64, rows = tile.contracted % 64;
  const uint32_t last = MultiplyBlocks<Traits>(sums, whole, stages, a_box);
  WgmmaWait<0>();
  HoldSums(sums);
  if (whole > 0) stages.Release(last);
  if (rows == 0) return;
  stages.Await();
  const int32_t sixteens = (rows + 15) / 16;
  ZeroLines(stages.lines(), a_box, rows, sixteens * 16, warpgroup);
  JAX_EP_NO_UNROLL
  for (int32_t i = 0; i < sixteens; ++i) {
    const uint32_t at = stages.units() + i * (16 * kLineBytes >> 4);
    WgmmaFence();
    Wgmma<typename Traits::Element, true, true>(sums, stages.Operand<true>(a_box, at),
                                                stages.Operand<true>(kABoxes, at), true);
    WgmmaCommit();
  }
  WgmmaWait<0>();
  HoldSums(sums);
  stages.Release(stages.stage());
  stages.Next();
}

// ---- Multiplying fp8 ----------------------------------------------------------------------------

// Multiplies 128 columns, from 128 * half on, along 128 of K.
__device__ __forceinline__ void MultiplyHalf(float (&part)[64], const Stages& stages,
                                             uint32_t a_box, uint32_t half) {
  const uint32_t at = stages.units();
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    WgmmaFp8(part, stages.Operand<false>(a_box, at + i * 2),
             stages.Operand<false>(kABoxes + half * 2, at + i * 2), i > 0);
  }
  WgmmaCommit();
}

__device__ __forceinline__ void AddHalf(float* sums, float (&part)[64], const float (&factors)[2]) {
  HoldSums(part);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    sums[i] = FusedMultiplyAdd(part[i], factors[i / 2 % 2], sums[i]);
  }
}

// There are not enough registers for a product under way and another that is being added up.
// Instead, one warpgroup adds while the other multiplies. Products of fewer columns would read more
// from shared memory than it can deliver beside the copies.
template <typename Traits>
__device__ __forceinline__ void MultiplyFp8(float (&sums)[Traits::kBlockN / 2], int32_t k_blocks,
                                            Stages& stages, uint32_t a_box, uint32_t warp) {
  constexpr int kHalves = Traits::kBlockN / 128;
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const uint32_t row = a_box * 64 + warp * kWarpRows + Lane() / 4;
  JAX_EP_NO_UNROLL
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
    stages.Await();
    float part[64];
    MultiplyHalf(part, stages, a_box, 0);
    float of_a[2] = {stages.AScale(row)};
    of_a[1] = Traits::kWgrad ? of_a[0] : stages.AScale(row + 8);
    float factors[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float of_b = stages.BScale(half);
#pragma unroll
      for (int r = 0; r < 2; ++r) factors[half][r] = Multiply(of_b, of_a[r]);
    }
    WgmmaWait<0>();
    if constexpr (kHalves == 2) {
      AddHalf(sums, part, factors[0]);
      MultiplyHalf(part, stages, a_box, 1);
      WgmmaWait<0>();
    }
    stages.Release(stages.stage());
    stages.Next();
    // Checks for the next operands now, so that the answer comes while sums are added up.
    if (k_block + 1 < k_blocks) stages.Look();
    AddHalf(sums + (kHalves - 1) * 64, part, factors[kHalves - 1]);
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

// Called by a warpgroup, unless Traits::kFew.
template <typename Traits>
__device__ __forceinline__ void MultiplyTiles(const MatmulMaps& maps,
                                              const MatmulArguments& arguments,
                                              const MatmulMemory& memory, uint32_t warpgroup) {
  const Results results{arguments.result, &maps.d, &maps.gate_up_rows};
  const uint32_t warp = Uniform(threadIdx.x / kWarpSize % 4);
  Drain drain(memory.drains + (warpgroup * 4 + warp) * kDrains * kDrainBytes);
  TileReader tiles(memory.shared.ring);
  Stages stages(memory);
  while (true) {
    const Tile tile = tiles.NextUniform();
    if (tile.k_blocks < 0) break;
    stages.Begin(tile.stage);
    if (tile.half() && tile.warpgroup != warpgroup) {
      stages.Skip(tile.k_blocks);
      continue;
    }
    const uint32_t a_box = tile.half() ? 0 : warpgroup;
    const int32_t row = static_cast<int32_t>(a_box * 64 + warp * kWarpRows);
    ResultPlace place{tile.row + row, tile.rows - row, tile.column, tile.group};
    if constexpr (Traits::kWgrad) {
      place.row += static_cast<int64_t>(tile.group) * arguments.scheduler.d_rows;
    }
    float sums[Traits::kBlockN / 2];
    if constexpr (Traits::kFp8) {
      MultiplyFp8<Traits>(sums, tile.k_blocks, stages, a_box, warp);
    } else if constexpr (Traits::kWgrad) {
      MultiplyRows<Traits>(sums, tile, stages, a_box, warpgroup);
    } else {
      MultiplyTile<Traits>(sums, tile, stages, a_box);
    }
    if (HasGivenUp(memory.shared.ring)) {
      // Nobody may mistake these sums for a result.
      FillWithNans(place, results, Traits::DBytes(results.out_element));
      continue;
    }
    if (place.column < results.n) {
      Traits::Epilogue::template Run<typename Traits::Type>(sums, results, place, drain);
    }
  }
  drain.End();
}

template <typename Traits>
__global__ void __launch_bounds__(kMatmulThreads, 1)
    MatmulKernel(const __grid_constant__ MatmulMaps maps,
                 const __grid_constant__ MatmulArguments arguments) {
  constexpr uint32_t kLoadWarps = Traits::kFp8 ? 3 : 2;
  const MatmulMemory memory(kFrontBytes<Traits::kFp8>);
  MatmulShared& shared = memory.shared;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.a, &maps.b, &maps.d, &maps.gate_up_rows}) {
      PrefetchTensorMap(map);
    }
    if constexpr (Traits::kHasUpMap) PrefetchTensorMap(&maps.b_up);
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      MbarrierInit(&shared.full[stage], kLoadWarps);
      MbarrierInit(&shared.empty[stage], 2 * kMathWarps);
    }
    for (uint64_t& barrier : shared.exchanged) MbarrierInit(&barrier, kMathWarps);
    InitTileRing(shared.ring, kMathWarps + kLoadWarps);
    FenceMbarrierInit();
  }
  LetNextKernelBegin();
  ClusterSync();
  const uint32_t warpgroup = Uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup == 0) {
    ShrinkRegisters<kLoadRegisters>();
    const uint32_t warp = threadIdx.x / kWarpSize;
    if (warp == 0) {
      LoadOperands<Traits, false>(maps, arguments.side_blocks, memory);
    } else if (warp == 1) {
      ScheduleTiles<Traits::kWgrad, Traits::kFew>(arguments.scheduler, Traits::kBlockK,
                                                  shared.ring);
    } else if (warp == 3) {
      LoadOperands<Traits, true>(maps, arguments.side_blocks, memory);
    } else if constexpr (Traits::kFp8) {
      LoadScales<Traits>(arguments.scales, arguments.scheduler.m, arguments.result.n, memory);
    }
  } else {
    GrowRegisters<kMathRegisters>();
    if constexpr (Traits::kFew) {
      MultiplyFewRows<Traits>(maps, arguments, memory, warpgroup - 1);
    } else {
      MultiplyTiles<Traits>(maps, arguments, memory, warpgroup - 1);
    }
  }
  // The other block may still copy to this one's memory or arrive at its barriers.
  __syncwarp();
  ClusterSync();
}

}  // namespace jax_ep::cuda
