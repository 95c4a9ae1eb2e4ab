// The windows of an EP group: CUDA virtual memory that only the group's devices may touch. Other
// processes map them by file descriptors or fabric handles. jax_ep.init opens them and close()
// frees them.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "cuda/memory/fabric.h"
#include "protocol/internode.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// A device has no room for its window.
class OutOfDeviceMemory : public std::exception {
 public:
  OutOfDeviceMemory(int device, int64_t asked_bytes, int64_t free_bytes)
      : device(device), asked_bytes(asked_bytes), free_bytes(free_bytes) {}
  const char* what() const noexcept override { return "jax_ep: out of device memory"; }

  const int device;
  const int64_t asked_bytes;
  const int64_t free_bytes;
};

// With whom a window is shared: with no other process, with processes of this host by descriptors,
// or with some processes by fabric handles, which requires SharesByFabric.
enum class Sharing { kThisProcess, kProcesses, kFabric };

// Memory of one device, at the same address on all devices of this process that may touch it.
//
// Other processes have it at addresses of their own. Each mapping keeps the memory alive: CUDA
// frees it when the last one is gone, whether by close() or by the end of a process, even a killed
// one. So a peer that still writes into the window of a rank that has closed or died writes into
// memory that nobody else has been given, and processes need not agree before they close.
class Window {
 public:
  // Allocates at least `bytes`, uninitialised. Like the other two constructors, it needs a device
  // of `may_touch` to be current.
  Window(int device, int64_t bytes, const std::vector<int32_t>& may_touch, Sharing sharing);
  // Maps another process's window, which has exactly `bytes`. The caller keeps the descriptor.
  Window(int descriptor, int64_t bytes, const std::vector<int32_t>& may_touch);
  // The same for a window of this host or of another host in the fabric.
  Window(const FabricHandle& fabric, int64_t bytes, const std::vector<int32_t>& may_touch);
  ~Window();
  Window(Window&& other) noexcept;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  // Returns a new descriptor of its memory. The caller must close it; until then it keeps the
  // memory alive.
  int Export() const;
  // Returns a handle that keeps nothing alive, or nullopt if the window was not made for fabrics.
  std::optional<FabricHandle> ExportToFabric() const;
  // Leaks the memory on purpose, because a kernel may still write to it.
  void Abandon();

 private:
  void Import(void* os_handle, unsigned kind, const std::vector<int32_t>& may_touch);
  void Map(const std::vector<int32_t>& may_touch);
  void Free();

  uint64_t handle_ = 0;   // CUmemGenericAllocationHandle
  uint64_t address_ = 0;  // CUdeviceptr
  size_t bytes_ = 0;
  bool has_handle_ = false;
  bool mapped_ = false;
  bool by_fabric_ = false;  // whether it can be exported by fabric handle
};

// Opens a window on each of these devices, which are the group's members in this process, ready for
// calls from `first_epoch` on. Throws OutOfDeviceMemory or std::runtime_error and then holds
// nothing.
std::vector<Window> OpenWindows(const std::vector<int32_t>& ordinals, const WindowLayout& layout,
                                const WindowSizes& sizes, uint64_t first_epoch, Sharing sharing);

// Initialises memory on that device as a window for calls from `first_epoch` on.
void StartWindow(int32_t ordinal, uint8_t* window, const WindowLayout& layout,
                 const WindowSizes& sizes, uint64_t first_epoch);

// The same for a block that holds more than the window (protocol/internode.h).
void StartBlock(int32_t ordinal, uint8_t* block, int64_t bytes, const WindowLayout& layout,
                const InternodeLayout& internode, const WindowSizes& sizes, uint64_t first_epoch);

// The handles by which other processes map a window.
struct ExportedWindow {
  int descriptor;  // from Window::Export
  std::optional<FabricHandle> fabric;
};

// Exports a window of device `ordinal`.
ExportedWindow ExportWindow(const Window& window, int32_t ordinal);

// Maps the window of another process for these devices of the EP group. Throws std::runtime_error,
// also if they cannot reach it.
Window ImportWindow(int descriptor, int64_t bytes, const std::vector<int32_t>& ordinals);
Window ImportWindow(const FabricHandle& fabric, int64_t bytes,
                    const std::vector<int32_t>& ordinals);

struct DeviceControl {
  int device;
  WindowControl* control;
};

// Closes the gates and waits for every device; afterwards no call touches a window. `limit` applies
// to each of three waits. Returns false if a device did not finish in time, CUDA reported an error,
// or no thread could be started: then gates may still be open, and the windows must stay where they
// are.
bool Quiesce(const std::vector<DeviceControl>& controls, std::chrono::nanoseconds limit);

}  // namespace jax_ep::cuda
