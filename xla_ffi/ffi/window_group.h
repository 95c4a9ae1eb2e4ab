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

// Returns the ordinals of this process's devices.
std::vector<int32_t> LocalOrdinals(const std::vector<int32_t>& ordinals);

// What other processes need to map a device's window, and its bytes.
struct SharedWindow {
  cuda::ExportedWindow exported;
  int64_t bytes;
};

// By EP group and rank: the addresses in this process of windows that somebody else has allocated,
// for ranks here and elsewhere. 0: on another node, out of reach.
using GivenWindows = std::vector<std::vector<uint64_t>>;

// How to reach ranks on other nodes: NVSHMEM's number of each rank, by EP group, and the kernels.
struct InternodeAccess {
  std::vector<std::vector<int32_t>> pes;
  // If dispatches are bundled: the number of each rank's node, by EP group. All nodes have equally
  // many ranks.
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
  // Over given windows, each as large as the sizes require or, with `access`, a block of
  // BundleLayout. Nobody may store into a window before this has returned in the process of the
  // window's rank.
  WindowedGroup(const std::vector<std::vector<int32_t>>& ep_groups, const WindowSizes& sizes,
                const WindowOptions& options, const GivenWindows& given,
                const InternodeAccess* access);
  ~WindowedGroup() override { Close(); }

  // Returns what other processes import of a local device. The caller must close the descriptor.
  SharedWindow Export(int32_t ordinal) const;
  // Maps the window of a rank elsewhere, in the EP group at this index, by either kind of handle. A
  // descriptor stays the caller's. Throws std::runtime_error if the devices cannot map the window.
  void Import(size_t ep_group, int32_t rank, int descriptor, int64_t bytes);
  void Import(size_t ep_group, int32_t rank, const cuda::FabricHandle& fabric, int64_t bytes);

  // Returns nullptr if the device is not in this group.
  const WindowGroup* OfDevice(int32_t ordinal) const;
  // Returns nullptr if all ranks are on the node of this one.
  const cuda::InternodeRank* InternodeOf(int32_t ordinal) const;
  const WindowSizes& sizes() const { return sizes_; }
  // Bytes of device memory per rank, including all that belongs to its window.
  int64_t window_bytes() const { return window_bytes_; }

  // Returns the rank and the reason for each local device whose calls have failed, by rank. After
  // one failure no call of the group may run: a rank that went on alone would wait for the failed
  // one.
  std::vector<std::pair<int32_t, std::string>> Failures() const;

  // Frees the windows, or gives them up if a kernel might still run. Call it after the group has
  // left the registry.
  void Close() override;

 private:
  // Returns the group without its windows.
  WindowGroup Common(const WindowOptions& options) const;
  const WindowGroup& AddLocal(WindowGroup group, int32_t rank, int32_t ordinal,
                              uint64_t first_epoch);

  template <typename Handle>
  void ImportBy(const Handle& handle, size_t ep_group, int32_t rank, int64_t bytes);

  struct EpGroup {
    std::vector<int32_t> ordinals;            // by rank
    std::map<int32_t, cuda::Window> windows;  // by rank, as far as present; until Close
  };

  const WindowSizes sizes_;
  const double timeout_s_;
  int64_t window_bytes_ = 0;
  std::map<int32_t, WindowGroup> of_device_;
  std::map<int32_t, cuda::InternodeRank> internode_of_device_;
  std::mutex closing_;
  std::vector<EpGroup> ep_groups_;
  std::vector<uint64_t> given_;  // of local ranks; until Close
};

}  // namespace jax_ep::ffi_layer
