// The list of custom-call targets that a native module registers.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

}  // namespace jax_ep::ffi_layer
