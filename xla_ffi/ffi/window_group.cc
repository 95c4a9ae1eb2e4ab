// Opening, watching and closing groups of transports p2p and shmem.
#include "ffi/window_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "cuda/memory/lasting.h"

namespace jax_ep::ffi_layer {
namespace {

std::vector<int32_t> Ordinals(const std::vector<std::vector<int32_t>>& ep_groups) {
  std::vector<int32_t> ordinals;
  for (const auto& group : ep_groups) {
    const std::vector<int32_t> local = LocalOrdinals(group);
    ordinals.insert(ordinals.end(), local.begin(), local.end());
  }
  return ordinals;
}

std::vector<int32_t> Ranks(const std::vector<std::vector<int32_t>>& ep_groups) {
  std::vector<int32_t> ranks;
  for (const auto& group : ep_groups) {
    for (size_t rank = 0; rank < group.size(); ++rank) {
      if (group[rank] != kElsewhere) ranks.push_back(static_cast<int32_t>(rank));
    }
  }
  return ranks;
}

void CheckRanks(size_t ranks, const WindowSizes& sizes) {
  if (static_cast<int64_t>(ranks) != sizes.ranks || sizes.ranks > kMaxWindowRanks) {
    throw std::invalid_argument("jax_ep: an EP group must have its ranks, at most 32");
  }
}

uint64_t Nanoseconds(double seconds) {
  // Deadlines are compared by the sign of a difference.
  constexpr double kLongest = 0x1p62;
  return static_cast<uint64_t>(std::min(seconds * 1e9, kLongest));
}

[[noreturn]] void ThrowShort(const cuda::OutOfDeviceMemory& error) {
  throw std::runtime_error(
      "jax_ep.init: a device must have room for its window of transport \"p2p\", " +
      std::to_string(error.asked_bytes) + " bytes on device " + std::to_string(error.device) +
      " for these max_tokens_per_rank, hidden_size, dtype, combine_dtype, dispatch_format, top_k, "
      "reduce and pending_calls, got " +
      std::to_string(error.free_bytes) +
      " bytes free; lower max_tokens_per_rank or pending_calls, leave JAX less of the device "
      "(XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false), or use "
      "transport=\"collective\"");
}

// The GPU stores a report in one access. The halves belong together if the second one is the same
// before and after the first one is read.
WaitReport Read(WaitReport* report) {
  static_assert(sizeof(WaitReport) == 2 * sizeof(uint64_t));
  auto* words = reinterpret_cast<uint64_t*>(report);
  const std::atomic_ref<uint64_t> epoch(words[0]), rest(words[1]);
  uint64_t halves[2] = {};
  do {
    // Acquire: keeps the order of the three reads. Nothing is released to the host.
    halves[1] = rest.load(std::memory_order_acquire);
    halves[0] = epoch.load(std::memory_order_acquire);
  } while (rest.load(std::memory_order_relaxed) != halves[1]);
  WaitReport copy;
  std::memcpy(&copy, halves, sizeof(copy));
  return copy;
}

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kRoute:
      return "route";
    case Phase::kSend:
      return "send";
    case Phase::kReceive:
      return "place";
    default:
      return "none";
  }
}

const char* CallName(uint16_t tag) {
  switch (KindOf(tag)) {
    case TagKind::kDispatch:
      return "dispatch";
    case TagKind::kDispatchCached:
      return "dispatch along a route";
    case TagKind::kCombine:
      return "combine";
    default:
      return "unknown";
  }
}

std::string FailureText(const WaitReport& report, double timeout_s) {
  const std::string call =
      std::string(CallName(report.tag)) + " call epoch " + std::to_string(report.epoch);
  const std::string remedy = "; close it and call jax_ep.init again";
  if (report.status == WaitStatus::kNotPending) {
    return "ep is poisoned: rank " + std::to_string(report.waiting_rank) + " was to end " + call +
           ", which was not pending: it had been waited for, or given up for later ones of more "
           "than config.pending_calls" +
           remedy;
  }
  char timeout[32];
  std::snprintf(timeout, sizeof(timeout), "%g", timeout_s);
  const std::string why =
      report.status == WaitStatus::kTimedOut
          ? std::string("timed out after ") + timeout + " s"
          : "met a flag of another call: the ranks ran calls of this ep in different orders or "
            "programs";
  return "ep is poisoned: rank " + std::to_string(report.waiting_rank) + " waited for rank " +
         std::to_string(report.awaited_rank) + " in phase " + PhaseName(report.phase) + " of " +
         call + ", " + why + remedy;
}

struct Blocks {
  std::mutex mutex;
  std::set<uint64_t> in_use;
};

Blocks& Given() {
  static auto* const blocks = new Blocks;  // groups may close at any time
  return *blocks;
}

}  // namespace

std::vector<uint64_t> GivenWindowsInUse() {
  std::lock_guard<std::mutex> lock(Given().mutex);
  return {Given().in_use.begin(), Given().in_use.end()};
}

