// What the CPU steps do to whole rows: copy, clear, accumulate, round. Compiled for several
// instruction sets in rows.cc.
#pragma once

#include <cstdint>

#include "formats/numbers.h"

namespace jax_ep::cpu {

// Above this many bytes a step's output does not stay in any cache; streaming stores then save the
// read that an ordinary store makes of the line it overwrites.
inline constexpr int64_t kStreamingBytes = int64_t{8} << 20;

// `streaming`: the row goes past the caches, where the processor can do that.
void CopyRow(void* to, const void* from, int64_t bytes, bool streaming);
void ClearRow(void* to, int64_t bytes, bool streaming);
// Streaming stores are weakly ordered: each thread fences before it reports its items done.
void FenceStreaming();

// sum[i] = rn(sum[i] + rn(weight * row[i])).
void Accumulate(float* sum, const float* row, float weight, int64_t count);
void Accumulate(float* sum, const BFloat16* row, float weight, int64_t count);
void Accumulate(float* sum, const Float16* row, float weight, int64_t count);

void Round(float* to, const float* from, int64_t count);
void Round(BFloat16* to, const float* from, int64_t count);
void Round(Float16* to, const float* from, int64_t count);

}  // namespace jax_ep::cpu
