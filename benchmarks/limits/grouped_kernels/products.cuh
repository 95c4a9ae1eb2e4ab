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
    {"down", MatmulKind::kFprop, false},
    {"down back", MatmulKind::kDownDgrad, false},
    {"gate_up to rows", MatmulKind::kDgrad, true},
    {"gate_up to matrices", MatmulKind::kWgrad, true},
    {"down to matrices", MatmulKind::kWgrad, false},
    {"down to matrices, float32", MatmulKind::kWgrad, false, true},
    {"fp8 gate_up", MatmulKind::kFp8GateUp, true},
    {"fp8 down", MatmulKind::kFp8Matmul, false},
    {"fp8 down back", MatmulKind::kFp8DownDgrad, false},
    {"fp8 gate_up to rows", MatmulKind::kFp8Matmul, true},
};

inline bool HasSides(MatmulKind kind) {
  return kind == MatmulKind::kGateUp || kind == MatmulKind::kFp8GateUp;
}
// Whether `out_element` is used.
__host__ __device__ inline bool ChoosesD(MatmulKind kind) {
  return kind == MatmulKind::kWgrad || kind == MatmulKind::kFp8Matmul;
}
inline bool IsDownDgrad(MatmulKind kind) {
  return kind == MatmulKind::kDownDgrad || kind == MatmulKind::kFp8DownDgrad;
}

