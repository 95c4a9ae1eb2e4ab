// Tells ThreadSanitizer in a build for races (JAX_EP_RACES) which CUDA thread, bulk copy, put or
// signal runs, and what is ordered before what. It then finds accesses of two of them that nothing
// orders, whatever order they happened to run in. In other builds these functions do nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace jax_ep::emulator {

#ifdef JAX_EP_RACES
inline constexpr bool kRaces = true;
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void __tsan_read_range(void* at, unsigned long bytes);
void __tsan_write_range(void* at, unsigned long bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
void __tsan_atomic64_store(volatile uint64_t* at, uint64_t value, int order);
}
#else
inline constexpr bool kRaces = false;
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void __tsan_destroy_fiber(void*) {}
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
inline void __tsan_read_range(void*, unsigned long) {}
inline void __tsan_write_range(void*, unsigned long) {}
inline void __tsan_ignore_thread_begin() {}
inline void __tsan_ignore_thread_end() {}
inline void __tsan_atomic64_store(uint64_t* at, uint64_t value, int) {
  __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
#endif

// Something that makes accesses. ThreadSanitizer can have a few thousand at a time and takes a
// third of a millisecond to make one. So the same GPU reuses the actors of threads and bulk copies
// that have ended: what one use did is ordered before the next use, as it mostly is anyway. Puts
// and signals, which are few and have no such order, get a new actor each time.
class Actor {
 public:
  // Ordered after what its maker has done.
  static Actor Make() { return Actor(__tsan_create_fiber(0)); }
  static Actor Running() { return Actor(__tsan_get_current_fiber()); }
  // This actor makes the accesses that follow. Orders nothing.
  void Run() const {
    constexpr unsigned kOrdersNothing = 1;
    __tsan_switch_to_fiber(of_, kOrdersNothing);
  }
  // Ends the actor for good. It must not call this itself.
  void End() const { __tsan_destroy_fiber(of_); }
  Actor() = default;

 private:
  explicit Actor(void* of) : of_(of) {}
  void* of_ = nullptr;
};

// What the running actor has done is ordered before what actors do that acquire `at` later.
inline void Release(const void* at) { __tsan_release(const_cast<void*>(at)); }
inline void Acquire(const void* at) { __tsan_acquire(const_cast<void*>(at)); }
// Stores a whole word. What was released there before can no longer be acquired.
inline void StoreAndRelease(uint64_t* at, uint64_t value) {
  __tsan_atomic64_store(at, value, __ATOMIC_RELEASE);
}

inline void Reads(const void* at, size_t bytes) { __tsan_read_range(const_cast<void*>(at), bytes); }
inline void Writes(void* at, size_t bytes) { __tsan_write_range(at, bytes); }

// The emulator's own accesses, which belong to no actor.
class Unseen {
 public:
  Unseen() { __tsan_ignore_thread_begin(); }
  ~Unseen() { __tsan_ignore_thread_end(); }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

// Atomic accesses of a word, or of words that must be seen together, as no other thread runs
// meanwhile. They order nothing.
template <size_t kBytes>
using Word = std::conditional_t<
    kBytes == 1, uint8_t,
    std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;

template <typename T>
T LoadWords(const T* from) {
  using Own = Word<sizeof(T)>;
  Own words[sizeof(T) / sizeof(Own)];
  for (size_t i = 0; i < sizeof(T) / sizeof(Own); ++i) {
    words[i] = __atomic_load_n(reinterpret_cast<const Own*>(from) + i, __ATOMIC_RELAXED);
  }
  T value;
  __builtin_memcpy(&value, words, sizeof value);
  return value;
}
template <typename T>
void StoreWords(T* to, T value) {
  using Own = Word<sizeof(T)>;
  Own words[sizeof(T) / sizeof(Own)];
  __builtin_memcpy(words, &value, sizeof value);
  for (size_t i = 0; i < sizeof(T) / sizeof(Own); ++i) {
    __atomic_store_n(reinterpret_cast<Own*>(to) + i, words[i], __ATOMIC_RELAXED);
  }
}

}  // namespace jax_ep::emulator
