// The operands of the steps of the collective transport, which handlers fill and both the CPU and
// the CUDA kernels take. docs/api/index.md explains the letters of shapes. All pointers refer to
// memory of the device that runs the step.
#pragma once

#include <cstdint>

#include "protocol/options.h"
#include "protocol/region_tag.h"
#include "protocol/shape.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t ElementBytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Where a call reports the first id outside [-1, E). One thread of one call writes it; nobody
// writes it again until ep.check() frees it.
struct alignas(16) InvalidIdReport {
  static constexpr int32_t kFree = 0;
  static constexpr int32_t kSet = 1;
  static constexpr int32_t kClaimed = 2;  // by a host thread that is writing the other fields

  int32_t token;
  int32_t k;
  int32_t value;
  int32_t state;
};

// Where a call reports that the ranks of its exchange were in different calls. It is written in the
// same way.
struct alignas(16) MixedCallReport {
  static constexpr int32_t kFree = InvalidIdReport::kFree;
  static constexpr int32_t kSet = InvalidIdReport::kSet;
  static constexpr int32_t kClaimed = InvalidIdReport::kClaimed;
  static constexpr int32_t kSameHandle = kCallOpMask + 1;

  int32_t source;  // the lowest rank that was in another call than this one
  int32_t here;    // CallOp of this rank
  int32_t there;   // CallOp of the source, with kSameHandle if only the call differs
  int32_t state;
};
JAX_EP_HOST_DEVICE MixedCallReport MixedCallOf(int32_t source, RegionTag own, RegionTag other) {
  const int32_t same = own.handle == other.handle ? MixedCallReport::kSameHandle : 0;
  return {source, static_cast<int32_t>(own.op()), static_cast<int32_t>(other.op()) | same,
          MixedCallReport::kSet};
}

// What an unpack needs in order to report mixed-up calls. It always looks for them; if it finds
// any, it fills its results with NaN, -1 and 0.
struct MixedCallCheck {
  int32_t own_rank = 0;               // used in the report only
  MixedCallReport* report = nullptr;  // nullptr: mixed-up calls are not reported
};

// route + encode: tokens -> one region per destination rank.
struct DispatchPackStep : DispatchOptions {
  EpShape shape;
  ElementType element;
  const void* tokens;        // [n, H], or codes [n, payload] if `token_scales` is set
  const int32_t* ids;        // [n, K]
  const float* weights;      // [n, K]
  const float* input_scale;  // [1], in formats that take one
  uint8_t* send;             // [R, region]
  int32_t* slot_of;          // [n, K]
  int32_t* position;         // [n, K]
  int32_t* num_invalid;      // [1]
  InvalidIdReport* report;   // nullptr: bad ids are not reported
  RegionTag tag{};
  const uint8_t* token_scales = nullptr;  // [n, scales] of tokens that are codes
};

// What a first dispatch leaves at the expert rank. The steps that place its rows extend it.
struct Arrivals {
  uint8_t* rows;  // [N, payload]
  // In formats with scales: [N, scales] or, tiled, [tiles, words, 32, 4, 4] or, in columns,
  // [scales, line].
  uint8_t* scales;
  int32_t* row_offsets;     // [G + 1]
  int32_t* group_sizes;     // [G]
  int32_t* expert_counts;   // [G]
  int32_t* expert_ids;      // [G]
  int32_t* scales_offsets;  // [G] when scales are tiled
  int32_t* src_info;        // [N, 3]
  float* router_weights;    // [N]
  int32_t* num_dropped;     // [1]
  int32_t* row_of;          // [R, n, K]
  int32_t* row_slot;        // [N]
  int32_t* slot_counts;     // [R]
};

// place: one region per source rank -> rows and the expert rank's tables.
struct DispatchUnpackStep : Arrivals, DispatchOptions {
  EpShape shape;
  const uint8_t* recv;  // [R, region]
  int32_t* row_base;    // [R, L] first row of each (source, local expert), not clamped to N
  // The results of the pack. They change only if calls were mixed up.
  int32_t* slot_of = nullptr;      // [n, K]
  int32_t* num_invalid = nullptr;  // [1]
  MixedCallCheck check{};
};

// encode, following a known route.
struct DispatchCachedPackStep {
  EpShape shape;
  ElementType element;
  int64_t num_weights;     // K or 0
  const void* tokens;      // [n, H]
  const float* weights;    // [n, num_weights]
  const int32_t* slot_of;  // [n, K]
  uint8_t* send;           // [R, DispatchCachedRegion]
  RegionTag tag{};
};

