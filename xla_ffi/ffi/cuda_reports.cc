// Where packs on GPUs report bad ids: pinned host memory, the back end's half of ffi/group.h.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "ffi/group.h"

namespace jax_ep::ffi_layer {
namespace {

constexpr int64_t kReportsAtOnce = 1024;

void ThrowOnError(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("jax_ep: pinned host memory: ") + cudaGetErrorString(error));
}

// A device on which this process already has a context. Pinning with another one current would open
// a context there, hundreds of megabytes on a GPU that belongs to another process.
int OpenDevice() {
  using GetState = CUresult (*)(CUdevice, unsigned*, int*);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kSinceVersion = 7000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuDevicePrimaryCtxGetState", &entry, kSinceVersion, cudaEnableDefault, &found);
  int devices = 0;
  ThrowOnError(cudaGetDeviceCount(&devices));
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return 0;
  for (int device = 0; device < devices; ++device) {
    unsigned flags = 0;
    int active = 0;
    const CUresult result = reinterpret_cast<GetState>(entry)(device, &flags, &active);
    if (result == CUDA_SUCCESS && active != 0) return device;
  }
  return 0;
}

InvalidIdReport* AllocatePinned(int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(InvalidIdReport);
  void* memory = nullptr;
  cudaError_t error = cudaSuccess;
  const int device = OpenDevice();
  // A thread of its own, so that the caller's current device stays what it is.
  std::thread([&] {
    error = cudaSetDevice(device);
    if (error != cudaSuccess) return;
    error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  }).join();
  ThrowOnError(error);
  std::memset(memory, 0, bytes);
  return static_cast<InvalidIdReport*>(memory);
}

}  // namespace

// Reports are cut from blocks that live as long as the process, and none is given out twice: a pack
// captured in a CUDA graph keeps its address and may write there long after its group was closed.
InvalidIdReport* AllocateReports(int64_t count) {
  static std::mutex mutex;
  static InvalidIdReport* next = nullptr;
  static int64_t left = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (count > left) {
    const int64_t size = std::max(count, kReportsAtOnce);
    next = AllocatePinned(size);
    left = size;
  }
  InvalidIdReport* reports = next;
  next += count;
  left -= count;
  return reports;
}

void FreeReports(InvalidIdReport*) {}

}  // namespace jax_ep::ffi_layer
