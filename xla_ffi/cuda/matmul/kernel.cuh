// The matmul kernel. A cluster of two blocks works on units (units.cuh), each block on a tile of
// 128 x 256 of the result. In a block, one warpgroup feeds two others: warp 0 copies left operands
// to stages in shared memory, warp 3 copies right ones, warp 1 finds tiles, and warp 2 loads the
// scales of codes. The other two warpgroups multiply 64 rows each and write the result; for few
// rows they do what few_rows.cuh says.
//
// Each stage has two barriers. `full` ends when the stage's operands are there. `free` ends when
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

// ---- Feeding ------------------------------------------------------------------------------------

// The addresses of a stage that is being fed.
struct StageAddresses {
  uint32_t operands;
  uint32_t full;
};

// Loads the left operand of one step. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void LoadLeft(const CUtensorMap* map, const Tile& tile, int32_t step,
                                         uint32_t rank, const StageAddresses& stage) {
  const int32_t k = step * static_cast<int32_t>(Traits::kStep);
  const auto load = [&](uint32_t box, bool both) {
    const int32_t row = tile.row + static_cast<int32_t>(box) * 64;
    BoxPlace place{{k, row, 0, 0}};
    if constexpr (Traits::kLeftAcross) place = {{row, tile.first + k, 0, 0}};
    const uint32_t to = stage.operands + box * kBoxBytes;
    both ? TensorLoadBoth(to, map, place, stage.full) : TensorLoad(to, map, place, stage.full);
  };
  MbarrierExpectAt(stage.full, (tile.half() ? 1 : kLeftBoxes) * kBoxBytes);
  if (tile.sharing == Sharing::kRight) {
    load(0, false);
    load(1, false);
  } else if (!tile.half()) {
    load(rank, true);
  } else if (static_cast<uint32_t>(step) % 2 == rank) {
    // The blocks take turns to load the only box of a half.
    load(0, true);
  }
}

// Loads the right operand of one step. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void LoadRight(const CUtensorMap* map, const Tile& tile, int32_t step,
                                          uint32_t rank, const StageAddresses& stage) {
  const int32_t k = step * static_cast<int32_t>(Traits::kStep);
  const auto load = [&](uint32_t box, bool both) {
    constexpr uint32_t kPerSide = Traits::kRightBoxes / Traits::kSides;
    const int32_t side = static_cast<int32_t>(box / kPerSide);
    const int32_t column = tile.column + static_cast<int32_t>(box % kPerSide) * 64;
    BoxPlace place{{k, column, side, tile.group}};
    if constexpr (Traits::kRightAcross) place = {{column, side, k, tile.group}};
    if constexpr (Traits::kOuter) place = {{column, 0, tile.first + k, 0}};
    const uint32_t to = stage.operands + (kLeftBoxes + box) * kBoxBytes;
    both ? TensorLoadBoth(to, map, place, stage.full) : TensorLoad(to, map, place, stage.full);
  };
  MbarrierExpectAt(stage.full, Traits::kRightBoxes * kBoxBytes);
  if (tile.sharing == Sharing::kRight) {
#pragma unroll
    for (uint32_t box = 0; box < Traits::kRightBoxes / 2; ++box) {
      load(rank * (Traits::kRightBoxes / 2) + box, true);
    }
  } else {
#pragma unroll
    for (uint32_t box = 0; box < Traits::kRightBoxes; ++box) load(box, false);
  }
}

// Called by one warp for the left operands and by another for the right ones. The previous kernel
// may write left operands; right ones are there before it begins (ApplyExperts).
template <typename Traits, bool kRight>
__device__ __forceinline__ void LoadOperands(const CUtensorMap* map, const MatmulMemory& memory) {
  MatmulShared& shared = memory.shared;
  TileReader tiles(shared.ring);
  const uint32_t rank = Uniform(ClusterRank());
  const uint32_t operands = Uniform(SharedAddress(memory.stages));
  const uint32_t full = Uniform(SharedAddress(shared.full));
  if constexpr (!kRight) AwaitPreviousKernel();
  while (true) {
    const Tile tile = tiles.NextUniform();
    if (tile.steps < 0) break;
    StageCursor at{tile.stage};
    JAX_EP_NO_UNROLL
    for (int32_t step = 0; step < tile.steps; ++step, ++at.passed) {
      const bool is_free = Await(&shared.free[at.slot()], at.parity() ^ 1, &shared.ring.given_up);
      // After a wait was given up, this block or the other one may still be reading the stage.
      // Nothing more is loaded, so that the other block gives up as well.
      if (!__all_sync(kFullWarp, is_free)) break;
      if (IsElected()) {
        const StageAddresses stage{operands + at.slot() * kStageBytes,
                                   full + at.slot() * static_cast<uint32_t>(sizeof(uint64_t))};
        if constexpr (kRight) {
          LoadRight<Traits>(map, tile, step, rank, stage);
        } else {
          LoadLeft<Traits>(map, tile, step, rank, stage);
        }
      }
      __syncwarp();
    }
  }
}

