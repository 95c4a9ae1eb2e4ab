// What happens to a tile's sums. The four warps of a warpgroup call an epilogue with the sums of
// wgmma [64, kBlockN], which have kBlockN / kSides columns of each side. A lane's element
// 4 * c + 2 * r + i is column 8 * c + 2 * (lane % 4) + i of row lane / 4 + 8 * r of its warp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/matmul/activations.cuh"
#include "cuda/matmul/drain.cuh"
#include "cuda/matmul/scheduler.cuh"
#include "cuda/matmul/step.h"
#include "formats/e4m3.h"
#include "formats/fp8_block128.h"

namespace jax_ep::cuda {

// What an epilogue reads of a MatmulStep.
struct ResultArguments : ActivationOptions {
  uint8_t* d;
  float* d_scales;
  uint8_t* gate_up_rows;
  uint8_t* to_gate_up_rows;
  const float* bias;
  int32_t n;
  int32_t d_sides;  // of each row of D
  ElementType element;
  ElementType out_element;
};

// The same on the device, with the maps for tensor stores. `gate_up_rows_map` is of
// `to_gate_up_rows` in kinds that have it, else of `gate_up_rows`.
struct Results : ResultArguments {
  const CUtensorMap* d_map;
  const CUtensorMap* gate_up_rows_map;

  __device__ ResultMatrix D(int64_t element_bytes) const {
    return {d, d_map, n, element_bytes * d_sides * n};
  }
  // Whose elements there are where `bias` is not null: a group's bias of a side.
  __device__ const float* Bias(int32_t group, int32_t side, int32_t sides) const {
    return bias + (int64_t{group} * sides + side) * n;
  }
  // `matrix`: gate_up_rows or to_gate_up_rows.
  __device__ ResultMatrix GateUpRows(uint8_t* matrix) const {
    return {matrix, gate_up_rows_map, n, int64_t{n} * 4};
  }
};

// A warp's rows of a tile.
struct ResultPlace {
  int64_t row;     // of the result
  int32_t rows;    // how many of the warp's 16 rows exist
  int32_t column;  // of a side
  int32_t group;

  __device__ DrainRows Of(const ResultMatrix& matrix) const { return DrainRows(matrix, row, rows); }
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

// An element type that is known when the kernel is compiled. Where it is not, epilogues take an
// ElementType.
template <ElementType kType>
struct FixedElement {
  __device__ explicit FixedElement(ElementType) {}
  __device__ operator ElementType() const { return kType; }
};

// Stores 128 columns in fp8, with one scale for each of the lane's two rows, which lie in the
// four lanes of a quad. Quantises as formats.quantize does, with the floor of `input_scale`.
// `values` has 64 elements, 4 * c + 2 * r + i.
__device__ __forceinline__ void StoreFp8(Drain& drain, const ResultPlace& place,
                                         const float* values, float input_scale, const Results& to,
                                         int side) {
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
      const int64_t line = (place.row + row) * to.d_sides + side;
      to.d_scales[line * (to.n / 128) + place.column / 128] = of_row[r];
    }
  }
  // The instruction may keep the sign of a NaN, so the codes of a NaN scale are set here. Masks do
  // it because nvcc turns choices into branches.
  uint32_t kept[2], nans[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_number = of_row[r] == of_row[r];
    kept[r] = is_number ? 0xFFFF : 0;
    nans[r] = is_number ? 0 : E4M3::kNan << 8 | E4M3::kNan;
  }
  const DividerBy<2> divided[2] = {DividerBy<2>(of_row[0]), DividerBy<2>(of_row[1])};
  drain.Store8(place.Of(to.D(1)), side, place.column, [&](uint32_t c, uint32_t r) {
    const float low = divided[r](values[4 * c + 2 * r]);
    const float high = divided[r](values[4 * c + 2 * r + 1]);
    return (E4M3::EncodeNumbers(low, high) & kept[r]) | nans[r];
  });
}

// Fills a warp's rows, with all of their columns, with bytes that are a NaN in every type: rows of
// D, or of `to_gate_up_rows` if that is the only result.
__device__ __forceinline__ void FillWithNans(const ResultPlace& place, const Results& to,
                                             int64_t d_bytes) {
  const ResultMatrix matrix = to.d != nullptr ? to.D(d_bytes) : to.GateUpRows(to.to_gate_up_rows);
  uint8_t* at = matrix.base + place.row * matrix.row_bytes;
  const int64_t end = Min<int64_t>(place.rows, kWarpRows) * matrix.row_bytes;
  for (int64_t byte = Lane() * 16; byte < end; byte += kWarpSize * 16) {
    *reinterpret_cast<uint4*>(at + byte) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
}

// Stores 64 * kParts columns of 16-bit elements of a side, from `column` on.
template <int kParts, typename Type>
__device__ __forceinline__ void StoreElements(Drain& drain, const DrainRows& rows, Type type,
                                              const float* sums, int side, int32_t column,
                                              int32_t columns) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int32_t at = column + part * 64;
    if (at >= columns) break;
    drain.Store16(rows, side, at, [&](uint32_t c, uint32_t r) {
      const float* two = sums + part * 32 + 4 * c + 2 * r;
      return RoundTwo(type, two[0], two[1]);
    });
  }
}

