// Looks up the CUDA driver's functions, and runs threads that use them.
#include "cuda/memory/driver.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

namespace jax_ep::cuda {
namespace {

[[noreturn]] void Throw(const char* what, const char* why) {
  throw std::runtime_error(std::string("jax_ep: ") + what + ": " + why);
}

// `version` is the version of the driver API that first had the function in the form of cuda.h.
template <typename Function>
void Find(const char* name, unsigned version, Function& function) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  function = ok ? reinterpret_cast<Function>(entry) : nullptr;
}

}  // namespace

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Throw(what, cudaGetErrorString(error));
}

void Check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const auto get_error_name = Driver::Get().get_error_name;
  if (get_error_name != nullptr) get_error_name(result, &name);
  Throw(what, name != nullptr ? name : "error of the CUDA driver");
}

const Driver& Driver::Get() {
  static const Driver driver = [] {
    constexpr unsigned kFirst = 7000;
    constexpr unsigned kVirtualMemory = 10020;
    constexpr unsigned kLibraries = 12000;
    constexpr unsigned kUuidOfInstances = 11040;  // its second form, which supports MIG
    constexpr unsigned kLaunchAttributes = 11060;
    Driver d{};
    Find("cuGetErrorName", kFirst, d.get_error_name);
    Find("cuDeviceGetAttribute", kFirst, d.device_get_attribute);
    Find("cuDeviceGetUuid", kUuidOfInstances, d.device_get_uuid);
    Find("cuDevicePrimaryCtxGetState", kFirst, d.primary_context_get_state);
    Find("cuMemGetAllocationGranularity", kVirtualMemory, d.get_granularity);
    Find("cuMemCreate", kVirtualMemory, d.create);
    Find("cuMemRelease", kVirtualMemory, d.release);
    Find("cuMemAddressReserve", kVirtualMemory, d.reserve);
    Find("cuMemAddressFree", kVirtualMemory, d.free_address);
    Find("cuMemMap", kVirtualMemory, d.map);
    Find("cuMemUnmap", kVirtualMemory, d.unmap);
    Find("cuMemSetAccess", kVirtualMemory, d.set_access);
    Find("cuMemExportToShareableHandle", kVirtualMemory, d.export_handle);
    Find("cuMemImportFromShareableHandle", kVirtualMemory, d.import_handle);
    Find("cuLibraryLoadData", kLibraries, d.load_library);
    Find("cuLibraryGetKernel", kLibraries, d.get_kernel);
    Find("cuKernelGetFunction", kLibraries, d.get_function);
    Find("cuLaunchKernelEx", kLaunchAttributes, d.launch);
    Find("cuTensorMapEncodeTiled", kLibraries, d.encode_tensor_map);
    return d;
  }();
  return driver;
}

bool Driver::manages_virtual_memory() const {
  return device_get_attribute && get_granularity && create && release && reserve && free_address &&
         map && unmap && set_access;
}

bool Driver::shares_memory() const {
  return manages_virtual_memory() && device_get_uuid && export_handle && import_handle;
}

void OnDevice(int device, const std::function<void()>& work) {
  std::exception_ptr thrown;
  std::thread([&] {
    try {
      // Other threads may be capturing graphs, which must not restrict this one.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      Check(cudaThreadExchangeStreamCaptureMode(&mode), "a thread for CUDA");
      Check(cudaSetDevice(device), "opening a device");
      work();
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
}

int OpenDevice() {
  int devices = 0;
  Check(cudaGetDeviceCount(&devices), "counting devices");
  const auto get_state = Driver::Get().primary_context_get_state;
  for (int device = 0; get_state != nullptr && device < devices; ++device) {
    unsigned flags = 0;
    int active = 0;
    if (get_state(device, &flags, &active) == CUDA_SUCCESS && active != 0) return device;
  }
  return 0;
}

}  // namespace jax_ep::cuda
