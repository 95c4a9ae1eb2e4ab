// The operands of the fused calls of the window transports, as steps.h has those of the collective
// transport. All pointers refer to memory of the device that runs the call.
#pragma once

#include <cstdint>

#include "protocol/steps.h"

namespace jax_ep {

// Digest of the line in the user's program that made a call; equal on all ranks.
using CallSite = int64_t;

// route + encode + exchange + place.
struct DispatchStep : Arrivals, DispatchOptions {
  EpShape shape;
  ElementType element;
  CallSite site;
  const void* tokens;                     // [n, H], or codes [n, payload] if `token_scales` is set
  const int32_t* ids;                     // [n, K]
  const float* weights;                   // [n, K]
  const float* input_scale;               // [1], in formats that take one
  int32_t* num_invalid;                   // [1]
  int32_t* slot_of;                       // [n, K]
  InvalidIdReport* report;                // nullptr: bad ids are not reported
  const uint8_t* token_scales = nullptr;  // [n, scales] of tokens that are codes
  // Bytes of a token's codes and of its scales, if `token_scales` is set.
  int64_t code_bytes = 0;
  int64_t scale_bytes = 0;
};

// encode + exchange + decode + place, following a known route; rows without a token become zero,
// unless the caller says that all of them are in the tail, which nobody reads.
struct DispatchCachedStep {
  EpShape shape;
  ElementType element;  // of tokens and rows
  CallSite site;
  int64_t num_weights;      // K or 0
  const void* tokens;       // [n, H]
  const float* weights;     // [n, num_weights]
  const int32_t* slot_of;   // [n, K]
  const int32_t* row_of;    // [R, n, K]
  const int32_t* row_slot;  // [N]
  uint8_t* rows;            // [N, H]
  float* router_weights;    // [N], unused without weights
  int32_t* done;            // [1] zero; later calls of the group depend on it
  bool zero_tail = true;
};

// reduce + exchange + reduce. With `by_entry` rows travel as tokens with one entry.
struct CombineStep : CombineInputs, SumInputs, CombineOptions {
  EpShape shape;
  CallSite site;
  ElementType element;         // of expert_out, residual and output
  ElementType wire;            // of the sums that travel
  int32_t quantized;           // 0, or the wire format of the sums: formats/combine_wire.h
  int64_t num_weights;         // K if weight gradients travel, else 0
  void* output;                // [n, H]
  float* output_weight_grads;  // [n, num_weights]
  int32_t* done;               // [1], as above
  float input_scale = 1.0f;    // kNoInputScale or kOfGradients

  bool has_options() const { return by_entry || shared_rows != nullptr; }
  // The most that one rank sends another.
  int64_t messages() const { return shape.tokens * (by_entry ? shape.top_k : 1); }
};

}  // namespace jax_ep