// Adds a group's bias of a side to 8 * kChunks columns of a warp's sums.
template <int kChunks>
__device__ __forceinline__ void AddBias(float* sums, const float* bias, int32_t column,
                                        int32_t columns) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int32_t at = column + 8 * c;
    if (at < columns) AddTwo(sums + 4 * c, bias + at + Lane() % 4 * 2);
  }
}

// Which element type D of StoreSums has.
enum class ElementD { kElement, kFloat32, kEither };

// D [M or L * K, N].
template <ElementD kElementD, bool kMayHaveBias>
struct StoreSums {
  static constexpr int kSides = 1;
  static constexpr int kBlockN = kMostBlockN;

  template <typename Type>
  __device__ static void Run(float (&sums)[128], const Results& to, const ResultPlace& place,
                             Drain& drain) {
    if constexpr (kMayHaveBias) {
      if (to.bias != nullptr) {
        AddBias<32>(sums, to.Bias(place.group, 0, 1), place.column, to.n);
      }
    }
    if (kElementD == ElementD::kFloat32 ||
        (kElementD == ElementD::kEither && to.out_element == ElementType::kFloat32)) {
      const DrainRows rows = place.Of(to.D(4));
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const int32_t column = place.column + part * 32;
        if (column >= to.n) break;
        drain.Store32(rows, column, [&](uint32_t c, uint32_t r, uint32_t i) {
          return sums[part * 16 + 4 * c + 2 * r + i];
        });
      }
      return;
    }
    StoreElements<4>(drain, place.Of(to.D(2)), Type(to.out_element), sums, 0, place.column, to.n);
  }
};

// The tile is 128 columns of gate, then the same columns of up.
template <bool kFp8>
struct Activate {
  static constexpr int kSides = 2;
  static constexpr int kBlockN = kMostBlockN;

  template <typename Type>
  __device__ static void Run(float (&sums)[128], const Results& to, const ResultPlace& place,
                             Drain& drain) {
    const Type type(to.element);
    if (to.bias != nullptr) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        AddBias<16>(sums + 64 * side, to.Bias(place.group, side, 2), place.column, to.n);
      }
    }
    if (to.gate_up_rows != nullptr) {
      const DrainRows rows = place.Of(to.GateUpRows(to.gate_up_rows));
      StoreElements<2>(drain, rows, type, sums, 0, place.column, to.n);
      StoreElements<2>(drain, rows, type, sums + 64, 1, place.column, to.n);
    }
    WithActivation(to, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        sums[i] = Multiply(activation.OfGate(sums[i]), activation.OfUp(sums[64 + i]));
      }
    });
    if constexpr (kFp8) {
      StoreFp8(drain, place, sums, kNoInputScale, to, 0);
    } else {
      StoreElements<2>(drain, place.Of(to.D(2)), type, sums, 0, place.column, to.n);
    }
  }
};

// The sums are cotangents of h. Gate and up are loaded from memory in turns, 64 columns at a time,
// each a step ahead of its use. No element is read after it was written, so `gate_up_rows` and
// `to_gate_up_rows` may be one array.
template <bool kFp8>
struct ActivateDgrad {
  static constexpr int kSides = 1;
  static constexpr int kBlockN = kFp8 ? 128 : kMostBlockN;

  template <typename Type>
  __device__ static void Run(float (&sums)[kBlockN / 2], const Results& to,
                             const ResultPlace& place, Drain& drain) {
    if constexpr (kFp8) {
      RunFp8(Type(to.element), sums, to, place, drain);
    } else {
      Run16(Type(to.element), sums, to, place, drain);
    }
  }

 private:
  // WithActivation, where only the function of up matters.
  template <typename Run>
  __device__ __forceinline__ static void WithUp(const ActivationOptions& options, Run run) {
    if (options.activation == Activation::kSwiGluClamped) {
      run(ActivationOf<Activation::kSwiGluClamped>(options));
    } else {
      run(ActivationOf<Activation::kSwiGlu>(options));
    }
  }

