// Encoding tokens that travel as codes and scales: a sender's helpers encode them in place, in the
// sender's stage.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/bulk_stages.cuh"
#include "cuda/common/quantize.cuh"
#include "cuda/window/rows.cuh"
#include "cuda/window/team.cuh"
#include "formats/token_format.h"
#include "protocol/steps.h"

namespace jax_ep::cuda {

// How tokens pass through stages: they come in as elements and go out as a message's payload,
// scales and, from `rest` on, what travels beside them. The pieces differ from the receiver's
// (RowPlan).
struct EncodePlan {
  Divisor pieces;
  uint32_t piece_elements;
  uint32_t hidden;
  uint32_t element_bytes;
  ElementType element;
  uint32_t scales;  // offset in a message
  uint32_t rest;    // offset in a message
  uint32_t message_bytes;

  __device__ uint32_t Elements(uint32_t piece) const {
    return Min(piece_elements, hidden - piece * piece_elements);
  }
};

// The smallest number of elements whose codes and scales are whole vectors.
template <typename Format>
constexpr int64_t EncodeElements() {
  int64_t elements = Format::kBlock;
  while (Format::PayloadBytes(elements, 0) % kRowAlignBytes != 0 ||
         Format::ScaleBytes(elements) % kRowAlignBytes != 0) {
    elements *= 2;
  }
  return elements;
}

// Fits the pieces of tokens into `stages`, which may make the stages larger and fewer. Returns
// false if there is no room for two.
template <typename Format>
bool PlanEncoding(int64_t hidden, ElementType element, int64_t scales, int64_t rest,
                  int64_t message_bytes, int64_t budget, EncodePlan& plan, StagePlan& stages) {
  constexpr int64_t kElements = EncodeElements<Format>();
  for (int64_t pieces = 1; pieces == 1 || pieces <= DivideUp(hidden, kElements); ++pieces) {
    const int64_t elements = pieces == 1 ? hidden : RoundUp(DivideUp(hidden, pieces), kElements);
    const int64_t scale_bytes = RoundUp(Format::ScaleBytes(elements), kRowAlignBytes);
    const int64_t as_elements = elements * ElementBytes(element);
    const int64_t as_codes = Format::PayloadBytes(elements, 0) + message_bytes - rest;
    const int64_t stage = scale_bytes + std::max(as_elements, as_codes);
    if (!FitStages(std::max<int64_t>(stage, stages.stage_bytes), budget, stages)) continue;
    plan = {.pieces = Divisor::Of(DivideUp(hidden, elements)),
            .piece_elements = static_cast<uint32_t>(elements),
            .hidden = static_cast<uint32_t>(hidden),
            .element_bytes = static_cast<uint32_t>(ElementBytes(element)),
            .element = element,
            .scales = static_cast<uint32_t>(scales),
            .rest = static_cast<uint32_t>(rest),
            .message_bytes = static_cast<uint32_t>(message_bytes)};
    return true;
  }
  return false;
}

// Called by the whole warp: loads a piece of a token.
__device__ inline void LoadTokenPiece(BulkStages& stages, const EncodePlan& plan,
                                      const void* tokens, int64_t token, uint32_t piece) {
  const uint32_t bytes = plan.Elements(piece) * plan.element_bytes;
  stages.Load(bytes, [&](uint8_t* stage, uint64_t* barrier) {
    const int64_t first = token * plan.hidden + static_cast<int64_t>(piece) * plan.piece_elements;
    BulkLoad(stage, static_cast<const uint8_t*>(tokens) + first * plan.element_bytes, bytes,
             barrier);
  });
}

// Vectors that a helper keeps in registers at a time.
inline constexpr uint32_t kHelperVectors = 2;

// A helper, as a whole warp: encodes its share of a stage's elements. The rounds ascend, so a
// round's codes end before the elements of the next one, which have not been read yet. That is not
// true of scales, so they are written behind the elements.
template <typename Format, typename Element>
__device__ __forceinline__ void EncodeElements(const Helper<Format>& helper, uint8_t* stage,
                                               uint32_t elements, float input_scale) {
  // Adjacent vectors, so that fewer lanes share a block and compute its scale.
  constexpr int kCount = kHelperVectors * kLaneElements<Element>;
  static_assert(Format::kBlock % kCount == 0);
  uint8_t* scales = stage + elements * sizeof(Element);
  const uint32_t runs = elements / kCount, threads = helper.team.threads();
  JAX_EP_NO_UNROLL
  for (uint32_t round = 0; round < runs; round += threads) {
    const uint32_t run = round + helper.thread();
    Elements<Element, kCount> values{};
    if (run < runs) values.Load(stage + run * kHelperVectors * kVectorBytes);
    const auto encoded = EncodedVector<Format, kCount>::Of(values, input_scale);
    helper.team.Sync();
    if (run < runs) encoded.Store(stage, scales, run);
  }
}

// A helper: serves senders until they dismiss it. Formats without an input_scale take kInputScale.
// Includes the block's wait for credits; returns false if that failed.
template <typename Format, float kInputScale = kNoInputScale>
__device__ bool HelpSenders(const WindowCall& call, const EncodePlan& plan, TeamJob* jobs,
                            const float* input_scale_at) {
  if (!AwaitCredits(call)) return false;
  if (call.senders() == 0) return true;
  float input_scale = kInputScale;
  if constexpr (Format::kTakesInputScale) input_scale = *input_scale_at;
  const auto helper = Helper<Format>::Of(jobs, call.senders());
  helper.team.Help([&](const TeamJob& job, uint8_t* stage) {
    const uint32_t elements = plan.Elements(job.piece);
    if (plan.element == ElementType::kBFloat16) {
      EncodeElements<Format, BFloat16>(helper, stage, elements, input_scale);
    } else if (plan.element == ElementType::kFloat16) {
      EncodeElements<Format, Float16>(helper, stage, elements, input_scale);
    } else {
      EncodeElements<Format, float>(helper, stage, elements, input_scale);
    }
  });
  return true;
}

// The sizes of an encoded piece in its stage, which holds codes, scales and then what travels
// beside them.
struct EncodedSizes {
  uint32_t codes;
  uint32_t scales;  // rounded up to whole vectors
};
template <typename Format>
__device__ __forceinline__ EncodedSizes SizesOfPiece(const EncodePlan& plan, uint32_t piece) {
  const uint32_t elements = plan.Elements(piece);
  return {static_cast<uint32_t>(Format::PayloadBytes(elements, 0)),
          static_cast<uint32_t>(RoundUp(Format::ScaleBytes(elements), kRowAlignBytes))};
}

// A sender, as a whole warp: has its helpers start to encode a piece.
__device__ inline void StartEncoding(const HelperTeam& team, const uint8_t* stage, uint32_t piece) {
  if (Lane() == 0) team.SetJob(stage, piece, 0);
  team.Start();
}

// A sender, as a whole warp: waits for its helpers and moves the scales directly behind the codes.
// Returns where what travels beside them goes. These are ordinary stores, so FenceProxyAsyncShared
// and __syncwarp must come before bulk stores.
template <typename Format>
__device__ __forceinline__ uint8_t* FinishEncoding(const HelperTeam& team, const EncodePlan& plan,
                                                   uint8_t* stage, uint32_t piece) {
  team.AwaitDone();
  const uint8_t* apart = stage + plan.Elements(piece) * plan.element_bytes;
  const EncodedSizes sizes = SizesOfPiece<Format>(plan, piece);
  uint8_t* scales = stage + sizes.codes;
  JAX_EP_NO_UNROLL
  for (uint32_t at = static_cast<uint32_t>(Lane()) * kVectorBytes; at < sizes.scales;
       at += kWarpSize * kVectorBytes) {
    *reinterpret_cast<uint4*>(scales + at) = *reinterpret_cast<const uint4*>(apart + at);
  }
  // What the caller writes next may overwrite where scales were read.
  __syncwarp();
  return scales + sizes.scales;
}

// Called by one lane: like StorePiece, for an encoded piece.
template <typename Format>
__device__ __forceinline__ void StoreEncoded(const EncodePlan& plan, uint32_t piece,
                                             uint8_t* message, const uint8_t* stage) {
  if (plan.pieces.value == 1) {
    BulkStore(message, stage, plan.message_bytes);
    return;
  }
  const EncodedSizes sizes = SizesOfPiece<Format>(plan, piece);
  const int64_t first = static_cast<int64_t>(piece) * plan.piece_elements;
  BulkStore(message + Format::PayloadBytes(first, 0), stage, sizes.codes);
  BulkStore(message + plan.scales + Format::ScaleBytes(first), stage + sizes.codes, sizes.scales);
  if (piece == 0 && plan.message_bytes != plan.rest) {
    BulkStore(message + plan.rest, stage + sizes.codes + sizes.scales,
              plan.message_bytes - plan.rest);
  }
}

}  // namespace jax_ep::cuda
