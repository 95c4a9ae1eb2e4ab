// Stand-alone quantisation: rows of elements to codes and scales, and back.
#include "cuda/common/quantize.cuh"

#include "cuda/collective/steps.h"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "formats/registry.h"

namespace jax_ep::cuda {
namespace {

template <typename Format, typename Element>
__global__ void __launch_bounds__(kBlockThreads)
    QuantizeKernel(const __grid_constant__ QuantizeStep step) {
  const int64_t row_bytes = step.hidden * static_cast<int64_t>(sizeof(Element));
  ForEachPart(step.rows, row_bytes, [&](int64_t row, int64_t part) {
    EncodedPart<Format, Element> encoded(part, row_bytes);
    encoded.Load(static_cast<const uint8_t*>(step.tokens) + row * row_bytes,
                 step.input_scales[InputScaleOf(step, row)]);
    encoded.Store(step.payload + row * Format::PayloadBytes(step.hidden, 0),
                  step.scales + row * Format::ScaleBytes(step.hidden));
  });
}

template <typename Format, typename Element>
__global__ void __launch_bounds__(kBlockThreads)
    DequantizeKernel(const __grid_constant__ DequantizeStep step) {
  const int64_t row_bytes = step.hidden * static_cast<int64_t>(sizeof(Element));
  ForEachPart(step.rows, row_bytes, [&](int64_t row, int64_t part) {
    DecodedPart<Format, Element> decoded(part, row_bytes);
    decoded.Load(step.payload + row * Format::PayloadBytes(step.hidden, 0),
                 step.scales + row * Format::ScaleBytes(step.hidden),
                 step.input_scales[InputScaleOf(step, row)]);
    decoded.Store(static_cast<uint8_t*>(step.tokens) + row * row_bytes);
  });
}

}  // namespace

template <typename Format>
cudaError_t Quantize(const QuantizeStep& step, cudaStream_t stream) {
  if (step.rows == 0) return cudaSuccess;
  return VisitElement(step.element, [&]<typename Element>(Element) {
    const dim3 grid = RowGrid(step.rows, step.hidden * ElementBytes(step.element));
    return Launch(QuantizeKernel<Format, Element>, grid, kBlockThreads, 0, stream, step);
  });
}

template <typename Format>
cudaError_t Dequantize(const DequantizeStep& step, cudaStream_t stream) {
  if (step.rows == 0) return cudaSuccess;
  return VisitElement(step.element, [&]<typename Element>(Element) {
    const dim3 grid = RowGrid(step.rows, step.hidden * ElementBytes(step.element));
    return Launch(DequantizeKernel<Format, Element>, grid, kBlockThreads, 0, stream, step);
  });
}

cudaError_t PreloadQuantizeKernels() {
  cudaError_t error = cudaSuccess;
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) {
      for (const ElementType element : kElementTypes) {
        VisitElement(element, [&]<typename Element>(Element) {
          if (error == cudaSuccess) error = Preload(QuantizeKernel<Format, Element>);
          if (error == cudaSuccess) error = Preload(DequantizeKernel<Format, Element>);
        });
      }
    }
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                          \
  template cudaError_t Quantize<Format>(const QuantizeStep&, cudaStream_t); \
  template cudaError_t Dequantize<Format>(const DequantizeStep&, cudaStream_t);
JAX_EP_QUANTIZED_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
