// Checks a step and finds its kernel.
#include "cuda/portable/portable.h"

#include <type_traits>

#include "cuda/portable/kinds.h"

namespace jax_ep::cuda {
namespace {

// Kernels count rows, groups and columns in int32.
constexpr int64_t kMost = int64_t{1} << 31;

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool Fits(const MatmulStep& step) {
  const int64_t align = ColumnsAlign(step.kind);
  return !IsFp8(step.kind) && step.m >= 0 && step.m < kMost && step.groups >= 0 &&
         step.groups < kMost && step.k > 0 && step.k < kMost && step.k % align == 0 && step.n > 0 &&
         step.n < kMost / 2 && step.n % align == 0 && Aligned(step.a) && Aligned(step.b) &&
         Aligned(step.b_up) && Aligned(step.bias) && Aligned(step.gate_up_rows) &&
         Aligned(step.d) && Aligned(step.to_gate_up_rows);
}

template <typename Element>
bool IsOf(ElementType element, bool exact) {
  if constexpr (std::is_same_v<Element, portable::ExactFloat>) {
    return element == ElementType::kFloat32 && exact;
  } else if constexpr (std::is_same_v<Element, float>) {
    return element == ElementType::kFloat32 && !exact;
  } else if constexpr (std::is_same_v<Element, Float16>) {
    return element == ElementType::kFloat16;
  } else {
    return element == ElementType::kBFloat16;
  }
}

}  // namespace

bool PortableSupported() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 8;
}

cudaError_t PortableMatmul(const MatmulStep& step, cudaStream_t stream) {
  if (!Fits(step)) return cudaErrorInvalidValue;
  if (!PortableSupported()) return cudaErrorNotSupported;
  if (step.groups == 0 || (step.m == 0 && step.kind != MatmulKind::kWgrad)) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  portable::ForEach([&]<MatmulKind kKind, typename Element, typename Out>() {
    if (step.kind == kKind && IsOf<Element>(step.element, step.exact) &&
        IsOf<Out>(step.out_element, false)) {
      error = portable::MultiplyKind<kKind, Element, Out>(step, stream);
    }
  });
  return error;
}

cudaError_t PreloadPortableKernels() {
  cudaError_t error = cudaSuccess;
  portable::ForEach([&]<MatmulKind kKind, typename Element, typename Out>() {
    if (error == cudaSuccess) error = portable::PreloadKind<kKind, Element, Out>();
  });
  return error;
}

}  // namespace jax_ep::cuda
