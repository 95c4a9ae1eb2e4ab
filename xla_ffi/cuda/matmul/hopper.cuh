// PTX of the matmul kernels: tensor copies, thread-block clusters and warpgroup matmuls (wgmma).
// tests/emulator replaces this header.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/matmul/operand.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

// ---- Clusters of two blocks ---------------------------------------------------------------------

// This block's rank in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Called by all threads of both blocks. What they did to shared memory before is visible after.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Makes barriers known to the other block and to tensor copies. Called after MbarrierInit and
// before ClusterSync.
__device__ __forceinline__ void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// True for one lane of a whole warp, always the same one. The compiler knows that a single lane
// runs what depends on it.
__device__ __forceinline__ bool IsElected() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Arrives once at this block's barrier. Release; pairs with the MbarrierTryWait that sees the phase
// end.
__device__ __forceinline__ void MbarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Returns a number that all lanes have, for use in loops. The shuffle tells the compiler that they
// do, so that it continues from there in uniform registers. It must also keep what it would
// otherwise compute again before every use: addresses in shared memory, from the block's rank in
// its cluster.
template <typename T>
__device__ __forceinline__ T Uniform(T value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}

// MbarrierTryWait without sleeping.
__device__ __forceinline__ bool MbarrierHasEnded(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Arrives once at the barrier at the same place in block `rank`. The scope is the default, the
// block: the arrival only says that this block has read what tensor copies brought, and a release
// at cluster scope would flush L1.
__device__ __forceinline__ void MbarrierArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Not moved ahead of what precedes it in the source. Otherwise the compiler would put loads between
// products.
__device__ __forceinline__ float LoadShared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// ---- Kernels that overlap (programmatic dependent launch) ---------------------------------------

// Lets the next kernel on the stream begin, if it was launched early, once all blocks have called
// this or have ended.
__device__ __forceinline__ void LetNextKernelBegin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// In a kernel that was launched early: waits until the previous kernel on the stream has ended.
// After this the calling thread sees, and copies, all that it wrote.
__device__ __forceinline__ void AwaitPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Tensor copies ------------------------------------------------------------------------------

// Where a box of a four-dimensional tensor map begins, the fastest dimension first. Elements
// outside the tensor are loaded as zeros.
struct BoxPlace {
  int32_t at[4];
};

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a box to this block's shared memory at `shared`, a multiple of 1024, and completes on
// `barrier`. All arguments should be Uniform: if they may differ between lanes, the compiler puts a
// loop around the instruction.
__device__ __forceinline__ void TensorLoad(uint32_t shared, const CUtensorMap* map, BoxPlace place,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(barrier)
      : "memory");
}

// The same, to the same place in both blocks of the cluster. It completes on each block's own
// barrier.
__device__ __forceinline__ void TensorLoadMulticast(uint32_t shared, const CUtensorMap* map,
                                                    BoxPlace place, uint32_t barrier) {
  constexpr uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]),
      "r"(barrier), "h"(kBoth)
      : "memory");
}

// Copies a box to the tensor, in this thread's open bulk group. Elements outside the tensor are not
// stored.
__device__ __forceinline__ void TensorStore(const CUtensorMap* map, BoxPlace place,
                                            uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
          map),
      "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(shared)
      : "memory");
}

// ---- Warpgroups ---------------------------------------------------------------------------------

inline constexpr uint32_t kWarpgroupThreads = 128;

// Changes the registers per thread of this warpgroup. All of its warps must call it.
template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Called before the first wgmma, and whenever anything else has touched its sums.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all but the last kPending groups have ended. HoldSums must follow before their sums
// are used.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from using the sums before this point, because they are not operands of
// WgmmaWait.
template <int kCount>
__device__ __forceinline__ void HoldSums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// sums [64, 256] (+)= a [64, 16] * b [16, 256]. Elements 4 * c to 4 * c + 3 of lane l of
// warp w are of row 16 * w + l / 4, then of the row 8 further, each in columns 8 * c + 2 * (l % 4)
// and the next one. kAMnMajor, kBMnMajor: see operand.h.
template <typename Element, bool kAMnMajor, bool kBMnMajor>
__device__ __forceinline__ void Wgmma(float (&sums)[128], uint64_t a, uint64_t b, bool add);

