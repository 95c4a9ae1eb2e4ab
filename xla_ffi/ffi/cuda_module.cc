// The native module jax_ep._native_cuda: CUDA targets. It imports where there is no GPU or driver.
#include <cuda_runtime_api.h>

#include "ffi/cuda_handlers.h"
#include "ffi/module_common.h"

namespace jax_ep::ffi_layer {
namespace {

int DeviceCount() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

NB_MODULE(_native_cuda, m) {
  m.doc() = "CUDA handlers of jax_ep.";
  DefineCommon(m, CudaTargets());
  m.def("device_count", &DeviceCount, "GPUs that this process can use; 0 without a driver.");
}

}  // namespace
}  // namespace jax_ep::ffi_layer
