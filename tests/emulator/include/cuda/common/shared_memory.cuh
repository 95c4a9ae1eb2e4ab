// Takes the place of xla_ffi/cuda/common/shared_memory.cuh on the include path.
#pragma once

#include "emulator.h"

namespace jax_ep::cuda {

using emulator::SharedBytes;
// Only kernels in clusters use it.
inline uint8_t* SharedAtoms() { return SharedBytes(); }
using emulator::SharedObject;

}  // namespace jax_ep::cuda
