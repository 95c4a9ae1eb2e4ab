// Where calls on GPUs report bad ids and mixed-up calls: pinned host memory, the back end's half of
// ffi/group.h.
#include "cuda/memory/lasting.h"
#include "ffi/group.h"

namespace jax_ep::ffi_layer {

DeviceReports* AllocateReports(int64_t count) {
  return static_cast<DeviceReports*>(
      cuda::LastingPinned(count * static_cast<int64_t>(sizeof(DeviceReports))));
}

void FreeReports(DeviceReports*) {}

}  // namespace jax_ep::ffi_layer