// A product's operands and results on the GPU.
class Made {
 public:
  // Of `rows` rows the first `grouped_rows` are in groups and random; those after them are NaN.
  Made(const Product& product, ElementType element, int hidden, int inner, int rows,
       const std::vector<int32_t>& sizes, int grouped_rows, uint64_t seed)
      : product_(product), fp8_(IsFp8(product.kind)), sizes_(sizes) {
    const MatmulKind kind = product.kind;
    const bool wgrad = kind == MatmulKind::kWgrad;
    const bool forward = HasSides(kind) || kind == MatmulKind::kFprop ||
                         (kind == MatmulKind::kFp8Matmul && !product.of_gate_up);
    const int64_t gate_up_columns = HasSides(kind) ? inner : 2 * inner;
    const int64_t from = product.of_gate_up ? hidden : inner;
    const int64_t to = product.of_gate_up ? gate_up_columns : hidden;
    step.kind = kind;
    step.element = element;
    if (ChoosesD(kind)) {
      step.out_element = product.float32 ? ElementType::kFloat32 : element;
    }
    step.m = rows;
    step.groups = static_cast<int64_t>(sizes.size());
    step.k = wgrad || forward ? from : to;
    step.n = wgrad || forward ? to : from;
    const int64_t sides = HasSides(kind) ? 2 : 1;
    const int64_t k = step.k, n = step.n, m = step.m, l = step.groups;
    a_ = Random(m * k, grouped_rows * k, seed);
    b_ =
        wgrad ? Random(m * n, grouped_rows * n, seed + 1) : Random(l * k * n * sides, -1, seed + 1);
    if (fp8_) {
      a_scales_ = Scales(m * (k / 128), seed + 2);
      b_scales_ = Scales(l * (k / 128) * sides * (n / 128), seed + 3);
    }
    const int64_t results = wgrad ? l * k * n : m * n * (IsDownDgrad(kind) ? 2 : 1);
    d_bytes = static_cast<uint64_t>(results) * (fp8_ && kind != MatmulKind::kFp8Matmul ? 1
                                                : product.float32                      ? 4
                                                                                       : 2);
    d_ = Bytes(d_bytes);
    if (HasSides(kind) || IsDownDgrad(kind)) {
      fp8_ = false;  // `gate_up_rows_` has 16 bits
      gate_up_rows_ = IsDownDgrad(kind) ? Random(m * 2 * n, grouped_rows * 2 * n, seed + 4)
                                        : Bytes(m * 2 * n * 2);
      if (IsDownDgrad(kind)) to_gate_up_rows_ = Bytes(static_cast<uint64_t>(m) * 2 * n * 2);
      fp8_ = IsFp8(kind);
    }
    if (fp8_ && kind != MatmulKind::kFp8Matmul) d_scales_ = Bytes(results / 128 * 4);
    step.sizes = sizes_.get();
    step.a = a_->get();
    step.b = b_->get();
    step.d = d_->get();
    step.gate_up_rows = gate_up_rows_ ? gate_up_rows_->get() : nullptr;
    step.to_gate_up_rows = to_gate_up_rows_ ? to_gate_up_rows_->get() : nullptr;
    step.a_scales = Floats(a_scales_);
    step.b_scales = Floats(b_scales_);
    step.d_scales = Floats(d_scales_);
    // Canonical weights: [L, H / 128, 2, F / 128] and [L, F / 128, H / 128].
    step.scales_per_group = (k / 128) * sides * (n / 128);
    step.scales_per_k = forward ? sides * (n / 128) : 1;
    step.scales_per_side = n / 128;
    step.scales_per_n = forward ? 1 : k / 128;
    // Operands were filled on the default stream, which the stream of a Timer does not wait for.
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  void Poison(cudaStream_t stream) {
    for (const Part* part : {&d_, &to_gate_up_rows_, &d_scales_}) {
      if (*part) CHECK_CUDA(cudaMemsetAsync((*part)->get(), 0xFF, (*part)->size(), stream));
    }
    if (HasSides(step.kind)) {
      CHECK_CUDA(cudaMemsetAsync(gate_up_rows_->get(), 0xFF, gate_up_rows_->size(), stream));
    }
  }

  double operations(int64_t grouped_rows) const {
    return 2.0 * static_cast<double>(grouped_rows) * static_cast<double>(step.k) *
           static_cast<double>(step.n) * (HasSides(step.kind) ? 2 : 1);
  }

  MatmulStep step{};
  uint64_t d_bytes = 0;

 private:
  using Part = std::unique_ptr<Memory<uint8_t>>;

  static float* Floats(const Part& part) {
    return part ? reinterpret_cast<float*>(part->get()) : nullptr;
  }
  static Part Bytes(uint64_t count) { return std::make_unique<Memory<uint8_t>>(count); }
  // `count` random elements; NaN from `grouped_rows` on, unless it is negative.
  Part Random(int64_t count, int64_t grouped_rows, uint64_t seed);
  static Part Scales(int64_t count, uint64_t seed) {
    Part made = Bytes(static_cast<uint64_t>(count) * 4);
    FillScales<<<1024, 256>>>(reinterpret_cast<float*>(made->get()), static_cast<uint64_t>(count),
                              seed);
    CHECK_CUDA(cudaGetLastError());
    return made;
  }

  Product product_;
  bool fp8_;
  Memory<int32_t> sizes_;
  Part a_, b_, a_scales_, b_scales_, d_, gate_up_rows_, to_gate_up_rows_, d_scales_;
};

static __global__ void FillHalves(__half* to, uint64_t count, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = __float2half(Normal(i, seed));
  }
}

inline Made::Part Made::Random(int64_t count, int64_t grouped_rows, uint64_t seed) {
  const uint64_t elements = static_cast<uint64_t>(count);
  const uint64_t bytes = fp8_ ? 1 : 2;
  Part made = Bytes(elements * bytes);
  if (fp8_) {
    FillCodes<<<1024, 256>>>(made->get(), elements, seed);
  } else if (step.element == ElementType::kFloat16) {
    FillHalves<<<1024, 256>>>(reinterpret_cast<__half*>(made->get()), elements, seed);
  } else {
    FillNormal<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(made->get()), elements, seed);
  }
  CHECK_CUDA(cudaGetLastError());
  if (grouped_rows >= 0 && grouped_rows < count) {
    CHECK_CUDA(cudaMemset(made->get() + static_cast<uint64_t>(grouped_rows) * bytes, 0xFF,
                          (elements - static_cast<uint64_t>(grouped_rows)) * bytes));
  }
  return made;
}

// ---- Samples ------------------------------------------------------------------------------------

