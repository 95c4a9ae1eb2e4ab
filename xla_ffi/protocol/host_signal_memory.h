// The SignalMemory of ranks that are threads of one process. tests/cc runs the state machine of
// signals.h over it, also under ThreadSanitizer. On x86 the 16-byte cells need -latomic.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "protocol/signals.h"

namespace jax_ep {

struct HostSignalMemory {
  // ThreadSanitizer does not model fences, so the posts after a fence are releases themselves, up
  // to the thread's next acquire or fetch-and-add, with which new work begins. A post without a
  // fence is relaxed, so that ThreadSanitizer finds whatever relied on it.
  void ReleaseFence() const { covered_ = true; }

  template <typename Cell>
  void Post(Cell* cell, const Cell& value) const {
    std::atomic_ref<Cell> shared(*cell);
    if (covered_) {
      // Release; pairs with Acquire below.
      shared.store(value, std::memory_order_release);
    } else {
      shared.store(value, std::memory_order_relaxed);
    }
  }

  template <typename Cell>
  Cell Peek(const Cell* cell) const {
    return View(cell).load(std::memory_order_relaxed);
  }

  template <typename Cell>
  Cell Acquire(const Cell* cell) const {
    covered_ = false;
    // Acquire; pairs with Post above.
    return View(cell).load(std::memory_order_acquire);
  }

  uint32_t FetchAddRelaxed(uint32_t* counter, uint32_t value) const {
    covered_ = false;
    return std::atomic_ref(*counter).fetch_add(value, std::memory_order_relaxed);
  }

  template <typename Counter>
  Counter FetchAddAcqRel(Counter* counter, Counter value) const {
    covered_ = false;
    // Acquire and release; pairs with itself in the other members of LastOf.
    return std::atomic_ref(*counter).fetch_add(value, std::memory_order_acq_rel);
  }

  template <typename Counter>
  void StoreRelaxed(Counter* counter, Counter value) const {
    std::atomic_ref(*counter).store(value, std::memory_order_relaxed);
  }

  uint64_t NowNs() const {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                     std::chrono::steady_clock::now().time_since_epoch())
                                     .count());
  }

  // Threads may outnumber cores, so let the awaited one run.
  void Pause() const { std::this_thread::yield(); }

 private:
  // Per thread, whichever rank's memory it works on.
  static inline thread_local bool covered_ = false;

  // C++20 has no atomic_ref<const T>; only loads go through this view.
  template <typename Cell>
  static std::atomic_ref<Cell> View(const Cell* cell) {
    return std::atomic_ref<Cell>(*const_cast<Cell*>(cell));
  }
};

static_assert(SignalMemory<HostSignalMemory>);

}  // namespace jax_ep
