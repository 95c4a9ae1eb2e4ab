// Grouped matmuls on Hopper: what a call multiplies.
//
// N rows lie in L groups of `sizes`, one after the other; group g has a matrix of its own. Sums are
// float32. Rows past the groups are not written, and whatever they hold changes no result; a NaN
// stays in its row. Sizes that are negative or reach past N are clamped.
#pragma once

#include <cstdint>

#include "protocol/steps.h"

namespace jax_ep {

// Shapes are in the order of memory. K is left_columns, B is columns. 16-bit operands have the type
// `element`; codes are e4m3 with a float32 scale per 128.
enum class MatmulKind {
  kRows,            // [N, K] x [L, K, B] -> [N, B]
  kRowsTransposed,  // [N, K] x [L, B, K] -> [N, B]
  kGateUp,          // [N, K] x [L, K, 2, B] -> h [N, B] = silu(gate) * up
  kDownBack,        // [N, K] x [L, B, K], cotangents of h -> those of gate and up [N, 2, B]
  kOuter,           // [N, K] x [N, B] -> [L, K, B], sums over each group's rows
  kCodeRows,        // kRowsTransposed of codes
  kCodeGateUp,      // [N, K] x [L, 2, B, K] -> h [N, B] as codes
  kCodeDownBack,    // kDownBack of codes -> [N, 2, B] as codes, and in `element`
};

JAX_EP_HOST_DEVICE constexpr bool OfCodes(MatmulKind kind) { return kind >= MatmulKind::kCodeRows; }

struct MatmulStep {
  MatmulKind kind;
  ElementType element;      // of 16-bit operands and results: bfloat16 or float16
  ElementType out_element;  // of `out` of kCodeRows and kOuter: `element` or float32
  int64_t rows;             // N
  int64_t groups;           // L
  int64_t left_columns;     // K
  int64_t columns;          // B
  const int32_t* sizes;     // [L]
  const void* left;
  const float* left_scales;  // of codes: [N, K / 128]
  const void* right;
  // Of codes, per 128 x 128 of a matrix. The scale of block k of K and block b of B (and of side s
  // in kCodeGateUp) is at g * scales_per_group + k * scales_per_k + s * scales_per_side + b *
  // scales_per_b, so that both orientations of the codes share an array.
  const float* right_scales;
  int64_t scales_per_group;
  int64_t scales_per_k;
  int64_t scales_per_side;
  int64_t scales_per_b;
  // [N, 2, B] of `element`. kGateUp and kCodeGateUp write gate and up there unless it is null;
  // kDownBack and kCodeDownBack read them from there.
  void* both;
  void* out;          // codes in kCodeGateUp and kCodeDownBack
  float* out_scales;  // of these codes, per 128
  // kDownBack and kCodeDownBack: the cotangents of gate and up in `element`, [N, 2, B]; may be
  // `both`.
  void* to_both;

  // Sets the strides of scales as kCodeGateUp has them, [L, K / 128, 2, B / 128].
  void SetGateUpScales() {
    const int64_t k = left_columns / 128, b = columns / 128;
    scales_per_group = 2 * k * b, scales_per_k = 2 * b, scales_per_side = b, scales_per_b = 1;
  }
  // Sets those of kCodeRows: `turned`, [L, K / 128, B / 128], else [L, B / 128, K / 128].
  void SetRowsScales(bool turned) {
    const int64_t k = left_columns / 128, b = columns / 128;
    scales_per_group = k * b, scales_per_side = 0;
    scales_per_k = turned ? b : 1, scales_per_b = turned ? 1 : k;
  }
};

// Both products of SwiGLU experts: kGateUp, whose h the second one multiplies, and kRows; or those
// of codes. [N, H] x [L, H, 2, F] -> h [N, F], x [L, F, H] -> [N, H]. In codes h is quantised, and
// the matrices are turned, [L, 2, F, H] and [L, H, F].
struct ExpertsStep {
  bool codes;
  ElementType element;      // as in MatmulStep
  ElementType out_element;  // of `out` of codes
  int64_t rows;             // N
  int64_t groups;           // L
  int64_t hidden;           // H
  int64_t inner;            // F
  const int32_t* sizes;     // [L]
  const void* left;
  const float* left_scales;  // of codes: [N, H / 128]
  const void* gate_up;
  const float* gate_up_scales;  // [L, H / 128, 2, F / 128]
  const void* down;
  const float* down_scales;  // [L, F / 128, H / 128]
  void* h;
  float* h_scales;  // [N, F / 128]
  void* out;

