// The windows of an EP group whose ranks are all devices of this process: CUDA virtual memory that
// exactly these devices may touch. Opened by jax_ep.init, freed by close().
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

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

// Memory of one device, at one address on all that may touch it.
class Window {
 public:
  // `device` must be current. Of at least `bytes`, with any contents.
  Window(int device, int64_t bytes, const std::vector<int32_t>& may_touch);
  ~Window();
  Window(Window&& other) noexcept;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  // Never frees it, because a kernel may still write there.
  void Abandon();

 private:
  void Free();

  uint64_t handle_ = 0;   // CUmemGenericAllocationHandle
  uint64_t address_ = 0;  // CUdeviceptr
  size_t bytes_ = 0;
  bool has_handle_ = false;
  bool mapped_ = false;
};

// One a rank, as calls from `first_epoch` on expect them; rank r is device `ordinals[r]`. Throws
// OutOfDeviceMemory or std::runtime_error, and then holds nothing.
std::vector<Window> OpenWindows(const std::vector<int32_t>& ordinals, const WindowLayout& layout,
                                const WindowSizes& sizes, uint64_t first_epoch);

struct DeviceControl {
  int device;
  WindowControl* control;
};

// Closes the gates and waits for every device: no call that touches a window runs after it. False
// where CUDA gave no such answer.
bool Quiesce(const std::vector<DeviceControl>& controls);

}  // namespace jax_ep::cuda
