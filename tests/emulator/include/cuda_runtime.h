// Stands in for CUDA's header of this name, which nvcc includes before all others: the language of
// device code as macros and functions over emulator.h, as far as the kernels use it.
#pragma once

#include "cuda_runtime_api.h"

// ---- The language -------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
// No code that runs uses it: see shared_memory.cuh.
#define __shared__ static

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

#define threadIdx (::jax_ep::emulator::current->thread)
#define blockIdx (::jax_ep::emulator::current->block->index)
#define blockDim (dim3(::jax_ep::emulator::current->block->launch->threads))
#define gridDim (::jax_ep::emulator::current->block->launch->grid)

// ---- Warps --------------------------------------------------------------------------------------

namespace jax_ep::emulator {

inline uint32_t Lane() { return current->thread.x % kWarpLanes; }

template <typename T>
const uint64_t* ExchangeBits(uint32_t mask, T value, const char* kind) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  return Exchange(mask, Bits<uint64_t>(value), kind);
}

template <typename Condition>
uint32_t LanesWhere(Condition condition) {
  uint32_t lanes = 0;
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    lanes |= static_cast<uint32_t>(condition(lane)) << lane;
  }
  return lanes;
}

}  // namespace jax_ep::emulator

inline void __syncwarp(unsigned mask = ~0u) {
  ::jax_ep::emulator::Exchange(mask, 0, "__syncwarp", true);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  using namespace ::jax_ep::emulator;
  return Bits<T>(ExchangeBits(mask, value, "__shfl_sync")[lane & 31]);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  using namespace ::jax_ep::emulator;
  const uint64_t* values = ExchangeBits(mask, value, "__shfl_up_sync");
  return Bits<T>(values[Lane() < by ? Lane() : Lane() - by]);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int by) {
  using namespace ::jax_ep::emulator;
  return Bits<T>(ExchangeBits(mask, value, "__shfl_xor_sync")[Lane() ^ static_cast<uint32_t>(by)]);
}

inline unsigned __ballot_sync(unsigned mask, bool value) {
  using namespace ::jax_ep::emulator;
  const uint64_t* values = Exchange(mask, value, "__ballot_sync");
  return LanesWhere([=](uint32_t lane) { return values[lane] != 0; });
}
inline int __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
inline int __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }

template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  using namespace ::jax_ep::emulator;
  const uint64_t* values = ExchangeBits(mask, value, "__match_any_sync");
  return LanesWhere([=](uint32_t lane) { return values[lane] == Bits<uint64_t>(value); });
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  using namespace ::jax_ep::emulator;
  const uint64_t* values = Exchange(mask, value, "__reduce_add_sync");
  uint64_t sum = 0;
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) sum += values[lane];
  return static_cast<unsigned>(sum);
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  using namespace ::jax_ep::emulator;
  const uint64_t* values = Exchange(mask, value, "__reduce_max_sync");
  return static_cast<unsigned>(*std::max_element(values, values + kWarpLanes));
}

inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  using namespace ::jax_ep::emulator;
  const uint64_t* values = Exchange(mask, value, "__reduce_min_sync");
  return static_cast<unsigned>(*std::min_element(values, values + kWarpLanes));
}

// ---- Blocks -------------------------------------------------------------------------------------

inline int __syncthreads_and(int value) {
  using namespace ::jax_ep::emulator;
  return Sync(0, current->block->launch->threads, value != 0, true);
}
inline void __syncthreads() { __syncthreads_and(1); }

template <typename T>
T atomicAdd(T* at, T value) {
  ::jax_ep::emulator::Yield("atomicAdd");
  const T before = ::jax_ep::emulator::LoadWords(at);
  ::jax_ep::emulator::StoreWords(at, before + value);
  return before;
}

inline unsigned atomicOr(unsigned* at, unsigned value) {
  ::jax_ep::emulator::Yield("atomicOr");
  const unsigned before = ::jax_ep::emulator::LoadWords(at);
  ::jax_ep::emulator::StoreWords(at, before | value);
  return before;
}

inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
  ::jax_ep::emulator::Yield("atomicCAS");
  const unsigned before = ::jax_ep::emulator::LoadWords(at);
  if (before == expected) ::jax_ep::emulator::StoreWords(at, value);
  return before;
}

template <typename T>
T atomicMax(T* at, T value) {
  ::jax_ep::emulator::Yield("atomicMax");
  const T before = ::jax_ep::emulator::LoadWords(at);
  if (value > before) ::jax_ep::emulator::StoreWords(at, value);
  return before;
}

// ---- Numbers ------------------------------------------------------------------------------------

inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __int_as_float(int bits) { return ::jax_ep::emulator::Bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return ::jax_ep::emulator::Bits<unsigned>(value); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return shift % 32 == 0 ? high : high << shift % 32 | low >> (32 - shift % 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) {
    found |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  }
  return found;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF);
}
inline unsigned __vmaxu4(unsigned a, unsigned b) {
  const unsigned odd = __vmaxu2(a >> 8 & 0xFF00FF, b >> 8 & 0xFF00FF);
  return odd << 8 | __vmaxu2(a & 0xFF00FF, b & 0xFF00FF);
}
