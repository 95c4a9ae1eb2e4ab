// The device side of ep_init: its results, and the loading of every kernel.
#include "cuda/launch.h"
#include "cuda/steps.h"

namespace jax_ep::cuda {
namespace {

__global__ void WriteInitKernel(uint32_t* dev_ptrs, int64_t words, int32_t* my_rank, int32_t rank) {
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) dev_ptrs[i] = 0;
  if (threadIdx.x == 0) *my_rank = rank;
}

}  // namespace

cudaError_t WriteInit(uint32_t* dev_ptrs, int64_t words, int32_t* my_rank, int32_t rank,
                      cudaStream_t stream) {
  return Launch(WriteInitKernel, dim3(1), kWarpSize, 0, stream, dev_ptrs, words, my_rank, rank);
}

cudaError_t PreloadKernels() {
  cudaError_t error = Preload(WriteInitKernel);
  if (error == cudaSuccess) error = PreloadDispatchKernels();
  if (error == cudaSuccess) error = PreloadCombineKernels();
  return error;
}

}  // namespace jax_ep::cuda
