// Stands in for NVSHMEM's header of this name: the functions that shmem/internode.cu calls, over
// puts.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator.h"

enum { NVSHMEM_SIGNAL_SET };
enum { NVSHMEM_CMP_GE };

inline void nvshmem_fence() { jax_ep::emulator::FencePuts(); }

// Whether the wait itself would have ended does not matter here.
inline int nvshmem_uint64_test(uint64_t* at, int, uint64_t value) {
  jax_ep::emulator::SettlePuts();
  return jax_ep::emulator::LoadWords(at) >= value;
}
