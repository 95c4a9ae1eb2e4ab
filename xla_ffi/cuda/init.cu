// The device side of ep_init: writing its results and loading every kernel.
#include "cuda/init.h"

#include "cuda/collective/steps.h"
#include "cuda/common/launch.h"
#include "cuda/window/calls.h"

namespace jax_ep::cuda {
namespace {

constexpr int kPointers = kBufferGroups * 3;

__global__ void WriteInitKernel(InitResults results, uint32_t* dev_ptrs, int32_t* my_rank) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kPointers) {
    const uint64_t pointer = results.dev_ptrs[i / 3][i % 3];
    dev_ptrs[2 * i] = static_cast<uint32_t>(pointer);
    dev_ptrs[2 * i + 1] = static_cast<uint32_t>(pointer >> 32);
  }
  if (i == 0) *my_rank = results.rank;
}

}  // namespace

cudaError_t WriteInit(const InitResults& results, uint32_t* dev_ptrs, int32_t* my_rank,
                      cudaStream_t stream) {
  static_assert(kPointers <= kWarpSize);
  return Launch(WriteInitKernel, dim3(1), kWarpSize, 0, stream, results, dev_ptrs, my_rank);
}

cudaError_t PreloadKernels() {
  cudaError_t error = Preload(WriteInitKernel);
  if (error == cudaSuccess) error = PreloadDispatchPackKernels();
  if (error == cudaSuccess) error = PreloadDispatchUnpackKernels();
  if (error == cudaSuccess) error = PreloadCombineKernels();
  if (error == cudaSuccess) error = PreloadQuantizeKernels();
  return error;
}

cudaError_t PreloadWindowKernels() {
  cudaError_t error = PreloadDispatch();
  if (error == cudaSuccess) error = PreloadDispatchCached();
  if (error == cudaSuccess) error = PreloadCombine();
  if (error == cudaSuccess) error = PreloadDispatchHalves();
  if (error == cudaSuccess) error = PreloadCombineSend();
  if (error == cudaSuccess) error = PreloadCombineRecv();
  return error;
}

}  // namespace jax_ep::cuda
