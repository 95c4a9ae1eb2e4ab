// Grouped matmuls: what a call multiplies.
//
// M rows lie in L groups of `sizes`, one after the other; group g has a matrix of its own. Sums are
// float32. Rows past the groups are not written, and whatever they hold changes no result; a NaN
// stays in its row. Sizes that are negative or reach past M are clamped.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "protocol/options.h"
#include "protocol/steps.h"

namespace jax_ep {

// A x B -> D, with shapes in the order of memory. 16-bit operands have the type `element`; fp8 ones
// are e4m3 codes with a float32 scale per 128.
enum class MatmulKind {
  kFprop,         // [M, K] x [L, K, N] -> [M, N]
  kDgrad,         // [M, K] x [L, N, K] -> [M, N]
  kGateUp,        // [M, K] x [L, K, 2, N] -> h [M, N], the activation of gate and up
  kDownDgrad,     // [M, K] x [L, N, K], cotangents of h -> those of gate and up [M, 2, N]
  kWgrad,         // [M, K] x [M, N] -> [L, K, N], sums over each group's rows
  kFp8Matmul,     // kDgrad in fp8, or with transposed weights fprop
  kFp8GateUp,     // [M, K] x [L, 2, N, K] -> h [M, N] in fp8
  kFp8DownDgrad,  // kDownDgrad in fp8 -> [M, 2, N] in fp8, and in `element`
  kFp8Wgrad,      // kWgrad in fp8, of operands that TransposeRowsStep makes: [K, M] x [N, M]
};

JAX_EP_HOST_DEVICE constexpr bool IsFp8(MatmulKind kind) { return kind >= MatmulKind::kFp8Matmul; }
JAX_EP_HOST_DEVICE constexpr bool IsWgrad(MatmulKind kind) {
  return kind == MatmulKind::kWgrad || kind == MatmulKind::kFp8Wgrad;
}

// h, a function of gate and up. s is the sigmoid.
enum class Activation : int32_t {
  kSwiGlu,         // gate * s(gate) * up
  kSwiGluClamped,  // g * s(alpha * g) * (u + 1): g = min(gate, limit), u in [-limit, limit]
  kGeGlu,          // gelu(gate) * up, gelu by tanh
  kReluSquared,    // max(gate, 0)^2 * up
};
template <>
inline constexpr std::array<std::string_view, 4> kWordsOf<Activation>{"swiglu", "swiglu_clamped",
                                                                      "geglu", "relu_squared"};

// Of kinds with gate and up.
struct ActivationOptions {
  Activation activation{};
  float alpha{};
  float limit{};
};

struct MatmulStep : ActivationOptions {
  MatmulKind kind;
  // Whether it is for GPUs of compute capability 8.0 and newer, not for Hopper alone: of the kinds
  // before kFp8Matmul. Operands may then be float32, which is rounded to TF32 unless it is `exact`.
  bool portable;
  bool exact;
  ElementType element;  // of 16-bit operands and results: bfloat16 or float16
  // Of D in kFp8Matmul, kWgrad and kFp8Wgrad, and portable kFprop and kDgrad: `element` or float32.
  ElementType out_element;
  int64_t m;
  int64_t groups;  // L
  int64_t k;
  int64_t n;             // of each side, gate or up
  const int32_t* sizes;  // [L]
  const void* a;
  const float* a_scales;  // of fp8: [M, K / 128]; of kFp8Wgrad: [M / 128, K / 128]
  const void* b;
  // kGateUp: the matrices of up [L, K, N], with those of gate in `b`; or null, if `b` has both.
  // kDgrad: with the matrices of gate in `b`, A is [M, 2, K], and D sums over gate and up.
  const void* b_up;
  // kWgrad: rows of B have as many sides of N columns, of which this multiplies one.
  int64_t b_sides = 1;
  // Null, or what is added to the float32 sums: [L, N] in kFprop and kFp8Matmul, and in kinds that
  // make h [L, 2, N], before the activation.
  const float* bias;
  // Of fp8, per 128 x 128 of a matrix. The scale of block i of K and block j of N (and of side s in
  // kFp8GateUp) is at g * scales_per_group + i * scales_per_k + s * scales_per_side + j *
  // scales_per_n, so that the weights and their transpose share an array of scales. That of block i
  // of M in kFp8Wgrad is at i * scales_per_k + j.
  const float* b_scales;
  int64_t scales_per_group;
  int64_t scales_per_k;
  int64_t scales_per_side;
  int64_t scales_per_n;
  // [M, 2, N] of `element`. kGateUp and kFp8GateUp write gate and up there unless it is null;
  // kDownDgrad and kFp8DownDgrad read them from there.
  void* gate_up_rows;
  void* d;          // codes in kFp8GateUp and kFp8DownDgrad
  float* d_scales;  // of these codes, per 128
  // kDownDgrad and kFp8DownDgrad: the cotangents of gate and up in `element`, [M, 2, N]; may be
  // `gate_up_rows`.
  void* to_gate_up_rows;

