// Passes over the rows at an expert rank that gradients need. They leave out rows that no token has
// reached, which are neither read nor written.
#pragma once

#include <cstdint>

#include "protocol/steps.h"

namespace jax_ep {

// The way back through a combine: what combine's cotangent sent to each row becomes the cotangents
// of expert_out and of the weights.
struct CombineBackStep {
  ElementType element;
  int64_t rows;              // N
  int64_t hidden;            // H, of 16 bytes at least
  const void* expert_out;    // [N, H]
  const float* row_weights;  // [N]
  const int32_t* row_slot;   // [N], negative in rows that are left out
  const void* cotangents;    // [N, H], the memory of to_rows
  void* to_rows;             // [N, H]: row_weights * cotangents, rounded once
  float* to_weights;         // [N]: <cotangents, expert_out>; 0 in rows that are left out
};

// The rows of groups, one after the other; sizes that are negative or reach past N are cut.
struct GroupedRows {
  int64_t rows;          // N
  int64_t groups;        // L
  int64_t columns;       // A, a multiple of 128
  const int32_t* sizes;  // [L]
};

// Cotangents to codes of "fp8_block128" with the floor of gradients.
struct QuantizeCotangentsStep : GroupedRows {
  ElementType element;
  const void* values;  // [N, A]
  uint8_t* codes;      // [N, A]
  float* scales;       // [N, A / 128]
};

// Codes of "fp8_block128" to elements.
struct DequantizeRowsStep : GroupedRows {
  ElementType out_element;
  const uint8_t* codes;   // [N, A]
  const uint8_t* scales;  // float32 [N, A / 128]
  void* out;              // [N, A]
};

}  // namespace jax_ep
