// The instructions of compute capability 8.0 that the portable matmuls are made of: asynchronous
// copies to shared memory, loads of matrix fragments, and products of a warp. tests/emulator
// replaces this header.
#pragma once

#include <cstdint>

#include "formats/numbers.h"

namespace jax_ep::cuda::portable {

// The address of shared memory, as the instructions below take it.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes to shared memory; if `bytes` is 0 and not 16, writes zeros and reads nothing.
// Both addresses are multiples of 16.
__device__ __forceinline__ void CopyOrZero(uint32_t to, const uint8_t* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// Ends a group of copies, which may be empty.
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest kLeft groups of this thread's copies have ended. Other threads see
// what they wrote after a barrier.
template <int kLeft>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Loads four matrices of eight rows of 16 bytes; lane 8 * i + j has the address of row j of matrix
// i. Lane l gets the bytes 4 * (l % 4) of row l / 4 of each.
__device__ __forceinline__ void LoadFragments(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The same of the transposed matrices of 16-bit elements.
__device__ __forceinline__ void LoadFragmentsTransposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ uint32_t LoadShared(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

// d += a * b: 16 x 8 sums of a warp, over 16 elements of 16 bits or 8 of 32 bits. Element 2 * r + i
// of `d` is column 2 * (lane % 4) + i of row lane / 4 + 8 * r.
template <typename Element>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);

#define JAX_EP_MULTIPLY_ADD(element, shape)                                                   \
  template <>                                                                                 \
  __device__ __forceinline__ void MultiplyAdd<element>(float (&d)[4], const uint32_t (&a)[4], \
                                                       uint32_t b0, uint32_t b1) {            \
    asm volatile("mma.sync.aligned." shape                                                    \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));             \
  }
JAX_EP_MULTIPLY_ADD(BFloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
JAX_EP_MULTIPLY_ADD(Float16, "m16n8k16.row.col.f32.f16.f16.f32")
JAX_EP_MULTIPLY_ADD(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef JAX_EP_MULTIPLY_ADD

// Adds to sums. Compilers keep its place among products, so that few of these wait in registers.
__device__ __forceinline__ void AddInOrder(float (&to)[4], const float (&with)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(to[i]) : "f"(with[i]));
  }
}

// Rounds the bits of a float to TF32, to nearest.
__device__ __forceinline__ uint32_t RoundToTf32(uint32_t bits) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(BitsFloat(bits)));
  return rounded;
}

}  // namespace jax_ep::cuda::portable
