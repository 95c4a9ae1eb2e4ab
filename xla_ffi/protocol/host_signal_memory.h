// SignalMemory for ranks that are threads of one process. tests/cc runs the state machine of
// signals.h over it, also under ThreadSanitizer; on x86 the 16-byte cells need -latomic.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "protocol/signals.h"

namespace jax_ep {

struct HostSignalMemory {
  // Empty: the release is on Post, because ThreadSanitizer does not model fences.
  void ReleaseFence() const {}

  template <typename Cell>
  void Post(Cell* cell, const Cell& value) const {
    // Release; pairs with Acquire below.
    std::atomic_ref<Cell>(*cell).store(value, std::memory_order_release);
  }

  template <typename Cell>
  Cell Peek(const Cell* cell) const {
    return View(cell).load(std::memory_order_relaxed);
  }

  template <typename Cell>
  Cell Acquire(const Cell* cell) const {
    // Acquire; pairs with Post above.
    return View(cell).load(std::memory_order_acquire);
  }

  uint32_t FetchAddRelaxed(uint32_t* counter, uint32_t value) const {
    return std::atomic_ref(*counter).fetch_add(value, std::memory_order_relaxed);
  }

  template <typename Counter>
  Counter FetchAddAcqRel(Counter* counter, Counter value) const {
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

  // Threads may outnumber cores: let the one that is waited for run.
  void Pause() const { std::this_thread::yield(); }

 private:
  // atomic_ref<const T> does not exist in C++20; only loads are made through this view.
  template <typename Cell>
  static std::atomic_ref<Cell> View(const Cell* cell) {
    return std::atomic_ref<Cell>(*const_cast<Cell*>(cell));
  }
};

static_assert(SignalMemory<HostSignalMemory>);

}  // namespace jax_ep
