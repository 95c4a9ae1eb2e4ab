// Windows in CUDA virtual memory: mapping them, initialising their signals, and ending their use.
#include "cuda/memory/windows.h"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "cuda/memory/bounded.h"
#include "cuda/memory/driver.h"

namespace jax_ep::cuda {
namespace {

static_assert(sizeof(CUmemGenericAllocationHandle) == sizeof(uint64_t) &&
              sizeof(CUdeviceptr) == sizeof(uint64_t));

CUmemLocation On(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

// Flags and credits start at StartMark, everything else at zero.
void WriteStart(uint8_t* window, const WindowLayout& layout, const WindowSizes& sizes,
                uint64_t first_epoch) {
  Stream stream;
  stream.Fill(window, 0, static_cast<size_t>(layout.bytes));
  const uint64_t mark = StartMark(first_epoch);
  const auto regions = static_cast<size_t>(sizes.depth * sizes.ranks);
  for (const BufferGroupLayout& group : layout.groups) {
    const std::vector<FlagCell> flags(regions * static_cast<size_t>(group.flags_per_source),
                                      FlagCell{mark, 0, 0, 0});
    const std::vector<uint64_t> credits(regions, mark);
    stream.Copy(window + group.flags, flags.data(), flags.size() * sizeof(FlagCell));
    stream.Copy(window + group.credits, credits.data(), credits.size() * sizeof(uint64_t));
    stream.Wait();
  }
}

// CUDA refuses a device-wide wait while a stream of the device is being captured. A capture takes
// milliseconds, so retry.
cudaError_t SynchronizeDevice() {
  constexpr int kAttempts = 1000;
  cudaError_t error = cudaDeviceSynchronize();
  for (int i = 0; i < kAttempts && error == cudaErrorStreamCaptureUnsupported; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    error = cudaDeviceSynchronize();
  }
  return error;
}

}  // namespace

Window::Window(int device, int64_t bytes, const std::vector<int32_t>& may_touch, Sharing sharing) {
  const Driver& driver = Driver::Get();
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location = On(device);
  by_fabric_ = sharing == Sharing::kFabric;
  if (sharing == Sharing::kProcesses) kind.requestedHandleTypes = kDescriptor;
  if (by_fabric_) kind.requestedHandleTypes = kDescriptorAndFabric;
  size_t granularity = 1;
  Check(driver.get_granularity(&granularity, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "the granularity of a window");
  bytes_ = static_cast<size_t>(RoundUp(bytes, static_cast<int64_t>(granularity)));

  CUmemGenericAllocationHandle handle = 0;
  const CUresult created = driver.create(&handle, bytes_, &kind, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY) {
    size_t free = 0, total = 0;
    Check(cudaMemGetInfo(&free, &total), "free memory");
    throw OutOfDeviceMemory(device, static_cast<int64_t>(bytes_), static_cast<int64_t>(free));
  }
  Check(created, "memory for a window");
  handle_ = handle;
  has_handle_ = true;

  Map(may_touch);
}

Window::Window(int descriptor, int64_t bytes, const std::vector<int32_t>& may_touch)
    : bytes_(static_cast<size_t>(bytes)) {
  // The driver takes the descriptor itself in place of a pointer to a handle.
  Import(reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)), kDescriptor, may_touch);
}

Window::Window(const FabricHandle& fabric, int64_t bytes, const std::vector<int32_t>& may_touch)
    : bytes_(static_cast<size_t>(bytes)) {
  FabricHandle handle = fabric;
  Import(handle.data(), CU_MEM_HANDLE_TYPE_FABRIC, may_touch);
}

void Window::Import(void* os_handle, unsigned kind, const std::vector<int32_t>& may_touch) {
  CUmemGenericAllocationHandle handle = 0;
  Check(
      Driver::Get().import_handle(&handle, os_handle, static_cast<CUmemAllocationHandleType>(kind)),
      "the window of another process");
  handle_ = handle;
  has_handle_ = true;
  Map(may_touch);
}

int Window::Export() const {
  int descriptor = -1;
  Check(Driver::Get().export_handle(&descriptor, handle_, kDescriptor, 0),
        "sharing a window with other processes");
  return descriptor;
}

std::optional<FabricHandle> Window::ExportToFabric() const {
  if (!by_fabric_) return std::nullopt;
  FabricHandle fabric{};
  Check(Driver::Get().export_handle(fabric.data(), handle_, CU_MEM_HANDLE_TYPE_FABRIC, 0),
        "sharing a window with other hosts");
  return fabric;
}

// Frees everything if it fails.
void Window::Map(const std::vector<int32_t>& may_touch) {
  const Driver& driver = Driver::Get();
  try {
    CUdeviceptr address = 0;
    Check(driver.reserve(&address, bytes_, 0, 0, 0), "addresses for a window");
    address_ = address;
    Check(driver.map(address_, bytes_, 0, handle_, 0), "mapping a window");
    mapped_ = true;
    std::vector<CUmemAccessDesc> access;
    for (const int32_t ordinal : may_touch) {
      access.push_back({On(ordinal), CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    Check(driver.set_access(address_, bytes_, access.data(), access.size()),
          "opening a window to its group");
  } catch (...) {
    Free();
    throw;
  }
}

Window::Window(Window&& other) noexcept
    : handle_(other.handle_),
      address_(other.address_),
      bytes_(other.bytes_),
      has_handle_(other.has_handle_),
      mapped_(other.mapped_),
      by_fabric_(other.by_fabric_) {
  other.Abandon();
}

Window::~Window() { Free(); }

// Also for a window whose constructor has failed.
void Window::Free() {
  const Driver& driver = Driver::Get();
  if (mapped_) driver.unmap(address_, bytes_);
  if (address_ != 0) driver.free_address(address_, bytes_);
  if (has_handle_) driver.release(handle_);
  Abandon();
}

void Window::Abandon() {
  address_ = 0;
  has_handle_ = mapped_ = false;
}

std::vector<Window> OpenWindows(const std::vector<int32_t>& ordinals, const WindowLayout& layout,
                                const WindowSizes& sizes, uint64_t first_epoch, Sharing sharing) {
  std::vector<Window> windows;
  windows.reserve(ordinals.size());
  for (const int32_t ordinal : ordinals) {
    OnDevice(ordinal, [&] {
      windows.emplace_back(ordinal, layout.bytes, ordinals, sharing);
      WriteStart(windows.back().data(), layout, sizes, first_epoch);
    });
  }
  return windows;
}

void StartWindow(int32_t ordinal, uint8_t* window, const WindowLayout& layout,
                 const WindowSizes& sizes, uint64_t first_epoch) {
  OnDevice(ordinal, [&] { WriteStart(window, layout, sizes, first_epoch); });
}

void StartBlock(int32_t ordinal, uint8_t* block, int64_t bytes, const WindowLayout& layout,
                const InternodeLayout& internode, const WindowSizes& sizes, uint64_t first_epoch) {
  OnDevice(ordinal, [&] {
    Stream stream;
    stream.Fill(block, 0, static_cast<size_t>(bytes));
    stream.Wait();
    WriteStart(block, layout, sizes, first_epoch);
    WriteStart(block + internode.staged, layout, sizes, first_epoch);
    const auto regions = static_cast<size_t>(sizes.depth * sizes.ranks);
    const std::vector<uint64_t> marks(regions * kInternodeShares, StartMark(first_epoch));
    for (const InternodeGroupLayout& group : internode.groups) {
      stream.Copy(block + group.arrived, marks.data(), marks.size() * sizeof(uint64_t));
      stream.Copy(block + group.returned, marks.data(), regions * sizeof(uint64_t));
    }
    stream.Wait();
  });
}

ExportedWindow ExportWindow(const Window& window, int32_t ordinal) {
  ExportedWindow exported{-1, std::nullopt};
  OnDevice(ordinal, [&] {
    // Export the fabric handle first: if it failed after the descriptor, that would stay open.
    exported.fabric = window.ExportToFabric();
    exported.descriptor = window.Export();
  });
  return exported;
}

Window ImportWindow(int descriptor, int64_t bytes, const std::vector<int32_t>& ordinals) {
  std::optional<Window> window;
  OnDevice(ordinals.front(), [&] { window.emplace(descriptor, bytes, ordinals); });
  return std::move(*window);
}

Window ImportWindow(const FabricHandle& fabric, int64_t bytes,
                    const std::vector<int32_t>& ordinals) {
  std::optional<Window> window;
  OnDevice(ordinals.front(), [&] { window.emplace(fabric, bytes, ordinals); });
  return std::move(*window);
}

bool Quiesce(const std::vector<DeviceControl>& controls, std::chrono::nanoseconds limit) {
  const auto wait = [controls] {
    for (const DeviceControl& each : controls) {
      OnDevice(each.device, [] { Check(SynchronizeDevice(), "waiting for a device"); });
    }
  };
  const auto close_gates = [controls] {
    const Gate closed = Gate::kClosed;
    for (const auto& [device, control] : controls) {
      OnDevice(device, [gate = &control->gate, &closed] {
        Stream stream;
        stream.Copy(gate, &closed, sizeof(closed));
        stream.Wait();
      });
    }
  };
  // Calls that were enqueued run to their end before the gates close. A graph that is replayed
  // later finds them closed, or has found one open and ends by itself. If a device does not finish
  // in time, close the gates all the same, so that whatever starts later ends at once. If that
  // fails too, perhaps for want of a thread, gates may stay open; the windows are then never freed,
  // and calls that start later wait in vain until their time limit.
  const bool ended = EndsWithin(limit, wait);
  const bool shut = EndsWithin(limit, close_gates);
  return ended && shut && EndsWithin(limit, wait);
}

}  // namespace jax_ep::cuda
