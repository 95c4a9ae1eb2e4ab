// What becomes of a tile's sums. Each epilogue is called by the four warps of a warpgroup with the
// sums of wgmma [64, 256]; elements 4 * c + 2 * r + i of a lane are columns 8 * c + 2 * (lane % 4)
// + i of row lane / 4 + 8 * r of its warp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/matmul/drain.cuh"
#include "cuda/matmul/step.h"
#include "formats/e4m3.h"
#include "formats/fp8_block128.h"

namespace jax_ep::cuda {

// What of MatmulStep an epilogue reads.
struct ResultArguments {
  uint8_t* out;
  float* out_scales;
  uint8_t* both;
  uint8_t* to_both;
  int64_t columns;  // B
  ElementType element;
  ElementType out_element;
};

// A warp's rows of a tile.
struct ResultPlace {
  int64_t row;     // of the result
  int32_t rows;    // how many of the warp's 16 rows exist
  int64_t column;  // of a side

  // A matrix with rows of `stride` bytes.
  __device__ DrainRows Of(uint8_t* matrix, int64_t stride) const {
    return {matrix + row * stride, stride, rows};
  }
};

// Rounds two floats to `element`, bfloat16 or float16.
__device__ __forceinline__ uint32_t RoundTwo(ElementType element, float low, float high) {
  return element == ElementType::kFloat16 ? RoundTwo<Float16>(low, high)
                                          : RoundTwo<BFloat16>(low, high);
}
__device__ __forceinline__ float FloatOf(ElementType element, uint32_t bits) {
  const uint16_t low = static_cast<uint16_t>(bits);
  return element == ElementType::kFloat16 ? __half2float(__ushort_as_half(low))
                                          : ToFloat(BFloat16{low});
}

// An element type that is known when the kernel is compiled, or one that is not.
template <ElementType kType>
struct FixedElement {
  __device__ explicit FixedElement(ElementType) {}
  __device__ operator ElementType() const { return kType; }
};

struct Swish {
  float sigmoid;
  float silu;

  __device__ explicit Swish(float gate) {
    constexpr float kLog2E = 1.44269504f;
    sigmoid = FastReciprocal(Add(1.0f, ExpTwo(Multiply(gate, -kLog2E))));
    silu = Multiply(gate, sigmoid);
  }
  __device__ float derivative() const {
    return FusedMultiplyAdd(silu, Add(1.0f, -sigmoid), sigmoid);
  }
};

// One scale for 128 columns of each of the lane's two rows, all of which lie in the four lanes of a
// quad; as formats.quantize, with the floor of `input_scale`.
// values: elements 4 * c + 2 * r + i, 64 of them.
__device__ __forceinline__ void StoreCodes(Drain& drain, const ResultPlace& place,
                                           const float* values, float input_scale, uint8_t* codes,
                                           float* scales, int64_t columns, int64_t column) {
  using Format = Fp8Block128Format;
  const uint32_t lane = Lane();
  float of_row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t amax = 0;
#pragma unroll
    for (int c = 0; c < 16; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        amax = max(amax, FloatBits(values[4 * c + 2 * r + i]) & 0x7FFFFFFFu);
      }
    }
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
    of_row[r] = Format::ScaleOf(amax, input_scale);
    const int32_t row = static_cast<int32_t>(lane / 4 + 8 * r);
    if (lane % 4 == 0 && row < place.rows) {
      scales[(place.row + row) * (columns / 128) + column / 128] = of_row[r];
    }
  }
  const DividerBy<2> divided[2] = {DividerBy<2>(of_row[0]), DividerBy<2>(of_row[1])};
  drain.Store8(place.Of(codes, columns), column, columns, [&](uint32_t c, uint32_t r) {
    const float low = divided[r](values[4 * c + 2 * r]);
    const float high = divided[r](values[4 * c + 2 * r + 1]);
    constexpr uint32_t kNans = E4M3::kNan << 8 | E4M3::kNan;
    return of_row[r] != of_row[r] ? kNans : E4M3::EncodeNumbers(low, high);
  });
}

// out [N or L * K, B]; kFloats: which may be float32.
template <bool kFloats>
struct StoreSums {
  static constexpr int kSides = 1;

  template <typename Type>
  __device__ static void Run(const float (&sums)[128], const ResultArguments& to,
                             const ResultPlace& place, Drain& drain) {
    if (kFloats && to.out_element == ElementType::kFloat32) {
      const DrainRows rows = place.Of(to.out, to.columns * 4);
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const int64_t column = place.column + part * 32;
        if (column >= to.columns) break;
        drain.Store32(rows, column * 4, to.columns * 4, [&](uint32_t c, uint32_t r, uint32_t i) {
          return sums[part * 16 + 4 * c + 2 * r + i];
        });
      }
      return;
    }
    const Type type(to.out_element);
    const DrainRows rows = place.Of(to.out, to.columns * 2);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int64_t column = place.column + part * 64;
      if (column >= to.columns) break;
      drain.Store16(rows, column * 2, to.columns * 2, [&](uint32_t c, uint32_t r) {
        const int at = part * 32 + 4 * c + 2 * r;
        return RoundTwo(type, sums[at], sums[at + 1]);
      });
    }
  }
};

// The tile is 128 columns of gate, then the same of up.
template <bool kCodes>
struct SwiGlu {
  static constexpr int kSides = 2;

