// CUDA calls for init and close: on threads of their own, so that the caller's current device does
// not change, and with errors as exceptions. In handlers of calls, only launches of NVSHMEM's
// kernels and the tensor maps of matmuls use this header.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

namespace jax_ep::cuda {

// Throws std::runtime_error "jax_ep: <what>: <CUDA's message>" unless the call succeeded.
void Check(cudaError_t error, const char* what);
void Check(CUresult result, const char* what);

// The driver's functions, looked up at run time: the module does not link to libcuda, so that it
// can be imported without a driver. A function that the driver lacks is nullptr.
struct Driver {
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuDeviceGetUuid) device_get_uuid;
  decltype(&cuDevicePrimaryCtxGetState) primary_context_get_state;
  decltype(&cuMemGetAllocationGranularity) get_granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuLibraryLoadData) load_library;
  decltype(&cuLibraryGetKernel) get_kernel;
  decltype(&cuKernelGetFunction) get_function;
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuTensorMapEncodeTiled) encode_tensor_map;

  static const Driver& Get();
  bool manages_virtual_memory() const;
  bool shares_memory() const;  // between processes
};

// Kinds of handles for memory that is shared with other processes by file descriptors and, where
// fabrics work, also by fabric handles.
inline constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
inline constexpr auto kDescriptorAndFabric =
    static_cast<CUmemAllocationHandleType>(kDescriptor | CU_MEM_HANDLE_TYPE_FABRIC);

// Runs `work` on a new thread with `device` current, and waits for it. Exceptions propagate.
void OnDevice(int device, const std::function<void()>& work);

// Returns a device on which this process already has a context. Use it for work that any device
// could do: another device would get a new context, which takes hundreds of megabytes on a GPU that
// may belong to another process.
int OpenDevice();

// A stream that does not synchronise with any other.
class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Fill(void* to, int value, size_t bytes) {
    Check(cudaMemsetAsync(to, value, bytes, stream_), "filling memory");
  }
  // Keep `from` alive until Wait.
  void Copy(void* to, const void* from, size_t bytes) {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copying to a device");
  }
  void Wait() { Check(cudaStreamSynchronize(stream_), "waiting for a device"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace jax_ep::cuda
