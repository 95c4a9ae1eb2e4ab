// What aliased_test.cc uses of the fuzz target. It is compiled once, since XLA's headers take long.
#pragma once

#include <cstdint>

#include "fuzz/input.h"

namespace jax_ep::ffi_layer {

// The part of an input's first byte that does not choose the call.
struct How {
  int64_t alias;  // the pair of operand and result that share memory, 0 for none
  bool mixed;     // the regions keep the tags of the input
};

// Runs the call with this number. Returns how many pairs it has seen up to that of `how`.
int64_t RunNumbered(FuzzInput& input, int64_t number, const How& how);

}  // namespace jax_ep::ffi_layer
