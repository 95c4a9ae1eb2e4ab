// Passes over rows that gradients need (cuda/expert_rows.cu) on emulated GPUs, bit for bit, with
// denormals, NaN and infinities. Rows that are left out must not change. Takes the seed of its
// draws and their number.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "../cc/check.h"
#include "asked.h"
#include "cuda/expert_rows.h"
#include "cuda_runtime.h"
#include "formats/element_type.h"
#include "formats/fp8_block128.h"

namespace jax_ep {
namespace {

using Format = Fp8Block128Format;
constexpr int64_t kBlock = Format::kBlock;
constexpr int64_t kVectorBytes = 16;
constexpr int kLanes = 32;
constexpr uint8_t kPattern = 0x5A;  // fills results before a call

template <typename T>
T* Allocate(int64_t count) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)) == cudaSuccess);
  std::memset(static_cast<void*>(data), kPattern, static_cast<size_t>(count) * sizeof(T));
  return data;
}

// Whether `count` elements at `from` still hold the pattern.
template <typename T>
bool IsUntouched(const T* from, int64_t count) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(from);
  return std::all_of(bytes, bytes + count * static_cast<int64_t>(sizeof(T)),
                     [](uint8_t byte) { return byte == kPattern; });
}

void SetCase(const char* kernel, ElementType type, std::initializer_list<int64_t> sizes) {
  std::string text = std::string(kernel) + " element " + std::to_string(static_cast<int>(type));
  for (const int64_t size : sizes) text += ' ' + std::to_string(size);
  CurrentCase() = text + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
}

// A number whose biased float32 exponent is `most` or a little less.
float DrawNumber(Random& random, int64_t most) {
  const auto bits = static_cast<uint32_t>(random.Bits());
  switch (random.In(0, 400)) {
    case 0:
      return BitsFloat(bits & 0x80000000u);
    case 1:
      return BitsFloat(bits & 0x807FFFFFu);
    default:
      return BitsFloat((bits & 0x807FFFFFu) | static_cast<uint32_t>(random.In(most - 14, most))
                                                  << 23);
  }
}

int64_t DrawRows(Random& random) { return random.OneIn(8) ? 0 : random.In(1, 40); }

// ---- The way back through a combine -------------------------------------------------------------

// Adds in the order that the kernel documents.
template <typename Element>
float Dot(const Element* left, const Element* right, int64_t count) {
  constexpr auto kCount = static_cast<int64_t>(kVectorBytes / sizeof(Element));
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    float& sum = lanes[i / kCount % kLanes];
    sum = Add(sum, Multiply(ToFloat(left[i]), ToFloat(right[i])));
  }
  for (int by = 1; by < kLanes; by *= 2) {
    float sums[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = Add(lanes[lane], lanes[lane ^ by]);
    std::copy(sums, sums + kLanes, lanes);
  }
  return lanes[0];
}