// decode + place, following a known route; padding and tail become zero.
struct DispatchCachedUnpackStep {
  EpShape shape;
  ElementType element;      // of rows
  int64_t num_weights;      // K or 0
  const uint8_t* recv;      // [R, DispatchCachedRegion]
  const int32_t* row_of;    // [R, n, K]
  const int32_t* row_slot;  // [N]
  uint8_t* rows;            // [N, H]
  float* router_weights;    // [N], unused without weights
  MixedCallCheck check{};
};

// The operands of a combine at the expert rank, as in jax_ep/_transport/base.py.
struct CombineInputs {
  const void* expert_out = nullptr;       // [N, H]
  const float* router_weights = nullptr;  // [N], nullptr = 1
  const float* weight_grads = nullptr;    // [N], unused without weight gradients
  const int32_t* row_of = nullptr;        // [R, n, K]; in CombineStep, by_entry, [R, n * K, 1]
  const int32_t* slot_counts = nullptr;   // [R], slots received from each source
};

// Those at the source rank.
struct SumInputs {
  const int32_t* slot_of = nullptr;      // [n, K], the slot or, by_entry, the message of each entry
  const void* residual = nullptr;        // [n, H] or nullptr
  const float* entry_weights = nullptr;  // [n, K] with by_entry, nullptr = 1
  const void* shared_rows = nullptr;     // [N, H] or nullptr
  // [2]: the first token with a row in shared_rows, and how many tokens have one. Their rows come
  // first there.
  const int32_t* shared_part = nullptr;
};

// reduce at the expert rank: rows -> one sum per slot.
struct CombinePackStep : CombineInputs, CombineOptions {
  EpShape shape;
  ElementType element;  // of expert_out
  ElementType wire;     // of the sums
  int32_t quantized;    // 0, or the wire format of the sums: formats/combine_wire.h
  int64_t num_weights;  // K if weight gradients travel, else 0
  uint8_t* send;        // [R, CombineRegion]
  RegionTag tag{};
  float input_scale = 1.0f;  // kNoInputScale or kOfGradients
};

// reduce at the source: the ranks' sums, in ascending order of ranks -> tokens. With `by_entry`
// each row has come in a message of its own, and the rows are weighted and added here in k order.
// The shared expert's row is added last.
struct CombineUnpackStep : SumInputs, CombineOptions {
  EpShape shape;
  ElementType element;  // of output and residual
  ElementType wire;
  int32_t quantized;
  int64_t num_weights;
  const uint8_t* recv;  // [R, CombineRegion]; by_entry its regions have n * K slots
  void* output;         // [n, H]
  float* weight_grads;  // [n, num_weights]
  MixedCallCheck check{};

  // Slots of one rank; messages() is the number for all ranks.
  JAX_EP_HOST_DEVICE int64_t slots_of_rank() const {
    return shape.tokens * (by_entry ? shape.top_k : 1);
  }
  JAX_EP_HOST_DEVICE int64_t messages() const { return shape.ranks * slots_of_rank(); }
};

// Returns the row of shared_rows for a token, or -1.
template <typename Step>
JAX_EP_HOST_DEVICE int64_t SharedRowOf(const Step& step, int64_t token) {
  if (step.shared_rows == nullptr) return -1;
  const int64_t row = token - step.shared_part[0];
  return row >= 0 && row < Min<int64_t>(step.shared_part[1], step.shape.recv_rows) ? row : -1;
}

// Stand-alone quantisation of [rows, H] to codes and scales, and back.
struct QuantizeStep {
  int64_t rows;
  int64_t hidden;
  ElementType element;
  const void* tokens;         // [rows, H]
  const float* input_scales;  // [num_input_scales], each for equally many consecutive rows
  int64_t num_input_scales;
  uint8_t* payload;  // [rows, payload]
  uint8_t* scales;   // [rows, scales]
};
struct DequantizeStep {
  int64_t rows;
  int64_t hidden;
  ElementType element;     // of tokens
  const uint8_t* payload;  // [rows, payload]
  const uint8_t* scales;   // [rows, scales]
  const float* input_scales;
  int64_t num_input_scales;
  void* tokens;  // [rows, H]
};

// Returns the index in input_scales that applies to a row.
template <typename Step>
JAX_EP_HOST_DEVICE int64_t InputScaleOf(const Step& step, int64_t row) {
  return row / (step.rows / step.num_input_scales);
}

}  // namespace jax_ep
