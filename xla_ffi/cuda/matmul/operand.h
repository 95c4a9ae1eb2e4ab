// How operands of warpgroup matmuls (wgmma) lie in shared memory, and what describes one.
//
// An operand lies in lines of 128 bytes with the 128-byte swizzle, eight lines an atom of 1024
// bytes, to which it is aligned. Along: a line holds 128 bytes of the contracted dimension of one
// row (or column) of the operand, atoms follow each other. Across: a line holds 64 rows (or
// columns) of one step of the contracted dimension, atoms follow each other along it, and the next
// 64 begin kChunkBytes later.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep::cuda {

inline constexpr uint32_t kAtomBytes = 1024;
inline constexpr uint32_t kChunkBytes = 8192;

// Addresses in these descriptors count 16 bytes, and leave out the bits that say which block of a
// cluster has them: wgmma reads its own. To a load they would be addresses of block 0.
JAX_EP_HOST_DEVICE uint32_t OperandUnits(uint32_t shared_bytes) {
  return (shared_bytes & 0x3FFFF) >> 4;
}

// The operand at `units`. Sums, not bits put together: the compiler then adds up offsets in
// registers of the whole warp.
template <bool kAcross>
JAX_EP_HOST_DEVICE uint64_t OperandAt(uint32_t units) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  // Along, the hardware knows where the next 16 bytes lie, and wants 1 here.
  constexpr uint32_t kNextChunk = kAcross ? kChunkBytes >> 4 : 1;
  return uint64_t{kSwizzle128 | kAtomBytes >> 4} << 32 | (units + (kNextChunk << 16));
}

}  // namespace jax_ep::cuda