  template <typename Type>
  __device__ static void Run(float (&sums)[128], const ResultArguments& to,
                             const ResultPlace& place, Drain& drain) {
    const Type type(to.element);
    if (to.both != nullptr) {
      const DrainRows rows = place.Of(to.both, to.columns * 4);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int64_t side = part / 2, column = place.column + part % 2 * 64;
        if (column >= to.columns) continue;
        drain.Store16(rows, (side * to.columns + column) * 2, (side + 1) * to.columns * 2,
                      [&](uint32_t c, uint32_t r) {
                        const int at = part * 32 + 4 * c + 2 * r;
                        return RoundTwo(type, sums[at], sums[at + 1]);
                      });
      }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = Multiply(Swish(sums[i]).silu, sums[64 + i]);
    if constexpr (kCodes) {
      StoreCodes(drain, place, sums, kNoInputScale, to.out, to.out_scales, to.columns,
                 place.column);
    } else {
      const DrainRows rows = place.Of(to.out, to.columns * 2);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int64_t column = place.column + part * 64;
        if (column >= to.columns) break;
        drain.Store16(rows, column * 2, to.columns * 2, [&](uint32_t c, uint32_t r) {
          const int at = part * 32 + 4 * c + 2 * r;
          return RoundTwo(type, sums[at], sums[at + 1]);
        });
      }
    }
  }
};

// The sums are cotangents of h; gate and up come from memory.
template <bool kCodes>
struct SwiGluBack {
  static constexpr int kSides = 1;

  // This lane's two elements of gate and of up, of columns 8 * c and on of its two rows.
  struct GateUp {
    uint32_t gate[2], up[2];

    __device__ void Load(const ResultArguments& to, const ResultPlace& place, int64_t column) {
      const uint32_t lane = Lane();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t row = static_cast<int32_t>(lane / 4 + 8 * r);
        gate[r] = up[r] = 0;
        if (row >= place.rows || column >= to.columns) continue;
        const uint8_t* from =
            to.both + ((place.row + row) * 2 * to.columns + column + lane % 4 * 2) * 2;
        gate[r] = *reinterpret_cast<const uint32_t*>(from);
        up[r] = *reinterpret_cast<const uint32_t*>(from + to.columns * 2);
      }
    }
  };

  // From the cotangent of h to those of gate (in place) and up.
  template <typename Type>
  __device__ static void Back(Type type, const GateUp& of, int r, int i, float& sum, float& to_up) {
    const float gate = FloatOf(type, of.gate[r] >> 16 * i), up = FloatOf(type, of.up[r] >> 16 * i);
    const Swish swish(gate);
    to_up = Multiply(sum, swish.silu);
    sum = Multiply(Multiply(sum, up), swish.derivative());
  }

  template <typename Type>
  __device__ static void Run(float (&sums)[128], const ResultArguments& to,
                             const ResultPlace& place, Drain& drain) {
    const Type type(to.element);
    const DrainRows rows = place.Of(to.to_both, to.columns * 4);
    if constexpr (kCodes) {
      RunCodes(type, sums, to, place, drain);
      return;
    }
    // 64 columns at a time; gate and up of the next ones are read while these are stored.
    constexpr int kParts = 4, kGroups = 8;
    GateUp next[kGroups];
#pragma unroll
    for (int c = 0; c < kGroups; ++c) next[c].Load(to, place, place.column + 8 * c);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t column = place.column + part * 64;
      if (column >= to.columns) break;
      uint32_t gate_words[2 * kGroups], up_words[2 * kGroups];
#pragma unroll
      for (int c = 0; c < kGroups; ++c) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int at = part * 32 + 4 * c + 2 * r;
          float low = sums[at], high = sums[at + 1], low_up, high_up;
          Back(type, next[c], r, 0, low, low_up);
          Back(type, next[c], r, 1, high, high_up);
          gate_words[2 * c + r] = RoundTwo(type, low, high);
          up_words[2 * c + r] = RoundTwo(type, low_up, high_up);
        }
        if (part + 1 < kParts) next[c].Load(to, place, column + 64 + 8 * c);
      }
      drain.Store16(rows, column * 2, to.columns * 2,
                    [&](uint32_t c, uint32_t r) { return gate_words[2 * c + r]; });
      drain.Store16(rows, (to.columns + column) * 2, to.columns * 4,
                    [&](uint32_t c, uint32_t r) { return up_words[2 * c + r]; });
    }
  }

 private:
  // 128 columns at a time, which share scales.
  template <typename Type>
  __device__ static void RunCodes(Type type, float (&sums)[128], const ResultArguments& to,
                                  const ResultPlace& place, Drain& drain) {
    const DrainRows rows = place.Of(to.to_both, to.columns * 4);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int64_t column = place.column + part * 128;
      if (column >= to.columns) break;
      float* to_gate = sums + part * 64;
      float to_up[64];
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        GateUp of;
        of.Load(to, place, column + 8 * c);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          Back(type, of, e / 2, e % 2, to_gate[4 * c + e], to_up[4 * c + e]);
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float* values = side == 0 ? to_gate : to_up;
        const int64_t at = side * to.columns + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          drain.Store16(rows, (at + half * 64) * 2, to.columns * 4, [&](uint32_t c, uint32_t r) {
            const int i = half * 32 + 4 * c + 2 * r;
            return RoundTwo(type, values[i], values[i + 1]);
          });
        }
        StoreCodes(drain, place, values, kOfGradients, to.out, to.out_scales, 2 * to.columns, at);
      }
    }
  }
};

}  // namespace jax_ep::cuda
