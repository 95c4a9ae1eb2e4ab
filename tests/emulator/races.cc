// Volatile accesses count as relaxed atomics: other threads may change the words meanwhile, and
// they order nothing. With --param tsan-distinguish-volatile=1 GCC calls these functions, which its
// run-time library does not have.
#include <cstdint>

extern "C" {
uint32_t __tsan_atomic32_load(const volatile uint32_t* at, int order);
uint64_t __tsan_atomic64_load(const volatile uint64_t* at, int order);
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* at, uint32_t value, int order);

void __tsan_volatile_read4(void* at) {
  __tsan_atomic32_load(static_cast<uint32_t*>(at), __ATOMIC_RELAXED);
}
void __tsan_volatile_read8(void* at) {
  __tsan_atomic64_load(static_cast<uint64_t*>(at), __ATOMIC_RELAXED);
}
// The store itself follows.
void __tsan_volatile_write4(void* at) {
  __tsan_atomic32_fetch_add(static_cast<uint32_t*>(at), 0, __ATOMIC_RELAXED);
}
}