#define JAX_EP_WGMMA(kElement, kType, kAMnMajor, kBMnMajor)                                    \
  template <>                                                                                  \
  __device__ __forceinline__ void Wgmma<kElement, kAMnMajor, kBMnMajor>(                       \
      float (&sums)[128], uint64_t a, uint64_t b, bool add) {                                  \
    asm volatile(                                                                              \
        "{\n"                                                                                  \
        ".reg .pred add;\n"                                                                    \
        "setp.ne.b32 add, %130, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." kType "." kType                         \
        " {"                                                                                   \
        "%0, %1, %2, %3, %4, %5, %6, %7, "                                                     \
        "%8, %9, %10, %11, %12, %13, %14, %15, "                                               \
        "%16, %17, %18, %19, %20, %21, %22, %23, "                                             \
        "%24, %25, %26, %27, %28, %29, %30, %31, "                                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, "                                             \
        "%40, %41, %42, %43, %44, %45, %46, %47, "                                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, "                                             \
        "%56, %57, %58, %59, %60, %61, %62, %63, "                                             \
        "%64, %65, %66, %67, %68, %69, %70, %71, "                                             \
        "%72, %73, %74, %75, %76, %77, %78, %79, "                                             \
        "%80, %81, %82, %83, %84, %85, %86, %87, "                                             \
        "%88, %89, %90, %91, %92, %93, %94, %95, "                                             \
        "%96, %97, %98, %99, %100, %101, %102, %103, "                                         \
        "%104, %105, %106, %107, %108, %109, %110, %111, "                                     \
        "%112, %113, %114, %115, %116, %117, %118, %119, "                                     \
        "%120, %121, %122, %123, %124, %125, %126, %127}, "                                    \
        "%128, %129, add, 1, 1, %131, %132;\n"                                                 \
        "}"                                                                                    \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]),           \
          "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]),           \
          "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]),      \
          "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),      \
          "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]),      \
          "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),      \
          "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]),      \
          "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),      \
          "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]),      \
          "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]),      \
          "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]),      \
          "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),      \
          "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]),      \
          "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]),      \
          "+f"(sums[70]), "+f"(sums[71]), "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]),      \
          "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),      \
          "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]), "+f"(sums[84]),      \
          "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]),      \
          "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]),      \
          "+f"(sums[95]), "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),      \
          "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]), "+f"(sums[104]), \
          "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]), "+f"(sums[108]), "+f"(sums[109]), \
          "+f"(sums[110]), "+f"(sums[111]), "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), \
          "+f"(sums[115]), "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]), \
          "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]), "+f"(sums[124]), \
          "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])                                    \
        : "l"(a), "l"(b), "r"(static_cast<uint32_t>(add)), "n"(kAMnMajor ? 1 : 0),             \
          "n"(kBMnMajor ? 1 : 0));                                                             \
  }
JAX_EP_WGMMA(BFloat16, "bf16", false, false)
JAX_EP_WGMMA(BFloat16, "bf16", false, true)
JAX_EP_WGMMA(BFloat16, "bf16", true, true)
JAX_EP_WGMMA(Float16, "f16", false, false)
JAX_EP_WGMMA(Float16, "f16", false, true)
JAX_EP_WGMMA(Float16, "f16", true, true)
#undef JAX_EP_WGMMA

// sums [64, 128] (+)= a [64, 32] * b [32, 128] of e4m3, with both operands K-major (operand.h). The
// tensor cores keep some 14 bits of these sums, so they must be added up elsewhere after every 128
// of K.
__device__ __forceinline__ void WgmmaFp8(float (&sums)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, add, 1, 1;\n"
      "}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]),
        "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]),
        "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]),
        "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]),
        "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),
        "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]),
        "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
        "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]),
        "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]),
        "+f"(sums[62]), "+f"(sums[63])
      : "l"(a), "l"(b), "r"(static_cast<uint32_t>(add)));
}

// The same with the operands swapped, columns of a matrix first and few rows second:
// sums [64, kRows] (+)= columns [64, k] * rows [k, kRows], where k is 32 bytes. A lane's elements
// 4 * c to 4 * c + 3 are of column 16 * w + l / 4, then of the column 8 further, each for rows
// 8 * c + 2 * (l % 4) and the next one. Rows are K-major; columns are MN-major in 16 bits, and
// K-major in fp8, whose Element is void.
template <typename Element, int kRows>
__device__ __forceinline__ void WgmmaFewRows(float (&sums)[kRows / 2], uint64_t columns,
                                             uint64_t rows, bool add);

#define JAX_EP_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define JAX_EP_SUMS_8(i) JAX_EP_SUMS_4(i), JAX_EP_SUMS_4(i + 4)
#define JAX_EP_SUMS_16(i) JAX_EP_SUMS_8(i), JAX_EP_SUMS_8(i + 8)
#define JAX_EP_SUMS_32(i) JAX_EP_SUMS_16(i), JAX_EP_SUMS_16(i + 16)
#define JAX_EP_WGMMA_FEW(kElement, kRows, kShape, kModes, kNames, kColumns, kFew, kAdd, kSums)     \
  template <>                                                                                      \
  __device__ __forceinline__ void WgmmaFewRows<kElement, kRows>(                                   \
      float (&sums)[kRows / 2], uint64_t columns, uint64_t rows, bool add) {                       \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " kAdd                                      \
                 ", 0;\nwgmma.mma_async.sync.aligned." kShape " {" kNames "}, " kColumns ", " kFew \
                 ", add, " kModes ";\n}"                                                           \
                 : kSums(0)                                                                        \
                 : "l"(columns), "l"(rows), "r"(static_cast<uint32_t>(add)));                      \
  }
