// Codes per 128 x 128 for experts' weights and for their gradients. A thread block takes 128 x 128
// elements and reads them into registers once. It writes their codes through shared memory,
// transposed, and those of matrices of numbers also in the order of the elements.
#include "cuda/matmul/quantize_matrices.h"

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/group_pieces.cuh"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/element_type.h"
#include "formats/fp8_block128.h"
#include "formats/fp8_block128_e8m0.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {
namespace {

using Format = Fp8Block128Format;

constexpr int kSize = 128;  // of a block, and the bytes of a line of its codes
constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowsPerWarp = kSize / kWarps;
constexpr int kChunkBytes = 16;
constexpr int kChunks = kSize / kChunkBytes;

// A lane's share of elements: kRows consecutive rows of kColumns consecutive columns.
template <typename Element>
struct Share {
  static constexpr int kColumns = kLaneElements<Element>;
  static constexpr int kLanesPerRow = kSize / kColumns;
  static constexpr int kRows = kRowsPerWarp * kLanesPerRow / kWarpSize;

  // Where byte `row` of line `column` of the transposed codes lies. Lanes that store at once differ
  // in their columns, and a line spans all banks, so columns have their chunks in different orders.
  __device__ static int PlaceOf(int column, int row) {
    const int chunk = (row / kChunkBytes) ^ (column / kColumns % kChunks);
    return column * kSize + chunk * kChunkBytes + row % kChunkBytes;
  }
};

// Where a thread block's 128 x 128 elements lie: which block of 128 rows and of 128 columns.
struct BlockAt {
  int64_t matrix, y, x;  // a matrix is a side of a group
};

// Stores the codes of rows `row` to `row + kRows - 1` of a column, from the lowest byte on.
template <typename Own>
__device__ void StoreColumn(uint8_t* transposed, int column, int row,
                            const uint32_t (&words)[Own::kRows / 4]) {
  uint8_t* to = transposed + Own::PlaceOf(column, row);
  if constexpr (Own::kRows == 4) {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

// Stores a lane's codes, which it has by rows.
template <typename Own>
__device__ void StoreColumns(uint8_t* transposed, int first_column, int first_row,
                             const uint32_t (&codes)[Own::kRows][Own::kColumns / 4]) {
#pragma unroll
  for (int column = 0; column < Own::kColumns; ++column) {
    // Byte i of word k is of row 4 * k + i.
    uint32_t words[Own::kRows / 4];
#pragma unroll
    for (int k = 0; k < Own::kRows / 4; ++k) {
      const auto of = [&](int i) { return codes[4 * k + i][column / 4]; };
      const uint32_t pick = static_cast<uint32_t>(column % 4) | (column % 4 + 4) << 4;
      const uint32_t low = __byte_perm(of(0), of(1), pick);
      const uint32_t high = __byte_perm(of(2), of(3), pick);
      words[k] = __byte_perm(low, high, 0x5410);
    }
    StoreColumn<Own>(transposed, first_column + column, first_row, words);
  }
}

// Writes what all threads have stored to the matrices at `to`, which have `columns` lines of
// `rows`.
template <typename Own>
__device__ void WriteTransposed(const uint8_t* transposed, uint8_t* to, int64_t rows,
                                int64_t columns, const BlockAt& at) {
  __syncthreads();
  to += (at.matrix * columns + at.x * kSize) * rows + at.y * kSize;
#pragma unroll
  for (int i = 0; i < kSize * kChunks / kThreads; ++i) {
    const int place = static_cast<int>(threadIdx.x) + i * kThreads;
    const int column = place / kChunks, row = place % kChunks * kChunkBytes;
    *reinterpret_cast<uint4*>(to + column * rows + row) =
        *reinterpret_cast<const uint4*>(transposed + Own::PlaceOf(column, row));
  }
}

struct Maxima {
  uint32_t of_warps[kWarps];
};

// Returns the largest of all threads' `bits`.
__device__ uint32_t BlockMax(uint32_t bits) {
  auto& [of_warps] = SharedObject<Maxima>();
#pragma unroll
  for (int by = 1; by < kWarpSize; by *= 2) {
    bits = max(bits, __shfl_xor_sync(kFullWarp, bits, by));
  }
  if (Lane() == 0) of_warps[threadIdx.x / kWarpSize] = bits;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) bits = max(bits, of_warps[i]);
  return bits;
}

// As many blocks share a multiprocessor as there are registers for, so that one loads while others
// compute.
template <typename Element>
__global__ void __launch_bounds__(kThreads, sizeof(Element) == 2 ? 3 : 2)
    QuantizeMatricesKernel(const __grid_constant__ QuantizeMatricesStep step) {
  using Own = Share<Element>;
  using Vector = Elements<Element, Own::kColumns>;
  constexpr int kWords = Own::kColumns / 4;  // of codes in a row

  // Blocks beside each other in a row have consecutive indices, so that whole rows are read.
  const auto across = static_cast<uint32_t>(step.columns / kSize);
  const auto sides = static_cast<uint32_t>(step.sides);
  const auto down = static_cast<uint32_t>(step.rows / kSize);
  const uint32_t x = blockIdx.x % across;
  const uint32_t side = blockIdx.x / across % sides;
  const uint32_t y = blockIdx.x / across / sides % down;
  const uint32_t group = blockIdx.x / across / sides / down;

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int first_row = warp * kRowsPerWarp + Lane() / Own::kLanesPerRow * Own::kRows;
  const int first_column = Lane() % Own::kLanesPerRow * Own::kColumns;
  const int64_t row = static_cast<int64_t>(group) * step.rows + y * int64_t{kSize} + first_row;
  const int64_t column = x * int64_t{kSize} + first_column;
  const int64_t line = step.sides * step.columns;  // from one row to the next
  const int64_t first = row * line + side * step.columns + column;

  Vector values[Own::kRows];
  const bool apart = step.up != nullptr;
  const int64_t pitch = apart ? step.columns : line;
  const auto* from = static_cast<const uint8_t*>(apart && side == 1 ? step.up : step.matrices) +
                     (apart ? row * pitch + column : first) * sizeof(Element);
#pragma unroll
  for (int i = 0; i < Own::kRows; ++i) values[i].Load(from + i * pitch * sizeof(Element));
  uint32_t amax_bits = 0;
#pragma unroll
  for (int i = 0; i < Own::kRows; ++i) amax_bits = max(amax_bits, values[i].AmaxBits());
  amax_bits = BlockMax(amax_bits);

  const float scale = Format::ScaleOf(amax_bits, kNoInputScale);
  if (threadIdx.x == 0) step.scales[blockIdx.x] = scale;
  const float factor = Format::FactorOf(scale, kNoInputScale);
  const bool numbers = fabsf(factor) < INFINITY;
  // See EncodedVector for the number of corrections.
  const DividerBy<sizeof(Element) == 2 ? 1 : 2> scaled(factor);
  uint32_t codes[Own::kRows][kWords];
#pragma unroll
  for (int i = 0; i < Own::kRows; ++i) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = scaled(values[i].Get(4 * word + j));
      codes[i][word] = E4M3::EncodeWord<4>(four, numbers);
    }
    uint8_t* to = step.codes + first + i * line;
    if constexpr (kWords == 1) {
      *reinterpret_cast<uint32_t*>(to) = codes[i][0];
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes[i][0], codes[i][1]);
    }
  }
  if (step.transposed == nullptr) return;

  uint8_t* transposed = SharedBytes();
  StoreColumns<Own>(transposed, first_column, first_row, codes);
  const BlockAt at{static_cast<int64_t>(group) * step.sides + side, y, x};
  WriteTransposed<Own>(transposed, step.transposed, step.rows, step.columns, at);
}

