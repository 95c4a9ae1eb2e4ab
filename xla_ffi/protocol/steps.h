// The operands of the steps of the collective transport: the one description that handlers fill and
// that the CPU and the CUDA kernels take. Shapes are SPEC.md's; every pointer lies in the memory of
// the device that runs the step.
#pragma once

#include <cstdint>

#include "protocol/shape.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t ElementBytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Where a call reports the first id outside [-1, E). Written at most once until ep.check() frees
// it, by one thread of the call.
struct alignas(16) InvalidIdReport {
  static constexpr int32_t kFree = 0;
  static constexpr int32_t kSet = 1;
  static constexpr int32_t kClaimed = 2;  // by a host thread that is writing the other fields

  int32_t token;
  int32_t k;
  int32_t value;
  int32_t state;
};

// route + encode: tokens -> one region a destination rank.
struct PackStep {
  EpShape shape;
  const void* tokens;       // [n, H]
  const int32_t* ids;       // [n, K]
  const float* weights;     // [n, K]
  uint8_t* send;            // [R, region]
  int32_t* slot_of;         // [n, K]
  int32_t* position;        // [n, K]
  int32_t* num_invalid;     // [1]
  InvalidIdReport* report;  // nullptr: not reported
};

// place: one region a source rank -> rows and the expert rank's tables.
struct UnpackStep {
  EpShape shape;
  bool zero_tail;
  const uint8_t* recv;     // [R, region]
  uint8_t* rows;           // [N, payload]
  int32_t* row_offsets;    // [G + 1]
  int32_t* group_sizes;    // [G]
  int32_t* expert_counts;  // [G]
  int32_t* expert_ids;     // [G]
  int32_t* src_info;       // [N, 3]
  float* row_weights;      // [N]
  int32_t* num_dropped;    // [1]
  int32_t* row_of;         // [R, n, K]
  int32_t* row_slot;       // [N]
  int32_t* slot_counts;    // [R]
  int32_t* row_base;       // [R, L] first row of each (source, local expert), before the cut by N
};

// encode along a known route.
struct CachedPackStep {
  EpShape shape;
  int64_t num_weights;     // K or 0
  const void* tokens;      // [n, H]
  const float* weights;    // [n, num_weights]
  const int32_t* slot_of;  // [n, K]
  uint8_t* send;           // [R, n * message]
};

// place along a known route; padding and tail become zero.
struct CachedUnpackStep {
  EpShape shape;
  int64_t num_weights;      // K or 0
  const uint8_t* recv;      // [R, n * message]
  const int32_t* row_of;    // [R, n, K]
  const int32_t* row_slot;  // [N]
  uint8_t* rows;            // [N, payload]
  float* row_weights;       // [N] or unused without weights
};

// reduce at the expert rank: rows -> one sum a slot.
struct CombinePackStep {
  EpShape shape;
  ElementType element;         // of expert_out
  ElementType wire;            // of the sums
  int64_t num_weights;         // K when weight gradients travel, else 0
  const void* expert_out;      // [N, H]
  const float* row_weights;    // [N], nullptr = 1
  const float* weight_grads;   // [N] or unused
  const int32_t* row_of;       // [R, n, K]
  const int32_t* slot_counts;  // [R]
  uint8_t* send;               // [R, n * message]
};

// reduce at the source: sums of the ranks, ascending -> tokens.
struct CombineUnpackStep {
  EpShape shape;
  ElementType element;  // of output and residual
  ElementType wire;
  int64_t num_weights;
  const uint8_t* recv;     // [R, n * message]
  const int32_t* slot_of;  // [n, K]
  const void* residual;    // [n, H] or nullptr
  void* output;            // [n, H]
  float* weight_grads;     // [n, num_weights]
};

}  // namespace jax_ep
