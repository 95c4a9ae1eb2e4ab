// How operands of warpgroup matmuls (wgmma) lie in shared memory, and their descriptors.
//
// An operand lies in lines of 128 bytes with the 128-byte swizzle. Eight lines make an atom of 1024
// bytes, to which operands are aligned. There are two layouts:
//   Along: a line holds 128 bytes of the contracted dimension, of one row (or column) of the
//   operand. Atoms follow each other.
//   Across: a line holds 64 rows (or columns) of one step of the contracted dimension. Atoms follow
//   each other along that dimension, and the next 64 rows begin kChunkBytes later.
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
template <bool kAcross>
JAX_EP_HOST_DEVICE uint64_t OperandAt(uint32_t units) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  // Along, the hardware knows where the next 16 bytes lie, and wants 1 here.
  constexpr uint32_t kNextChunk = kAcross ? kChunkBytes >> 4 : 1;
  return uint64_t{kSwizzle128 | kAtomBytes >> 4} << 32 | (units + (kNextChunk << 16));
}

}  // namespace jax_ep::cuda
