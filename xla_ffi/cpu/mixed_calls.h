// Tags of calls on the CPU: writing them, and what an unpack does where they differ.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "protocol/layout.h"
#include "protocol/steps.h"

namespace jax_ep::cpu {

// Independent calls of a handle may run at the same time on one device, so the first to claim a
// report writes it. `write()` sets all of its fields except the state.
template <typename Report, typename Write>
void WriteReport(Report& report, Write&& write) {
  const std::atomic_ref<int32_t> state(report.state);
  int32_t expected = Report::kFree;
  // Acquire pairs with the release that frees the report in Group::TakeReports.
  if (!state.compare_exchange_strong(expected, Report::kClaimed, std::memory_order_acquire)) return;
  write();
  // Release pairs with the acquire of Group::TakeReports.
  state.store(Report::kSet, std::memory_order_release);
}

inline void WriteTag(uint8_t* region, RegionTag tag) {
  std::memcpy(region + kTagOffset, &tag, sizeof tag);
}
inline RegionTag TagOf(const uint8_t* region) {
  RegionTag tag;
  std::memcpy(&tag, region + kTagOffset, sizeof tag);
  return tag;
}

// Returns whether the regions of all sources come from one call, and reports it if they do not.
inline bool OfOneCall(const MixedCallCheck& check, const uint8_t* recv, int64_t ranks,
                      int64_t region_bytes) {
  const int64_t own_rank = check.own_rank < ranks ? check.own_rank : 0;
  const RegionTag own = TagOf(recv + own_rank * region_bytes);
  for (int64_t source = 0; source < ranks; ++source) {
    const RegionTag other = TagOf(recv + source * region_bytes);
    if (other == own) continue;
    if (check.report != nullptr) {
      WriteReport(*check.report, [&] {
        const MixedCallReport found = MixedCallOf(static_cast<int32_t>(source), own, other);
        check.report->source = found.source;
        check.report->here = found.here;
        check.report->there = found.there;
      });
    }
    return false;
  }
  return true;
}

// All ones: NaN in every float type, -1 in every id.
inline void FillNoValue(void* to, int64_t bytes) {
  if (bytes > 0) std::memset(to, 0xFF, static_cast<size_t>(bytes));
}

}  // namespace jax_ep::cpu
