// Codes per 128 x 128 (cuda/matmul/quantize_matrices.cu) on emulated GPUs, bit for bit as the
// formats define: of matrices of numbers with denormals, NaN and infinities, of matrices in mxfp4,
// and of rows, transposed. Takes the seed of its draws and their number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../cc/check.h"
#include "asked.h"
#include "calls_draws.h"
#include "cuda/matmul/quantize_matrices.h"
#include "cuda_runtime.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/element_type.h"
#include "formats/fp8_block128.h"
#include "formats/fp8_block128_e8m0.h"

namespace jax_ep {
namespace {

using Format = Fp8Block128Format;
constexpr int64_t kBlock = Format::kBlock;

template <typename T>
T* Allocate(int64_t count) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)) == cudaSuccess);
  return data;
}

// Numbers of all magnitudes; some in a block are much smaller than others.
float DrawNumber(Random& random) {
  const auto bits = static_cast<uint32_t>(random.Bits());
  switch (random.In(0, 400)) {
    case 0:
      return BitsFloat(bits & 0x80000000u);
    case 1:
      return BitsFloat(bits & 0x807FFFFFu);
    default:
      return BitsFloat((bits & 0x807FFFFFu) | static_cast<uint32_t>(random.In(100, 130)) << 23);
  }
}

