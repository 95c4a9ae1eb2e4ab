// From a MatmulStep to the launch of its kernel.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/portable/kernel.cuh"
#include "cuda/portable/kinds.h"

namespace jax_ep::cuda::portable {

template <typename Traits>
cudaError_t AllowShared() {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel<Traits>),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kMemoryBytes));
}

template <typename Traits>
cudaError_t LaunchMatmul(const MatmulStep& step, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = AllowShared<Traits>();
  if (error != cudaSuccess) return error;
  const bool pair = step.b_up != nullptr;
  const int64_t sides = !Traits::kGateUp || pair ? 1 : 2;  // of a matrix in B
  Arguments arguments{};
  static_cast<ActivationOptions&>(arguments) = step;
  arguments.sizes = step.sizes;
  arguments.groups = static_cast<int32_t>(step.groups);
  arguments.m = static_cast<int32_t>(step.m);
  arguments.a = static_cast<const uint8_t*>(step.a);
  arguments.b = static_cast<const uint8_t*>(step.b);
  arguments.to_up = pair ? static_cast<const uint8_t*>(step.b_up) - arguments.b
                         : step.n * int64_t{Traits::kBytes};
  arguments.k = static_cast<int32_t>(step.k);
  arguments.k_sides = Traits::kKind == MatmulKind::kDgrad && pair ? 2 : 1;
  arguments.n = static_cast<int32_t>(step.n);
  arguments.matrix_n = sides * step.n;
  arguments.row_n = (Traits::kWgrad ? step.b_sides : sides) * step.n;
  arguments.bias = step.bias;
  arguments.d = static_cast<uint8_t*>(step.d);
  arguments.gate_up_rows = static_cast<uint8_t*>(step.gate_up_rows);
  arguments.to_gate_up_rows = static_cast<uint8_t*>(step.to_gate_up_rows);
  return Launch(Kernel<Traits>, dim3(static_cast<unsigned>(processors)), kThreads, kMemoryBytes,
                stream, arguments);
}

#define JAX_EP_PORTABLE(kind, Element, Out)                                        \
  template <>                                                                      \
  cudaError_t MultiplyKind<MatmulKind::kind, Element, Out>(const MatmulStep& step, \
                                                           cudaStream_t stream) {  \
    return LaunchMatmul<Traits<MatmulKind::kind, Element, Out>>(step, stream);     \
  }                                                                                \
  template <>                                                                      \
  cudaError_t PreloadKind<MatmulKind::kind, Element, Out>() {                      \
    return AllowShared<Traits<MatmulKind::kind, Element, Out>>();                  \
  }

// In all types of operands, with results of the same type.
#define JAX_EP_PORTABLE_IN_ALL(kind)        \
  JAX_EP_PORTABLE(kind, BFloat16, BFloat16) \
  JAX_EP_PORTABLE(kind, Float16, Float16)   \
  JAX_EP_PORTABLE(kind, float, float)       \
  JAX_EP_PORTABLE(kind, ExactFloat, float)

}  // namespace jax_ep::cuda::portable
