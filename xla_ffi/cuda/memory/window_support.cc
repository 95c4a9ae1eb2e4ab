// Checks driver and devices for the requirements of windows (docs/architecture.md).
#include "cuda/memory/window_support.h"

#include <algorithm>

#include "cuda/memory/driver.h"

namespace jax_ep::cuda {
namespace {

// Bulk copies between global and shared memory, with barriers for their completion.
constexpr int kMinMajor = 9;
// kMaxSharedBytes of window/rows.cuh. Kernels adapt to it: the tables of the largest config leave
// room for stages, and long rows are sent in pieces, up to the hidden sizes that
// jax_ep/_transport/select.py admits.
constexpr int kMinSharedKiB = 227;

int Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  Check(cudaDeviceGetAttribute(&value, attribute, device), "an attribute of a device");
  return value;
}

bool Supports(CUdevice_attribute attribute, int device) {
  int supported = 0;
  // The runtime and the driver number devices alike.
  const CUresult result = Driver::Get().device_get_attribute(&supported, attribute, device);
  return result == CUDA_SUCCESS && supported != 0;
}

bool ManagesVirtualMemory(int device) {
  return Driver::Get().manages_virtual_memory() &&
         Supports(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
}

bool SharesMemory(int device) {
  return Driver::Get().shares_memory() &&
         Supports(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
}

// Checks a device against a device of this process, which messages call `peer_name`.
std::optional<Obstacle> FindPairObstacle(int device, int peer, const std::string& peer_name) {
  int reaches = 1;
  if (device != peer) Check(cudaDeviceCanAccessPeer(&reaches, device, peer), "peer access");
  if (reaches != 0) return std::nullopt;
  return Obstacle{"peer access between all devices of an EP group",
                  "none from device " + std::to_string(device) + " to device " + peer_name};
}

std::optional<Obstacle> FindObstacle(int device, bool shared) {
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
  if (shared && !SharesMemory(device)) {
    return Obstacle{"CUDA memory that processes share by file descriptors", "none" + on_device};
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

std::optional<Obstacle> FindObstacle(const std::vector<int32_t>& ordinals, bool shared) {
  for (const int32_t device : ordinals) {
    if (auto obstacle = FindObstacle(device, shared)) return obstacle;
  }
  for (const int32_t device : ordinals) {
    for (const int32_t peer : ordinals) {
      if (auto obstacle = FindPairObstacle(device, peer, std::to_string(peer))) return obstacle;
    }
  }
  return std::nullopt;
}

std::optional<Obstacle> FindPeerObstacle(const std::vector<int32_t>& ordinals,
                                         const std::vector<std::string>& peer_uuids) {
  int visible = 0;
  Check(cudaGetDeviceCount(&visible), "counting devices");
  for (int peer = 0; peer < visible; ++peer) {
    const std::string uuid = DeviceUuid(peer);
    if (std::find(peer_uuids.begin(), peer_uuids.end(), uuid) == peer_uuids.end()) continue;
    for (const int32_t device : ordinals) {
      if (auto obstacle = FindPairObstacle(device, peer, uuid)) return obstacle;
    }
  }
  return std::nullopt;
}

std::string DeviceUuid(int32_t ordinal) {
  CUuuid uuid{};
  const auto get_uuid = Driver::Get().device_get_uuid;
  if (get_uuid == nullptr || get_uuid(&uuid, ordinal) != CUDA_SUCCESS) return "";
  return Hex(uuid.bytes, sizeof(uuid.bytes));
}

std::string Hex(const void* bytes, size_t count) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    const unsigned value = static_cast<const unsigned char*>(bytes)[i];
    text += {kDigits[value >> 4], kDigits[value & 15]};
  }
  return text;
}

int64_t Multiprocessors(const std::vector<int32_t>& ordinals) {
  int64_t least = INT32_MAX;
  for (const int32_t device : ordinals) {
    least = std::min<int64_t>(least, Attribute(cudaDevAttrMultiProcessorCount, device));
  }
  return least;
}

}  // namespace jax_ep::cuda
