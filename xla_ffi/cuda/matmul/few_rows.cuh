// How groups with few rows are multiplied, and what happens to the sums. Wgmma gets the operands
// swapped: columns of B are the rows of its first operand, so a warp has 16 columns of up to 64
// rows from each wgmma of a warpgroup. Element 4 * c + 2 * r + i of a lane is row 8 * c + 2 * (lane
// % 4) + i in column lane / 4 + 8 * r.
#pragma once

#include <cstdint>

#include "cuda/matmul/stages.cuh"

namespace jax_ep::cuda {

// A warp's columns of a tile's rows.
struct FewRowsPlace {
  int64_t row;     // of the result
  int32_t rows;    // how many exist
  int32_t column;  // of the warp's 16
  int32_t group;
};

// Adds a group's bias of a side to a warp's 16 columns.
template <int kRows>
__device__ __forceinline__ void AddBiasOfColumns(float (&sums)[kRows / 2],
                                                 const FewRowsPlace& place, const float* bias,
                                                 int32_t columns) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t column = place.column + static_cast<int32_t>(Lane() / 4) + 8 * r;
    const float own = column < columns ? bias[column] : 0.0f;
#pragma unroll
    for (int at = 2 * r; at < kRows / 2; at += 4) {
      sums[at] = Add(sums[at], own), sums[at + 1] = Add(sums[at + 1], own);
    }
  }
}

// What the epilogues use of shared memory.
struct FewRowsMemory {
  uint8_t* drains;              // kDrains * kDrainBytes per math warp
  uint64_t* exchanged;          // two barriers, each of which expects all math warps
  volatile uint32_t* given_up;  // as in Await
  uint32_t warp;                // of all math warps
  uint32_t turn;                // of the tile, for `exchanged`

  __device__ uint8_t* buffer() const { return OfWarp(warp); }
  // Where a warp's largest magnitudes are, one per row.
  __device__ uint32_t* Largest(uint32_t of_warp) const {
    return reinterpret_cast<uint32_t*>(OfWarp(of_warp) + kDrainBytes) + turn % 2 * kHalfBlockM;
  }

 private:
  __device__ uint8_t* OfWarp(uint32_t of_warp) const {
    return drains + of_warp * kDrains * kDrainBytes;
  }
};
static_assert(2 * kHalfBlockM * sizeof(uint32_t) <= kDrainBytes);

// Copies lines of kBytes of the warp's buffer to rows of a result.
template <uint32_t kBytes>
__device__ __forceinline__ void CopyLines(const FewRowsMemory& memory, uint8_t* to,
                                          int64_t row_bytes, int32_t rows, int32_t units) {
  constexpr int32_t kUnits = kBytes / 16;
  __syncwarp();
  for (int32_t i = static_cast<int32_t>(Lane()); i < rows * kUnits; i += kWarpSize) {
    if (i % kUnits >= units) continue;
    *reinterpret_cast<uint4*>(to + i / kUnits * row_bytes + i % kUnits * 16) =
        *reinterpret_cast<const uint4*>(memory.buffer() + i * 16);
  }
  __syncwarp();
}

// Stores 16 columns of 16-bit elements, but none past `columns`, a multiple of 8.
template <int kRows, typename Type>
__device__ __forceinline__ void StoreColumns16(Type type, const float (&sums)[kRows / 2],
                                               const FewRowsPlace& place, uint8_t* d,
                                               int32_t columns, const FewRowsMemory& memory) {
  const uint32_t lane = Lane();
#pragma unroll
  for (int c = 0; c < kRows / 8; c += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (c + i / 2) + i % 2 * 2;
      words[i] = at < kRows / 2 ? RoundTwo(type, sums[at], sums[at + 1]) : 0;
    }
    const uint32_t matrix = lane / 8, row = 8 * (c + matrix / 2) + lane % 8;
    StoreTransposed(memory.buffer() + row * 32 + matrix % 2 * 16, words);
  }
  const int64_t row_bytes = int64_t{columns} * 2;
  CopyLines<32>(memory, d + place.row * row_bytes + int64_t{place.column} * 2, row_bytes,
                place.rows, (columns - place.column) / 8);
}

