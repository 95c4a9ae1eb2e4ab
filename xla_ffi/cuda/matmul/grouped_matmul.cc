// Checks a step and finds its kernel.
#include <type_traits>

#include "cuda/matmul/kinds.h"

namespace jax_ep::cuda {
namespace {

// Kernels count rows, groups and columns in int32.
constexpr int64_t kMostRows = int64_t{1} << 31;

// If there is room for at most this many rows per group, the kernels for few rows run. Chosen by
// the times in docs/benchmarks.md, "Decode".
constexpr int64_t kFewRows = 32;

// Row scales are indexed in uint32.
constexpr int64_t kMostScales = int64_t{1} << 32;

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool Fits(const MatmulStep& step) {
  const int64_t align = ColumnsAlign(step.kind);
  const bool is_half =
      step.element == ElementType::kBFloat16 || step.element == ElementType::kFloat16;
  return step.m >= 0 && step.m < kMostRows && step.groups >= 0 && step.groups < kMostRows &&
         step.k > 0 && step.k < kMostRows && step.k % align == 0 && step.n > 0 &&
         step.n < kMostRows && step.n % align == 0 && is_half &&
         // Tensor copies count rows of results in int32.
         (!IsWgrad(step.kind) || step.groups * step.k < kMostRows) &&
         (!IsFp8(step.kind) || step.m * (step.k / 128) <= kMostScales) && Aligned(step.a) &&
         Aligned(step.b) && Aligned(step.b_up) && Aligned(step.bias) &&
         Aligned(step.gate_up_rows) && Aligned(step.d) && Aligned(step.to_gate_up_rows);
}

template <typename Element>
bool Has(ElementType element) {
  if constexpr (std::is_void_v<Element>) return true;
  if constexpr (std::is_same_v<Element, Float16>) return element == ElementType::kFloat16;
  return element == ElementType::kBFloat16;
}

cudaError_t Multiply(const MatmulStep& step, MatmulWay way, cudaStream_t stream) {
  if (!Fits(step)) return cudaErrorInvalidValue;
  if (!MatmulSupported()) return cudaErrorNotSupported;
  if (step.groups == 0) return cudaSuccess;
  if (step.m == 0) {
    // A tensor map cannot have an empty dimension.
    if (!IsWgrad(step.kind)) return cudaSuccess;
    const int64_t bytes = step.groups * step.k * step.n * ElementBytes(step.out_element);
    return cudaMemsetAsync(step.d, 0, static_cast<size_t>(bytes), stream);
  }
  cudaError_t error = cudaErrorInvalidValue;
  ForEachMatmul([&]<MatmulKind kKind, typename Element>() {
    if (step.kind == kKind && Has<Element>(step.element)) {
      error = MultiplyKind<kKind, Element>(step, way, stream);
    }
  });
  return error;
}

}  // namespace

bool MatmulSupported() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

cudaError_t GroupedMatmul(const MatmulStep& step, cudaStream_t stream) {
  return Multiply(step, {}, stream);
}

cudaError_t ApplyExperts(const ExpertsStep& step, cudaStream_t stream) {
  const bool few = step.m <= kFewRows * step.groups;
  const cudaError_t error = Multiply(step.GateUp(), {.few_rows = few}, stream);
  if (error != cudaSuccess) return error;
  return Multiply(step.Down(), {.early = true, .few_rows = few}, stream);
}

cudaError_t PreloadMatmulKernels() {
  cudaError_t error = cudaSuccess;
  ForEachMatmul([&]<MatmulKind kKind, typename Element>() {
    if (error == cudaSuccess) error = PreloadKind<kKind, Element>();
  });
  return error;
}

}  // namespace jax_ep::cuda
