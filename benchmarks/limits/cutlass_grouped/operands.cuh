// The operands of a product, and a plain kernel that computes samples of its result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "grouped/random.cuh"

namespace jax_ep::cuda {

constexpr int kScaled = 128;  // elements that share a scale, along k and for weights also along n

// d[row] = a[row] @ b[the row's group]. b is [groups, k, n], or [groups, n, k] if `transposed`.
// `codes_b` is always [groups, n, k].
struct Problem {
  int groups;
  int rows;
  int n;
  int k;
  bool transposed;
  const int32_t* sizes;  // of the groups; on the device, like everything below
  const int32_t* ends;   // where the rows of each group end
  const int32_t* equal_ends;
  const __nv_bfloat16* a;
  const __nv_bfloat16* b;
  const __nv_fp8_storage_t* codes_a;
  const __nv_fp8_storage_t* codes_b;
  const float* scales_a;  // [rows, k / kScaled]
  const float* scales_b;  // [groups, n / kScaled, k / kScaled]
  __nv_bfloat16* d;
};

__device__ inline double Decoded(__nv_fp8_storage_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

struct Sample {
  int row;
  int column;
  double wanted;
  double found;
};

// Computes each sample on one warp.
static __global__ void CheckSamples(Problem problem, const int32_t* ends, bool codes,
                                    Sample* samples, int count) {
  const int index = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / warpSize);
  const int lane = static_cast<int>(threadIdx.x) % warpSize;
  if (index >= count) return;
  Sample& sample = samples[index];
  int group = 0;
  while (ends[group] <= sample.row) ++group;
  const int64_t n = problem.n;
  const int64_t k = problem.k;
  const int64_t row = sample.row;
  double sum = 0;
  for (int64_t i = lane; i < k; i += warpSize) {
    const int64_t in_a = row * k + i;
    const int64_t by_column = (group * n + sample.column) * k + i;
    const int64_t by_row = (group * k + i) * n + sample.column;
    if (codes) {
      const int64_t blocks = k / kScaled;
      const double scale_a = problem.scales_a[row * blocks + i / kScaled];
      const double scale_b =
          problem
              .scales_b[(group * (n / kScaled) + sample.column / kScaled) * blocks + i / kScaled];
      sum += Decoded(problem.codes_a[in_a]) * scale_a *
             (Decoded(problem.codes_b[by_column]) * scale_b);
    } else {
      const __nv_bfloat16 weight = problem.b[problem.transposed ? by_column : by_row];
      sum += static_cast<double>(__bfloat162float(problem.a[in_a])) * __bfloat162float(weight);
    }
  }
  for (int other = warpSize / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(~0u, sum, other);
  }
  if (lane != 0) return;
  sample.wanted = sum;
  sample.found = __bfloat162float(problem.d[row * n + sample.column]);
}

// Counts NaN. Results are filled with NaN first, so what still is one was not written.
static __global__ void CountNan(const __nv_bfloat16* from, uint64_t count,
                                unsigned long long* found) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  unsigned long long mine = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    mine += __hisnan(from[i]) ? 1 : 0;
  }
  if (mine != 0) atomicAdd(found, mine);
}

}  // namespace jax_ep::cuda
