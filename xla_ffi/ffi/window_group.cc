// Opening, watching and closing groups of transport p2p.
#include "ffi/window_group.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "cuda/lasting.h"

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

uint64_t Nanoseconds(double seconds) {
  // Deadlines are compared by the sign of a difference.
  constexpr double kLongest = 0x1p62;
  return static_cast<uint64_t>(std::min(seconds * 1e9, kLongest));
}

[[noreturn]] void ThrowShort(const cuda::OutOfDeviceMemory& error) {
  throw std::runtime_error(
      "jax_ep.init: a device must have room for its window of transport \"p2p\", " +
      std::to_string(error.asked_bytes) + " bytes on device " + std::to_string(error.device) +
      " for these max_tokens_per_rank, hidden_size, dtype, combine_dtype and top_k, got " +
      std::to_string(error.free_bytes) +
      " bytes free; lower max_tokens_per_rank, leave JAX less of the device "
      "(XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false), or use "
      "transport=\"collective\"");
}

// The GPU stores a report in one access; two halves that are read around an unchanged one belong
// together.
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
    case Phase::kPlace:
      return "place";
    default:
      return "none";
  }
}

const char* CallName(uint16_t tag) {
  constexpr const char* kNames[] = {"dispatch", "dispatch along a route", "combine", "unknown"};
  return kNames[tag >> 14];
}

std::string FailureText(const WaitReport& report, double timeout_s) {
  char timeout[32];
  std::snprintf(timeout, sizeof(timeout), "%g", timeout_s);
  const std::string why =
      report.status == WaitStatus::kTimedOut
          ? std::string("timed out after ") + timeout + " s"
          : "met a flag of another call: the ranks ran calls of this ep in different orders or "
            "programs";
  return "ep is poisoned: rank " + std::to_string(report.waiting_rank) + " waited for rank " +
         std::to_string(report.awaited_rank) + " in phase " + PhaseName(report.phase) + " of " +
         CallName(report.tag) + " call epoch " + std::to_string(report.epoch) + ", " + why +
         "; close it and call jax_ep.init again";
}

}  // namespace

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
    if (static_cast<int64_t>(ordinals.size()) != sizes.ranks || sizes.ranks > kMaxWindowRanks) {
      throw std::invalid_argument("jax_ep: an EP group must have its ranks, at most 32");
    }
    const std::vector<int32_t> local = LocalOrdinals(ordinals);
    const bool alone = local.size() == ordinals.size();
    std::vector<cuda::Window> windows;
    try {
      windows = cuda::OpenWindows(local, layout, sizes, options.first_epoch,
                                  alone ? cuda::Sharing::kThisProcess : cuda::Sharing::kProcesses);
    } catch (const cuda::OutOfDeviceMemory& error) {
      ThrowShort(error);
    }
    EpGroup& ep_group = ep_groups_.emplace_back(EpGroup{ordinals, {}});
    WindowGroup group{};
    for (size_t rank = 0, next = 0; rank < ordinals.size(); ++rank) {
      if (ordinals[rank] == kElsewhere) continue;
      cuda::Window& window = windows[next++];
      group.windows[rank] = window.data();
      window_bytes_ = window.bytes();
      ep_group.windows.emplace(static_cast<int32_t>(rank), std::move(window));
    }
    group.layout = layout;
    group.timeout_ns = Nanoseconds(options.timeout_s);
    group.ranks = static_cast<uint32_t>(sizes.ranks);
    group.depth = static_cast<uint32_t>(sizes.depth);
    group.num_sms = static_cast<uint32_t>(options.num_sms);
    for (const auto& [rank, window] : ep_group.windows) {
      const int32_t ordinal = ordinals[static_cast<size_t>(rank)];
      group.rank = static_cast<uint32_t>(rank);
      group.control = cuda::LastingControl(ordinal, options.first_epoch);
      group.host_report = static_cast<WaitReport*>(cuda::LastingPinned(sizeof(WaitReport)));
      of_device_[ordinal] = group;
    }
  }
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

void WindowedGroup::Import(size_t ep_group, int32_t rank, const SharedWindow& shared) {
  EpGroup& group = ep_groups_.at(ep_group);
  const auto place = static_cast<size_t>(rank);
  if (group.ordinals.at(place) != kElsewhere || group.windows.contains(rank) ||
      shared.bytes < WindowLayout::Of(sizes_).bytes) {
    throw std::invalid_argument(
        "jax_ep: a window of another process must be as large as those here");
  }
  const std::vector<int32_t> local = LocalOrdinals(group.ordinals);
  cuda::Window window = cuda::ImportWindow(shared.descriptor, shared.bytes, local);
  for (const int32_t ordinal : local) of_device_.at(ordinal).windows[place] = window.data();
  group.windows.emplace(rank, std::move(window));
}

const WindowGroup* WindowedGroup::OfDevice(int32_t ordinal) const {
  const auto it = of_device_.find(ordinal);
  return it == of_device_.end() ? nullptr : &it->second;
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
  if (!cuda::Quiesce(controls)) {
    for (EpGroup& group : ep_groups_) {
      for (auto& [rank, window] : group.windows) window.Abandon();
    }
  }
  ep_groups_.clear();
}

}  // namespace jax_ep::ffi_layer
