#include "cuda/matmul/four_bits.cuh"

#include "cuda/common/launch.h"

namespace jax_ep::cuda {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;

bool Fits(const FourBitStep& step) {
  const int64_t tile = step.gate_up ? kFourBitColumns / 2 : kFourBitColumns;
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return step.rows >= 0 && step.rows < kMostRows && step.groups >= 0 && step.groups < kMostRows &&
         step.left_columns > 0 && step.left_columns % kFourBitAlign == 0 &&
         step.left_columns < kMostRows && step.columns > 0 && step.columns % tile == 0 &&
         step.columns < kMostRows && step.out_element != ElementType::kFloat16 &&
         aligned(step.left) && aligned(step.right) && aligned(step.out);
}

// Calls `visit(kernel, shared bytes)` for a kernel.
template <int kRowTiles, bool kCodes, bool kGateUp, typename Visit>
cudaError_t Visited(Visit visit) {
  const auto kernel = FourBitKernel<kRowTiles, kCodes, kGateUp>;
  constexpr uint32_t kBytes = FourBitPlan<kRowTiles, kCodes>::kSharedBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  return error == cudaSuccess ? visit(kernel, kBytes) : error;
}

template <int kRowTiles, typename Visit>
cudaError_t VisitOf(bool codes, bool gate_up, Visit visit) {
  if (codes) {
    return gate_up ? Visited<kRowTiles, true, true>(visit) : Visited<kRowTiles, true, false>(visit);
  }
  return gate_up ? Visited<kRowTiles, false, true>(visit) : Visited<kRowTiles, false, false>(visit);
}

template <typename Visit>
cudaError_t VisitKernel(int row_tiles, bool codes, bool gate_up, Visit visit) {
  if (row_tiles == 1) return VisitOf<1>(codes, gate_up, visit);
  if (row_tiles == 2) return VisitOf<2>(codes, gate_up, visit);
  return VisitOf<4>(codes, gate_up, visit);
}

}  // namespace

cudaError_t MultiplyFourBits(const FourBitStep& step, cudaStream_t stream) {
  if (!Fits(step)) return cudaErrorInvalidValue;
  int device = 0, major = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  if (major < 9) return cudaErrorNotSupported;
  if (step.rows == 0 || step.groups == 0) return cudaSuccess;
  // Groups that have more rows than a tile read their weights again, if from L2.
  const int64_t mean = DivideUp(step.rows, step.groups);
  const int row_tiles = mean <= 4 ? 1 : mean <= 8 ? 2 : 4;
  return VisitKernel(row_tiles, step.left_scales != nullptr, step.gate_up,
                     [&](auto kernel, uint32_t shared_bytes) {
                       return Launch(kernel, dim3(static_cast<unsigned>(processors)),
                                     kFourBitThreads, shared_bytes, stream, step);
                     });
}

cudaError_t PreloadFourBitKernels() {
  cudaError_t error = cudaSuccess;
  for (const int row_tiles : {1, 2, 4}) {
    for (const bool codes : {false, true}) {
      for (const bool gate_up : {false, true}) {
        if (error != cudaSuccess) return error;
        error = VisitKernel(row_tiles, codes, gate_up,
                            [](auto kernel, uint32_t) { return Preload(kernel); });
      }
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
