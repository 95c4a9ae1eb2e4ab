// The loops of quantize.h. Everything in them is branch-free, so that compilers vectorise it.
#include "cpu/quantize.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/simd.h"
#include "cpu/steps.h"
#include "formats/element_type.h"

// Compiled into each clone, with its instructions.
#define JAX_EP_IN_CLONES __attribute__((always_inline)) inline

namespace jax_ep::cpu {
namespace {

// Signed, because the smallest instruction sets have no unsigned maximum. The sign bit is clear.
JAX_EP_IN_CLONES int32_t Magnitude(float value) {
  return static_cast<int32_t>(FloatBits(value) & 0x7FFFFFFFu);
}
template <typename Half>
JAX_EP_IN_CLONES int16_t Magnitude(Half value) {
  return static_cast<int16_t>(value.bits & 0x7FFF);
}

// The bit patterns of a type have the order of its magnitudes, with NaN last, so only the largest
// is converted to float32.
template <typename Element, int64_t kBlock>
JAX_EP_IN_CLONES uint32_t AmaxBits(const Element* block) {
  decltype(Magnitude(Element{})) largest = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const auto magnitude = Magnitude(block[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  if constexpr (std::is_same_v<Element, float>) {
    return static_cast<uint32_t>(largest);
  } else {
    return FloatBits(ToFloat(Element{static_cast<uint16_t>(largest)}));
  }
}

// Whether a block's factor is infinite or NaN, which is rare. Elements may then become NaN.
JAX_EP_IN_CLONES uint32_t IsUnusual(float factor) {
  return (FloatBits(factor) & 0x7FFFFFFFu) >= 0x7F800000u ? 1u : 0u;
}

// A chunk goes through each loop in turn, in the first-level cache. Every loop is then a long one
// over plain arrays, however short the blocks are.
constexpr int64_t kChunk = 512;

template <typename Format, typename Element>
JAX_EP_IN_CLONES void QuantizeChunk(const Element* from, int64_t count, float input_scale,
                                    uint8_t* payload, uint8_t* scales) {
  using Code = typename Format::Code;
  constexpr int64_t kBlock = Format::kBlock;
  static_assert(kChunk % kBlock == 0);
  constexpr int64_t kBlocks = kChunk / kBlock;
  const int64_t blocks = count / kBlock;
  uint32_t amax_bits[kBlocks];
  typename Format::Scale block_scales[kBlocks];
  float block_factors[kBlocks];
  float factors[kChunk];
  uint8_t codes[kChunk];
  for (int64_t i = 0; i < blocks; ++i) {
    amax_bits[i] = AmaxBits<Element, kBlock>(from + i * kBlock);
  }
  for (int64_t i = 0; i < blocks; ++i) block_scales[i] = Format::ScaleOf(amax_bits[i], input_scale);
  for (int64_t i = 0; i < blocks; ++i) {
    block_factors[i] = Format::FactorOf(block_scales[i], input_scale);
  }
  std::memcpy(scales, block_scales, static_cast<size_t>(Format::ScaleBytes(count)));
  uint32_t unusual = 0;
  for (int64_t i = 0; i < blocks; ++i) unusual |= IsUnusual(block_factors[i]);
  for (int64_t i = 0; i < blocks; ++i) {
    for (int64_t j = 0; j < kBlock; ++j) factors[i * kBlock + j] = block_factors[i];
  }
  uint8_t* byte_codes = Code::kBits == 8 ? payload : codes;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = Scaled<Format>(ToFloat(from[i]), factors[i]);
    byte_codes[i] = static_cast<uint8_t>(Code::EncodeNumber(scaled));
  }
  for (int64_t block = 0; unusual != 0 && block < blocks; ++block) {
    if (IsUnusual(block_factors[block]) == 0) continue;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
      const float scaled = Scaled<Format>(ToFloat(from[i]), factors[i]);
      byte_codes[i] = static_cast<uint8_t>(Code::Encode(scaled));
    }
  }
  if constexpr (Code::kBits == 4) {
    for (int64_t i = 0; i < count / 2; ++i) {
      payload[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  }
}

template <typename Format, typename Element>
JAX_EP_IN_CLONES void DequantizeChunk(const uint8_t* payload, const uint8_t* scales, int64_t count,
                                      float input_scale, Element* to) {
  using Code = typename Format::Code;
  constexpr int64_t kBlock = Format::kBlock;
  constexpr int64_t kBlocks = kChunk / kBlock;
  const int64_t blocks = count / kBlock;
  typename Format::Scale block_scales[kBlocks];
  float block_values[kBlocks];
  float values[kChunk];
  uint8_t codes[kChunk];
  std::memcpy(block_scales, scales, static_cast<size_t>(Format::ScaleBytes(count)));
  for (int64_t i = 0; i < blocks; ++i) block_values[i] = Format::ScaleValue(block_scales[i]);
  for (int64_t i = 0; i < blocks; ++i) {
    for (int64_t j = 0; j < kBlock; ++j) values[i * kBlock + j] = block_values[i];
  }
  if constexpr (Code::kBits == 4) {
    for (int64_t i = 0; i < count / 2; ++i) {
      codes[2 * i] = payload[i] & 0xF;
      codes[2 * i + 1] = payload[i] >> 4;
    }
  }
  const uint8_t* byte_codes = Code::kBits == 8 ? payload : codes;
  for (int64_t i = 0; i < count; ++i) {
    to[i] =
        FromFloat<Element>(Format::Restored(Code::Decode(byte_codes[i]), values[i], input_scale));
  }
}

}  // namespace

#define JAX_EP_DEFINE_ROWS(Format, Element)                                                   \
  JAX_EP_WIDE_SIMD_CLONES                                                                     \
  void QuantizeRow(Format, const Element* from, int64_t count, float input_scale,             \
                   uint8_t* payload, uint8_t* scales) {                                       \
    for (int64_t first = 0; first < count; first += kChunk) {                                 \
      QuantizeChunk<Format>(from + first, Min(kChunk, count - first), input_scale,            \
                            payload + Format::PayloadBytes(first, 0),                         \
                            scales + Format::ScaleBytes(first));                              \
    }                                                                                         \
  }                                                                                           \
  JAX_EP_WIDE_SIMD_CLONES                                                                     \
  void DequantizeRow(Format, const uint8_t* payload, const uint8_t* scales, int64_t count,    \
                     float input_scale, Element* to) {                                        \
    for (int64_t first = 0; first < count; first += kChunk) {                                 \
      DequantizeChunk<Format>(payload + Format::PayloadBytes(first, 0),                       \
                              scales + Format::ScaleBytes(first), Min(kChunk, count - first), \
                              input_scale, to + first);                                       \
    }                                                                                         \
  }
#define JAX_EP_DEFINE_FORMAT(Format)   \
  JAX_EP_DEFINE_ROWS(Format, float)    \
  JAX_EP_DEFINE_ROWS(Format, BFloat16) \
  JAX_EP_DEFINE_ROWS(Format, Float16)
JAX_EP_QUANTIZED_FORMATS(JAX_EP_DEFINE_FORMAT)
#undef JAX_EP_DEFINE_FORMAT
#undef JAX_EP_DEFINE_ROWS

template <typename Format>
RowTask Quantize(const QuantizeStep& step) {
  auto run = [=](int64_t begin, int64_t end) {
    VisitElement(step.element, [&]<typename Element>(Element) {
      for (int64_t row = begin; row < end; ++row) {
        QuantizeRow(Format{}, static_cast<const Element*>(step.tokens) + row * step.hidden,
                    step.hidden, step.input_scales[InputScaleOf(step, row)],
                    step.payload + row * Format::PayloadBytes(step.hidden, 0),
                    step.scales + row * Format::ScaleBytes(step.hidden));
      }
    });
  };
  return {step.rows, step.rows * step.hidden * ElementBytes(step.element), std::move(run)};
}

template <typename Format>
RowTask Dequantize(const DequantizeStep& step) {
  auto run = [=](int64_t begin, int64_t end) {
    VisitElement(step.element, [&]<typename Element>(Element) {
      for (int64_t row = begin; row < end; ++row) {
        DequantizeRow(Format{}, step.payload + row * Format::PayloadBytes(step.hidden, 0),
                      step.scales + row * Format::ScaleBytes(step.hidden), step.hidden,
                      step.input_scales[InputScaleOf(step, row)],
                      static_cast<Element*>(step.tokens) + row * step.hidden);
      }
    });
  };
  return {step.rows, step.rows * step.hidden * ElementBytes(step.element), std::move(run)};
}

#define JAX_EP_INSTANTIATE(Format)                        \
  template RowTask Quantize<Format>(const QuantizeStep&); \
  template RowTask Dequantize<Format>(const DequantizeStep&);
JAX_EP_QUANTIZED_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cpu
