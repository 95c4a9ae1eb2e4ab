// The windows of an EP group: CUDA virtual memory that exactly the group's devices may touch, those
// of other processes by way of file descriptors, or of fabric handles. Opened by jax_ep.init, freed
// by close().
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

// A device cannot hold its window.
class OutOfDeviceMemory : public std::exception {
 public:
  OutOfDeviceMemory(int device, int64_t asked_bytes, int64_t free_bytes)
      : device(device), asked_bytes(asked_bytes), free_bytes(free_bytes) {}
  const char* what() const noexcept override { return "jax_ep: out of device memory"; }

  const int device;
  const int64_t asked_bytes;
  const int64_t free_bytes;
};

// With processes of this host, by descriptors; or with some by fabric handles, for which
// SharesByFabric must hold.
enum class Sharing { kThisProcess, kProcesses, kFabric };

// Memory of one device, at one address on all devices of this process that may touch it.
//
// Other processes have it at addresses of their own, and each mapping holds the memory itself: CUDA
// frees it when the last one is gone, whether by close() or by the end of a process, killed or not.
// So whoever still writes into the window of a rank that has closed or died writes into memory that
// nobody else has been given. It takes no agreement between processes to close.
class Window {
 public:
  // A device of `may_touch` must be current in both. Of at least `bytes`, with any contents.
  Window(int device, int64_t bytes, const std::vector<int32_t>& may_touch, Sharing sharing);
  // Another process's, of as many bytes as it has there. The descriptor stays the caller's.
  Window(int descriptor, int64_t bytes, const std::vector<int32_t>& may_touch);
  // Likewise, of this host or of another one in the fabric.
  Window(const FabricHandle& fabric, int64_t bytes, const std::vector<int32_t>& may_touch);
  ~Window();
  Window(Window&& other) noexcept;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  // A new descriptor of its memory, the caller's to close; until then it holds the memory.
  int Export() const;
  // What holds no memory; nullopt where the window was not made for it.
  std::optional<FabricHandle> ExportToFabric() const;
  // Never frees it, because a kernel may still write there.
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
  bool by_fabric_ = false;  // can be exported so
};

// One for each of these devices, the members of an EP group in this process, as calls from
// `first_epoch` on expect them. Throws OutOfDeviceMemory or std::runtime_error, and then holds
// nothing.
std::vector<Window> OpenWindows(const std::vector<int32_t>& ordinals, const WindowLayout& layout,
                                const WindowSizes& sizes, uint64_t first_epoch, Sharing sharing);

// Makes memory of that device the window that calls from `first_epoch` on expect.
void StartWindow(int32_t ordinal, uint8_t* window, const WindowLayout& layout,
                 const WindowSizes& sizes, uint64_t first_epoch);

// Likewise a block that has more than the window (protocol/internode.h).
void StartBlock(int32_t ordinal, uint8_t* block, int64_t bytes, const WindowLayout& layout,
                const InternodeLayout& internode, const WindowSizes& sizes, uint64_t first_epoch);

// What other processes map a window by.
struct ExportedWindow {
  int descriptor;  // as of Window::Export
  std::optional<FabricHandle> fabric;
};

// Of a window on that device.
ExportedWindow ExportWindow(const Window& window, int32_t ordinal);

// The window of another process, for these devices of an EP group. Throws std::runtime_error, also
// where they cannot reach it.
Window ImportWindow(int descriptor, int64_t bytes, const std::vector<int32_t>& ordinals);
Window ImportWindow(const FabricHandle& fabric, int64_t bytes,
                    const std::vector<int32_t>& ordinals);

struct DeviceControl {
  int device;
  WindowControl* control;
};

// Closes the gates and waits for every device: no call that touches a window runs after it. False
// where a device did not come to its end within the limit, for each of three waits, or CUDA gave no
// such answer, or the process has no thread left for them: then the windows must stay where they
// are, since a gate may still be open.
bool Quiesce(const std::vector<DeviceControl>& controls, std::chrono::nanoseconds limit);

}  // namespace jax_ep::cuda
