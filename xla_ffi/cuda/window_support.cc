// The conditions of docs/architecture.md for windows, asked of driver and devices.
#include "cuda/window_support.h"

#include <algorithm>

#include "cuda/driver.h"

namespace jax_ep::cuda {
namespace {

// Bulk copies between global and shared memory with barriers for their completion.
constexpr int kMinMajor = 9;
// kMaxSharedBytes of window_rows.cuh. What calls keep there is cut to fit whatever their sizes: the
// tables of the largest config leave room for stages, and long rows pass in pieces.
constexpr int kMinSharedKiB = 227;

int Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  Check(cudaDeviceGetAttribute(&value, attribute, device), "an attribute of a device");
  return value;
}

bool ManagesVirtualMemory(int device) {
  const Driver& driver = Driver::Get();
  if (!driver.manages_virtual_memory()) return false;
  int supported = 0;
  // CUDA's runtime counts devices as the driver does.
  const CUresult result = driver.device_get_attribute(
      &supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  return result == CUDA_SUCCESS && supported != 0;
}

std::optional<Obstacle> FindObstacle(int device) {
  const std::string on_device = " on device " + std::to_string(device);
  const int major = Attribute(cudaDevAttrComputeCapabilityMajor, device);
  if (major < kMinMajor) {
    const int minor = Attribute(cudaDevAttrComputeCapabilityMinor, device);
    return Obstacle{"GPUs of compute capability 9.0 or newer",
                    std::to_string(major) + "." + std::to_string(minor) + on_device};
  }
  if (!ManagesVirtualMemory(device)) {
    return Obstacle{"CUDA virtual memory management", "none" + on_device};
  }
  const int shared_bytes = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (shared_bytes < kMinSharedKiB << 10) {
    return Obstacle{
        "GPUs that give a block " + std::to_string(kMinSharedKiB) + " KiB of shared memory",
        std::to_string(shared_bytes >> 10) + " KiB" + on_device};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Obstacle> FindObstacle(const std::vector<int32_t>& ordinals) {
  for (const int32_t device : ordinals) {
    if (auto obstacle = FindObstacle(device)) return obstacle;
  }
  for (const int32_t device : ordinals) {
    for (const int32_t peer : ordinals) {
      int reaches = 1;
      if (device != peer) Check(cudaDeviceCanAccessPeer(&reaches, device, peer), "peer access");
      if (reaches != 0) continue;
      return Obstacle{
          "peer access between all devices of an EP group",
          "none from device " + std::to_string(device) + " to device " + std::to_string(peer)};
    }
  }
  return std::nullopt;
}

int64_t Multiprocessors(const std::vector<int32_t>& ordinals) {
  int64_t least = INT32_MAX;
  for (const int32_t device : ordinals) {
    least = std::min<int64_t>(least, Attribute(cudaDevAttrMultiProcessorCount, device));
  }
  return least;
}

}  // namespace jax_ep::cuda
