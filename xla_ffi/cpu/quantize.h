// Rows to codes and scales of a format and back, a block at a time. Compiled for several
// instruction sets in quantize.cc. There is an overload for each quantised format and element type.
#pragma once

#include <cstdint>

#include "formats/numbers.h"
#include "formats/registry.h"

namespace jax_ep::cpu {

// `count` elements, whole blocks: `payload` gets Format::PayloadBytes(count, ..) bytes, `scales`
// Format::ScaleBytes(count). Nothing needs to be aligned.
#define JAX_EP_DECLARE_ROWS(Format, Element)                                               \
  void QuantizeRow(Format, const Element* from, int64_t count, float input_scale,          \
                   uint8_t* payload, uint8_t* scales);                                     \
  void DequantizeRow(Format, const uint8_t* payload, const uint8_t* scales, int64_t count, \
                     float input_scale, Element* to);
#define JAX_EP_DECLARE_FORMAT(Format)   \
  JAX_EP_DECLARE_ROWS(Format, float)    \
  JAX_EP_DECLARE_ROWS(Format, BFloat16) \
  JAX_EP_DECLARE_ROWS(Format, Float16)
JAX_EP_QUANTIZED_FORMATS(JAX_EP_DECLARE_FORMAT)
#undef JAX_EP_DECLARE_FORMAT
#undef JAX_EP_DECLARE_ROWS

}  // namespace jax_ep::cpu
