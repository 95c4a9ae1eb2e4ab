// All PTX of jax_ep but conversions of numbers (formats/): system-scope accesses and fences, bulk
// copies (TMA) with the barriers they complete on, and the timer. Used by signal_memory.cuh and by
// kernels that store into windows; docs/protocol.md, "Memory order", says which operation a step
// needs.
//
// Addresses of 64 and 128 bits are of global memory, this GPU's, a peer's or mapped host memory.
#pragma once

#include <cstdint>

namespace jax_ep::cuda {

// A cell of 16 bytes, always accessed whole.
struct alignas(16) Bits128 {
  uint64_t low;
  uint64_t high;
};

// What a load returns and what a store does, of a kind of order and scope. One access of 128 bits:
// a .v2.u64 would be two.
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

// Orders nothing.
__device__ __forceinline__ uint64_t LoadRelaxedSystem(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// As for 64 bits.
__device__ __forceinline__ Bits128 LoadRelaxedSystem(const Bits128* from) {
  JAX_EP_LOAD_CELL("relaxed.sys", from);
}

// This thread's later generic-proxy accesses come after all that the store it reads from released.
__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// As for 64 bits.
__device__ __forceinline__ Bits128 LoadAcquireSystem(const Bits128* from) {
  JAX_EP_LOAD_CELL("acquire.sys", from);
}

// Orders nothing; releases what an earlier FenceAcqRelSystem of this thread covers.
__device__ __forceinline__ void StoreRelaxedSystem(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// As for 64 bits.
__device__ __forceinline__ void StoreRelaxedSystem(Bits128* to, const Bits128& value) {
  JAX_EP_STORE_CELL("relaxed.sys", to, value);
}

// Makes this thread's later relaxed stores releases and its earlier relaxed loads acquires, towards
// every GPU and the host. Does not wait for bulk copies: BulkWait before it.
__device__ __forceinline__ void FenceAcqRelSystem() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// For threads of which several may store, but all the same; a barrier comes before others read it.
template <typename T>
__device__ __forceinline__ void StoreSame(T* to, T value) {
  *to = value;
}

// ---- Loads around L1 ----------------------------------------------------------------------------

// L1 may still hold what lay at an address before a flag was observed. Volatile, so that no
// compiler moves the load to before that.
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

// Orders nothing.
__device__ __forceinline__ uint32_t LoadRelaxedGpu(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Orders nothing.
__device__ __forceinline__ void StoreRelaxedGpu(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreRelaxedGpu(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Likewise, of cells.
__device__ __forceinline__ Bits128 LoadRelaxedGpu(const Bits128* from) {
  JAX_EP_LOAD_CELL("relaxed.gpu", from);
}

__device__ __forceinline__ void StoreRelaxedGpu(Bits128* to, const Bits128& value) {
  JAX_EP_STORE_CELL("relaxed.gpu", to, value);
}

#undef JAX_EP_LOAD_CELL
#undef JAX_EP_STORE_CELL

// Orders nothing. Returns what was there.
__device__ __forceinline__ uint32_t FetchAddRelaxedGpu(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// Orders this thread's accesses on both sides against those of the other threads that add.
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

// Waits until `threads` threads of the block, whole warps, have come to barrier `id` (1 to 15; 0 is
// __syncthreads); orders their accesses.
__device__ __forceinline__ void NamedBarrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same where warps come to one barrier by different instructions, as those with different roles
// do: synccheck wants one instruction of bar.sync and its like, and of all that comes to barrier 0.
__device__ __forceinline__ void NamedBarrierApart(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this thread's warp as come to barrier `id` without waiting; orders its accesses before
// those that others make after they waited there.
__device__ __forceinline__ void ArriveAtBarrier(uint32_t id, uint32_t threads) {
#ifdef JAX_EP_ARRIVE_WAITS  // for racecheck: benchmarks/sanitize.sh
  NamedBarrierApart(id, threads);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// ---- Time ---------------------------------------------------------------------------------------

// Nanoseconds of this GPU's clock, in steps of up to a microsecond. Orders nothing.
__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// ---- Bulk copies and their barriers -------------------------------------------------------------
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// An address as PTX names it in the shared state space.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Orders this thread's ordinary accesses to shared memory, and those ordered before it, against
// bulk copies that follow. Also needed once after MbarrierInit.
__device__ __forceinline__ void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As above for global memory, a peer's included: between an acquire that a barrier has passed on to
// this thread and the bulk copies that it issues.
__device__ __forceinline__ void FenceProxyAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders nothing: a FenceProxyAsyncShared and a barrier of the users follow. Phase 0 is under way.
__device__ __forceinline__ void MbarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrives and makes the phase wait for `bytes` more. Before the copies that bring them.
__device__ __forceinline__ void MbarrierExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// True once the phase of this parity has ended (phase n has parity n % 2); then the bytes that
// arrived can be read by this thread. May sleep a little, and may be false without cause.
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

// Global to this block's shared memory, completing on `barrier`. Addresses and bytes are multiples
// of 16. Ordered after nothing but the fences of this thread.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Shared to global memory, a peer's included, in this thread's open bulk group. Multiples of 16.
__device__ __forceinline__ void BulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(SharedAddress(shared)), "r"(bytes)
               : "memory");
}

// Closes this thread's bulk group. Groups are a thread's own: no other thread can wait for them.
__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups have written, visibly to this thread.
template <int kPending>
__device__ __forceinline__ void BulkWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the last kPending groups have read their shared memory, which can then be
// overwritten. Says nothing about what they write.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

#else

// Kernels that use these are empty on older GPUs; their parts must compile all the same.
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

}  // namespace jax_ep::cuda
