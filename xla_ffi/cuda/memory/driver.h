// CUDA calls for init and close: on threads of their own, so that the caller's current device stays
// what it is, with errors as exceptions. Handlers of calls use its launches of NVSHMEM's image
// alone.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

namespace jax_ep::cuda {

// Throws std::runtime_error "jax_ep: <what>: <CUDA's words>" unless the call succeeded.
void Check(cudaError_t error, const char* what);
void Check(CUresult result, const char* what);

// The driver's functions, found at run time: the module is not linked to libcuda, so that it
// imports where there is no driver. nullptr where the driver lacks one.
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

  static const Driver& Get();
  bool manages_virtual_memory() const;
  bool shares_memory() const;  // between processes
};

// Of memory that other processes map by file descriptors, and, where fabrics work, by their
// handles.
inline constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
inline constexpr auto kDescriptorAndFabric =
    static_cast<CUmemAllocationHandleType>(kDescriptor | CU_MEM_HANDLE_TYPE_FABRIC);

// Runs `work` on a new thread where `device` is current, and waits for it. Exceptions pass.
void OnDevice(int device, const std::function<void()>& work);

// A device on which this process already has a context. Work that any device could do, done with
// another one current, would open a context there: hundreds of megabytes on a GPU that belongs to
// another process.
int OpenDevice();

// A stream that waits for no other.
class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Fill(void* to, int value, size_t bytes) {
    Check(cudaMemsetAsync(to, value, bytes, stream_), "filling memory");
  }
  // `from` stays until Wait.
  void Copy(void* to, const void* from, size_t bytes) {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copying to a device");
  }
  void Wait() { Check(cudaStreamSynchronize(stream_), "waiting for a device"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace jax_ep::cuda