#define JAX_EP_NAMES_4 "%0, %1, %2, %3"
#define JAX_EP_NAMES_8 JAX_EP_NAMES_4 ", %4, %5, %6, %7"
#define JAX_EP_NAMES_16 JAX_EP_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_EP_NAMES_32                                                      \
  JAX_EP_NAMES_16                                                            \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31"
#define JAX_EP_WGMMA_FEW_OF(kElement, kSuffix, kModes)                                           \
  JAX_EP_WGMMA_FEW(kElement, 8, "m64n8" kSuffix, kModes, JAX_EP_NAMES_4, "%4", "%5", "%6",       \
                   JAX_EP_SUMS_4)                                                                \
  JAX_EP_WGMMA_FEW(kElement, 16, "m64n16" kSuffix, kModes, JAX_EP_NAMES_8, "%8", "%9", "%10",    \
                   JAX_EP_SUMS_8)                                                                \
  JAX_EP_WGMMA_FEW(kElement, 32, "m64n32" kSuffix, kModes, JAX_EP_NAMES_16, "%16", "%17", "%18", \
                   JAX_EP_SUMS_16)                                                               \
  JAX_EP_WGMMA_FEW(kElement, 64, "m64n64" kSuffix, kModes, JAX_EP_NAMES_32, "%32", "%33", "%34", \
                   JAX_EP_SUMS_32)
// The modes are those of the scales of both operands and, of 16 bits, whether each is MN-major.
JAX_EP_WGMMA_FEW_OF(BFloat16, "k16.f32.bf16.bf16", "1, 1, 1, 0")
JAX_EP_WGMMA_FEW_OF(Float16, "k16.f32.f16.f16", "1, 1, 1, 0")
JAX_EP_WGMMA_FEW_OF(void, "k32.f32.e4m3.e4m3", "1, 1")
#undef JAX_EP_WGMMA_FEW_OF
#undef JAX_EP_WGMMA_FEW

// The same of bfloat16 with the columns in registers, which must stay as they are until the product
// has been waited for. A lane's words 0 to 3 are of columns 16 * w + l / 4, 8 further, and the same
// again 8 of K further, each for K = 2 * (l % 4) and the next one.
template <int kRows>
__device__ __forceinline__ void WgmmaOfRegisters(float (&sums)[kRows / 2],
                                                 const uint32_t (&columns)[4], uint64_t rows,
                                                 bool add);

#define JAX_EP_SUMS_64(i) JAX_EP_SUMS_32(i), JAX_EP_SUMS_32(i + 32)
#define JAX_EP_NAMES_64                                                      \
  JAX_EP_NAMES_32                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "   \
  "%60, %61, %62, %63"
#define JAX_EP_WGMMA_OF_REGISTERS(kRows, kNames, kSums, kA, kB, kAdd)                             \
  template <>                                                                                     \
  __device__ __forceinline__ void WgmmaOfRegisters<kRows>(                                        \
      float (&sums)[kRows / 2], const uint32_t (&columns)[4], uint64_t rows, bool add) {          \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " kAdd                                     \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kRows "k16.f32.bf16.bf16 {" kNames    \
                 "}, {" kA "}, " kB ", add, 1, 1, 0;\n}"                                          \
                 : kSums(0)                                                                       \
                 : "r"(columns[0]), "r"(columns[1]), "r"(columns[2]), "r"(columns[3]), "l"(rows), \
                   "r"(static_cast<uint32_t>(add)));                                              \
  }
JAX_EP_WGMMA_OF_REGISTERS(32, JAX_EP_NAMES_16, JAX_EP_SUMS_16, "%16, %17, %18, %19", "%20", "%21")
JAX_EP_WGMMA_OF_REGISTERS(64, JAX_EP_NAMES_32, JAX_EP_SUMS_32, "%32, %33, %34, %35", "%36", "%37")
JAX_EP_WGMMA_OF_REGISTERS(128, JAX_EP_NAMES_64, JAX_EP_SUMS_64, "%64, %65, %66, %67", "%68", "%69")
#undef JAX_EP_WGMMA_OF_REGISTERS

// ---- A warp's registers to shared memory --------------------------------------------------------

// Stores four 8 x 8 matrices of 16-bit elements. In lane l, words[m] holds element
// (l / 4, 2 * (l % 4)) of matrix m and the next one of its row, and `line` is where the 16 bytes of
// row l % 8 of matrix l / 8 go.
__device__ __forceinline__ void StoreMatrices(void* line, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(line)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// The same with each matrix transposed: row l % 8 is then of elements (0, l % 8) to (7, l % 8).
__device__ __forceinline__ void StoreTransposed(void* line, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   SharedAddress(line)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stores 16 bytes of zeros. Several threads may do so at one place, and another warpgroup's wgmma
// may read there meanwhile: that warpgroup has stored the same zeros before.
__device__ __forceinline__ void StoreZeros(void* to) {
  *static_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
}

}  // namespace jax_ep::cuda