std::vector<int32_t> LocalOrdinals(const std::vector<int32_t>& ordinals) {
  std::vector<int32_t> local = ordinals;
  std::erase(local, kElsewhere);
  return local;
}

WindowedGroup::WindowedGroup(const std::vector<std::vector<int32_t>>& ep_groups,
                             const WindowSizes& sizes, const WindowOptions& options)
    : Group(Ordinals(ep_groups), Ranks(ep_groups)), sizes_(sizes), timeout_s_(options.timeout_s) {
  const WindowLayout layout = WindowLayout::Of(sizes);
  for (const std::vector<int32_t>& ordinals : ep_groups) {
    CheckRanks(ordinals.size(), sizes);
    const std::vector<int32_t> local = LocalOrdinals(ordinals);
    const bool alone = local.size() == ordinals.size();
    const cuda::Sharing sharing = alone               ? cuda::Sharing::kThisProcess
                                  : options.by_fabric ? cuda::Sharing::kFabric
                                                      : cuda::Sharing::kProcesses;
    std::vector<cuda::Window> windows;
    try {
      windows = cuda::OpenWindows(local, layout, sizes, options.first_epoch, sharing);
    } catch (const cuda::OutOfDeviceMemory& error) {
      ThrowShort(error);
    }
    EpGroup& ep_group = ep_groups_.emplace_back(EpGroup{ordinals, {}});
    WindowGroup group = Common(options);
    for (size_t rank = 0, next = 0; rank < ordinals.size(); ++rank) {
      if (ordinals[rank] == kElsewhere) continue;
      cuda::Window& window = windows[next++];
      group.windows[rank] = window.data();
      window_bytes_ = window.bytes();
      ep_group.windows.emplace(static_cast<int32_t>(rank), std::move(window));
    }
    for (const auto& [rank, window] : ep_group.windows) {
      AddLocal(group, rank, ordinals[static_cast<size_t>(rank)], options.first_epoch);
    }
  }
}

WindowedGroup::WindowedGroup(const std::vector<std::vector<int32_t>>& ep_groups,
                             const WindowSizes& sizes, const WindowOptions& options,
                             const GivenWindows& given, const InternodeAccess* access)
    : Group(Ordinals(ep_groups), Ranks(ep_groups)), sizes_(sizes), timeout_s_(options.timeout_s) {
  if (given.size() != ep_groups.size() ||
      (access != nullptr && access->pes.size() != given.size())) {
    throw std::invalid_argument("jax_ep: each EP group must be given its windows");
  }
  const WindowLayout layout = WindowLayout::Of(sizes);
  const InternodeLayout internode_layout = InternodeLayout::Of(layout, sizes);
  const auto map_of = [&](size_t index) {
    if (access == nullptr || access->nodes.empty()) return NodeMap{};
    CheckRanks(access->nodes.at(index).size(), sizes);
    return NodeMap::Of(access->nodes[index].data(), static_cast<uint32_t>(sizes.ranks));
  };
  const NodeMap first = map_of(0);
  const BundleLayout bundles =
      BundleLayout::Of(internode_layout, layout, sizes, first.nodes, first.size);
  window_bytes_ = access != nullptr ? bundles.bytes : layout.bytes;
  for (size_t index = 0; index < ep_groups.size(); ++index) {
    const std::vector<int32_t>& ordinals = ep_groups[index];
    CheckRanks(ordinals.size(), sizes);
    CheckRanks(given[index].size(), sizes);
    WindowGroup group = Common(options);
    for (size_t rank = 0; rank < ordinals.size(); ++rank) {
      group.windows[rank] = reinterpret_cast<uint8_t*>(given[index][rank]);
      if (given[index][rank] == 0) group.internode |= 1u << rank;
    }
    for (size_t rank = 0; rank < ordinals.size(); ++rank) {
      if (ordinals[rank] == kElsewhere) continue;
      uint8_t* block = group.windows[rank];
      if (block == nullptr || (group.internode != 0 && access == nullptr)) {
        throw std::invalid_argument("jax_ep: windows out of reach must be reached by puts");
      }
      const auto local = static_cast<int32_t>(rank);
      given_.push_back(given[index][rank]);
      if (access == nullptr) {
        cuda::StartWindow(ordinals[rank], block, layout, sizes, options.first_epoch);
        AddLocal(group, local, ordinals[rank], options.first_epoch);
        continue;
      }
      cuda::StartBlock(ordinals[rank], block, bundles.bytes, layout, internode_layout, sizes,
                       options.first_epoch);
      WindowGroup own = group;
      for (uint8_t*& window : own.windows) {
        if (window == nullptr) window = block + internode_layout.staged;
      }
      cuda::InternodeGroup reached{AddLocal(own, local, ordinals[rank], options.first_epoch),
                                   internode_layout,
                                   bundles,
                                   map_of(index),
                                   {}};
      if (reached.map.nodes != first.nodes || reached.map.size != first.size) {
        throw std::invalid_argument("jax_ep: bundles need nodes of one size");
      }
      if (own.internode == 0) continue;
      std::copy_n(access->pes[index].begin(),
                  std::min<size_t>(access->pes[index].size(), sizes.ranks), reached.pes);
      internode_of_device_.emplace(ordinals[rank], cuda::InternodeRank(reached, access->kernels));
    }
    ep_groups_.emplace_back(EpGroup{ordinals, {}});
  }
  std::lock_guard<std::mutex> lock(Given().mutex);
  Given().in_use.insert(given_.begin(), given_.end());
}