// Loads the scales of codes, which it reads from memory two steps ahead. Called by a warp.
__device__ __forceinline__ void LoadScales(const ScaleArguments& scales, int32_t all_rows,
                                           bool sides, int64_t columns,
                                           const MatmulMemory& memory) {
  MatmulShared& shared = memory.shared;
  constexpr int kPerLane = kTileRows / kWarpSize;
  constexpr int kAhead = 2;
  TileReader tiles(shared.ring);
  const int32_t lane = static_cast<int32_t>(Lane());
  AwaitPreviousKernel();
  while (true) {
    const Tile tile = tiles.Next();
    if (tile.steps < 0) break;
    StageCursor at{tile.stage};
    uint32_t rows[kPerLane];  // in elements
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      // Rows past the last one have no results.
      const int32_t row = min(tile.row + lane + i * static_cast<int32_t>(kWarpSize), all_rows - 1);
      rows[i] = static_cast<uint32_t>(row) * scales.row_stride;
    }
    // Lanes 0 and 1 load the scales of gate and of up, or of 128 columns each.
    const int32_t column = tile.column + (sides ? 0 : lane * 128);
    const bool has_right = lane < 2 && column < columns;
    const float* right = scales.right + tile.group * scales.per_group +
                         (sides ? lane * scales.per_side : 0) + column / 128 * scales.per_b;
    const int32_t steps = tile.steps;
    float ahead[kAhead][kPerLane + 1];
    const auto load = [&](float (&to)[kPerLane + 1], int32_t step) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) to[i] = step < steps ? scales.rows[rows[i] + step] : 0.0f;
      to[kPerLane] = has_right && step < steps ? right[step * scales.per_k] : 0.0f;
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i], i);
    const auto store = [&](float (&from)[kPerLane + 1], int32_t step) {
      Await(&shared.free[at.slot()], at.parity() ^ 1, &shared.ring.given_up);
      StageScales& to = memory.scales[at.slot()];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) to.rows[lane + i * kWarpSize] = from[i];
      if (lane < 2) to.right[lane] = from[kPerLane];
      load(from, step + kAhead);
      __syncwarp();
      // Release; pairs with the math warps' wait.
      if (lane == 0) MbarrierArrive(&shared.full[at.slot()]);
      ++at.passed;
    };
    JAX_EP_NO_UNROLL
    for (int32_t step = 0; step < steps; step += kAhead) {
      store(ahead[0], step);
      if (step + 1 < steps) store(ahead[1], step + 1);
    }
  }
}

// ---- Multiplying --------------------------------------------------------------------------------

template <typename Traits>
__device__ __forceinline__ void MultiplyStage(float (&sums)[128], const Stages& stages,
                                              uint32_t left_box, bool add) {
  // From one product to the next: sixteen elements along a line, or sixteen lines.
  constexpr uint32_t kLeftStep = (Traits::kLeftAcross ? 16 * kLineBytes : 32) >> 4;
  constexpr uint32_t kRightStep = (Traits::kRightAcross ? 16 * kLineBytes : 32) >> 4;
  const uint32_t at = stages.units();
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wgmma<typename Traits::Element, Traits::kLeftAcross, Traits::kRightAcross>(
        sums, stages.Operand<Traits::kLeftAcross>(left_box, at + i * kLeftStep),
        stages.Operand<Traits::kRightAcross>(kLeftBoxes, at + i * kRightStep), add || i > 0);
  }
  WgmmaCommit();
}

