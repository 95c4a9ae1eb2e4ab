// PTX of a warp's own products, without wgmma. tests/emulator replaces this header.
#pragma once

#include <cstdint>

namespace jax_ep::cuda {

// sums [16, 8] += a [16, 16] * b [16, 8] of bfloat16. With r = lane / 4 and q = lane % 4, a lane
// has
//   a, words 0 to 3: rows r, r + 8, r, r + 8 in columns 2 * q and on, the last two words 8
//   columns further;
//   b, words 0 and 1: rows 2 * q and on, and 8 further, in column r;
//   sums, elements 0 to 3: rows r, r, r + 8, r + 8 in columns 2 * q, 2 * q + 1, and the same again.
__device__ __forceinline__ void WarpMultiply(float (&sums)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four matrices of eight rows of 16 bytes from shared memory; lane 8 * i + j has the address
// of row j of matrix i. Lane l gets bytes 4 * (l % 4) and on of row l / 4 of each.
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const uint8_t* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
}

// Multiplies two pairs of bfloat16, with denormals.
__device__ __forceinline__ uint32_t MultiplyTwo(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Multiplies two bfloat16 by one half of `b`: 0 is the lower one. The instruction chooses the half
// itself, but the compiler sees that only here: __byte_perm would be an instruction of its own.
template <int kHalf>
__device__ __forceinline__ uint32_t MultiplyTwoBy(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("{\n"
      ".reg .b16 halves<2>;\n"
      ".reg .b32 both;\n"
      "mov.b32 {halves0, halves1}, %2;\n"
      "mov.b32 both, {halves%3, halves%3};\n"
      "mul.rn.bf16x2 %0, %1, both;\n"
      "}"
      : "=r"(product)
      : "r"(a), "r"(b), "n"(kHalf));
  return product;
}

}  // namespace jax_ep::cuda
