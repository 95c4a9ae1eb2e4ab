// Products of few rows with matrices of four bits, which are read once: decoding on Hopper and
// newer GPUs.
//
// N rows lie in L groups of `sizes`, as in step.h, and what is said there of rows past the groups,
// of NaN and of wrong sizes holds here, too. Weights are codes of "mxfp4": e2m1 with a power of two
// per 32 of the contracted dimension K.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/platform.h"
#include "protocol/steps.h"

namespace jax_ep::cuda {

// How codes lie for this kernel: [L, tiles, K / 32, kFourBitAtomBytes]. A tile has kFourBitColumns
// columns of a matrix, or in a product with SwiGLU half as many of gate, then the same of up. An
// atom holds them for 32 of K. Column 16 * m + 8 * h + r has its codes of K = 8 * q to 8 * q + 7 in
// four bytes at 512 * (m / 2) + 16 * (4 * r + q) + 8 * (m % 2) + 4 * h: from the lowest bits on
// those of 0, 2, 4, 6, 1, 3, 5, 7. Its scale is the byte at 2048 + 16 * r + 2 * m + h.
inline constexpr int64_t kFourBitColumns = 128;
inline constexpr int64_t kFourBitSteps = 32;
inline constexpr int64_t kFourBitAtomBytes = kFourBitColumns * kFourBitSteps / 2 + kFourBitColumns;
// K is a multiple of this.
inline constexpr int64_t kFourBitAlign = 128;

struct FourBitStep {
  bool gate_up;              // whether SwiGLU follows
  ElementType out_element;   // bfloat16 or float32
  int64_t rows;              // N
  int64_t groups;            // L
  int64_t left_columns;      // K
  int64_t columns;           // B, of each side; a multiple of a tile's
  const int32_t* sizes;      // [L]
  const void* left;          // [N, K] of bfloat16, or e4m3 codes
  const float* left_scales;  // [N, K / 128] of codes, else null
  const uint8_t* right;
  void* out;  // [N, B]
};

// Enqueues the step on `stream`. Returns cudaErrorNotSupported on GPUs older than Hopper, and
// cudaErrorInvalidValue for sizes that do not fit.
cudaError_t MultiplyFourBits(const FourBitStep& step, cudaStream_t stream);

// Loads the kernels, which a graph capture must not be the first to use.
cudaError_t PreloadFourBitKernels();

}  // namespace jax_ep::cuda
