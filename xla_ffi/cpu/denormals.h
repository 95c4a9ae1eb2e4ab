// XLA:CPU runs handlers with flush-to-zero and denormals-are-zero. Sums and encodings must run
// without them, or their bits would differ from the GPU's.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jax_ep::cpu {

// Clears both modes for the current thread and restores them at the end of the scope.
class ScopedDenormals {
 public:
#if defined(__SSE2__)
  ScopedDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushMask); }
  ~ScopedDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  ScopedDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kFlushMask));
  }
  ~ScopedDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
#error "ScopedDenormals: clear and restore this processor's flush-to-zero mode here"
#endif
  ScopedDenormals(const ScopedDenormals&) = delete;
  ScopedDenormals& operator=(const ScopedDenormals&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr uint32_t kFlushMask = 0x8040;  // FTZ (bit 15) and DAZ (bit 6) of MXCSR
  uint32_t saved_;
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushMask = (1u << 24) | (1u << 19);  // FZ and FZ16 of FPCR
  uint64_t saved_;
#endif
};

}  // namespace jax_ep::cpu
