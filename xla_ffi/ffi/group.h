// What one jax_ep.init leaves in this process: which local device is which rank, and where its
// calls report bad ids. Handlers find it by the key in their attributes; collective handlers also
// run without it, after close().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "protocol/steps.h"

namespace jax_ep::ffi_layer {

// Memory that both the host and the back end's kernels can write; a back end implements both.
InvalidIdReport* AllocateReports(int64_t count);
void FreeReports(InvalidIdReport* reports);

struct InvalidId {
  int32_t rank;
  InvalidIdReport report;
};

class Group {
 public:
  // Device `ordinals[i]` of this process is rank `ranks[i]` of its EP group.
  Group(const std::vector<int32_t>& ordinals, const std::vector<int32_t>& ranks)
      : ranks_(ranks), reports_(AllocateReports(static_cast<int64_t>(ranks.size()))) {
    for (size_t i = 0; i < ordinals.size(); ++i) member_of_[ordinals[i]] = i;
  }
  ~Group() { FreeReports(reports_); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  std::optional<int32_t> RankOf(int32_t ordinal) const {
    const auto it = member_of_.find(ordinal);
    if (it == member_of_.end()) return std::nullopt;
    return ranks_[it->second];
  }

  InvalidIdReport* ReportOf(int32_t ordinal) const {
    const auto it = member_of_.find(ordinal);
    return it == member_of_.end() ? nullptr : reports_ + it->second;
  }

  // The first bad id of each local device since the last call, by rank; forgets them.
  std::vector<InvalidId> TakeInvalidIds() {
    std::vector<InvalidId> found;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      // Pairs with the write at the end of a pack; callers first wait for the results of the calls.
      volatile int32_t* set = &reports_[i].set;
      if (*set == 0) continue;
      found.push_back({ranks_[i], reports_[i]});
      *set = 0;
    }
    return found;
  }

  void set_pool_threads(int64_t threads) { pool_threads_ = threads; }
  int64_t pool_threads() const { return pool_threads_; }

 private:
  std::map<int32_t, size_t> member_of_;
  std::vector<int32_t> ranks_;
  InvalidIdReport* reports_;
  int64_t pool_threads_ = 0;  // of XLA's CPU pool, seen by ep_init; 0 where there is none
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
    std::shared_ptr<Group> last;  // destroyed after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = groups_.find(key);
    if (it == groups_.end()) return;
    last = std::move(it->second);
    groups_.erase(it);
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

}  // namespace jax_ep::ffi_layer