// Thread blocks that take several times 128 x 128 each load the next ones ahead. This is how many
// of them share a line of so many elements.
JAX_EP_HOST_DEVICE uint32_t PartsOf(int64_t elements) {
  constexpr int64_t kEach = 4 * kSize;
  return static_cast<uint32_t>((elements + kEach - 1) / kEach);
}

// ---- Of mxfp4 -----------------------------------------------------------------------------------

// The e4m3 codes of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times a power of two, which are the codes of e2m1
// without signs. Smaller powers than the least make all of them 0.
struct Products {
  static constexpr int kLeast = -13;
  static constexpr int kNan = kMxfp4Headroom - kLeast + 1;  // the entry of a scale that is NaN

  uint2 of_power[kNan + 1];  // those of 2^(kLeast + i)
};

__device__ void MakeProducts(Products& products) {
  static_assert(8 * (Products::kNan + 1) <= kThreads);
  const auto entry = static_cast<int>(threadIdx.x / 8), code = static_cast<int>(threadIdx.x % 8);
  if (entry > Products::kNan) return;
  const float power = BitsFloat(static_cast<uint32_t>(127 + Products::kLeast + entry) << 23);
  const float value = E2M1::Decode(static_cast<uint32_t>(code)) * power;
  reinterpret_cast<uint8_t*>(products.of_power + entry)[code] =
      static_cast<uint8_t>(entry == Products::kNan ? E4M3::kNan : E4M3::Encode(value));
}

