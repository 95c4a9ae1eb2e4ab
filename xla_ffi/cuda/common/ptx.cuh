// All PTX of jax_ep except number conversions (formats/): system-scope accesses and fences, bulk
// copies (TMA) and their barriers, and the timer. docs/protocol.md, "Memory order", says which
// operation each step of the protocol needs.
//
// 64-bit and 128-bit addresses refer to global memory: this GPU's, a peer's, or mapped host memory.
#pragma once

#include <cstdint>

namespace jax_ep::cuda {

// A 16-byte cell. Always access it whole: accesses of different sizes do not synchronise.
struct alignas(16) Bits128 {
  uint64_t low;
  uint64_t high;
};

// One access of 128 bits with the given order and scope. A .v2.u64 access would be two accesses,
// between which the cell could change.
#define JAX_EP_LOAD_CELL(kind, from)      \
  Bits128 value;                          \
  asm volatile(                           \
      "{\n"                               \
      ".reg .b128 cell;\n"                \
      "ld." kind                          \
      ".global.b128 cell, [%2];\n"        \
      "mov.b128 {%0, %1}, cell;\n"        \
      "}"                                 \
      : "=l"(value.low), "=l"(value.high) \
      : "l"(from)                         \
      : "memory");                        \
  return value
#define JAX_EP_STORE_CELL(kind, to, value) \
  asm volatile(                            \
      "{\n"                                \
      ".reg .b128 cell;\n"                 \
      "mov.b128 cell, {%1, %2};\n"         \
      "st." kind                           \
      ".global.b128 [%0], cell;\n"         \
      "}" ::"l"(to),                       \
      "l"((value).low), "l"((value).high)  \
      : "memory")

// ---- Loads and stores at system scope -----------------------------------------------------------

// Relaxed: orders nothing.
__device__ __forceinline__ uint64_t LoadRelaxedSystem(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ Bits128 LoadRelaxedSystem(const Bits128* from) {
  JAX_EP_LOAD_CELL("relaxed.sys", from);
}

// Acquire; pairs with FenceAcqRelSystem followed by StoreRelaxedSystem in the thread that stored
// the value, on any GPU. Covers generic-proxy accesses only: bulk copies need FenceProxyAsyncGlobal
// as well.
__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// Acquire, with the same partner.
__device__ __forceinline__ Bits128 LoadAcquireSystem(const Bits128* from) {
  JAX_EP_LOAD_CELL("acquire.sys", from);
}

// Relaxed, but a release of everything that an earlier FenceAcqRelSystem of this thread covers.
__device__ __forceinline__ void StoreRelaxedSystem(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void StoreRelaxedSystem(Bits128* to, const Bits128& value) {
  JAX_EP_STORE_CELL("relaxed.sys", to, value);
}

// Turns this thread's later relaxed stores into releases, which pair with LoadAcquireSystem, and
// its earlier relaxed loads into acquires, towards every GPU and the host. Does not wait for bulk
// copies: call BulkWait first.
__device__ __forceinline__ void FenceAcqRelSystem() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Several threads may store the same value to one place at once. Readers must come after a barrier.
template <typename T>
__device__ __forceinline__ void StoreSame(T* to, T value) {
  *to = value;
}

// ---- Loads around L1 ----------------------------------------------------------------------------

// L1 may still hold what was at an address before a flag was observed, so these loads bypass it.
// They are volatile so that no compiler moves them before the observation.
__device__ __forceinline__ int32_t LoadAroundL1(const int32_t* from) {
  int32_t value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ float LoadAroundL1(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint2 LoadAroundL1(const uint2* from) {
  uint2 value;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ uint4 LoadAroundL1(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// ---- Counters among the blocks of one GPU -------------------------------------------------------

// Relaxed: orders nothing.
__device__ __forceinline__ uint32_t LoadRelaxedGpu(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Relaxed: orders nothing.
__device__ __forceinline__ void StoreRelaxedGpu(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreRelaxedGpu(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ Bits128 LoadRelaxedGpu(const Bits128* from) {
  JAX_EP_LOAD_CELL("relaxed.gpu", from);
}

__device__ __forceinline__ void StoreRelaxedGpu(Bits128* to, const Bits128& value) {
  JAX_EP_STORE_CELL("relaxed.gpu", to, value);
}

#undef JAX_EP_LOAD_CELL
#undef JAX_EP_STORE_CELL

// Relaxed: orders nothing. Returns the previous value.
__device__ __forceinline__ uint32_t FetchAddRelaxedGpu(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// Acquire and release; pairs with itself in the other threads that add to the counter. Returns the
// previous value.
__device__ __forceinline__ uint32_t FetchAddAcqRelGpu(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ uint64_t FetchAddAcqRelGpu(uint64_t* counter, uint64_t value) {
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(value)
               : "memory");
  return before;
}

// Waits until `threads` threads of the block, in whole warps, have come to barrier `id` (1 to 15; 0
// is __syncthreads), and orders their accesses.
__device__ __forceinline__ void NamedBarrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for warps that reach one barrier through different instructions, as warps with different
// roles do. compute-sanitizer's synccheck demands that all warps reach a bar.sync, and barrier 0 in
// any form, through the same instruction.
__device__ __forceinline__ void NamedBarrierApart(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` without waiting. This warp's earlier accesses come before the later ones
// of threads that wait there.
__device__ __forceinline__ void ArriveAtBarrier(uint32_t id, uint32_t threads) {
#ifdef JAX_EP_ARRIVE_WAITS  // racecheck does not understand arrivals; see tools/sanitize.sh
  NamedBarrierApart(id, threads);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// ---- Time ---------------------------------------------------------------------------------------

// Nanoseconds on this GPU's clock, which advances in steps of up to a microsecond. Orders nothing.
__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// ---- A thread's own copies ----------------------------------------------------------------------

// Copies kBytes (8 or 16) from global to shared memory; both addresses are aligned to kBytes. The
// copy happens at some time before this thread's next AsyncArrive completes.
template <int kBytes>
__device__ __forceinline__ void AsyncCopy(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    static_assert(kBytes == 8);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
  }
}

// The same of 16 bytes. Unless they exist, writes zeros and reads nothing.
__device__ __forceinline__ void AsyncCopyOrZero(void* shared, const void* global, bool exists) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(exists ? 16 : 0)
               : "memory");
}

// ---- Bulk copies and their barriers -------------------------------------------------------------
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Converts a pointer to an address in PTX's shared state space.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Orders earlier ordinary accesses to shared memory, this thread's and those ordered before them,
// before later bulk copies. Also needed once after MbarrierInit.
__device__ __forceinline__ void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory, including a peer's. Call it between an acquire that a barrier has
// passed on to this thread and the bulk copies that this thread then issues.
__device__ __forceinline__ void FenceProxyAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders nothing: FenceProxyAsyncShared and a barrier among the users must follow. Phase 0 begins.
__device__ __forceinline__ void MbarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrives, and makes the phase wait for `bytes` more. Call it before the copies that bring them.
__device__ __forceinline__ void MbarrierExpectAt(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void MbarrierExpect(uint64_t* barrier, uint32_t bytes) {
  MbarrierExpectAt(SharedAddress(barrier), bytes);
}

// Arrives when this thread's earlier AsyncCopy calls have completed, perhaps after this call has
// returned. Release of what they wrote; pairs with the MbarrierTryWait that sees the phase end.
__device__ __forceinline__ void AsyncArrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// Returns true once the phase of this parity has ended (phase n has parity n % 2); this thread may
// then read the bytes that arrived. May sleep briefly, and may return false spuriously.
__device__ __forceinline__ bool MbarrierTryWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Copies from global memory to this block's shared memory and completes on `barrier`. Addresses and
// sizes are multiples of 16. Nothing but this thread's fences orders it.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Copies from shared to global memory, including a peer's, in this thread's open bulk group.
// Addresses and sizes are multiples of 16.
__device__ __forceinline__ void BulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(SharedAddress(shared)), "r"(bytes)
               : "memory");
}

// Closes this thread's bulk group. No other thread can wait for it.
__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups have written; their writes are visible to this
// thread.
template <int kPending>
__device__ __forceinline__ void BulkWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the last kPending groups have read their shared memory, which may then be
// overwritten. Says nothing about their writes.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

#else

// On older GPUs the kernels that use these are empty, but their parts must still compile.
__device__ void FenceProxyAsyncShared();
__device__ void FenceProxyAsyncGlobal();
__device__ void MbarrierInit(uint64_t* barrier, uint32_t arrivals);
__device__ void MbarrierExpect(uint64_t* barrier, uint32_t bytes);
__device__ bool MbarrierTryWait(uint64_t* barrier, uint32_t parity);
__device__ void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);
__device__ void BulkStore(void* global, const void* shared, uint32_t bytes);
__device__ void BulkCommit();
template <int kPending>
__device__ void BulkWait();
template <int kPending>
__device__ void BulkWaitRead();

#endif  // sm_90

// ---- Arithmetic ---------------------------------------------------------------------------------

// 2^x and 1 / x, within two units of the last place.
__device__ __forceinline__ float ExpTwo(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float FastReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jax_ep::cuda