// Stores 16 columns of float32. Lanes with the same rows have neighbouring columns.
template <int kRows>
__device__ __forceinline__ void StoreColumns32(const float (&sums)[kRows / 2],
                                               const FewRowsPlace& place, float* d,
                                               int32_t columns) {
#pragma unroll
  for (int at = 0; at < kRows / 2; ++at) {
    const int32_t row = static_cast<int32_t>(8 * (at / 4) + 2 * (Lane() % 4)) + at % 2;
    const int32_t column = place.column + static_cast<int32_t>(Lane() / 4) + at / 2 % 2 * 8;
    if (row < place.rows && column < columns) {
      d[(place.row + row) * columns + column] = sums[at];
    }
  }
}

// Stores 16 of 128 columns in fp8. A row's scale is of all 128, which the math warps have
// together. Quantises as StoreFp8 does. Returns without storing if a wait was given up.
template <int kRows>
__device__ __forceinline__ void StoreColumnsFp8(const float (&values)[kRows / 2],
                                                const FewRowsPlace& place, const Results& to,
                                                const FewRowsMemory& memory) {
  using Format = Fp8Block128Format;
  const uint32_t lane = Lane();
#pragma unroll
  for (int of_lane = 0; of_lane < kRows / 4; ++of_lane) {
    const int at = of_lane / 2 * 4 + of_lane % 2;
    uint32_t amax =
        max(FloatBits(values[at]) & 0x7FFFFFFFu, FloatBits(values[at + 2]) & 0x7FFFFFFFu);
#pragma unroll
    for (int by = 4; by < static_cast<int>(kWarpSize); by *= 2) {
      amax = max(amax, __shfl_xor_sync(kFullWarp, amax, by));
    }
    const uint32_t row = 8 * (of_lane / 2) + 2 * lane + of_lane % 2;
    if (lane < 4) memory.Largest(memory.warp)[row] = amax;
  }
  __syncwarp();
  uint64_t* exchanged = &memory.exchanged[memory.turn % 2];
  // Release; pairs with the other math warps' waits.
  if (lane == 0) MbarrierArrive(exchanged);
  const bool all_came = Await(exchanged, memory.turn / 2 % 2, memory.given_up);
  if (!__all_sync(kFullWarp, all_came)) return;
#pragma unroll
  for (int of_lane = 0; of_lane < kRows / 4; ++of_lane) {
    const int at = of_lane / 2 * 4 + of_lane % 2;
    const uint32_t row = 8 * (of_lane / 2) + 2 * (lane % 4) + of_lane % 2;
    uint32_t amax = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < kMathWarps; ++warp) {
      amax = max(amax, memory.Largest(warp)[row]);
    }
    const float scale = Format::ScaleOf(amax, kNoInputScale);
    const bool is_number = scale == scale;
    const DividerBy<2> divided(scale);
    const uint32_t two = E4M3::EncodeNumbers(divided(values[at]), divided(values[at + 2]));
    const uint32_t codes = is_number ? two : E4M3::kNan << 8 | E4M3::kNan;
    uint8_t* line = memory.buffer() + row * 16 + lane / 4;
    line[0] = static_cast<uint8_t>(codes);
    line[8] = static_cast<uint8_t>(codes >> 8);
    if (memory.warp == 0 && lane < 4 && static_cast<int32_t>(row) < place.rows) {
      to.d_scales[(place.row + row) * (to.n / 128) + place.column / 128] = scale;
    }
  }
  CopyLines<16>(memory, to.d + place.row * to.n + place.column, to.n, place.rows, 1);
}

// `sums` are of the two boxes of FewRows. `row` is the first of the tile's `rows`.
template <typename Traits, int kRows>
struct FewRowsStore {
  static constexpr MatmulKind kKind = Traits::kKind;