// Codes of four elements of e2m1, the first in the lowest bits, by an entry of Products.
__device__ uint32_t FourProducts(uint32_t codes, uint2 products) {
  const uint32_t magnitudes = __byte_perm(products.x, products.y, codes & 0x7777u);
  const uint32_t signs = __byte_perm(0x8000u, 0, codes >> 3 & 0x1111u);
  return magnitudes | signs;
}

// What a lane reads of a block: 8 rows of 4 columns.
struct LaneNibbles {
  using Own = Share<float>;
  static_assert(Own::kRows == 8 && Own::kColumns == 4);

  // Byte `column` of each word is of that column. A byte of codes is of two rows.
  uint32_t codes[Own::kRows / 2];
  uint32_t scales;

  // `row`: of all groups' rows; `at`: of the first column in a row, of which a line has all sides.
  __device__ void Load(const Fp8OfMxfp4Step& step, int64_t row, int64_t at, int64_t line) {
#pragma unroll
    for (int i = 0; i < Own::kRows / 2; ++i) {
      codes[i] = *reinterpret_cast<const uint32_t*>(step.codes + (row / 2 + i) * line + at);
    }
    const uint8_t* from = step.code_scales + row / kMxfp4AtomK * line + at;
    scales = *reinterpret_cast<const uint32_t*>(from);
  }
};

