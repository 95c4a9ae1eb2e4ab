// Loops over rows, compiled once per x86 instruction set and chosen when the library loads, so that
// one wheel runs everywhere and is fast where it can be.
#include "cpu/rows.h"

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Sanitizers cannot instrument the resolvers that choose between clones.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define JAX_EP_SIMD_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define JAX_EP_SIMD_CLONES
#endif

namespace jax_ep::cpu {

#if defined(__SSE2__)
static bool IsAligned(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & 15) == 0;
}
#endif

void CopyRow(void* to, const void* from, int64_t bytes, bool streaming) {
#if defined(__SSE2__)
  if (streaming && IsAligned(to, from)) {
    auto* target = static_cast<__m128i*>(to);
    const auto* source = static_cast<const __m128i*>(from);
    const int64_t units = bytes / 16;
    int64_t i = 0;
    for (; i + 4 <= units; i += 4) {
      const __m128i a = _mm_load_si128(source + i);
      const __m128i b = _mm_load_si128(source + i + 1);
      const __m128i c = _mm_load_si128(source + i + 2);
      const __m128i d = _mm_load_si128(source + i + 3);
      _mm_stream_si128(target + i, a);
      _mm_stream_si128(target + i + 1, b);
      _mm_stream_si128(target + i + 2, c);
      _mm_stream_si128(target + i + 3, d);
    }
    for (; i < units; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
    return;
  }
#endif
  static_cast<void>(streaming);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void ClearRow(void* to, int64_t bytes, bool streaming) {
#if defined(__SSE2__)
  if (streaming && IsAligned(to, to)) {
    auto* target = static_cast<__m128i*>(to);
    for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(target + i, _mm_setzero_si128());
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
