// How operands of warpgroup matmuls (wgmma) lie in shared memory, and their descriptors.
//
// An operand lies in lines of 128 bytes with the 128-byte swizzle. Eight lines make an atom of 1024
// bytes, to which operands are aligned. There are two layouts:
//   K-major: a line holds 128 bytes of K, of one row of A or column of B. Atoms follow each other.
//   MN-major: a line holds 64 rows of A or columns of B, for one element of K. Atoms follow each
//   other along K, and the next 64 rows begin kChunkBytes later.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep::cuda {

inline constexpr uint32_t kAtomBytes = 1024;
inline constexpr uint32_t kChunkBytes = 8192;

// Addresses in these descriptors are in units of 16 bytes and leave out the bits that say which
// block of a cluster they belong to: wgmma reads its own block's memory. To a load they would be
// addresses of block 0.
JAX_EP_HOST_DEVICE uint32_t OperandUnits(uint32_t shared_bytes) {
  return (shared_bytes & 0x3FFFF) >> 4;
}

// The descriptor of the operand at `units`. `units` is added, not combined with |, so that the
// compiler adds up offsets in uniform registers.
template <bool kMnMajor>
JAX_EP_HOST_DEVICE uint64_t OperandAt(uint32_t units) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  // If K-major, the hardware knows where the next 16 bytes lie, and wants 1 here.
  constexpr uint32_t kNextChunk = kMnMajor ? kChunkBytes >> 4 : 1;
  return uint64_t{kSwizzle128 | kAtomBytes >> 4} << 32 | (units + (kNextChunk << 16));
}

}  // namespace jax_ep::cuda
