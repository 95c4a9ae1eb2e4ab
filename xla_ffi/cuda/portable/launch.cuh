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
  const Arguments arguments{step.sizes,
                            static_cast<int32_t>(step.groups),
                            static_cast<int32_t>(step.m),
                            static_cast<const uint8_t*>(step.a),
                            static_cast<const uint8_t*>(step.b),
                            static_cast<int32_t>(step.k),
                            static_cast<int32_t>(step.n),
                            static_cast<uint8_t*>(step.d),
                            static_cast<uint8_t*>(step.gate_up_rows),
                            static_cast<uint8_t*>(step.to_gate_up_rows)};
  return Launch(Kernel<Traits>, dim3(static_cast<unsigned>(processors)), kThreads, kMemoryBytes,
                stream, arguments);
}

#define JAX_EP_PORTABLE(kind, Element, Out)                                    \
  template <>                                                                  \
  cudaError_t Multiply<MatmulKind::kind, Element, Out>(const MatmulStep& step, \
                                                       cudaStream_t stream) {  \
    return LaunchMatmul<Traits<MatmulKind::kind, Element, Out>>(step, stream); \
  }                                                                            \
  template <>                                                                  \
  cudaError_t Preload<MatmulKind::kind, Element, Out>() {                      \
    return AllowShared<Traits<MatmulKind::kind, Element, Out>>();              \
  }

// In all types of operands, with results of the same type.
#define JAX_EP_PORTABLE_IN_ALL(kind)        \
  JAX_EP_PORTABLE(kind, BFloat16, BFloat16) \
  JAX_EP_PORTABLE(kind, Float16, Float16)   \
  JAX_EP_PORTABLE(kind, float, float)       \
  JAX_EP_PORTABLE(kind, ExactFloat, float)

}  // namespace jax_ep::cuda::portable