WindowGroup WindowedGroup::Common(const WindowOptions& options) const {
  WindowGroup group{};
  group.layout = WindowLayout::Of(sizes_);
  group.timeout_ns = Nanoseconds(options.timeout_s);
  group.ranks = static_cast<uint32_t>(sizes_.ranks);
  group.turns = static_cast<uint32_t>(sizes_.turns);
  group.depth = static_cast<uint32_t>(sizes_.depth);
  group.num_sms = static_cast<uint32_t>(options.num_sms);
  return group;
}

const WindowGroup& WindowedGroup::AddLocal(WindowGroup group, int32_t rank, int32_t ordinal,
                                           uint64_t first_epoch) {
  group.rank = static_cast<uint32_t>(rank);
  group.control = cuda::LastingControl(ordinal, first_epoch);
  group.host_report = static_cast<WaitReport*>(cuda::LastingPinned(sizeof(WaitReport)));
  return of_device_[ordinal] = group;
}

SharedWindow WindowedGroup::Export(int32_t ordinal) const {
  for (const EpGroup& group : ep_groups_) {
    for (const auto& [rank, window] : group.windows) {
      if (group.ordinals[static_cast<size_t>(rank)] != ordinal) continue;
      return {cuda::ExportWindow(window, ordinal), window.bytes()};
    }
  }
  throw std::invalid_argument("jax_ep: device ordinal " + std::to_string(ordinal) +
                              " must have a window to share");
}

template <typename Handle>
void WindowedGroup::ImportBy(const Handle& handle, size_t ep_group, int32_t rank, int64_t bytes) {
  EpGroup& group = ep_groups_.at(ep_group);
  const auto place = static_cast<size_t>(rank);
  if (group.ordinals.at(place) != kElsewhere || group.windows.contains(rank) ||
      bytes < WindowLayout::Of(sizes_).bytes) {
    throw std::invalid_argument(
        "jax_ep: a window of another process must be as large as those here");
  }
  const std::vector<int32_t> local = LocalOrdinals(group.ordinals);
  cuda::Window window = cuda::ImportWindow(handle, bytes, local);
  for (const int32_t ordinal : local) of_device_.at(ordinal).windows[place] = window.data();
  group.windows.emplace(rank, std::move(window));
}

void WindowedGroup::Import(size_t ep_group, int32_t rank, int descriptor, int64_t bytes) {
  ImportBy(descriptor, ep_group, rank, bytes);
}

void WindowedGroup::Import(size_t ep_group, int32_t rank, const cuda::FabricHandle& fabric,
                           int64_t bytes) {
  ImportBy(fabric, ep_group, rank, bytes);
}

const WindowGroup* WindowedGroup::OfDevice(int32_t ordinal) const {
  const auto it = of_device_.find(ordinal);
  return it == of_device_.end() ? nullptr : &it->second;
}

const cuda::InternodeRank* WindowedGroup::InternodeOf(int32_t ordinal) const {
  const auto it = internode_of_device_.find(ordinal);
  return it == internode_of_device_.end() ? nullptr : &it->second;
}

std::vector<std::pair<int32_t, std::string>> WindowedGroup::Failures() const {
  std::vector<std::pair<int32_t, std::string>> failures;
  for (const auto& [ordinal, group] : of_device_) {
    const WaitReport report = Read(group.host_report);
    if (report.status == WaitStatus::kArrived) continue;
    failures.emplace_back(static_cast<int32_t>(group.rank), FailureText(report, timeout_s_));
  }
  std::sort(failures.begin(), failures.end());
  return failures;
}

void WindowedGroup::Close() {
  std::lock_guard<std::mutex> lock(closing_);
  if (ep_groups_.empty()) return;
  std::vector<cuda::DeviceControl> controls;
  for (const auto& [ordinal, group] : of_device_) controls.push_back({ordinal, group.control});
  if (cuda::Quiesce(controls, std::chrono::nanoseconds(Nanoseconds(timeout_s_)))) {
    std::lock_guard<std::mutex> given_lock(Given().mutex);
    for (const uint64_t block : given_) Given().in_use.erase(block);
  } else {
    for (EpGroup& group : ep_groups_) {
      for (auto& [rank, window] : group.windows) window.Abandon();
    }
  }
  ep_groups_.clear();
  given_.clear();
}

}  // namespace jax_ep::ffi_layer
