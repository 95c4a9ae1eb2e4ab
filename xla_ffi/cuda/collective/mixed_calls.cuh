// Tags of calls on the GPU: how they are written, and what an unpack does if they differ.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "protocol/layout.h"
#include "protocol/steps.h"

namespace jax_ep::cuda {

// Regions are aligned to 16 bytes, so one access takes the whole tag.
__device__ inline void WriteTag(uint8_t* region, RegionTag tag) {
  *reinterpret_cast<uint2*>(region + kTagOffset) = make_uint2(tag.handle, tag.call);
}
__device__ inline RegionTag TagOf(const uint8_t* region) {
  const uint2 tag = *reinterpret_cast<const uint2*>(region + kTagOffset);
  return {tag.x, tag.y};
}

// Called by one thread of the call; stores the whole report at once.
__device__ __noinline__ inline void ReportMixedCall(const MixedCallCheck& check,
                                                    const uint8_t* recv, int64_t ranks,
                                                    int64_t region_bytes) {
  // Keep an earlier report: the host clears it between calls.
  if (check.report == nullptr ||
      *static_cast<const volatile int32_t*>(&check.report->state) != MixedCallReport::kFree) {
    return;
  }
  const int64_t own_rank = check.own_rank < ranks ? check.own_rank : 0;
  const RegionTag own = TagOf(recv + own_rank * region_bytes);
  for (int64_t source = 0; source < ranks; ++source) {
    const RegionTag other = TagOf(recv + source * region_bytes);
    if (other == own) continue;
    const MixedCallReport found = MixedCallOf(static_cast<int32_t>(source), own, other);
    *reinterpret_cast<int4*>(check.report) =
        make_int4(found.source, found.here, found.there, found.state);
    return;
  }
}

// Called by the whole block before its first store. Returns whether the regions of all sources come
// from one call; if not, the first block reports it.
__device__ inline bool OfOneCall(const MixedCallCheck& check, const uint8_t* recv, int64_t ranks,
                                 int64_t region_bytes) {
  if (ranks == 1) return true;
  const RegionTag first = TagOf(recv);
  bool other = false;
  for (int64_t source = threadIdx.x; source < ranks; source += blockDim.x) {
    other |= !(TagOf(recv + source * region_bytes) == first);
  }
  if (__syncthreads_or(other) == 0) return true;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    ReportMixedCall(check, recv, ranks, region_bytes);
  }
  return false;
}

// Called by the whole grid: fills `to` with all ones, the bytes of kNoValue.
__device__ inline void FillNoValue(void* to, int64_t bytes) {
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * gridDim.y * blockDim.x;
  auto* words = static_cast<uint32_t*>(to);
  ForEachItem(block * blockDim.x + threadIdx.x, threads, bytes / 4,
              [&](int64_t i) { words[i] = kNoValue; });
  auto* rest = static_cast<uint8_t*>(to) + bytes / 4 * 4;
  ForEachItem(block * blockDim.x + threadIdx.x, threads, bytes % 4,
              [&](int64_t i) { rest[i] = 0xFF; });
}

}  // namespace jax_ep::cuda