  __device__ __forceinline__ static void Run(float (&sums)[2][kRows / 2], const Results& to,
                                             FewRowsPlace place, uint32_t warpgroup,
                                             const FewRowsMemory& memory) {
    const int32_t of_warp = static_cast<int32_t>(memory.warp % 4 * 16);
    const int32_t first = place.column;
    const typename Traits::Type type(kKind == MatmulKind::kFp8Matmul ? to.out_element : to.element);
    if constexpr (Traits::kGateUp) {
      place.column = first + static_cast<int32_t>(warpgroup) * 64 + of_warp;
      if (to.bias != nullptr) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          AddBiasOfColumns<kRows>(sums[side], place, to.Bias(place.group, side, 2), to.n);
        }
      }
      float (&h)[kRows / 2] = sums[0];
      WithActivation(to, [&](auto activation) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
          h[i] = Multiply(activation.OfGate(sums[0][i]), activation.OfUp(sums[1][i]));
        }
      });
      if constexpr (Traits::kFp8) {
        StoreColumnsFp8<kRows>(h, place, to, memory);
      } else if (place.column < to.n) {
        StoreColumns16<kRows>(type, h, place, to.d, to.n, memory);
      }
    } else {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        place.column = first + static_cast<int32_t>(warpgroup) * 128 + box * 64 + of_warp;
        if (place.column >= to.n) break;
        if (to.bias != nullptr) {
          AddBiasOfColumns<kRows>(sums[box], place, to.Bias(place.group, 0, 1), to.n);
        }
        if (kKind == MatmulKind::kFp8Matmul && to.out_element == ElementType::kFloat32) {
          StoreColumns32<kRows>(sums[box], place, reinterpret_cast<float*>(to.d), to.n);
        } else {
          StoreColumns16<kRows>(type, sums[box], place, to.d, to.n, memory);
        }
      }
    }
  }
};

// ---- Few rows -----------------------------------------------------------------------------------

// Both warpgroups multiply all tiles, which have up to 64 rows, with 128 columns each. Box `i` of
// two is of 64 columns of gate or of up, or of the matrix.
template <typename Traits>
struct FewRows {
  static constexpr int kBoxes = 2;

  __device__ static uint32_t Box(uint32_t warpgroup, uint32_t i) {
    return Traits::kSides == 2 ? warpgroup + 2 * i : 2 * warpgroup + i;
  }
  // The first column of a box, within its side and tile.
  __device__ static int32_t Column(uint32_t warpgroup, uint32_t i) {
    return static_cast<int32_t>(64 * (Traits::kSides == 2 ? warpgroup : Box(warpgroup, i)));
  }

  template <int kRows>
  using Sums = float[kBoxes][kRows / 2];

  // Multiplies one box along one block of K.
  template <int kRows>
  __device__ __forceinline__ static void MultiplyBox(float (&sums)[kRows / 2], const Stages& stages,
                                                     uint32_t box, bool add) {
    constexpr uint32_t kBStep = (Traits::kBMnMajor ? 16 * kLineBytes : 32) >> 4;
    const uint32_t at = stages.units();
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      WgmmaFewRows<typename Traits::Element, kRows>(
          sums, stages.template Operand<Traits::kBMnMajor>(kABoxes + box, at + i * kBStep),
          stages.template Operand<false>(0, at + i * 2), add || i > 0);
    }
    WgmmaCommit();
  }

  template <int kRows>
  __device__ __forceinline__ static void Multiply16(Sums<kRows>& sums, int32_t k_blocks,
                                                    Stages& stages, uint32_t warpgroup) {
    uint32_t before = 0;
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      stages.Await();
#pragma unroll
      for (uint32_t i = 0; i < kBoxes; ++i) {
        MultiplyBox<kRows>(sums[i], stages, Box(warpgroup, i), k_block > 0);
      }
      // The block of K before has been read.
      WgmmaWait<kBoxes>();
      if (k_block > 0) stages.Release(before);
      before = stages.stage();
      stages.Next();
    }
    WgmmaWait<0>();
