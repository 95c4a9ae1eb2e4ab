// The loops of rows.h.
#include "cpu/rows.h"

#include <cstring>

#include "cpu/simd.h"
#include "protocol/platform.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jax_ep::cpu {

#if defined(__SSE2__)
// Only whole cache lines are streamed. A line that is streamed in part and otherwise written by
// ordinary stores (a message's indices beside its payload) would go to memory in pieces.
static constexpr int64_t kLineBytes = 64;
static int64_t BytesToLine(const void* to, int64_t bytes) {
  return Min(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLineBytes), bytes);
}
#endif

void CopyRow(void* to, const void* from, int64_t bytes, bool streaming) {
#if defined(__SSE2__)
  if (streaming) {
    auto* target = static_cast<uint8_t*>(to);
    const auto* source = static_cast<const uint8_t*>(from);
    int64_t i = BytesToLine(to, bytes);
    std::memcpy(target, source, static_cast<size_t>(i));
    for (; i + kLineBytes <= bytes; i += kLineBytes) {
      auto* line = reinterpret_cast<__m128i*>(target + i);
      const auto* loads = reinterpret_cast<const __m128i*>(source + i);
      const __m128i a = _mm_loadu_si128(loads);
      const __m128i b = _mm_loadu_si128(loads + 1);
      const __m128i c = _mm_loadu_si128(loads + 2);
      const __m128i d = _mm_loadu_si128(loads + 3);
      _mm_stream_si128(line, a);
      _mm_stream_si128(line + 1, b);
      _mm_stream_si128(line + 2, c);
      _mm_stream_si128(line + 3, d);
    }
    std::memcpy(target + i, source + i, static_cast<size_t>(bytes - i));
    return;
  }
#endif
  static_cast<void>(streaming);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void ClearRow(void* to, int64_t bytes, bool streaming) {
#if defined(__SSE2__)
  if (streaming) {
    auto* target = static_cast<uint8_t*>(to);
    int64_t i = BytesToLine(to, bytes);
    std::memset(target, 0, static_cast<size_t>(i));
    for (; i + kLineBytes <= bytes; i += kLineBytes) {
      auto* line = reinterpret_cast<__m128i*>(target + i);
      for (int64_t part = 0; part < 4; ++part) _mm_stream_si128(line + part, _mm_setzero_si128());
    }
    std::memset(target + i, 0, static_cast<size_t>(bytes - i));
    return;
  }
#endif
  static_cast<void>(streaming);
  std::memset(to, 0, static_cast<size_t>(bytes));
}

void FenceStreaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

JAX_EP_SIMD_CLONES
void Accumulate(float* sum, const float* row, float weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = MultiplyThenAdd(sum[i], weight, row[i]);
}

JAX_EP_SIMD_CLONES
void Accumulate(float* sum, const BFloat16* row, float weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = MultiplyThenAdd(sum[i], weight, ToFloat(row[i]));
}

JAX_EP_SIMD_CLONES
void Accumulate(float* sum, const Float16* row, float weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = MultiplyThenAdd(sum[i], weight, ToFloat(row[i]));
}

JAX_EP_SIMD_CLONES
void Round(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = FromFloat<float>(from[i]);
}

JAX_EP_SIMD_CLONES
void Round(BFloat16* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = FromFloat<BFloat16>(from[i]);
}

JAX_EP_SIMD_CLONES
void Round(Float16* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = FromFloat<Float16>(from[i]);
}

}  // namespace jax_ep::cpu
