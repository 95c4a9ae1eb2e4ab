// Encodes and decodes tokens on the host, block by block, with the functions of each format. Used
// by window_kernels.cu.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats/numbers.h"
#include "formats/registry.h"

namespace jax_ep::window_kernels {

// With this the scales of nvfp4 use their whole range, since most elements lie below 2.
inline constexpr float kInputScale = 1000.0f;

struct Encoded {
  std::vector<uint8_t> payload;
  std::vector<uint8_t> scales;
};

// Writes a block's codes from `payload` on, and its scale.
template <typename Format>
void EncodeBlock(const float* values, float input_scale, uint8_t* payload, uint8_t* scale) {
  using Code = typename Format::Code;
  uint32_t amax_bits = 0;
  for (int64_t i = 0; i < Format::kBlock; ++i) {
    amax_bits = std::max(amax_bits, FloatBits(values[i]) & 0x7FFFFFFFu);
  }
  const typename Format::Scale made = Format::ScaleOf(amax_bits, input_scale);
  const float factor = Format::FactorOf(made, input_scale);
  std::memcpy(scale, &made, sizeof made);
  constexpr int64_t kPerByte = 8 / Code::kBits;
  for (int64_t i = 0; i < Format::kBlock; ++i) {
    uint8_t& byte = payload[i / kPerByte];
    const uint32_t code = Code::Encode(Scaled<Format>(values[i], factor));
    byte = static_cast<uint8_t>(i % kPerByte == 0 ? code : byte | code << Code::kBits);
  }
}

template <typename Format>
void DecodeBlock(const uint8_t* payload, const uint8_t* scale, float* values) {
  using Code = typename Format::Code;
  static_assert(Code::kBits == 8);
  typename Format::Scale made;
  std::memcpy(&made, scale, sizeof made);
  for (int64_t i = 0; i < Format::kBlock; ++i) {
    values[i] = Format::Restored(Code::Decode(payload[i]), Format::ScaleValue(made), 1.0f);
  }
}

// Rows must consist of whole blocks.
template <typename Format>
Encoded Encode(const std::vector<BFloat16>& tokens, float input_scale) {
  const int64_t blocks = std::ssize(tokens) / Format::kBlock;
  const int64_t code_bytes = Format::PayloadBytes(Format::kBlock, 0);
  const int64_t scale_bytes = Format::ScaleBytes(Format::kBlock);
  Encoded encoded{std::vector<uint8_t>(blocks * code_bytes),
                  std::vector<uint8_t>(blocks * scale_bytes)};
  float values[Format::kBlock];
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < Format::kBlock; ++i) {
      values[i] = ToFloat(tokens[block * Format::kBlock + i]);
    }
    EncodeBlock<Format>(values, input_scale, &encoded.payload[block * code_bytes],
                        &encoded.scales[block * scale_bytes]);
  }
  return encoded;
}

template <typename Format>
std::vector<BFloat16> Decode(const Encoded& encoded) {
  std::vector<BFloat16> tokens(encoded.payload.size());
  float values[Format::kBlock];
  for (int64_t first = 0; first < std::ssize(tokens); first += Format::kBlock) {
    DecodeBlock<Format>(&encoded.payload[first], &encoded.scales[Format::ScaleBytes(first)],
                        values);
    for (int64_t i = 0; i < Format::kBlock; ++i) tokens[first + i] = FromFloat<BFloat16>(values[i]);
  }
  return tokens;
}

}  // namespace jax_ep::window_kernels