#pragma unroll
    for (auto& of_box : sums) HoldSums(of_box);
    stages.Release(before);
  }

  template <int kRows>
  __device__ __forceinline__ static void MultiplyFp8(Sums<kRows>& sums, int32_t k_blocks,
                                                     Stages& stages, uint32_t warpgroup) {
#pragma unroll
    for (auto& of_box : sums) {
#pragma unroll
      for (float& sum : of_box) sum = 0.0f;
    }
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      stages.Await();
      Sums<kRows> parts;
#pragma unroll
      for (uint32_t i = 0; i < kBoxes; ++i) {
        MultiplyBox<kRows>(parts[i], stages, Box(warpgroup, i), false);
      }
      float of_row[kRows / 4];
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        of_row[i] = stages.AScale(8 * (i / 2) + 2 * (Lane() % 4) + i % 2);
      }
      float of_box[kBoxes];
#pragma unroll
      for (uint32_t i = 0; i < kBoxes; ++i) of_box[i] = stages.BScale(Box(warpgroup, i) / 2);
      WgmmaWait<1>();
      Add<kRows>(sums[0], parts[0], of_row, of_box[0]);
      WgmmaWait<0>();
      stages.Release(stages.stage());
      stages.Next();
      if (k_block + 1 < k_blocks) stages.Look();
      Add<kRows>(sums[1], parts[1], of_row, of_box[1]);
    }
  }

  template <int kRows>
  __device__ __forceinline__ static void Add(float (&sums)[kRows / 2], float (&part)[kRows / 2],
                                             const float (&of_row)[kRows / 4], float of_box) {
    HoldSums(part);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      sums[i] = FusedMultiplyAdd(part[i], Multiply(of_box, of_row[i / 4 * 2 + i % 2]), sums[i]);
    }
  }

  template <int kRows>
  __device__ __forceinline__ static void RunTile(const Results& results, const Tile& tile,
                                                 Stages& stages, const MatmulMemory& memory,
                                                 uint32_t warpgroup, uint32_t turn) {
    Sums<kRows> sums;
    if constexpr (Traits::kFp8) {
      MultiplyFp8<kRows>(sums, tile.k_blocks, stages, warpgroup);
    } else {
      Multiply16<kRows>(sums, tile.k_blocks, stages, warpgroup);
    }
    const uint32_t warp = Uniform(threadIdx.x / kWarpSize) - 4;
    if (tile.column < results.n && !HasGivenUp(memory.shared.ring)) {
      const FewRowsMemory few{memory.drains, memory.shared.exchanged, &memory.shared.ring.given_up,
                              warp, turn};
      FewRowsStore<Traits, kRows>::Run(
          sums, results, {tile.row, tile.rows, tile.column, tile.group}, warpgroup, few);
    }
    // Waits of the epilogue may have been given up as well.
    if (HasGivenUp(memory.shared.ring)) {
      // A warp's share of the tile's rows: nobody may mistake sums for a result.
      const int32_t first = static_cast<int32_t>(warp % 4 * kWarpRows);
      const ResultPlace place{tile.row + first, tile.rows - first, 0, tile.group};
      if (warpgroup == 0 && place.rows > 0) {
        FillWithNans(place, results, Traits::DBytes(results.out_element));
      }
    }
  }
};

template <typename Traits>
__device__ __forceinline__ void MultiplyFewRows(const MatmulMaps& maps,
                                                const MatmulArguments& arguments,
                                                const MatmulMemory& memory, uint32_t warpgroup) {
  const Results results{arguments.result, &maps.d, &maps.gate_up_rows};
  TileReader tiles(memory.shared.ring);
  Stages stages(memory);
  uint32_t turn = 0;
  while (true) {
    const Tile tile = tiles.NextUniform();
    if (tile.k_blocks < 0) break;
    stages.Begin(tile.stage);
    const auto run = [&]<int kRows>() {
      FewRows<Traits>::template RunTile<kRows>(results, tile, stages, memory, warpgroup, turn);
    };
    if (tile.rows <= 8) {
      run.template operator()<8>();
    } else if (tile.rows <= 16) {
      run.template operator()<16>();
    } else if (tile.rows <= 32) {
      run.template operator()<32>();
    } else {
      run.template operator()<64>();
    }
    turn += tile.column < results.n;
  }
}

}  // namespace jax_ep::cuda
