// Uses NVSHMEM through dlopen: only its host library, which contains no device code.
#include "shmem/heap.h"

#include <dlfcn.h>
#define NVSHMEM_HOSTLIB_ONLY
#include <nvshmem_host.h>

#include <cstring>
#include <mutex>
#include <stdexcept>

#include "cuda/memory/driver.h"

namespace jax_ep::shmem {
namespace {

// More than any part of a window needs.
constexpr size_t kAlignment = 512;

struct Library {
  decltype(&nvshmemx_vendor_get_version_info) version;
  decltype(&nvshmemx_init_status) status;
  decltype(&nvshmemx_get_uniqueid) unique_id;
  decltype(&nvshmemx_set_attr_uniqueid_args) set_unique_id;
  decltype(&nvshmemx_hostlib_init_attr) start;
  decltype(&nvshmemx_culibrary_init) start_library;
  decltype(&nvshmem_align) allocate;
  decltype(&nvshmem_free) free;
  decltype(&nvshmem_ptr) reached;
};

std::mutex opening;
Library library{};
bool opened = false;
std::string version;  // of the open library
int32_t device = -1;  // the device given to Start

template <typename Function>
void Find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (!function) throw std::runtime_error(std::string("no ") + name + " in it");
}

// Rejects libraries that are too old: they lack what the headers and the device code rely on.
std::string CheckedVersion(const Library& found) {
  int major = 0, minor = 0, patch = 0;
  found.version(&major, &minor, &patch);
  const std::string text =
      std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
  if (major != NVSHMEM_VENDOR_MAJOR_VERSION || minor < NVSHMEM_VENDOR_MINOR_VERSION) {
    throw std::runtime_error("version " + text + ", built for " +
                             std::to_string(NVSHMEM_VENDOR_MAJOR_VERSION) + "." +
                             std::to_string(NVSHMEM_VENDOR_MINOR_VERSION) + " or newer of " +
                             std::to_string(NVSHMEM_VENDOR_MAJOR_VERSION));
  }
  return text;
}

const Library& Opened() {
  if (!opened) throw std::runtime_error("jax_ep: NVSHMEM must be loaded first");
  return library;
}

}  // namespace

// NVSHMEM works on the current device.
void OnStarted(const std::function<void()>& work) {
  if (device < 0) throw std::runtime_error("jax_ep: NVSHMEM must be started first");
  cuda::OnDevice(device, work);
}

std::string Load(const std::string& path) {
  std::lock_guard<std::mutex> lock(opening);
  if (!opened) {
    // Never closed, because it starts threads.
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(dlerror());
    Library found{};
    Find(handle, "nvshmemx_vendor_get_version_info", found.version);
    Find(handle, "nvshmemx_init_status", found.status);
    Find(handle, "nvshmemx_get_uniqueid", found.unique_id);
    Find(handle, "nvshmemx_set_attr_uniqueid_args", found.set_unique_id);
    Find(handle, "nvshmemx_hostlib_init_attr", found.start);
    Find(handle, "nvshmemx_culibrary_init", found.start_library);
    Find(handle, "nvshmem_align", found.allocate);
    Find(handle, "nvshmem_free", found.free);
    Find(handle, "nvshmem_ptr", found.reached);
    version = CheckedVersion(found);
    library = found;
    opened = true;
  }
  return version;
}

bool Started() { return Opened().status() >= NVSHMEM_STATUS_IS_INITIALIZED; }

std::string UniqueId() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (const int error = Opened().unique_id(&id)) {
    throw std::runtime_error("jax_ep: NVSHMEM makes no unique id: error " + std::to_string(error));
  }
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

void Start(const std::string& unique_id, int pe, int pes, int32_t ordinal) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (unique_id.size() != sizeof(id)) {
    throw std::runtime_error("jax_ep: a unique id of NVSHMEM must have " +
                             std::to_string(sizeof(id)) + " bytes, got " +
                             std::to_string(unique_id.size()));
  }
  std::memcpy(&id, unique_id.data(), sizeof(id));
  cuda::OnDevice(ordinal, [&] {
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    int error = Opened().set_unique_id(pe, pes, &id, &attributes);
    // Starting reads `id` through the attributes.
    if (!error) error = Opened().start(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (error) {
      throw std::runtime_error("NVSHMEM does not start: error " + std::to_string(error) +
                               "; NVSHMEM_DEBUG=INFO in the environment says why");
    }
  });
  device = ordinal;
}

void StartLibrary(CUlibrary started) {
  if (const int error = Opened().start_library(started)) {
    throw std::runtime_error("NVSHMEM does not take its device code: error " +
                             std::to_string(error) + "; the library must be of the version " +
                             "that jax_ep was built with");
  }
}

uint64_t Allocate(int64_t bytes) {
  uint64_t block = 0;
  OnStarted([&] {
    block = reinterpret_cast<uint64_t>(library.allocate(kAlignment, static_cast<size_t>(bytes)));
  });
  return block;
}

void Free(uint64_t block) {
  OnStarted([&] { library.free(reinterpret_cast<void*>(block)); });
}

uint64_t Reached(uint64_t block, int pe) {
  uint64_t there = 0;
  OnStarted([&] {
    there = reinterpret_cast<uint64_t>(library.reached(reinterpret_cast<const void*>(block), pe));
  });
  return there;
}

}  // namespace jax_ep::shmem