  template <typename Type>
  __device__ static void Run16(Type type, float (&sums)[128], const Results& to,
                               const ResultPlace& place, Drain& drain) {
    const DrainRows from = place.Of(to.GateUpRows(to.gate_up_rows));
    const DrainRows rows = place.Of(to.GateUpRows(to.to_gate_up_rows));
    Drain::Lines ahead = drain.Load(from, 0, place.column);
    // Not unrolled: every part uses the same registers, because there are no more.
    JAX_EP_NO_UNROLL
    for (int part = 0; part < 4; ++part) {
      const int32_t column = place.column + part * 64;
      if (column >= to.n) break;
      uint32_t up_words[16];
      drain.Take();
      drain.Put(ahead);
      ahead = drain.Load(from, 1, column);
      WithActivation(to, [&](auto activation) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float to_up[2];
          BackToUp(activation, type, drain.Word(i / 2, i % 2), sums + 2 * i, to_up);
          up_words[i] = RoundTwo(type, to_up[0], to_up[1]);
        }
      });
      drain.Put(ahead);
      if (part < 3) ahead = drain.Load(from, 0, column + 64);
      WithUp(to, [&](auto activation) {
        drain.Store16<true>(rows, 0, column, [&](uint32_t c, uint32_t r) {
          float* two = sums + 4 * c + 2 * r;
          const uint32_t up = drain.Word(c, r);
          BackToGate(activation, type, up, two);
          if constexpr (!decltype(activation)::kUpIsPlain) {
            uint32_t& word = up_words[2 * c + r];
            float to_up[2] = {FloatOf(type, word), FloatOf(type, word >> 16)};
            ThroughUp(activation, type, up, to_up);
            word = RoundTwo(type, to_up[0], to_up[1]);
          }
          return RoundTwo(type, two[0], two[1]);
        });
      });
      drain.Store16(rows, 1, column, [&](uint32_t c, uint32_t r) { return up_words[2 * c + r]; });
#pragma unroll
      for (int i = 0; i < 96; ++i) sums[i] = sums[32 + i];
    }
  }

  // Takes cotangents of h and two elements of gate. Computes the cotangents of OfUp(up), and leaves
  // in `sums` what must be multiplied by OfUp(up) to give the cotangents of gate.
  template <typename Of, typename Type>
  __device__ static void BackToUp(Of activation, Type type, uint32_t gate, float* sums,
                                  float* to_up) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const GateAndDerivative of_gate = activation.Both(FloatOf(type, gate >> 16 * i));
      to_up[i] = Multiply(sums[i], of_gate.value);
      sums[i] = Multiply(sums[i], of_gate.derivative);
    }
  }
  template <typename Of, typename Type>
  __device__ static void BackToGate(Of activation, Type type, uint32_t up, float* sums) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = Multiply(sums[i], activation.OfUp(FloatOf(type, up >> 16 * i)));
    }
  }
  // Makes cotangents of up of those of OfUp(up).
  template <typename Of, typename Type>
  __device__ static void ThroughUp(Of activation, Type type, uint32_t up, float* to_up) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to_up[i] = Multiply(to_up[i], activation.UpDerivative(FloatOf(type, up >> 16 * i)));
    }
  }

  __device__ static void Swap(float& a, float& b) {
    const float other = a;
    a = b, b = other;
  }

  // Stores 128 columns, as they are and in fp8.
  template <typename Type>
  __device__ static void StoreSide(Type type, int side, const float* values, const Results& to,
                                   const ResultPlace& place, Drain& drain) {
    StoreElements<2>(drain, place.Of(to.GateUpRows(to.to_gate_up_rows)), type, values, side,
                     place.column, to.n);
    StoreFp8(drain, place, values, kOfGradients, to, side);
  }

  // A tile has 128 columns: there are not enough registers for twice as many.
  template <typename Type>
  __device__ static void RunFp8(Type type, float (&sums)[64], const Results& to,
                                const ResultPlace& place, Drain& drain) {
    const DrainRows from = place.Of(to.GateUpRows(to.gate_up_rows));
    const int32_t column = place.column;
    float to_up[64];
    drain.Take();
    Drain::Lines ahead = drain.Load(from, 0, column);
    // Not unrolled: both halves use the same registers, so that no more lines are under way.
    JAX_EP_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      drain.Put(ahead);
      ahead = drain.Load(from, 1, column + half * 64);
      WithActivation(to, [&](auto activation) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          BackToUp(activation, type, drain.Word(i / 2, i % 2), sums + 2 * i, to_up + 2 * i);
        }
      });
      drain.Put(ahead);
      if (half == 0) ahead = drain.Load(from, 0, column + 64);
      WithUp(to, [&](auto activation) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const uint32_t up = drain.Word(i / 2, i % 2);
          BackToGate(activation, type, up, sums + 2 * i);
          if constexpr (!decltype(activation)::kUpIsPlain) {
            ThroughUp(activation, type, up, to_up + 2 * i);
          }
        }
      });
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        Swap(sums[i], sums[32 + i]);
        Swap(to_up[i], to_up[32 + i]);
      }
    }
    StoreSide(type, 0, sums, to, place, drain);
    StoreSide(type, 1, to_up, to, place, drain);
  }
};

}  // namespace jax_ep::cuda