template <typename Element>
void Run(Random& random, ElementType type) {
  QuantizeMatricesStep step{};
  step.element = type;
  step.groups = random.In(1, 2), step.sides = random.In(1, 2);
  step.rows = kBlock * random.In(1, 3), step.columns = kBlock * random.In(1, 3);
  const int64_t count = step.groups * step.rows * step.sides * step.columns;
  auto* matrices = Allocate<Element>(count);
  for (int64_t i = 0; i < count; ++i) matrices[i] = FromFloat<Element>(DrawNumber(random));
  if (random.OneIn(2)) {
    matrices[random.In(0, count - 1)] = FromFloat<Element>(BitsFloat(0x7FC00000));
    matrices[random.In(0, count - 1)] = FromFloat<Element>(BitsFloat(0xFF800000));
  }
  // One block is below the floor.
  for (int64_t row = 0; row < kBlock; ++row) {
    for (int64_t i = 0; i < kBlock; ++i) {
      Element& value = matrices[row * step.sides * step.columns + i];
      value = FromFloat<Element>(ToFloat(value) * 0x1p-40f);
    }
  }
  const bool transposed = !random.OneIn(4);
  step.matrices = matrices;
  if (step.sides == 2 && random.OneIn(2)) {
    auto* gate = Allocate<Element>(count / 2);
    auto* up = Allocate<Element>(count / 2);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = i / step.columns / 2, column = i % step.columns;
      (i / step.columns % 2 == 0 ? gate : up)[row * step.columns + column] = matrices[i];
    }
    step.matrices = gate, step.up = up;
  }
  step.codes = Allocate<uint8_t>(count);
  step.scales = Allocate<float>(count / kBlock / kBlock);
  step.transposed = transposed ? Allocate<uint8_t>(count) : nullptr;
  CHECK(cuda::QuantizeMatrices(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  const int64_t across = step.columns / kBlock, down = step.rows / kBlock;
  const int64_t line = step.sides * step.columns;
  for (int64_t block = 0; block < count / kBlock / kBlock; ++block) {
    const int64_t x = block % across, side = block / across % step.sides;
    const int64_t y = block / across / step.sides % down;
    const int64_t group = block / across / step.sides / down;
    const int64_t first =
        (group * step.rows + y * kBlock) * line + side * step.columns + x * kBlock;
    uint32_t amax_bits = 0;
    for (int64_t i = 0; i < kBlock * kBlock; ++i) {
      const float value = ToFloat(matrices[first + i / kBlock * line + i % kBlock]);
      amax_bits = std::max(amax_bits, FloatBits(value) & 0x7FFFFFFFu);
    }
    const float scale = Format::ScaleOf(amax_bits, kNoInputScale);
    CHECK(FloatBits(step.scales[block]) == FloatBits(scale));
    for (int64_t i = 0; i < kBlock * kBlock; ++i) {
      const int64_t row = i / kBlock, column = i % kBlock, at = first + row * line + column;
      const uint32_t code = E4M3::Encode(Divide(ToFloat(matrices[at]), scale));
      CHECK(step.codes[at] == code);
      const int64_t there =
          ((group * step.sides + side) * step.columns + x * kBlock + column) * step.rows +
          y * kBlock + row;
      if (transposed) CHECK(step.transposed[there] == code);
    }
  }
  step.columns -= 1;
  CHECK(cuda::QuantizeMatrices(step, nullptr) == cudaErrorInvalidValue);
  emulator::Reset();
}

void RunOfMxfp4(Random& random) {
  Fp8OfMxfp4Step step{};
  step.groups = random.In(1, 2), step.sides = random.In(1, 2);
  step.rows = kBlock * random.In(1, 6), step.columns = kBlock * random.In(1, 3);
  const int64_t count = step.groups * step.rows * step.sides * step.columns;
  auto* codes = Allocate<uint8_t>(count / 2);
  for (int64_t i = 0; i < count / 2; ++i) codes[i] = static_cast<uint8_t>(random.In(0, 255));
  auto* powers = Allocate<uint8_t>(count / kMxfp4AtomK);
  // The least and the largest numbers, too.
  const int64_t least = random.OneIn(3) ? 0 : random.In(0, 200);
  const int64_t octaves = random.OneIn(2) ? 14 : 50;
  for (int64_t i = 0; i < count / kMxfp4AtomK; ++i) {
    const bool bad = random.OneIn(500);
    powers[i] = bad ? E8M0::kNan : E8M0::Clamp(static_cast<int32_t>(least + random.In(0, octaves)));
  }
  step.codes = codes, step.code_scales = powers;
  step.transposed = Allocate<uint8_t>(count);
  step.scales = Allocate<float>(count / kBlock / kBlock);
  CHECK(cuda::Fp8OfMxfp4(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  const int64_t across = step.columns / kBlock, down = step.rows / kBlock;
  const int64_t line = step.sides * step.columns;
  for (int64_t block = 0; block < count / kBlock / kBlock; ++block) {
    const int64_t x = block % across, side = block / across % step.sides;
    const int64_t y = block / across / step.sides % down;
    const int64_t group = block / across / step.sides / down;
    const int64_t first_row = group * step.rows + y * kBlock;
    const int64_t first = side * step.columns + x * kBlock;
    const auto power_of = [&](int64_t row, int64_t column) {
      return int{powers[(first_row + row) / kMxfp4AtomK * line + first + column]};
    };
    int largest = 0;
    for (int64_t i = 0; i < kBlock * kBlock; ++i) {
      const int power = power_of(i / kBlock, i % kBlock);
      if (power != E8M0::kNan) largest = std::max(largest, power);
    }
    const int shared = std::max(largest - 6, 1);
    CHECK(step.scales[block] == std::ldexp(1.0f, shared - 127));
    for (int64_t i = 0; i < kBlock * kBlock; ++i) {
      const int64_t row = i / kBlock, column = i % kBlock;
      const int byte = codes[(first_row + row) / 2 * line + first + column];
      const float value = E2M1::Decode(static_cast<uint32_t>(byte >> row % 2 * 4) & 0xFu);
      const int power = power_of(row, column);
      const int64_t there =
          ((group * step.sides + side) * step.columns + x * kBlock + column) * step.rows +
          y * kBlock + row;
      const uint32_t code = step.transposed[there];
      if (power == E8M0::kNan) {
        CHECK((code & 0x7Fu) == E4M3::kNan);
      } else {
        CHECK(code == E4M3::Encode(std::ldexp(value, power - shared)));
      }
    }
  }
  step.rows -= 1;
  CHECK(cuda::Fp8OfMxfp4(step, nullptr) == cudaErrorInvalidValue);
  emulator::Reset();
}

void RunTransposed(Random& random) {
  const bool coded = random.OneIn(2);
  TransposeRowsStep step{};
  step.groups = random.OneIn(4) ? random.In(30, 70) : random.In(1, 5);
  step.columns = kBlock * (random.OneIn(8) ? random.In(5, 11) : random.In(1, 3));
  auto* sizes = Allocate<int32_t>(step.groups);
  for (int64_t i = 0; i < step.groups; ++i) {
    constexpr int32_t kSizes[] = {-3, 0, 0, 1, 2, 3, 127, 128, 129, 260};
    sizes[i] = kSizes[random.In(0, step.groups > 5 ? 5 : 9)];
    step.m += std::max(sizes[i], 0);
  }
  step.m = random.OneIn(4) ? random.In(0, step.m) : step.m + random.In(0, 40);
  if (random.OneIn(6)) sizes[random.In(0, step.groups - 1)] = INT32_MAX;
  step.padded = PaddedRows(step.m, step.groups);
  const int64_t count = step.m * step.columns, per_row = step.columns / kBlock;
  auto* numbers = Allocate<BFloat16>(count);
  auto* codes = Allocate<uint8_t>(count);
  auto* scales = Allocate<float>(count / kBlock);
  const bool powers = random.OneIn(2);
  for (int64_t i = 0; i < count / kBlock; ++i) {
    scales[i] = std::ldexp(powers ? 1.0f : 1.3f, static_cast<int>(random.In(-20, 3)));
  }
  const auto value_of = [&](int64_t row, int64_t column) {
    const int64_t at = row * step.columns + column;
    return coded ? Multiply(E4M3::Decode(codes[at]), scales[row * per_row + column / kBlock])
                 : ToFloat(numbers[at]);
  };
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = FromFloat<BFloat16>(DrawNumber(random));
    codes[i] = static_cast<uint8_t>(random.In(0, 0x7E) | (random.OneIn(2) ? 0x80 : 0));
  }
  for (int64_t i = 0; i < 2 && count > 0 && random.OneIn(2); ++i) {
    const int64_t at = random.In(0, count - 1);
    numbers[at] = FromFloat<BFloat16>(BitsFloat(i == 0 ? 0x7FC00000 : 0xFF800000));
    codes[at] = static_cast<uint8_t>(E4M3::kNan | (i == 0 ? 0x80 : 0));
  }
  step.sizes = sizes;
  step.values = coded ? static_cast<const void*>(codes) : numbers;
  step.value_scales = coded ? scales : nullptr;
  step.codes = Allocate<uint8_t>(step.columns * step.padded);
  step.scales = Allocate<float>(step.padded / kBlock * per_row);
  step.padded_sizes = Allocate<int32_t>(step.groups);
  const int64_t all = step.columns * step.padded;
  std::vector<uint8_t> want(step.codes, step.codes + all);
  CHECK(cuda::TransposeRows(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  int64_t start = 0, block = 0;
  for (int64_t group = 0; group < step.groups; ++group) {
    const int64_t size = std::min<int64_t>(std::max(sizes[group], 0), step.m - start);
    const int64_t blocks = (size + kBlock - 1) / kBlock;
    CHECK(step.padded_sizes[group] == blocks * kBlock);
    for (int64_t i = 0; i < blocks * per_row; ++i) {
      const int64_t y = i / per_row, x = i % per_row, rows = std::min(size - y * kBlock, kBlock);
      const int64_t first = start + y * kBlock;
      uint32_t amax_bits = 0;
      for (int64_t at = 0; at < rows * kBlock; ++at) {
        const float value = value_of(first + at / kBlock, x * kBlock + at % kBlock);
        amax_bits = std::max(amax_bits, FloatBits(value) & 0x7FFFFFFFu);
      }
      const uint8_t power = Fp8Block128E8M0Format::ScaleOf(amax_bits, kNoInputScale);
      const float scale = E8M0::Decode(power), by = E8M0::DecodeInverse(power);
      const float found = step.scales[(block + y) * per_row + x];
      CHECK(found == scale || (found != found && scale != scale));
      for (int64_t at = 0; at < kBlock * kBlock; ++at) {
        const int64_t row = at / kBlock, column = x * kBlock + at % kBlock;
        const float value = row < rows ? value_of(first + row, column) : 0.0f;
        want[static_cast<size_t>(column * step.padded + (block + y) * kBlock + row)] =
            static_cast<uint8_t>(E4M3::Encode(Multiply(value, by)));
      }
    }
    start += size, block += blocks;
  }
  // What no group has is left as it was.
  CHECK(all == 0 || std::memcmp(want.data(), step.codes, static_cast<size_t>(all)) == 0);
  step.padded += kBlock;
  CHECK(cuda::TransposeRows(step, nullptr) == cudaErrorInvalidValue);
  emulator::Reset();
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 12);
  Random random(seed);
  CHECK(cuda::PreloadQuantizeMatrices() == cudaSuccess);
  for (int64_t i = 0; i < draws; ++i) {
    const ElementType type = kElementTypes[i % std::size(kElementTypes)];
    VisitElement(type, [&]<typename Element>(Element) { Run<Element>(random, type); });
    RunOfMxfp4(random);
    RunTransposed(random);
  }
  std::printf("%lld quantised: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