  MatmulStep GateUp() const {
    MatmulStep step = Product(codes ? MatmulKind::kCodeGateUp : MatmulKind::kGateUp);
    step.left_columns = hidden, step.columns = inner;
    step.left = left, step.left_scales = left_scales;
    step.right = gate_up, step.right_scales = gate_up_scales;
    step.out = h, step.out_scales = h_scales;
    step.SetGateUpScales();
    return step;
  }
  MatmulStep Down() const {
    MatmulStep step = Product(codes ? MatmulKind::kCodeRows : MatmulKind::kRows);
    step.left_columns = inner, step.columns = hidden;
    step.left = h, step.left_scales = h_scales;
    step.right = down, step.right_scales = down_scales;
    step.out = out;
    step.SetRowsScales(true);
    return step;
  }

 private:
  MatmulStep Product(MatmulKind kind) const {
    MatmulStep step{};
    step.kind = kind;
    step.element = element, step.out_element = out_element;
    step.rows = rows, step.groups = groups, step.sizes = sizes;
    return step;
  }
};

// Numbers of columns are multiples of this: 16 bytes of 16-bit elements, or a block of codes.
constexpr int64_t ColumnsAlign(MatmulKind kind) { return OfCodes(kind) ? 128 : 8; }

// Quantises matrices per 128 x 128 block by the rule of "fp8_block128", with amax over the block.
struct QuantizeMatricesStep {
  ElementType element;
  int64_t groups;        // G
  int64_t rows;          // A, a multiple of 128
  int64_t sides;         // Z: 2 where gate and up lie side by side
  int64_t columns;       // B, a multiple of 128
  const void* matrices;  // [G, A, Z, B]
  uint8_t* codes;        // [G, A, Z, B]
  float* scales;         // [G, A / 128, Z, B / 128]
  uint8_t* turned;       // [G, Z, B, A], the same codes; or nullptr
};

// The layout of four-bit matrices for kernels. Their codes are those of "mxfp4": e2m1 with a power
// of two per 32 of the contracted dimension K. They lie as [L, tiles, K / 32, kFourBitAtomBytes]. A
// tile has kFourBitColumns columns of a matrix or, in a product with SwiGLU, half as many of gate
// and of up, kFourBitRun of each by turns. An atom holds the tile for 32 of K. Column
// 16 * m + 8 * h + r has its codes for K = 8 * q to 8 * q + 7 in the word of four bytes that begins
// at byte 512 * (m / 2) + 16 * (4 * r + q) + 8 * (m % 2) + 4 * h. Codes are placed so that decoding
// takes the fewest instructions. The lower half of the word has K = 0, 2, 4 and 7, and the upper
// half K = 1, 3, 5 and 6. In each half the first three have their signs in bits 15, 12, 9, and
// their other bits from bit 6, 3, 0 on; the last one has its sign in bit 13 and its other bits, the
// lowest first, in bits 14, 10, 11. The column's scale is the byte at 2048 + 16 * r + 2 * m + h.
inline constexpr int64_t kFourBitColumns = 128;
inline constexpr int64_t kFourBitRun = 16;
inline constexpr int64_t kFourBitSteps = 32;
inline constexpr int64_t kFourBitAtomBytes = kFourBitColumns * kFourBitSteps / 2 + kFourBitColumns;
// K is a multiple of this.
inline constexpr int64_t kFourBitAlign = 128;

// A product with such matrices, for few rows. Rows, NaN and sizes are treated as in MatmulStep.
struct FourBitStep {
  bool gate_up;              // whether SwiGLU follows
  ElementType out_element;   // bfloat16 or float32
  int64_t rows;              // N
  int64_t groups;            // L
  int64_t left_columns;      // K
  int64_t columns;           // B, of each side; a multiple of the columns that a tile has of it
  const int32_t* sizes;      // [L]
  const void* left;          // [N, K] of bfloat16
  const float* left_scales;  // null, or factors of `left` [N, K / 128]
  const uint8_t* right;
  void* out;  // [N, B]
};

}  // namespace jax_ep
