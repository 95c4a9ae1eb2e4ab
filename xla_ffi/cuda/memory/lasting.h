// Memory that is never freed, and no byte of which is given out twice. A call captured in a CUDA
// graph keeps its addresses and may write to them long after its group was closed.
#pragma once

#include <cstdint>

#include "protocol/window.h"

namespace jax_ep::cuda {

// Zeroed pinned memory, aligned to 16 bytes, at the same address on the host and on every device.
void* LastingPinned(int64_t bytes);

// A control block on `device`, with its gate open and its calls in their initial state.
WindowControl* LastingControl(int device, uint64_t first_epoch);

}  // namespace jax_ep::cuda
