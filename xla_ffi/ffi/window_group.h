// A group of transport p2p or shmem: its windows, and what the calls of each local device run with.
// Between close() and the end of the process its calls may still be launched or replayed: they find
// their gates closed, in memory that outlives the group. Each process closes the gates of its own
// ranks, and no rank runs calls of another one, so processes may close in any order.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/internode/calls.h"
#include "cuda/memory/windows.h"
#include "ffi/group.h"
#include "protocol/window.h"

namespace jax_ep::ffi_layer {

struct WindowOptions {
  double timeout_s;
  int64_t num_sms;  // 0: chosen from a call's shape
  uint64_t first_epoch;
  bool by_fabric = false;  // windows also have fabric handles, for other processes
};

// In place of an ordinal: the rank is a device of another process.
inline constexpr int32_t kElsewhere = -1;

// Those of this process.
std::vector<int32_t> LocalOrdinals(const std::vector<int32_t>& ordinals);

// What other processes map a window of a device by, and its bytes.
struct SharedWindow {
  cuda::ExportedWindow exported;
  int64_t bytes;
};

// By EP group and rank, where this process has windows that somebody else has allocated, of ranks
// here and elsewhere; 0: on another node, out of its reach.
using GivenWindows = std::vector<std::vector<uint64_t>>;

// What reaches those: NVSHMEM's number of each rank, by EP group, and the kernels.
struct FarAccess {
  std::vector<std::vector<int32_t>> pes;
  // Numbers of the ranks' nodes, by EP group, where dispatches are bundled: all of one size.
  std::vector<std::vector<int32_t>> nodes;
  cuda::InternodeKernels kernels;
};

// The blocks of GivenWindows that kernels of this process may still use: of open groups, and of
// those that could not wait for their devices when they closed.
std::vector<uint64_t> GivenWindowsInUse();

class WindowedGroup : public Group {
 public:
  // `ep_groups`: by rank the device ordinals of each EP group that has ranks in this process. Where
  // some are elsewhere, their windows must be imported before the first call. Throws
  // std::runtime_error.
  WindowedGroup(const std::vector<std::vector<int32_t>>& ep_groups, const WindowSizes& sizes,
                const WindowOptions& options);
  // Over given windows, all of them as large as the sizes want; with `far`, all of them blocks of
  // BundleLayout. Nobody may store into one before this has returned where it belongs.
  WindowedGroup(const std::vector<std::vector<int32_t>>& ep_groups, const WindowSizes& sizes,
                const WindowOptions& options, const GivenWindows& given, const FarAccess* far);
  ~WindowedGroup() override { Close(); }

  // What other processes import of a local device. The descriptor is the caller's to close.
  SharedWindow Export(int32_t ordinal) const;
  // The window of a rank elsewhere, of the group at this index; by either handle, of which a
  // descriptor stays the caller's. Throws std::runtime_error where the devices cannot map it.
  void Import(size_t ep_group, int32_t rank, int descriptor, int64_t bytes);
  void Import(size_t ep_group, int32_t rank, const cuda::FabricHandle& fabric, int64_t bytes);

  // nullptr: not of this group.
  const WindowGroup* OfDevice(int32_t ordinal) const;
  // nullptr: all ranks are on the node of this one.
  const cuda::InternodeRank* FarOf(int32_t ordinal) const;
  const WindowSizes& sizes() const { return sizes_; }
  // Device memory that each rank holds, with all that belongs to its window.
  int64_t window_bytes() const { return window_bytes_; }

  // Of each local device whose calls have failed, the rank and why; by rank. One is enough for no
  // call of the group to run any more: a rank that ran on alone would wait for the failed one.
  std::vector<std::pair<int32_t, std::string>> Failures() const;

  // Frees the windows, or gives them up where a kernel might still run. After the group has left
  // the registry.
  void Close() override;

 private:
  // All of the group but its windows.
  WindowGroup Common(const WindowOptions& options) const;
  const WindowGroup& AddLocal(WindowGroup group, int32_t rank, int32_t ordinal,
                              uint64_t first_epoch);

  template <typename Handle>
  void ImportBy(const Handle& handle, size_t ep_group, int32_t rank, int64_t bytes);

  struct EpGroup {
    std::vector<int32_t> ordinals;            // by rank
    std::map<int32_t, cuda::Window> windows;  // by rank, as far as they are there; until Close
  };

  const WindowSizes sizes_;
  const double timeout_s_;
  int64_t window_bytes_ = 0;
  std::map<int32_t, WindowGroup> of_device_;
  std::map<int32_t, cuda::InternodeRank> far_of_device_;
  std::mutex closing_;
  std::vector<EpGroup> ep_groups_;
  std::vector<uint64_t> given_;  // of local ranks; until Close
};

}  // namespace jax_ep::ffi_layer
