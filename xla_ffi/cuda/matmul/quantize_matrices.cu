// Quantises experts' weights. A thread block takes 128 x 128 elements and reads them into registers
// once. It writes their codes in the order of the elements and, through shared memory, transposed.
#include "cuda/matmul/quantize_matrices.h"

#include <cmath>
#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/shared_memory.cuh"
#include "formats/element_type.h"
#include "formats/fp8_block128.h"

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
    uint8_t* to = transposed + Own::PlaceOf(first_column + column, first_row);
    if constexpr (Own::kRows == 4) {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
  __syncthreads();
  uint8_t* matrix = step.transposed +
                    (static_cast<int64_t>(group) * step.sides + side) * step.columns * step.rows;
#pragma unroll
  for (int i = 0; i < kSize * kChunks / kThreads; ++i) {
    const int place = static_cast<int>(threadIdx.x) + i * kThreads;
    const int column = place / kChunks, row = place % kChunks * kChunkBytes;
    uint8_t* to = matrix + (x * int64_t{kSize} + column) * step.rows + y * int64_t{kSize} + row;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(transposed + Own::PlaceOf(column, row));
  }
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

}  // namespace

cudaError_t QuantizeMatrices(const QuantizeMatricesStep& step, cudaStream_t stream) {
  const int64_t down = step.rows / kSize, across = step.columns / kSize;
  if (step.rows % kSize != 0 || step.columns % kSize != 0 || !IsAligned(step.matrices) ||
      !IsAligned(step.up) || !IsAligned(step.codes) || !IsAligned(step.transposed)) {
    return cudaErrorInvalidValue;
  }
  int64_t blocks = 0;
  if (__builtin_mul_overflow(step.groups * step.sides, down * across, &blocks) ||
      blocks > kMaxIndex) {
    return cudaErrorInvalidValue;
  }
  if (blocks == 0) return cudaSuccess;
  return VisitElement(step.element, [&]<typename Element>(Element) {
    return Launch(QuantizeMatricesKernel<Element>, dim3(static_cast<unsigned>(blocks)), kThreads,
                  kSize * kSize, stream, step);
  });
}

cudaError_t PreloadQuantizeMatrices() {
  cudaError_t error = cudaSuccess;
  for (const ElementType element : kElementTypes) {
    VisitElement(element, [&]<typename Element>(Element) {
      if (error == cudaSuccess) error = Preload(QuantizeMatricesKernel<Element>);
    });
  }
  return error;
}

}  // namespace jax_ep::cuda
