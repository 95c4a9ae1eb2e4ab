// The products of a layer's experts as steps of xla_ffi/cuda/matmul, on random operands, and a
// plain kernel that computes samples of their results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/matmul/step.h"
#include "formats/e4m3.h"
#include "formats/numbers.h"
#include "grouped/random.cuh"
#include "grouped/timing.cuh"

namespace jax_ep::cuda {

// A product of a layer with hidden size H and inner size F.
struct Product {
  const char* name;
  MatmulKind kind;
  bool of_gate_up;  // otherwise of down
  bool float32 = false;
};

inline constexpr Product kProducts[] = {
    {"gate_up", MatmulKind::kGateUp, true},
    {"down", MatmulKind::kRows, false},
    {"down back", MatmulKind::kDownBack, false},
    {"gate_up to rows", MatmulKind::kRowsTransposed, true},
    {"gate_up to matrices", MatmulKind::kOuter, true},
    {"down to matrices", MatmulKind::kOuter, false},
    {"down to matrices, float32", MatmulKind::kOuter, false, true},
    {"fp8 gate_up", MatmulKind::kCodeGateUp, true},
    {"fp8 down", MatmulKind::kCodeRows, false},
    {"fp8 down back", MatmulKind::kCodeDownBack, false},
    {"fp8 gate_up to rows", MatmulKind::kCodeRows, true},
};

inline bool HasSides(MatmulKind kind) {
  return kind == MatmulKind::kGateUp || kind == MatmulKind::kCodeGateUp;
}
// Whether `out_element` is used.
__host__ __device__ inline bool ChoosesOut(MatmulKind kind) {
  return kind == MatmulKind::kOuter || kind == MatmulKind::kCodeRows;
}
inline bool GoesBack(MatmulKind kind) {
  return kind == MatmulKind::kDownBack || kind == MatmulKind::kCodeDownBack;
}

// A product's operands and results on the GPU.
class Made {
 public:
  // Of `rows` rows the first `held` are in groups and random; those after them are NaN.
  Made(const Product& product, ElementType element, int hidden, int inner, int rows,
       const std::vector<int32_t>& sizes, int held, uint64_t seed)
      : product_(product), codes_(OfCodes(product.kind)), sizes_(sizes) {
    const MatmulKind kind = product.kind;
    const bool outer = kind == MatmulKind::kOuter;
    const bool forward = HasSides(kind) || kind == MatmulKind::kRows ||
                         (kind == MatmulKind::kCodeRows && !product.of_gate_up);
    const int64_t gate_up_columns = HasSides(kind) ? inner : 2 * inner;
    const int64_t from = product.of_gate_up ? hidden : inner;
    const int64_t to = product.of_gate_up ? gate_up_columns : hidden;
    step.kind = kind;
    step.element = element;
    if (ChoosesOut(kind)) {
      step.out_element = product.float32 ? ElementType::kFloat32 : element;
    }
    step.rows = rows;
    step.groups = static_cast<int64_t>(sizes.size());
    step.left_columns = outer || forward ? from : to;
    step.columns = outer || forward ? to : from;
    const int64_t sides = HasSides(kind) ? 2 : 1;
    const int64_t k = step.left_columns, b = step.columns, n = step.rows, l = step.groups;
    left_ = Random(n * k, held * k, seed);
    right_ = outer ? Random(n * b, held * b, seed + 1) : Random(l * k * b * sides, -1, seed + 1);
    if (codes_) {
      left_scales_ = Scales(n * (k / 128), seed + 2);
      right_scales_ = Scales(l * (k / 128) * sides * (b / 128), seed + 3);
    }
    const int64_t results = outer ? l * k * b : n * b * (GoesBack(kind) ? 2 : 1);
    out_bytes = static_cast<uint64_t>(results) * (codes_ && kind != MatmulKind::kCodeRows ? 1
                                                  : product.float32                       ? 4
                                                                                          : 2);
    out_ = Bytes(out_bytes);
    if (HasSides(kind) || GoesBack(kind)) {
      codes_ = false;  // `both_` has no codes
      both_ = GoesBack(kind) ? Random(n * 2 * b, held * 2 * b, seed + 4) : Bytes(n * 2 * b * 2);
      if (GoesBack(kind)) to_both_ = Bytes(static_cast<uint64_t>(n) * 2 * b * 2);
      codes_ = OfCodes(kind);
    }
    if (codes_ && kind != MatmulKind::kCodeRows) out_scales_ = Bytes(results / 128 * 4);
    step.sizes = sizes_.get();
    step.left = left_->get();
    step.right = right_->get();
    step.out = out_->get();
    step.both = both_ ? both_->get() : nullptr;
    step.to_both = to_both_ ? to_both_->get() : nullptr;
    step.left_scales = Floats(left_scales_);
    step.right_scales = Floats(right_scales_);
    step.out_scales = Floats(out_scales_);
    // Canonical weights: [L, H / 128, 2, F / 128] and [L, F / 128, H / 128].
    step.scales_per_group = (k / 128) * sides * (b / 128);
    step.scales_per_k = forward ? sides * (b / 128) : 1;
    step.scales_per_side = b / 128;
    step.scales_per_b = forward ? 1 : k / 128;
    // Operands were filled on the default stream, which the stream of a Timer does not wait for.
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  void Poison(cudaStream_t stream) {
    for (const Part* part : {&out_, &to_both_, &out_scales_}) {
      if (*part) CHECK_CUDA(cudaMemsetAsync((*part)->get(), 0xFF, (*part)->size(), stream));
    }
    if (HasSides(step.kind)) {
      CHECK_CUDA(cudaMemsetAsync(both_->get(), 0xFF, both_->size(), stream));
    }
  }

  double operations(int64_t held) const {
    return 2.0 * static_cast<double>(held) * static_cast<double>(step.left_columns) *
           static_cast<double>(step.columns) * (HasSides(step.kind) ? 2 : 1);
  }

  MatmulStep step{};
  uint64_t out_bytes = 0;

 private:
  using Part = std::unique_ptr<Memory<uint8_t>>;

  static float* Floats(const Part& part) {
    return part ? reinterpret_cast<float*>(part->get()) : nullptr;
  }
  static Part Bytes(uint64_t count) { return std::make_unique<Memory<uint8_t>>(count); }
  // `count` random elements; NaN from `held` on, unless it is negative.
  Part Random(int64_t count, int64_t held, uint64_t seed);
  static Part Scales(int64_t count, uint64_t seed) {
    Part made = Bytes(static_cast<uint64_t>(count) * 4);
    FillScales<<<1024, 256>>>(reinterpret_cast<float*>(made->get()), static_cast<uint64_t>(count),
                              seed);
    CHECK_CUDA(cudaGetLastError());
    return made;
  }

  Product product_;
  bool codes_;
  Memory<int32_t> sizes_;
  Part left_, right_, left_scales_, right_scales_, out_, both_, to_both_, out_scales_;
};

static __global__ void FillHalves(__half* to, uint64_t count, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = __float2half(Normal(i, seed));
  }
}

inline Made::Part Made::Random(int64_t count, int64_t held, uint64_t seed) {
  const uint64_t elements = static_cast<uint64_t>(count);
  const uint64_t bytes = codes_ ? 1 : 2;
  Part made = Bytes(elements * bytes);
  if (codes_) {
    FillCodes<<<1024, 256>>>(made->get(), elements, seed);
  } else if (step.element == ElementType::kFloat16) {
    FillHalves<<<1024, 256>>>(reinterpret_cast<__half*>(made->get()), elements, seed);
  } else {
    FillNormal<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(made->get()), elements, seed);
  }
  CHECK_CUDA(cudaGetLastError());
  if (held >= 0 && held < count) {
    CHECK_CUDA(cudaMemset(made->get() + static_cast<uint64_t>(held) * bytes, 0xFF,
                          (elements - static_cast<uint64_t>(held)) * bytes));
  }
  return made;
}