// Zeros lines [first, end) of the warpgroup's left box and of all right boxes: the last rows of a
// group are followed by other groups' rows, which may hold NaN. Both warpgroups write the same
// zeros to the right boxes.
__device__ __forceinline__ void ZeroLines(uint8_t* operands, uint32_t left_box, uint32_t first,
                                          uint32_t end, uint32_t warpgroup) {
  constexpr uint32_t kUnits = kLineBytes / 16;
  const uint32_t count = (end - first) * kUnits;
  const uint32_t thread = threadIdx.x % kWarpgroupThreads;
  JAX_EP_NO_UNROLL
  for (uint32_t box = 0; box <= kMostRightBoxes; ++box) {
    uint8_t* at = operands + (box == 0 ? left_box : kLeftBoxes + box - 1) * kBoxBytes;
    for (uint32_t unit = thread; unit < count; unit += kWarpgroupThreads) {
      StoreZeros(at + first * kLineBytes + unit * 16);
    }
  }
  FenceProxyAsyncShared();
  NamedBarrier(1 + warpgroup, kWarpgroupThreads);
}

// Sums over all whole steps. Returns the last stage, which a product may still be reading.
template <typename Traits>
__device__ __forceinline__ uint32_t MultiplySteps(float (&sums)[128], int32_t steps, Stages& stages,
                                                  uint32_t left_box) {
  uint32_t before = 0;
  JAX_EP_NO_UNROLL
  for (int32_t step = 0; step < steps; ++step) {
    stages.Await();
    MultiplyStage<Traits>(sums, stages, left_box, Traits::kOuter || step > 0);
    // The step before has been read.
    WgmmaWait<1>();
    if (step > 0) stages.Free(before);
    before = stages.stage();
    stages.Next();
  }
  return before;
}

template <typename Traits>
__device__ __forceinline__ void MultiplyTile(float (&sums)[128], const Tile& tile, Stages& stages,
                                             uint32_t left_box) {
  const uint32_t last = MultiplySteps<Traits>(sums, tile.steps, stages, left_box);
  WgmmaWait<0>();
  HoldSums(sums);
  stages.Free(last);
}

// For kOuter: sums over all rows of a group, the last ones in sixteens. Sums begin as zeros: if the
// first product, in either of two loops, set them, ptxas would wait after every product.
template <typename Traits>
__device__ __forceinline__ void MultiplyRows(float (&sums)[128], const Tile& tile, Stages& stages,
                                             uint32_t left_box, uint32_t warpgroup) {
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const int32_t whole = tile.contracted / 64, rows = tile.contracted % 64;
  const uint32_t last = MultiplySteps<Traits>(sums, whole, stages, left_box);
  WgmmaWait<0>();
  HoldSums(sums);
  if (whole > 0) stages.Free(last);
  if (rows == 0) return;
  stages.Await();
  const int32_t sixteens = (rows + 15) / 16;
  ZeroLines(stages.lines(), left_box, rows, sixteens * 16, warpgroup);
  JAX_EP_NO_UNROLL
  for (int32_t i = 0; i < sixteens; ++i) {
    const uint32_t at = stages.units() + i * (16 * kLineBytes >> 4);
    WgmmaFence();
    Wgmma<typename Traits::Element, true, true>(sums, stages.Operand<true>(left_box, at),
                                                stages.Operand<true>(kLeftBoxes, at), true);
    WgmmaCommit();
  }
  WgmmaWait<0>();
  HoldSums(sums);
  stages.Free(stages.stage());
  stages.Next();
}

// ---- Multiplying codes --------------------------------------------------------------------------

