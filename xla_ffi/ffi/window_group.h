// A group of transport p2p: its windows, and what the calls of each local device run with. Between
// close() and the end of the process its calls may still be launched or replayed: they find their
// gates closed, in memory that outlives the group.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/windows.h"
#include "ffi/group.h"
#include "protocol/window.h"

namespace jax_ep::ffi_layer {

struct WindowOptions {
  double timeout_s;
  int64_t num_sms;  // 0: chosen from a call's shape
  uint64_t first_epoch;
};

class WindowedGroup : public Group {
 public:
  // `ep_groups`: the device ordinals of each EP group, by rank. Throws std::runtime_error.
  WindowedGroup(const std::vector<std::vector<int32_t>>& ep_groups, const WindowSizes& sizes,
                const WindowOptions& options);
  ~WindowedGroup() override { Close(); }

  // nullptr: not of this group.
  const WindowGroup* OfDevice(int32_t ordinal) const;
  const WindowSizes& sizes() const { return sizes_; }
  // Device memory that each rank holds.
  int64_t window_bytes() const { return window_bytes_; }

  // Of each local device whose calls have failed, the rank and why; by rank. One is enough for no
  // call of the group to run any more: a rank that ran on alone would wait for the failed one.
  std::vector<std::pair<int32_t, std::string>> Failures() const;

  // Frees the windows, or gives them up where a kernel might still run. After the group has left
  // the registry.
  void Close() override;

 private:
  const WindowSizes sizes_;
  const double timeout_s_;
  int64_t window_bytes_ = 0;
  std::map<int32_t, WindowGroup> of_device_;
  std::mutex closing_;
  std::vector<std::vector<cuda::Window>> windows_;  // [EP group][rank], until Close
};

}  // namespace jax_ep::ffi_layer
