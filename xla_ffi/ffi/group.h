// What one jax_ep.init leaves in this process: which local device is which rank, and where its
// calls report bad ids and mixed-up calls. Handlers find it by the key in their attributes;
// collective handlers also run without it, after close().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "protocol/steps.h"

namespace jax_ep::ffi_layer {

// Memory that both the host and the back end's kernels can write. A back end implements both
// functions.
struct DeviceReports {
  InvalidIdReport invalid_id;
  MixedCallReport mixed_call;
};
DeviceReports* AllocateReports(int64_t count);
void FreeReports(DeviceReports* reports);

template <typename Report>
struct Reported {
  int32_t rank;
  int32_t ordinal;
  Report report;
};

class Group {
 public:
  // Device `ordinals[i]` of this process is rank `ranks[i]` of its EP group.
  Group(const std::vector<int32_t>& ordinals, const std::vector<int32_t>& ranks)
      : ordinals_(ordinals),
        ranks_(ranks),
        reports_(AllocateReports(static_cast<int64_t>(ranks.size()))) {
    for (size_t i = 0; i < ordinals.size(); ++i) member_of_[ordinals[i]] = i;
  }
  virtual ~Group() { FreeReports(reports_); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Gives up what only an open group needs, though a handler may still hold the group.
  virtual void Close() {}

  std::optional<int32_t> RankOf(int32_t ordinal) const {
    const auto it = member_of_.find(ordinal);
    if (it == member_of_.end()) return std::nullopt;
    return ranks_[it->second];
  }

  InvalidIdReport* InvalidIdReportOf(int32_t ordinal) const {
    const auto it = member_of_.find(ordinal);
    return it == member_of_.end() ? nullptr : &reports_[it->second].invalid_id;
  }
  MixedCallCheck MixedCallCheckOf(int32_t ordinal) const {
    const auto it = member_of_.find(ordinal);
    if (it == member_of_.end()) return {};
    return {ranks_[it->second], &reports_[it->second].mixed_call};
  }

  // Return the first bad id, or the first mixed-up call, of each local device since the last time,
  // and forget them.
  std::vector<Reported<InvalidIdReport>> TakeInvalidIds() {
    return TakeReports(&DeviceReports::invalid_id);
  }
  std::vector<Reported<MixedCallReport>> TakeMixedCalls() {
    return TakeReports(&DeviceReports::mixed_call);
  }

  // Every device of the process sets it, to the same value.
  void set_pool_threads(int64_t threads) {
    pool_threads_.store(threads, std::memory_order_relaxed);
  }
  int64_t pool_threads() const { return pool_threads_.load(std::memory_order_relaxed); }

 private:
  template <typename Report>
  std::vector<Reported<Report>> TakeReports(Report DeviceReports::* kind) {
    std::vector<Reported<Report>> found;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Report& report = reports_[i].*kind;
      // Acquire pairs with the release of cpu::WriteReport; a GPU stores the report as one 16-byte
      // unit.
      const std::atomic_ref<int32_t> state(report.state);
      if (state.load(std::memory_order_acquire) != Report::kSet) continue;
      found.push_back({ranks_[i], ordinals_[i], report});
      // Release pairs with the acquire of the next writer's claim, after these reads.
      state.store(Report::kFree, std::memory_order_release);
    }
    return found;
  }

  std::map<int32_t, size_t> member_of_;
  std::vector<int32_t> ordinals_;
  std::vector<int32_t> ranks_;
  DeviceReports* reports_;
  // Threads of XLA's CPU pool, as ep_init saw it; 0 if there is none.
  std::atomic<int64_t> pool_threads_{0};
};

// The groups of this process. One per native module: each serves one platform.
class GroupRegistry {
 public:
  static GroupRegistry& Get() {
    // Never destroyed: handlers may still run while the interpreter exits.
    static auto* registry = new GroupRegistry;
    return *registry;
  }

  void Open(int64_t key, std::shared_ptr<Group> group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_[key] = std::move(group);
  }
  void Close(int64_t key) {
    std::shared_ptr<Group> last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = groups_.find(key);
      if (it == groups_.end()) return;
      last = std::move(it->second);
      groups_.erase(it);
    }
    last->Close();  // without the lock: it may wait for devices
  }
  std::shared_ptr<Group> Find(int64_t key) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = groups_.find(key);
    return it == groups_.end() ? nullptr : it->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Group>> groups_;
};

// Sets where an unpack reports mixed-up calls: nowhere once its group has been closed. The reports
// may belong to the group, which is returned: on CPUs they end with it.
template <typename UnpackCall>
std::shared_ptr<Group> SetCheck(UnpackCall& call, int32_t ordinal) {
  std::shared_ptr<Group> group = GroupRegistry::Get().Find(call.key);
  if (group) call.step.check = group->MixedCallCheckOf(ordinal);
  return group;
}

}  // namespace jax_ep::ffi_layer
