// Memory that lives as long as the process, and of which no byte is given out twice: a call
// captured in a CUDA graph keeps its addresses, and may write there long after its group was
// closed.
#pragma once

#include <cstdint>

#include "protocol/window.h"

namespace jax_ep::cuda {

// Zeroed pinned memory, aligned to 16 bytes, at one address on the host and on every device.
void* LastingPinned(int64_t bytes);

// A control on `device`: its gate open, its calls at their start.
WindowControl* LastingControl(int device, uint64_t first_epoch);

}  // namespace jax_ep::cuda