// Multiplies 128 columns, from 128 * half on, along 128 of the contracted dimension.
__device__ __forceinline__ void MultiplyHalf(float (&part)[64], const Stages& stages,
                                             uint32_t left_box, uint32_t half) {
  const uint32_t at = stages.units();
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    WgmmaCodes(part, stages.Operand<false>(left_box, at + i * 2),
               stages.Operand<false>(kLeftBoxes + half * 2, at + i * 2), i > 0);
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
template <int kHalves>
__device__ __forceinline__ void MultiplyCodes(float (&sums)[64 * kHalves], int32_t steps,
                                              Stages& stages, uint32_t left_box, uint32_t warp) {
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const uint32_t row = left_box * 64 + warp * kWarpRows + Lane() / 4;
  JAX_EP_NO_UNROLL
  for (int32_t step = 0; step < steps; ++step) {
    stages.Await();
    float part[64];
    MultiplyHalf(part, stages, left_box, 0);
    const float of_row[2] = {stages.RowScale(row), stages.RowScale(row + 8)};
    float factors[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float of_right = stages.RightScale(half);
#pragma unroll
      for (int r = 0; r < 2; ++r) factors[half][r] = Multiply(of_right, of_row[r]);
    }
    WgmmaWait<0>();
    if constexpr (kHalves == 2) {
      AddHalf(sums, part, factors[0]);
      MultiplyHalf(part, stages, left_box, 1);
      WgmmaWait<0>();
    }
    stages.Free(stages.stage());
    stages.Next();
    // Checks for the next operands now, so that the answer comes while sums are added up.
    if (step + 1 < steps) stages.Look();
    AddHalf(sums + (kHalves - 1) * 64, part, factors[kHalves - 1]);
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

// Called by a warpgroup, unless Traits::kFew.
template <typename Traits>
__device__ __forceinline__ void MultiplyTiles(const MatmulMaps& maps,
                                              const MatmulArguments& arguments,
                                              const MatmulMemory& memory, uint32_t warpgroup) {
  const Results results{arguments.result, &maps.out, &maps.both};
  const uint32_t warp = Uniform(threadIdx.x / kWarpSize % 4);
  Drain drain(memory.drains + (warpgroup * 4 + warp) * kDrains * kDrainBytes);
  TileReader tiles(memory.shared.ring);
  Stages stages(memory);
  while (true) {
    const Tile tile = tiles.NextUniform();
    if (tile.steps < 0) break;
    stages.Begin(tile.stage);
    if (tile.half() && tile.warpgroup != warpgroup) {
      stages.Skip(tile.steps);
      continue;
    }
    const uint32_t left_box = tile.half() ? 0 : warpgroup;
    const int32_t row = static_cast<int32_t>(left_box * 64 + warp * kWarpRows);
    ResultPlace place{tile.row + row, tile.rows - row, tile.column};
    if constexpr (Traits::kOuter) {
      place.row += static_cast<int64_t>(tile.group) * arguments.plan.outer_rows;
    }
    float sums[Traits::kColumns / 2];
    if constexpr (Traits::kCodes) {
      MultiplyCodes<Traits::kColumns / 128>(sums, tile.steps, stages, left_box, warp);
    } else if constexpr (Traits::kOuter) {
      MultiplyRows<Traits>(sums, tile, stages, left_box, warpgroup);
    } else {
      MultiplyTile<Traits>(sums, tile, stages, left_box);
    }
    if (HasGivenUp(memory.shared.ring)) {
      // Nobody may mistake these sums for a result.
      FillWithNans(place, results, Traits::OutBytes(results.out_element));
      continue;
    }
    if (place.column < results.columns) {
      Traits::Epilogue::template Run<typename Traits::Type>(sums, results, place, drain);
    }
  }
  drain.End();
}

template <typename Traits>
__global__ void __launch_bounds__(kMatmulThreads, 1)
    MatmulKernel(const __grid_constant__ MatmulMaps maps,
                 const __grid_constant__ MatmulArguments arguments) {
  constexpr uint32_t kLoaders = Traits::kCodes ? 3 : 2;
  const MatmulMemory memory(kFrontBytes<Traits::kCodes>);
  MatmulShared& shared = memory.shared;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.left, &maps.right, &maps.out, &maps.both}) {
      PrefetchTensorMap(map);
    }
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      MbarrierInit(&shared.full[stage], kLoaders);
      MbarrierInit(&shared.free[stage], 2 * kWarpsOfMath);
    }
    for (uint64_t& barrier : shared.exchanged) MbarrierInit(&barrier, kWarpsOfMath);
    InitTileRing(shared.ring, kWarpsOfMath + kLoaders);
    FenceMbarrierInit();
  }
  LetNextKernelBegin();
  ClusterSync();
  const uint32_t warpgroup = Uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup == 0) {
    ShrinkRegisters<kFeederRegisters>();
    const uint32_t warp = threadIdx.x / kWarpSize;
    if (warp == 0) {
      LoadOperands<Traits, false>(&maps.left, memory);
    } else if (warp == 1) {
      FindTiles<Traits::kOuter, Traits::kFew>(arguments.plan, Traits::kStep, shared.ring);
    } else if (warp == 3) {
      LoadOperands<Traits, true>(&maps.right, memory);
    } else if (Traits::kCodes) {
      LoadScales(arguments.scales, arguments.plan.rows, Traits::kGateUp, arguments.result.columns,
                 memory);
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