struct Sample {
  int32_t group;
  int32_t row;     // of M; for kWgrad of the group's matrix
  int32_t column;  // within a side
  int32_t side;
  bool of_gate_up_rows;  // in `gate_up_rows` or `to_gate_up_rows`, not in D
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
  __device__ double A(int64_t row, int64_t k) const {
    const int64_t at = row * step.k + k;
    if (!IsFp8(step.kind)) return Element(step.a, at);
    return Code(step.a, at) * step.a_scales[row * (step.k / 128) + k / 128];
  }
  __device__ double B(int64_t group, int64_t k, int64_t side, int64_t n) const {
    const int64_t sides =
        step.kind == MatmulKind::kGateUp || step.kind == MatmulKind::kFp8GateUp ? 2 : 1;
    const int64_t k_major = ((group * sides + side) * step.n + n) * step.k + k;
    const int64_t mn_major = ((group * step.k + k) * sides + side) * step.n + n;
    if (IsFp8(step.kind)) {
      return Code(step.b, k_major) *
             step.b_scales[group * step.scales_per_group + k / 128 * step.scales_per_k +
                           side * step.scales_per_side + n / 128 * step.scales_per_n];
    }
    const bool b_is_mn_major = step.kind == MatmulKind::kFprop || step.kind == MatmulKind::kGateUp;
    return Element(step.b, b_is_mn_major ? mn_major : k_major);
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
  const int64_t row = sample.row, column = sample.column, side = sample.side, n = step.n;
  double sums[2] = {0, 0};
  if (step.kind == MatmulKind::kWgrad) {
    for (int64_t m = first[sample.group] + lane; m < first[sample.group + 1]; m += warpSize) {
      sums[0] += read.Element(step.a, m * step.k + row) * read.Element(step.b, m * n + column);
    }
  } else {
    const bool sides = step.kind == MatmulKind::kGateUp || step.kind == MatmulKind::kFp8GateUp;
    for (int64_t k = lane; k < step.k; k += warpSize) {
      for (int s = 0; s <= sides; ++s) {
        sums[s] += read.A(row, k) * read.B(sample.group, k, s, column);
      }
    }
  }
  sums[0] = WarpSum(sums[0]);
  sums[1] = WarpSum(sums[1]);
  if (lane != 0) return;
  const int64_t in_gate_up = (row * 2 + side) * n + column;
  switch (step.kind) {
    case MatmulKind::kGateUp:
    case MatmulKind::kFp8GateUp: {
      const double h = sums[0] / (1 + exp(-sums[0])) * sums[1];
      sample.wanted = sample.of_gate_up_rows ? sums[side] : h;
      const int64_t at = row * n + column;
      if (sample.of_gate_up_rows) {
        sample.found = read.Element(step.gate_up_rows, in_gate_up);
      } else if (IsFp8(step.kind)) {
        sample.found = read.Code(step.d, at) * step.d_scales[row * (n / 128) + column / 128];
      } else {
        sample.found = read.Element(step.d, at);
      }
      return;
    }
    case MatmulKind::kDownDgrad:
    case MatmulKind::kFp8DownDgrad: {
      const double gate = read.Element(step.gate_up_rows, row * 2 * n + column);
      const double up = read.Element(step.gate_up_rows, row * 2 * n + n + column);
      const double sigmoid = 1 / (1 + exp(-gate)), silu = gate * sigmoid;
      sample.wanted = sums[0] * (side == 1 ? silu : up * (sigmoid + silu * (1 - sigmoid)));
      if (IsFp8(step.kind) && !sample.of_gate_up_rows) {
        sample.found = read.Code(step.d, in_gate_up) *
                       step.d_scales[(row * 2 + side) * (n / 128) + column / 128];
      } else {
        sample.found = read.Element(step.to_gate_up_rows, in_gate_up);
      }
      return;
    }
    default: {
      const int64_t result = step.kind == MatmulKind::kWgrad
                                 ? (sample.group * step.k + row) * n + column
                                 : row * n + column;
      sample.wanted = sums[0];
      sample.found = ChoosesD(step.kind) && step.out_element == ElementType::kFloat32
                         ? static_cast<const float*>(step.d)[result]
                         : read.Element(step.d, result);
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
