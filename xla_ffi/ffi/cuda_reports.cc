// Where calls on GPUs report bad ids: pinned host memory, the back end's half of ffi/group.h.
#include "cuda/lasting.h"
#include "ffi/group.h"

namespace jax_ep::ffi_layer {

InvalidIdReport* AllocateReports(int64_t count) {
  return static_cast<InvalidIdReport*>(
      cuda::LastingPinned(count * static_cast<int64_t>(sizeof(InvalidIdReport))));
}

void FreeReports(InvalidIdReport*) {}

}  // namespace jax_ep::ffi_layer
