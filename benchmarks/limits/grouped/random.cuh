// Random normal operands, made on the GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep::cuda {

__device__ inline uint64_t Mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// Returns element `index` of a stream of random normal numbers.
__device__ inline float Normal(uint64_t index, uint64_t seed) {
  const uint64_t bits = Mixed(index ^ Mixed(seed));
  const float radius = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
  const float angle = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
  return sqrtf(-2 * __logf(radius)) * cospif(2 * angle);
}

static __global__ void FillNormal(__nv_bfloat16* to, uint64_t count, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = __float2bfloat16(Normal(i, seed));
  }
}

// About what a scale of amax / 448 does to normal numbers: codes use most of their range.
constexpr float kCodesPerUnit = 100;

static __global__ void FillCodes(__nv_fp8_storage_t* to, uint64_t count, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = __nv_cvt_float_to_fp8(kCodesPerUnit * Normal(i, seed), __NV_SATFINITE, __NV_E4M3);
  }
}

// All scales differ, so that it shows if a wrong one is used.
static __global__ void FillScales(float* to, uint64_t count, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const float unit = static_cast<float>(Mixed(i ^ Mixed(seed)) >> 40) * 0x1p-24f;
    to[i] = (0.5f + unit) / kCodesPerUnit;
  }
}

}  // namespace jax_ep::cuda
