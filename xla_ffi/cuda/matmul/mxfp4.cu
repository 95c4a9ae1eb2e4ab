#include "cuda/matmul/mxfp4_many.cuh"

#include "cuda/common/launch.h"
#include "cuda/matmul/tensor_map.h"

namespace jax_ep::cuda {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;

// If there is room for at most this many rows per group, the kernels that read matrices once run.
// Measured on an H200: at 24 rows they take 0.73 to 0.88 of the others' time, at 32 1.1 to 1.25.
constexpr int64_t kFewRows = 24;

bool Fits(const Mxfp4Step& step) {
  const bool scaled = step.a_scales != nullptr;
  const int64_t k_align = scaled ? kMxfp4Align : kMxfp4AtomK;
  const int64_t n_align = scaled ? kMxfp4BlockN / (step.gate_up ? 2 : 1) : 8;
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return step.m >= 0 && step.m < kMostRows && step.groups >= 0 && step.groups < kMostRows &&
         step.k > 0 && step.k % k_align == 0 && step.k < kMostRows && step.n > 0 &&
         step.n % n_align == 0 && step.n < kMostRows && step.out_element != ElementType::kFloat16 &&
         aligned(step.a) && aligned(step.b) && aligned(step.d);
}

// Calls `visit(kernel, shared bytes, blocks per multiprocessor)` for one kernel.
template <bool kScaled, bool kGateUp, typename Visit>
cudaError_t Visited(Visit visit) {
  const auto kernel = Mxfp4Kernel<kScaled, kGateUp>;
  using Layout = Mxfp4Layout<kScaled>;
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(Layout::kBytes));
  return error == cudaSuccess ? visit(kernel, Layout::kBytes, Layout::kBlocks) : error;
}

template <typename Visit>
cudaError_t VisitKernel(bool scaled, bool gate_up, Visit visit) {
  if (scaled) return gate_up ? Visited<true, true>(visit) : Visited<true, false>(visit);
  return gate_up ? Visited<false, true>(visit) : Visited<false, false>(visit);
}

template <bool kScaled, bool kGateUp>
cudaError_t AllowMany() {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(Mxfp4ManyKernel<kScaled, kGateUp>),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kManyBytes));
}

template <bool kScaled, bool kGateUp>
cudaError_t LaunchMany(const Mxfp4Step& step, int processors, cudaStream_t stream) {
  CUtensorMap rows;
  const int64_t row = step.k * 2, all = step.m * row;
  const MappedTensor tensor{
      step.a, 2, {step.k, 1, step.m, 1}, {row, row, all}, {kManyBlockK, 1, kManyBlockM, 1}};
  cudaError_t error = MakeTensorMap(tensor, &rows);
  if (error == cudaSuccess) error = AllowMany<kScaled, kGateUp>();
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(processors > 1 ? processors / 2 * 2 : 2));
  return LaunchInPairs(Mxfp4ManyKernel<kScaled, kGateUp>, grid, kManyThreads, kManyBytes, false,
                       stream, rows, step);
}

}  // namespace

cudaError_t MultiplyMxfp4(const Mxfp4Step& step, cudaStream_t stream) {
  if (!Fits(step)) return cudaErrorInvalidValue;
  int device = 0, major = 0, minor = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) return error;
  if (major < 9) return cudaErrorNotSupported;
  if (step.m == 0 || step.groups == 0) return cudaSuccess;
  if (step.m > kFewRows * step.groups && major == 9 && minor == 0) {
    const bool scaled = step.a_scales != nullptr;
    const auto run = scaled ? step.gate_up ? LaunchMany<true, true> : LaunchMany<true, false>
                     : step.gate_up ? LaunchMany<false, true>
                                    : LaunchMany<false, false>;
    return run(step, processors, stream);
  }
  return VisitKernel(step.a_scales != nullptr, step.gate_up,
                     [&](auto kernel, uint32_t shared_bytes, int blocks) {
                       return Launch(kernel, dim3(static_cast<unsigned>(processors * blocks)),
                                     kMxfp4Threads, shared_bytes, stream, step);
                     });
}

cudaError_t PreloadMxfp4Kernels() {
  cudaError_t error = cudaSuccess;
  const auto preload = [&]<bool kScaled, bool kGateUp>() {
    if (error == cudaSuccess) error = Preload(Mxfp4ManyKernel<kScaled, kGateUp>);
    if (error == cudaSuccess) error = AllowMany<kScaled, kGateUp>();
  };
  preload.operator()<false, false>();
  preload.operator()<false, true>();
  preload.operator()<true, false>();
  preload.operator()<true, true>();
  for (const bool scaled : {false, true}) {
    for (const bool gate_up : {false, true}) {
      if (error != cudaSuccess) return error;
      error =
          VisitKernel(scaled, gate_up, [](auto kernel, uint32_t, int) { return Preload(kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
