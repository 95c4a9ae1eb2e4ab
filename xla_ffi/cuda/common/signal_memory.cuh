// The SignalMemory of GPUs: what protocol/signals.h needs, over the accesses of ptx.cuh.
// docs/protocol.md, "Memory order", has the table.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "protocol/signals.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// The type in which a cell is moved in one access.
template <typename Cell>
struct CellBits {
  static_assert(sizeof(Cell) == 8 || sizeof(Cell) == 16);
  static_assert(alignof(Cell) == sizeof(Cell), "a cell is one naturally aligned access");
  using Type = std::conditional_t<sizeof(Cell) == 8, uint64_t, Bits128>;
};

// Called by one thread, so that later calls touch no window. A gate that the host has closed stays
// closed: the group's memory may soon belong to somebody else.
__device__ inline void PoisonGate(Gate& gate) {
  atomicCAS(reinterpret_cast<unsigned*>(&gate), static_cast<unsigned>(Gate::kOpen),
            static_cast<unsigned>(Gate::kPoisoned));
}

struct DeviceSignalMemory {
  // Covers this thread's bulk copies only after BulkWait has returned.
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

  // A poll already takes as long as an access to L2; sleeping would only add latency.
  __device__ void Pause() const {}
};

static_assert(SignalMemory<DeviceSignalMemory>);

}  // namespace jax_ep::cuda
