// SignalMemory for ranks that are GPUs: signals.h over the accesses of ptx.cuh. The kernels of the
// window transports use it; docs/protocol.md, "Memory order", has the table.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "protocol/signals.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// The access that moves a cell whole.
template <typename Cell>
struct CellBits {
  static_assert(sizeof(Cell) == 8 || sizeof(Cell) == 16);
  static_assert(alignof(Cell) == sizeof(Cell), "a cell is one naturally aligned access");
  using Type = std::conditional_t<sizeof(Cell) == 8, uint64_t, Bits128>;
};

// One thread: later calls touch no window. Unless the host has closed it, which is for good: the
// group's memory may be another's soon.
__device__ inline void PoisonGate(Gate& gate) {
  atomicCAS(reinterpret_cast<unsigned*>(&gate), static_cast<unsigned>(Gate::kOpen),
            static_cast<unsigned>(Gate::kPoisoned));
}

struct DeviceSignalMemory {
  // Covers the thread's own bulk copies only once BulkWait has returned.
  __device__ void ReleaseFence() const {
    FenceAcqRelSystem();  // Release; pairs with Acquire below on another GPU.
  }

  template <typename Cell>
  __device__ void Post(Cell* cell, const Cell& value) const {
    using Bits = typename CellBits<Cell>::Type;
    StoreRelaxedSystem(reinterpret_cast<Bits*>(cell), __builtin_bit_cast(Bits, value));
  }

  template <typename Cell>
  __device__ Cell Peek(const Cell* cell) const {
    using Bits = typename CellBits<Cell>::Type;
    return __builtin_bit_cast(Cell, LoadRelaxedSystem(reinterpret_cast<const Bits*>(cell)));
  }

  template <typename Cell>
  __device__ Cell Acquire(const Cell* cell) const {
    using Bits = typename CellBits<Cell>::Type;
    // Acquire; pairs with ReleaseFence, then Post, on another GPU.
    return __builtin_bit_cast(Cell, LoadAcquireSystem(reinterpret_cast<const Bits*>(cell)));
  }

  __device__ uint32_t FetchAddRelaxed(uint32_t* counter, uint32_t value) const {
    return FetchAddRelaxedGpu(counter, value);
  }

  template <typename Counter>
  __device__ Counter FetchAddAcqRel(Counter* counter, Counter value) const {
    // Acquire and release; pairs with itself in the other members of LastOf.
    return FetchAddAcqRelGpu(counter, value);
  }

  template <typename Counter>
  __device__ void StoreRelaxed(Counter* counter, Counter value) const {
    StoreRelaxedGpu(counter, value);
  }

  __device__ uint64_t NowNs() const { return GlobalTimerNs(); }

  // A poll is already as slow as L2; sleeping would only add to the latency.
  __device__ void Pause() const {}
};

static_assert(SignalMemory<DeviceSignalMemory>);

}  // namespace jax_ep::cuda