  // Sets the strides of scales as kFp8GateUp has them, [L, K / 128, 2, N / 128].
  void SetGateUpScales() {
    const int64_t k_blocks = k / 128, n_blocks = n / 128;
    scales_per_group = 2 * k_blocks * n_blocks;
    scales_per_k = 2 * n_blocks, scales_per_side = n_blocks, scales_per_n = 1;
  }
  // Sets those of kFp8Matmul: for fprop, [L, K / 128, N / 128], else [L, N / 128, K / 128].
  void SetScales(bool fprop) {
    const int64_t k_blocks = k / 128, n_blocks = n / 128;
    scales_per_group = k_blocks * n_blocks, scales_per_side = 0;
    scales_per_k = fprop ? n_blocks : 1, scales_per_n = fprop ? 1 : k_blocks;
  }
};

// Both matmuls of SwiGLU experts: kGateUp, whose h is A of the second one, and kFprop; or those of
// fp8. [M, H] x [L, H, 2, F] -> h [M, F], x [L, F, H] -> [M, H]. In fp8 h is quantised, and the
// matrices are transposed, [L, 2, F, H] and [L, H, F].
struct ExpertsStep : ActivationOptions {
  bool fp8;
  ElementType element;      // as in MatmulStep
  ElementType out_element;  // of D in fp8
  int64_t m;
  int64_t groups;        // L
  int64_t hidden;        // H
  int64_t inner;         // F
  const int32_t* sizes;  // [L]
  const void* a;
  const float* a_scales;  // of fp8: [M, H / 128]
  const void* gate_up;
  const void* up;               // the matrices of up, with those of gate in `gate_up`; or null
  const float* gate_up_scales;  // [L, H / 128, 2, F / 128]
  const float* gate_up_bias;    // [L, 2, F], or null
  const void* down;
  const float* down_scales;  // [L, F / 128, H / 128]
  const float* down_bias;    // [L, H], or null
  void* h;
  float* h_scales;  // [M, F / 128]
  void* d;

  MatmulStep GateUp() const {
    MatmulStep step = Matmul(fp8 ? MatmulKind::kFp8GateUp : MatmulKind::kGateUp);
    step.k = hidden, step.n = inner;
    step.a = a, step.a_scales = a_scales;
    step.b = gate_up, step.b_up = up, step.b_scales = gate_up_scales;
    step.bias = gate_up_bias;
    static_cast<ActivationOptions&>(step) = *this;
    step.d = h, step.d_scales = h_scales;
    step.SetGateUpScales();
    return step;
  }
  MatmulStep Down() const {
    MatmulStep step = Matmul(fp8 ? MatmulKind::kFp8Matmul : MatmulKind::kFprop);
    step.k = inner, step.n = hidden;
    step.a = h, step.a_scales = h_scales;
    step.b = down, step.b_scales = down_scales;
    step.bias = down_bias;
    step.d = d;
    step.SetScales(true);
    return step;
  }