__global__ void __launch_bounds__(kThreads, 3)
    Fp8OfMxfp4MatricesKernel(const __grid_constant__ Fp8OfMxfp4Step step) {
  using Own = LaneNibbles::Own;
  constexpr int kColumns = Own::kColumns;
  // Blocks below each other have consecutive indices, so that whole lines of codes are written.
  const auto down = static_cast<uint32_t>(step.rows / kSize);
  const auto across = static_cast<uint32_t>(step.columns / kSize);
  const auto sides = static_cast<uint32_t>(step.sides);
  const uint32_t parts = PartsOf(step.rows), part = blockIdx.x % parts;
  const uint32_t x = blockIdx.x / parts % across;
  const uint32_t matrix = blockIdx.x / parts / across;
  const uint32_t group = matrix / sides, side = matrix % sides;

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int first_row = warp * Own::kRows;
  const int first_column = Lane() * kColumns;
  const int64_t row = static_cast<int64_t>(group) * step.rows + first_row;
  const int64_t column = side * step.columns + x * int64_t{kSize} + first_column;
  const int64_t line = step.sides * step.columns;  // from one row of bytes to the next

  auto& products = SharedObject<Products>();
  MakeProducts(products);
  uint8_t* transposed = SharedBytes();
  LaneNibbles next;
  next.Load(step, row + part * int64_t{kSize}, column, line);
  JAX_EP_NO_UNROLL
  for (uint32_t y = part; y < down; y += parts) {
    const auto [codes, scales] = next;
    if (y + parts < down) next.Load(step, row + (y + parts) * int64_t{kSize}, column, line);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const uint32_t byte = scales >> 8 * i & 0xFFu;
      largest = max(largest, byte == E8M0::kNan ? 0 : byte);
    }
    // Its barrier also comes after all reads of what was transposed before.
    largest = BlockMax(largest);
    // A scale stays a normal float.
    const int shared = max(static_cast<int>(largest) - kMxfp4Headroom, 1);
    if (threadIdx.x == 0) {
      const int64_t block = (static_cast<int64_t>(group) * down + y) * sides + side;
      step.scales[block * across + x] = BitsFloat(static_cast<uint32_t>(shared) << 23);
    }

    // Byte i of line j is that of row 2 * i and of the one after it, of column j.
    const uint32_t even = __byte_perm(codes[0], codes[1], 0x6240);  // of columns 0 and 2
    const uint32_t odd = __byte_perm(codes[0], codes[1], 0x7351);
    const uint32_t later_even = __byte_perm(codes[2], codes[3], 0x6240);
    const uint32_t later_odd = __byte_perm(codes[2], codes[3], 0x7351);
    const uint32_t lines[kColumns] = {
        __byte_perm(even, later_even, 0x5410), __byte_perm(odd, later_odd, 0x5410),
        __byte_perm(even, later_even, 0x7632), __byte_perm(odd, later_odd, 0x7632)};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int byte = static_cast<int>(scales >> 8 * i & 0xFFu);
      const int entry = max(byte - shared - Products::kLeast, 0);
      const uint2 own = products.of_power[byte == E8M0::kNan ? Products::kNan : entry];
      const uint32_t words[2] = {FourProducts(lines[i] & 0xFFFFu, own),
                                 FourProducts(lines[i] >> 16, own)};
      StoreColumn<Own>(transposed, first_column + i, first_row, words);
    }
    const BlockAt at{matrix, y, x};
    WriteTransposed<Own>(transposed, step.transposed, step.rows, step.columns, at);
  }
}

// ---- Of rows ------------------------------------------------------------------------------------

// What a lane holds of rows: numbers, or codes with a scale for each of its rows.
template <bool kCodes>
struct LaneRows {
  using Own = Share<BFloat16>;
  static constexpr int kWords = Own::kColumns / 4;  // of codes in a row
  using Row = std::conditional_t<kCodes, uint2, Elements<BFloat16, Own::kColumns>>;

  Row rows[Own::kRows];
  float scales[Own::kRows];

  __device__ void Load(const TransposeRowsStep& step, int i, int64_t row, int64_t column) {
    const int64_t at = row * step.columns + column;
    const auto* values = static_cast<const uint8_t*>(step.values);
    if constexpr (kCodes) {
      rows[i] = *reinterpret_cast<const uint2*>(values + at);
      scales[i] = step.value_scales[row * (step.columns / kSize) + column / kSize];
    } else {
      rows[i].Load(values + at * static_cast<int64_t>(sizeof(BFloat16)));
    }
  }
  __device__ void Clear(int i) {
    rows[i] = Row{};
    scales[i] = 0.0f;
  }
  __device__ uint32_t AmaxBits(int i) const {
    if constexpr (kCodes) {
      // Without their signs, codes have the order of their values, and NaN is the largest.
      const uint32_t four = __vmaxu4(rows[i].x & 0x7F7F7F7Fu, rows[i].y & 0x7F7F7F7Fu);
      const uint32_t two = __vmaxu4(four, four >> 16);
      const float largest = E4M3::Decode(max(two & 0xFFu, two >> 8 & 0xFFu));
      return FloatBits(Multiply(largest, scales[i])) & 0x7FFFFFFFu;
    } else {
      return rows[i].AmaxBits();
    }
  }
  // Four elements of a row, multiplied by a power of two.
  __device__ void Scaled(int i, int word, float factor, float (&four)[4]) const {
    if constexpr (kCodes) {
      const uint32_t codes = word == 0 ? rows[i].x : rows[i].y;
      E4M3::DecodeTwo(codes, four[0], four[1]);
      E4M3::DecodeTwo(codes >> 16, four[2], four[3]);
      // A power of two, so that it may come before the product.
      factor = Multiply(scales[i], factor);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = rows[i].Get(4 * word + j);
    }
#pragma unroll
    for (float& value : four) value = Multiply(value, factor);
  }
};

