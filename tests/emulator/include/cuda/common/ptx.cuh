// Takes the place of xla_ffi/cuda/common/ptx.cuh on the include path: its functions, name by name,
// over emulator.h. Ordinary accesses take effect at once and in order, so fences between them
// matter only to a build for races. Where the order among threads matters, other threads run first.
#pragma once

#include <cmath>
#include <cstdint>

#include "emulator.h"

namespace jax_ep::cuda {

struct alignas(16) Bits128 {
  uint64_t low;
  uint64_t high;
};

// ---- Loads, stores, counters --------------------------------------------------------------------

template <typename T>
T LoadAtOnce(const T* from, const char* what) {
  emulator::Yield(what);
  emulator::CheckGlobal(from, sizeof(T), sizeof(T), what);
  emulator::LoadsRelaxed(from);
  return emulator::LoadWords(from);
}
template <typename T>
T LoadAndAcquire(const T* from, const char* what) {
  const T value = LoadAtOnce(from, what);
  emulator::LoadsAcquire(from);
  return value;
}
template <typename T>
void StoreAtOnce(T* to, const T& value, const char* what) {
  if (emulator::Random() % 2 == 0) emulator::Yield(what);
  emulator::CheckGlobal(to, sizeof(T), sizeof(T), what);
  emulator::StoresRelaxed(to);
  emulator::StoreWords(to, value);
}

inline uint64_t LoadRelaxedSystem(const uint64_t* from) {
  return LoadAtOnce(from, "ld.relaxed.sys");
}
inline Bits128 LoadRelaxedSystem(const Bits128* from) {
  return LoadAtOnce(from, "ld.relaxed.sys.b128");
}
inline uint64_t LoadAcquireSystem(const uint64_t* from) {
  return LoadAndAcquire(from, "ld.acquire.sys");
}
inline Bits128 LoadAcquireSystem(const Bits128* from) {
  return LoadAndAcquire(from, "ld.acquire.sys.b128");
}
inline void StoreRelaxedSystem(uint64_t* to, uint64_t value) {
  StoreAtOnce(to, value, "st.relaxed.sys");
}
inline void StoreRelaxedSystem(Bits128* to, const Bits128& value) {
  StoreAtOnce(to, value, "st.relaxed.sys.b128");
}
inline void FenceAcqRelSystem() { emulator::Fence(); }

template <typename T>
void StoreSame(T* to, T value) {
  emulator::StoreWords(to, value);
}

template <typename T>
T LoadAroundL1(const T* from) {
  emulator::CheckGlobal(from, sizeof(T), sizeof(T), "ld.cg");
  return *from;
}

inline uint32_t LoadRelaxedGpu(const uint32_t* from) { return LoadAtOnce(from, "ld.relaxed.gpu"); }
inline void StoreRelaxedGpu(uint32_t* to, uint32_t value) {
  StoreAtOnce(to, value, "st.relaxed.gpu");
}
inline void StoreRelaxedGpu(uint64_t* to, uint64_t value) {
  StoreAtOnce(to, value, "st.relaxed.gpu");
}
inline Bits128 LoadRelaxedGpu(const Bits128* from) {
  return LoadAtOnce(from, "ld.relaxed.gpu.b128");
}
inline void StoreRelaxedGpu(Bits128* to, const Bits128& value) {
  StoreAtOnce(to, value, "st.relaxed.gpu.b128");
}
template <typename T>
T FetchAdd(T* counter, T value) {
  const T before = LoadAtOnce(counter, "atom.add.gpu");
  emulator::StoreWords(counter, before + value);
  return before;
}
template <typename T>
T FetchAddInOrder(T* counter, T value) {
  const T before = FetchAdd(counter, value);
  emulator::Acquire(counter);
  emulator::Release(counter);
  return before;
}
inline uint32_t FetchAddRelaxedGpu(uint32_t* counter, uint32_t value) {
  return FetchAdd(counter, value);
}
inline uint32_t FetchAddAcqRelGpu(uint32_t* counter, uint32_t value) {
  return FetchAddInOrder(counter, value);
}
inline uint64_t FetchAddAcqRelGpu(uint64_t* counter, uint64_t value) {
  return FetchAddInOrder(counter, value);
}

// ---- Barriers and time --------------------------------------------------------------------------

inline void NamedBarrier(uint32_t id, uint32_t threads) { emulator::Sync(id, threads, true, true); }
inline void NamedBarrierApart(uint32_t id, uint32_t threads) { NamedBarrier(id, threads); }
inline void ArriveAtBarrier(uint32_t id, uint32_t threads) {
  emulator::Sync(id, threads, true, false);
}
inline uint64_t GlobalTimerNs() { return emulator::ClockNs(); }

// ---- A thread's own copies ----------------------------------------------------------------------

template <int kBytes>
void AsyncCopy(void* shared, const void* global) {
  static_assert(kBytes == 8 || kBytes == 16);
  emulator::OwnCopy(shared, global, kBytes);
}
inline void AsyncCopyOrZero(void* shared, const void* global, bool exists) {
  emulator::OwnCopy(shared, exists ? global : nullptr, 16);
}
using emulator::AsyncArrive;

// ---- Bulk copies and their barriers -------------------------------------------------------------

using emulator::SharedAddress;
inline void FenceProxyAsyncShared() { emulator::FenceAsyncShared(); }
inline void FenceProxyAsyncGlobal() {}

using emulator::BulkCommit;
using emulator::BulkLoad;
using emulator::BulkStore;
using emulator::MbarrierExpect;
using emulator::MbarrierInit;
using emulator::MbarrierTryWait;

template <int kPending>
void BulkWait() {
  emulator::BulkWait(kPending, false);
}
template <int kPending>
void BulkWaitRead() {
  emulator::BulkWait(kPending, true);
}

inline float NoDenormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float ExpTwo(float x) { return NoDenormal(std::exp2(NoDenormal(x))); }
inline float FastReciprocal(float x) { return NoDenormal(1.0f / NoDenormal(x)); }

}  // namespace jax_ep::cuda