// ---- Samples ------------------------------------------------------------------------------------

struct Sample {
  int32_t group;
  int32_t row;     // of N rows; for kOuter of the group's matrix
  int32_t column;  // within a side
  int32_t side;
  bool both;  // in `both` or `to_both`, not in `out`
  double wanted;
  double found;
};

struct Reader {
  MatmulStep step;

  __device__ double Element(const void* from, int64_t index) const {
    if (step.element == ElementType::kFloat16)
      return __half2float(static_cast<const __half*>(from)[index]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[index]);
  }
  __device__ double Code(const void* from, int64_t index) const {
    return E4M3::Decode(static_cast<const uint8_t*>(from)[index]);
  }
  __device__ double Left(int64_t row, int64_t k) const {
    const int64_t at = row * step.left_columns + k;
    if (!OfCodes(step.kind)) return Element(step.left, at);
    return Code(step.left, at) * step.left_scales[row * (step.left_columns / 128) + k / 128];
  }
  __device__ double Right(int64_t group, int64_t k, int64_t side, int64_t b) const {
    const int64_t sides =
        step.kind == MatmulKind::kGateUp || step.kind == MatmulKind::kCodeGateUp ? 2 : 1;
    const int64_t along = ((group * sides + side) * step.columns + b) * step.left_columns + k;
    const int64_t across = ((group * step.left_columns + k) * sides + side) * step.columns + b;
    if (OfCodes(step.kind)) {
      return Code(step.right, along) *
             step.right_scales[group * step.scales_per_group + k / 128 * step.scales_per_k +
                               side * step.scales_per_side + b / 128 * step.scales_per_b];
    }
    const bool is_across = step.kind == MatmulKind::kRows || step.kind == MatmulKind::kGateUp;
    return Element(step.right, is_across ? across : along);
  }
};