struct RowGroups {
  const int32_t* sizes;
  int32_t groups;
  int32_t m;
};

template <bool kCodes>
__global__ void __launch_bounds__(kThreads, 2)
    TransposeRowsKernel(const __grid_constant__ TransposeRowsStep step) {
  using Own = typename LaneRows<kCodes>::Own;
  using BlockFormat = Fp8Block128E8M0Format;
  const auto across = static_cast<uint32_t>(step.columns / kSize);
  const uint32_t parts = PartsOf(step.columns);
  const uint32_t part = blockIdx.x % parts, y = blockIdx.x / parts;
  const RowGroups groups{step.sizes, static_cast<int32_t>(step.groups),
                         static_cast<int32_t>(step.m)};
  GroupPieces<RowGroups> pieces(groups);
  const bool writes_sizes = blockIdx.x == 0 && threadIdx.x < kWarpSize;
  GroupPiece own{-1, 0, 0, 0};
  do {
    pieces.Load([&](int32_t group, int32_t size) {
      const int32_t count = (size + kSize - 1) / kSize;
      if (writes_sizes && group < groups.groups) step.padded_sizes[group] = count * kSize;
      return group < groups.groups ? count : 0;
    });
    if (own.group < 0 && y < pieces.end()) own = pieces.Find(y);
  } while ((own.group < 0 || writes_sizes) && pieces.Advance());
  if (own.group < 0) return;  // all threads of the block

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int first_row = warp * kRowsPerWarp + Lane() / Own::kLanesPerRow * Own::kRows;
  const int first_column = Lane() % Own::kLanesPerRow * Own::kColumns;
  const int32_t within = own.index * kSize + first_row;  // the group
  const auto load = [&](LaneRows<kCodes>& lane, uint32_t x) {
#pragma unroll
    for (int i = 0; i < Own::kRows; ++i) {
      if (x < across && within + i < own.size) {
        lane.Load(step, i, int64_t{own.start} + within + i, x * int64_t{kSize} + first_column);
      } else {
        lane.Clear(i);
      }
    }
  };
  uint8_t* transposed = SharedBytes();
  LaneRows<kCodes> next;
  load(next, part);
  JAX_EP_NO_UNROLL
  for (uint32_t x = part; x < across; x += parts) {
    const LaneRows<kCodes> lane = next;
    load(next, x + parts);
    uint32_t amax_bits = 0;
#pragma unroll
    for (int i = 0; i < Own::kRows; ++i) amax_bits = max(amax_bits, lane.AmaxBits(i));
    // Its barrier also comes after all reads of what was transposed before.
    amax_bits = BlockMax(amax_bits);
    const uint8_t power = BlockFormat::ScaleOf(amax_bits, kNoInputScale);
    if (threadIdx.x == 0) {
      step.scales[int64_t{y} * across + x] = BlockFormat::ScaleValue(power);
    }
    const float factor = BlockFormat::FactorOf(power, kNoInputScale);
    const bool numbers = power != E8M0::kNan;
    uint32_t codes[Own::kRows][LaneRows<kCodes>::kWords];
#pragma unroll
    for (int i = 0; i < Own::kRows; ++i) {
#pragma unroll
      for (int word = 0; word < LaneRows<kCodes>::kWords; ++word) {
        float four[4];
        lane.Scaled(i, word, factor, four);
        codes[i][word] = E4M3::EncodeWord<4>(four, numbers);
      }
    }
    StoreColumns<Own>(transposed, first_column, first_row, codes);
    const BlockAt at{0, y, x};
    WriteTransposed<Own>(transposed, step.codes, step.padded, step.columns, at);
  }
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// Returns the number of thread blocks of a step, and -1 for sizes that kernels do not take.
template <typename Step>
int64_t BlocksOf(const Step& step) {
  if (step.rows % kSize != 0 || step.columns % kSize != 0) return -1;
  int64_t blocks = 0;
  const int64_t of_matrix = step.rows / kSize * (step.columns / kSize);
  const bool over = __builtin_mul_overflow(step.groups * step.sides, of_matrix, &blocks);
  return over || blocks > kMaxIndex ? -1 : blocks;
}

}  // namespace

