// The passes over an expert rank's rows that gradients need. They leave out rows that no token has
// reached: those are not read, and only their `to_weights` are written.
#pragma once

#include <cstdint>

#include "protocol/steps.h"

namespace jax_ep {

// The backward pass of a combine: turns the cotangents that have been sent to the rows into those
// of expert_out and of the weights.
struct CombineBackStep {
  ElementType element;
  int64_t rows;                 // N
  int64_t hidden;               // H; a row has at least 16 bytes
  const void* expert_out;       // [N, H]
  const float* router_weights;  // [N]
  const int32_t* row_slot;      // [N], negative in rows that are left out
  const void* cotangents;       // [N, H], in the memory of to_rows
  void* to_rows;                // [N, H]: router_weights * cotangents, rounded once
  float* to_weights;            // [N]: <cotangents, expert_out>; 0 in rows that are left out
};

// Rows in groups that lie one after the other. Sizes that are negative or reach past N are clamped.
struct GroupedRows {
  int64_t rows;          // N
  int64_t groups;        // L
  int64_t columns;       // A, a multiple of 128
  const int32_t* sizes;  // [L]
};

// Quantises cotangents to codes of "fp8_block128", with the floor for gradients.
struct QuantizeCotangentsStep : GroupedRows {
  ElementType element;
  const void* values;  // [N, A]
  uint8_t* codes;      // [N, A]
  float* scales;       // [N, A / 128]
};

// Turns codes of "fp8_block128" into elements.
struct DequantizeRowsStep : GroupedRows {
  ElementType out_element;
  const uint8_t* codes;   // [N, A]
  const uint8_t* scales;  // float32 [N, A / 128]
  void* out;              // [N, A]
};

}  // namespace jax_ep