template <typename Element>
void RunCombineBack(Random& random, ElementType type) {
  CombineBackStep step{};
  step.element = type;
  step.rows = DrawRows(random);
  // Fewer vectors than lanes, or more than a warp holds at once.
  step.hidden = static_cast<int64_t>(kVectorBytes / sizeof(Element)) *
                (random.OneIn(2) ? random.In(1, 40) : random.In(41, 300));
  SetCase("combine back", type, {step.rows, step.hidden});
  const int64_t count = step.rows * step.hidden;
  auto* rows = Allocate<Element>(count);
  auto* expert_out = Allocate<Element>(count);
  auto* weights = Allocate<float>(step.rows);
  auto* slots = Allocate<int32_t>(step.rows);
  const float nan = BitsFloat(0x7FC00000);
  for (int64_t row = 0; row < step.rows; ++row) {
    slots[row] = static_cast<int32_t>(random.In(0, 1000));
    weights[row] = DrawNumber(random, 128);
    if (random.OneIn(3)) slots[row] = random.OneIn(2) ? -1 : INT32_MIN;
    const bool there = slots[row] >= 0;
    if (!there && random.OneIn(2)) weights[row] = nan;
    for (int64_t i = row * step.hidden; i < (row + 1) * step.hidden; ++i) {
      rows[i] = FromFloat<Element>(DrawNumber(random, 130));
      expert_out[i] = FromFloat<Element>(there ? DrawNumber(random, 130) : nan);
      // Any bits, also of NaN that rounding never makes.
      if (!there) {
        const uint64_t bits = random.Bits();
        std::memcpy(&rows[i], &bits, sizeof rows[i]);
      }
    }
    if (there && random.OneIn(10)) {
      const int64_t at = row * step.hidden + random.In(0, step.hidden - 1);
      (random.OneIn(2) ? rows : expert_out)[at] =
          FromFloat<Element>(BitsFloat(random.OneIn(2) ? 0x7FC00000 : 0xFF800000));
    }
  }
  const std::vector<Element> cotangents(rows, rows + count);
  step.expert_out = expert_out, step.router_weights = weights, step.row_slot = slots;
  step.cotangents = step.to_rows = rows;
  step.to_weights = Allocate<float>(step.rows);
  CHECK(cuda::CombineBack(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  for (int64_t row = 0; row < step.rows; ++row) {
    const bool there = slots[row] >= 0;
    const Element* before = cotangents.data() + row * step.hidden;
    std::vector<Element> to_row(before, before + step.hidden);
    if (there) {
      for (Element& value : to_row) {
        value = FromFloat<Element>(Multiply(weights[row], ToFloat(value)));
      }
    }
    CHECK(std::memcmp(rows + row * step.hidden, to_row.data(), to_row.size() * sizeof(Element)) ==
          0);
    const float to_weight = there ? Dot(before, expert_out + row * step.hidden, step.hidden) : 0.0f;
    // FromFloat maps all NaN to one, as it is unspecified which NaN a sum is.
    CHECK(FloatBits(FromFloat<float>(step.to_weights[row])) ==
          FloatBits(FromFloat<float>(to_weight)));
  }
  emulator::Reset();
}

// ---- Rows of groups -----------------------------------------------------------------------------

// Draws sizes, and groups that are empty, negative or reach past the rows. Returns how many rows
// are in groups.
int64_t DrawGroups(Random& random, GroupedRows& grouped) {
  grouped.rows = DrawRows(random);
  grouped.columns = kBlock * random.In(1, 12);
  // Half of the time more than a warp has lanes.
  grouped.groups = random.OneIn(2) ? random.In(33, 80) : random.In(0, 6);
  auto* sizes = Allocate<int32_t>(grouped.groups);
  grouped.sizes = sizes;
  const int64_t most = grouped.rows * random.In(1, 3) / std::max<int64_t>(grouped.groups, 1);
  const bool large = random.OneIn(10);  // the sum overflows int32
  int64_t in_groups = 0;
  for (int64_t i = 0; i < grouped.groups; ++i) {
    sizes[i] = random.OneIn(4) ? 0 : static_cast<int32_t>(random.In(0, most));
    if (large && random.OneIn(2)) sizes[i] = INT32_MAX;
    if (random.OneIn(6)) sizes[i] = random.OneIn(2) ? -1 - sizes[i] : INT32_MIN;
    in_groups += std::max(sizes[i], 0);
  }
  return std::min(in_groups, grouped.rows);
}

template <typename Element>
void RunQuantize(Random& random, ElementType type) {
  QuantizeCotangentsStep step{};
  step.element = type;
  const int64_t there = DrawGroups(random, step), columns = step.columns;
  SetCase("quantize", type, {step.rows, columns, step.groups, there});
  const int64_t blocks = columns / kBlock;
  // Ends with the rows of groups, so that reads past them fault.
  auto* values = Allocate<Element>(there * columns);
  for (int64_t block = 0; block < there * blocks; ++block) {
    // Half of the time around the floor of gradients, but float16 has no such numbers.
    int64_t most = random.OneIn(2) ? random.In(30, 70) : random.In(71, 230);
    if (std::is_same_v<Element, Float16>) most = random.In(105, 140);
    Element* first = values + block * kBlock;
    for (int64_t i = 0; i < kBlock; ++i) first[i] = FromFloat<Element>(DrawNumber(random, most));
    if (!random.OneIn(20)) continue;
    first[random.In(0, kBlock - 1)] =
        FromFloat<Element>(BitsFloat(random.OneIn(2) ? 0x7FC00000 : 0xFF800000));
  }
  step.values = values;
  step.codes = Allocate<uint8_t>(step.rows * columns);
  step.scales = Allocate<float>(step.rows * blocks);
  CHECK(cuda::QuantizeCotangents(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  for (int64_t block = 0; block < there * blocks; ++block) {
    const Element* first = values + block * kBlock;
    uint32_t amax_bits = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      amax_bits = std::max(amax_bits, FloatBits(ToFloat(first[i])) & 0x7FFFFFFFu);
    }
    const float scale = Format::ScaleOf(amax_bits, kOfGradients);
    CHECK(FloatBits(step.scales[block]) == FloatBits(scale));
    for (int64_t i = 0; i < kBlock; ++i) {
      CHECK(step.codes[block * kBlock + i] == E4M3::Encode(Divide(ToFloat(first[i]), scale)));
    }
  }
  CHECK(IsUntouched(step.codes + there * columns, (step.rows - there) * columns));
  CHECK(IsUntouched(step.scales + there * blocks, (step.rows - there) * blocks));
  emulator::Reset();
}

template <typename Element>
void RunDequantize(Random& random, ElementType type) {
  DequantizeRowsStep step{};
  step.out_element = type;
  const int64_t there = DrawGroups(random, step), columns = step.columns;
  SetCase("dequantize", type, {step.rows, columns, step.groups, there});
  const int64_t blocks = columns / kBlock;
  auto* codes = Allocate<uint8_t>(there * columns);
  for (int64_t i = 0; i < there * columns; ++i) codes[i] = static_cast<uint8_t>(random.Bits());
  auto* scales = Allocate<float>(there * blocks);
  for (int64_t i = 0; i < there * blocks; ++i) {
    // Any bits, or numbers that float16 can hold.
    scales[i] =
        random.OneIn(3) ? BitsFloat(static_cast<uint32_t>(random.Bits())) : DrawNumber(random, 130);
  }
  auto* out = Allocate<Element>(step.rows * columns);
  step.codes = codes, step.scales = reinterpret_cast<uint8_t*>(scales), step.out = out;
  CHECK(cuda::DequantizeRows(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);

  for (int64_t i = 0; i < there * columns; ++i) {
    const float value = Format::Restored(E4M3::Decode(codes[i]), scales[i / kBlock], kNoInputScale);
    const auto element = FromFloat<Element>(value);
    CHECK(std::memcmp(out + i, &element, sizeof element) == 0);
  }
  CHECK(IsUntouched(out + there * columns, (step.rows - there) * columns));
  emulator::Reset();
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 300);
  Random random(seed);
  CHECK(cuda::PreloadExpertRowKernels() == cudaSuccess);
  for (int64_t i = 0; i < draws; ++i) {
    const ElementType type = kElementTypes[i % std::size(kElementTypes)];
    VisitElement(type, [&]<typename Element>(Element) {
      RunCombineBack<Element>(random, type);
      RunQuantize<Element>(random, type);
      RunDequantize<Element>(random, type);
    });
  }
  std::printf("%lld of each: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