cudaError_t QuantizeMatrices(const QuantizeMatricesStep& step, cudaStream_t stream) {
  const int64_t blocks = BlocksOf(step);
  if (blocks < 0 || !IsAligned(step.matrices) || !IsAligned(step.up) || !IsAligned(step.codes) ||
      !IsAligned(step.transposed)) {
    return cudaErrorInvalidValue;
  }
  if (blocks == 0) return cudaSuccess;
  return VisitElement(step.element, [&]<typename Element>(Element) {
    return Launch(QuantizeMatricesKernel<Element>, dim3(static_cast<unsigned>(blocks)), kThreads,
                  kSize * kSize, stream, step);
  });
}

cudaError_t Fp8OfMxfp4(const Fp8OfMxfp4Step& step, cudaStream_t stream) {
  const int64_t blocks = BlocksOf(step);
  if (blocks < 0 || !IsAligned(step.codes) || !IsAligned(step.code_scales) ||
      !IsAligned(step.transposed)) {
    return cudaErrorInvalidValue;
  }
  if (blocks == 0) return cudaSuccess;
  const int64_t down = step.rows / kSize;
  const auto shared = static_cast<unsigned>(blocks / down * PartsOf(step.rows));
  return Launch(Fp8OfMxfp4MatricesKernel, dim3(shared), kThreads, kSize * kSize, stream, step);
}

cudaError_t TransposeRows(const TransposeRowsStep& step, cudaStream_t stream) {
  if (step.columns % kSize != 0 || step.padded != PaddedRows(step.m, step.groups) ||
      step.padded > kMaxIndex || step.padded / kSize * (step.columns / kSize) > kMaxIndex ||
      !IsAligned(step.values) || !IsAligned(step.codes)) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<unsigned>(step.padded / kSize) * PartsOf(step.columns);
  if (blocks == 0) {
    return cudaMemsetAsync(step.padded_sizes, 0, static_cast<size_t>(step.groups) * 4, stream);
  }
  const auto run = [&](auto kernel) {
    return Launch(kernel, dim3(blocks), kThreads, kSize * kSize, stream, step);
  };
  return step.value_scales == nullptr ? run(TransposeRowsKernel<false>)
                                      : run(TransposeRowsKernel<true>);
}

cudaError_t PreloadQuantizeMatrices() {
  cudaError_t error = Preload(Fp8OfMxfp4MatricesKernel);
  if (error == cudaSuccess) error = Preload(TransposeRowsKernel<false>);
  if (error == cudaSuccess) error = Preload(TransposeRowsKernel<true>);
  for (const ElementType element : kElementTypes) {
    VisitElement(element, [&]<typename Element>(Element) {
      if (error == cudaSuccess) error = Preload(QuantizeMatricesKernel<Element>);
    });
  }
  return error;
}

}  // namespace jax_ep::cuda