 private:
  MatmulStep Matmul(MatmulKind kind) const {
    MatmulStep step{};
    step.kind = kind;
    step.element = element, step.out_element = out_element;
    step.m = m, step.groups = groups, step.sizes = sizes;
    return step;
  }
};

// K and N are multiples of this: 16 bytes of 16-bit elements, or a block of fp8.
constexpr int64_t ColumnsAlign(MatmulKind kind) { return IsFp8(kind) ? 128 : 8; }

// Quantises matrices per 128 x 128 block by the rule of "fp8_block128", with amax over the block.
struct QuantizeMatricesStep {
  ElementType element;
  int64_t groups;        // G
  int64_t rows;          // A, a multiple of 128
  int64_t sides;         // Z: 2 where gate and up lie side by side
  int64_t columns;       // B, a multiple of 128
  const void* matrices;  // [G, A, Z, B]; with `up` those of gate [G, A, B], and Z is 2
  const void* up;        // [G, A, B], or null
  uint8_t* codes;        // [G, A, Z, B]
  float* scales;         // [G, A / 128, Z, B / 128]
  uint8_t* transposed;   // [G, Z, B, A], the same codes; or nullptr
};

// The layout of matrices in "mxfp4" for kernels: e2m1 codes with a power of two per 32 of K. They
// lie as [L, tiles, K / 32, kMxfp4AtomBytes]. A tile has kMxfp4BlockN columns of a matrix or, if
// SwiGLU follows, half as many of gate and of up, kMxfp4Run of each by turns. An atom holds the
// tile for 32 of K. Column 16 * m + 8 * h + r has its codes for K = 8 * i + 2 * q + j, i < 4 and j
// < 2, in the word of four bytes that begins at byte 512 * (m / 2) + 16 * (4 * r + q) + 8 * (m % 2)
// + 4 * h. Codes are placed so that decoding takes the fewest instructions. Of its codes, 2 * i +
// j, the lower half of the word has 0, 2, 4 and 7, and the upper half 1, 3, 5 and 6. In each half
// the first three have their signs in bits 15, 12, 9, and their other bits from bit 6, 3, 0 on; the
// last one has its sign in bit 13 and its other bits, the lowest first, in bits 14, 10, 11. The
// column's scale is the byte at 2048
// + 16 * r + 2 * m + h.
inline constexpr int64_t kMxfp4BlockN = 128;
inline constexpr int64_t kMxfp4Run = 16;
inline constexpr int64_t kMxfp4AtomK = 32;
inline constexpr int64_t kMxfp4AtomBytes = kMxfp4BlockN * kMxfp4AtomK / 2 + kMxfp4BlockN;
// Atoms come in as many as have this of K, and tiles as many as N takes; codes past K and N are
// zeros.
inline constexpr int64_t kMxfp4Align = 128;
JAX_EP_HOST_DEVICE constexpr int64_t Mxfp4Atoms(int64_t k) {
  return (k + kMxfp4Align - 1) / kMxfp4Align * (kMxfp4Align / kMxfp4AtomK);
}

// Makes an operand of kFp8Wgrad of rows: transposed codes per 128 x 128 by the rule of
// "fp8_block128_e8m0", with amax over the block. There each group begins at a multiple of 128, and
// zeros fill its last block. So codes whose scales are powers of two stay exact, but for those
// below 2^-13 of the block's largest.
struct TransposeRowsStep {
  int64_t m;
  int64_t groups;             // L
  int64_t columns;            // A, a multiple of 128
  int64_t padded;             // P, PaddedRows(m, groups)
  const int32_t* sizes;       // [L]
  const void* values;         // [M, A] of bfloat16, or with `value_scales` codes of e4m3
  const float* value_scales;  // [M, A / 128], or null
  uint8_t* codes;             // [A, P]; not written past the groups
  float* scales;              // [P / 128, A / 128]
  int32_t* padded_sizes;      // [L], multiples of 128
};
// Returns the rows that groups of M rows may take there.
constexpr int64_t PaddedRows(int64_t m, int64_t groups) {
  constexpr int64_t kBlock = 128;
  const int64_t filled = groups < m ? groups : m;  // others are empty
  return (m + filled * (kBlock - 1) + kBlock - 1) / kBlock * kBlock;
}

// Turns matrices in "mxfp4", as weights have them, into "fp8_block128", transposed. A block's scale
// is that of its largest power of two by 2^kMxfp4Headroom: 6 times that is below 448. So elements
// are exact whose powers are within 14 octaves of the largest one, and others are rounded to 2^-15
// of it. NaN among the powers counts for its own 32 elements only.
inline constexpr int kMxfp4Headroom = 6;
struct Fp8OfMxfp4Step {
  int64_t groups;        // G
  int64_t rows;          // A, a multiple of 128
  int64_t sides;         // Z: 2 where gate and up lie side by side
  int64_t columns;       // B, a multiple of 128
  const uint8_t* codes;  // [G, A / 2, Z, B], of e2m1; the even row in the lower half of a byte
  const uint8_t* code_scales;  // [G, A / 32, Z, B], of e8m0
  uint8_t* transposed;         // [G, Z, B, A], of e4m3
  float* scales;               // [G, A / 128, Z, B / 128]
};

// A matmul with such matrices, for few rows. Rows, NaN and sizes are treated as in MatmulStep.
struct Mxfp4Step : ActivationOptions {
  bool gate_up;             // whether the activation follows
  ElementType out_element;  // bfloat16 or float32
  int64_t m;
  int64_t groups;         // L
  int64_t k;              // a multiple of kMxfp4AtomK, with scales of kMxfp4Align
  int64_t n;              // of each side; a multiple of 8, with scales of a tile's columns of it
  const int32_t* sizes;   // [L]
  const void* a;          // [M, K] of bfloat16
  const float* a_scales;  // null, or factors of A [M, K / 128]
  const uint8_t* b;
  const float* bias;  // as in MatmulStep
  void* d;            // [M, N]

  JAX_EP_HOST_DEVICE int64_t n_tiles() const {
    return (n * (gate_up ? 2 : 1) + kMxfp4BlockN - 1) / kMxfp4BlockN;
  }
};

}  // namespace jax_ep
