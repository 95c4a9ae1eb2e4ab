// Asks the driver and its management library (NVML) about fabrics.
#include "cuda/memory/fabric.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <type_traits>

#include "cuda/memory/driver.h"
#include "cuda/memory/window_support.h"

namespace jax_ep::cuda {
namespace {

static_assert(sizeof(FabricHandle) == sizeof(CUmemFabricHandle));

// The part of NVML's binary interface used here, because not every toolkit has its header.
using NvmlDevice = void*;
constexpr int kNvmlSuccess = 0;
constexpr uint8_t kNvmlFabricCompleted = 3;

// nvmlGpuFabricInfo_t.
struct FabricInfo {
  uint8_t cluster[16];
  int status;  // of the registration, valid once that is completed
  unsigned clique;
  uint8_t state;
};

// nvmlGpuFabricInfo_v2_t.
struct FabricInfo2 {
  unsigned version;
  uint8_t cluster[16];
  int status;
  unsigned clique;
  uint8_t state;
  unsigned health;
};
static_assert(sizeof(FabricInfo) == 28 && sizeof(FabricInfo2) == 36);
constexpr unsigned kFabricInfo2 = sizeof(FabricInfo2) | 2u << 24;

struct Nvml {
  int (*start)();
  int (*by_bus)(const char*, NvmlDevice*);
  int (*fabric)(NvmlDevice, FabricInfo*);    // nullptr if the driver lacks it
  int (*fabric2)(NvmlDevice, FabricInfo2*);  // nullptr if the driver lacks it
  bool started;

  // Never closed, because other parts of the process use the library too.
  static const Nvml& Get() {
    static const Nvml nvml = [] {
      Nvml n{};
      void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) return n;
      const auto find = [library](const char* name, auto& function) {
        function =
            reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      };
      find("nvmlInit_v2", n.start);
      find("nvmlDeviceGetHandleByPciBusId_v2", n.by_bus);
      find("nvmlDeviceGetGpuFabricInfo", n.fabric);
      find("nvmlDeviceGetGpuFabricInfoV", n.fabric2);
      n.started = n.start != nullptr && n.by_bus != nullptr && n.start() == kNvmlSuccess;
      return n;
    }();
    return nvml;
  }
};

bool AskFabric(NvmlDevice device, FabricInfo& info) {
  const Nvml& nvml = Nvml::Get();
  FabricInfo2 info2{};
  info2.version = kFabricInfo2;
  if (nvml.fabric2 != nullptr && nvml.fabric2(device, &info2) == kNvmlSuccess) {
    std::copy(std::begin(info2.cluster), std::end(info2.cluster), info.cluster);
    info.status = info2.status;
    info.clique = info2.clique;
    info.state = info2.state;
    return true;
  }
  return nvml.fabric != nullptr && nvml.fabric(device, &info) == kNvmlSuccess;
}

// Call it on a thread where the device is current. Everything that it allocates is released.
bool TryHandle(int device) {
  const Driver& driver = Driver::Get();
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  kind.location.id = device;
  kind.requestedHandleTypes = kDescriptorAndFabric;
  size_t bytes = 0;
  if (driver.get_granularity(&bytes, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS) {
    return false;
  }
  CUmemGenericAllocationHandle memory = 0, again = 0;
  if (driver.create(&memory, bytes, &kind, 0) != CUDA_SUCCESS) return false;
  CUmemFabricHandle handle{};
  const bool works =
      driver.export_handle(&handle, memory, CU_MEM_HANDLE_TYPE_FABRIC, 0) == CUDA_SUCCESS &&
      driver.import_handle(&again, &handle, CU_MEM_HANDLE_TYPE_FABRIC) == CUDA_SUCCESS;
  if (works) driver.release(again);
  driver.release(memory);
  return works;
}

}  // namespace

std::string FabricOf(int32_t ordinal) {
  char bus[32] = {};
  NvmlDevice device = nullptr;
  FabricInfo info{};
  const bool found = Nvml::Get().started &&
                     cudaDeviceGetPCIBusId(bus, sizeof(bus), ordinal) == cudaSuccess &&
                     Nvml::Get().by_bus(bus, &device) == kNvmlSuccess && AskFabric(device, info) &&
                     info.state == kNvmlFabricCompleted && info.status == kNvmlSuccess;
  const auto is_zero = [](uint8_t byte) { return byte == 0; };
  // GPUs behind the switches of a single host are in a completed fabric without a name.
  if (!found || std::all_of(std::begin(info.cluster), std::end(info.cluster), is_zero)) return "";
  return Hex(info.cluster, sizeof(info.cluster)) + "." + std::to_string(info.clique);
}

bool SharesByFabric(int32_t ordinal) {
  static std::mutex mutex;
  static auto* const known = new std::set<int32_t>;  // successes only: an obstacle may disappear
  std::lock_guard<std::mutex> lock(mutex);
  if (known->contains(ordinal)) return true;
  const Driver& driver = Driver::Get();
  int supported = 0;
  bool works =
      driver.shares_memory() &&
      driver.device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                                  ordinal) == CUDA_SUCCESS &&
      supported != 0;
  if (works) OnDevice(ordinal, [&] { works = TryHandle(ordinal); });
  if (works) known->insert(ordinal);
  return works;
}

}  // namespace jax_ep::cuda