__device__ inline double WarpSum(double sum) {
  for (int other = warpSize / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(~0u, sum, other);
  }
  return sum;
}

// Computes each sample on one warp. `first` has each group's first row, and the end of the last
// group.
static __global__ void CheckSamples(MatmulStep step, const int32_t* first, Sample* samples,
                                    int count) {
  const int index = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / warpSize);
  const int lane = static_cast<int>(threadIdx.x) % warpSize;
  if (index >= count) return;
  Sample& sample = samples[index];
  const Reader read{step};
  const int64_t row = sample.row, column = sample.column, side = sample.side, b = step.columns;
  double sums[2] = {0, 0};
  if (step.kind == MatmulKind::kOuter) {
    for (int64_t n = first[sample.group] + lane; n < first[sample.group + 1]; n += warpSize) {
      sums[0] += read.Element(step.left, n * step.left_columns + row) *
                 read.Element(step.right, n * b + column);
    }
  } else {
    const bool sides = step.kind == MatmulKind::kGateUp || step.kind == MatmulKind::kCodeGateUp;
    for (int64_t k = lane; k < step.left_columns; k += warpSize) {
      for (int s = 0; s <= sides; ++s) {
        sums[s] += read.Left(row, k) * read.Right(sample.group, k, s, column);
      }
    }
  }
  sums[0] = WarpSum(sums[0]);
  sums[1] = WarpSum(sums[1]);
  if (lane != 0) return;
  const int64_t in_both = (row * 2 + side) * b + column;
  switch (step.kind) {
    case MatmulKind::kGateUp:
    case MatmulKind::kCodeGateUp: {
      const double h = sums[0] / (1 + exp(-sums[0])) * sums[1];
      sample.wanted = sample.both ? sums[side] : h;
      const int64_t at = row * b + column;
      if (sample.both) {
        sample.found = read.Element(step.both, in_both);
      } else if (OfCodes(step.kind)) {
        sample.found = read.Code(step.out, at) * step.out_scales[row * (b / 128) + column / 128];
      } else {
        sample.found = read.Element(step.out, at);
      }
      return;
    }
    case MatmulKind::kDownBack:
    case MatmulKind::kCodeDownBack: {
      const double gate = read.Element(step.both, row * 2 * b + column);
      const double up = read.Element(step.both, row * 2 * b + b + column);
      const double sigmoid = 1 / (1 + exp(-gate)), silu = gate * sigmoid;
      sample.wanted = sums[0] * (side == 1 ? silu : up * (sigmoid + silu * (1 - sigmoid)));
      if (OfCodes(step.kind) && !sample.both) {
        sample.found = read.Code(step.out, in_both) *
                       step.out_scales[(row * 2 + side) * (b / 128) + column / 128];
      } else {
        sample.found = read.Element(step.to_both, in_both);
      }
      return;
    }
    default: {
      const int64_t result = step.kind == MatmulKind::kOuter
                                 ? (sample.group * step.left_columns + row) * b + column
                                 : row * b + column;
      sample.wanted = sums[0];
      sample.found = ChoosesOut(step.kind) && step.out_element == ElementType::kFloat32
                         ? static_cast<const float*>(step.out)[result]
                         : read.Element(step.out, result);
    }
  }
}

// Counts the bytes from `begin` to `end` that are not `value`.
static __global__ void CountOthers(const uint8_t* from, uint64_t begin, uint64_t end, uint8_t value,
                                   unsigned long long* found) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  unsigned long long mine = 0;
  for (uint64_t i = begin + uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < end; i += step) {
    mine += from[i] != value ? 1 : 0;
  }
  if (mine != 0) atomicAdd(found, mine);
}

}  // namespace jax_ep::cuda
