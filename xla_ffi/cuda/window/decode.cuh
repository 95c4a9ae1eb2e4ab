// Helpers of placing warps: messages along a known route become elements in rows. Used by
// window/cached_dispatch.cu.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/quantize.cuh"
#include "cuda/window/cached_worker.cuh"
#include "cuda/window/team.cuh"

namespace jax_ep::cuda {

// A helper, whole warp: its share of a piece of a message, in elements, to all of its rows.
template <typename Format, typename Element>
__device__ __forceinline__ void DecodeElements(const Helper<Format>& helper, const TeamJob& job,
                                               const uint8_t* codes, const RowPlan& plan,
                                               const WindowCachedDispatchStep& step) {
  static_assert(kPayloadAlign == Format::kBlock && Format::Code::kBits == 8);
  constexpr int kCount = kLaneElements<Element>;
  const int64_t begin = static_cast<int64_t>(job.piece) * plan.piece_bytes;
  const uint8_t* scales = codes + plan.piece_bytes + Format::ScaleBytes(begin);
  uint8_t* piece = step.rows + begin * static_cast<int64_t>(sizeof(Element));
  const int64_t row_bytes = step.shape.row_bytes();
  const uint32_t vectors = plan.PieceBytes(job.piece) / kCount, threads = helper.team.threads();
  const uint32_t num_rows = job.num_rows;
  JAX_EP_NO_UNROLL
  for (uint32_t first = helper.thread(); first < vectors; first += kHelperVectors * threads) {
    Elements<Element, kCount> elements[kHelperVectors];
#pragma unroll
    for (uint32_t i = 0; i < kHelperVectors; ++i) {
      // Past the end the first one again.
      const uint32_t vector = first + i * threads;
      DecodedVector<Format, kCount> decoded;
      decoded.Load(codes, scales, vector < vectors ? vector : first);
      float values[kCount];
      decoded.Restore(values);
      elements[i] = Elements<Element, kCount>::Round(values);
    }
    JAX_EP_NO_UNROLL
    for (uint32_t row = 0; row < num_rows; ++row) {
      uint8_t* to = piece + job.rows[row] * row_bytes;
#pragma unroll
      for (uint32_t i = 0; i < kHelperVectors; ++i) {
        const uint32_t vector = first + i * threads;
        if (vector < vectors) elements[i].Store(to + int64_t{vector} * kVectorBytes);
      }
    }
  }
}

// A helper: for placers, when its senders have dismissed it.
template <typename Format>
__device__ void HelpReceivers(const CachedPlan& plan, const WindowCachedDispatchStep& step,
                              TeamJob* jobs) {
  // The barriers of teams of senders are those of other teams now.
  Helper<Format>::AwaitAll();
  const auto helper = Helper<Format>::Of(jobs, kRowWarps);
  helper.team.Help([&](const TeamJob& job, const uint8_t* stage) {
    if (step.element == ElementType::kBFloat16) {
      DecodeElements<Format, BFloat16>(helper, job, stage, plan.rows, step);
    } else if (step.element == ElementType::kFloat16) {
      DecodeElements<Format, Float16>(helper, job, stage, plan.rows, step);
    } else {
      DecodeElements<Format, float>(helper, job, stage, plan.rows, step);
    }
  });
}

}  // namespace jax_ep::cuda
