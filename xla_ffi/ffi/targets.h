// The custom-call targets that a native module registers: ep_init and every step, in one list, and
// what else a back end adds.
#pragma once

#include <vector>

#include "ffi/combine_operands.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

template <typename... Decoded>
struct TargetList {};
using AllSteps =
    TargetList<DecodedPack, DecodedUnpack, DecodedCachedPack, DecodedCachedUnpack,
               DecodedCombinePack, DecodedCombineUnpack, DecodedQuantize, DecodedDequantize>;

// `handler_of(Decoded{})` is a back end's handler of that target.
template <typename... Decoded, typename HandlerOf>
void AddTargets(std::vector<Target>& targets, TargetList<Decoded...>, HandlerOf handler_of) {
  (targets.push_back({Decoded::kTarget, handler_of(Decoded{})}), ...);
}

// ep_init and every step.
template <typename HandlerOf>
std::vector<Target> Targets(XLA_FFI_Handler* init, HandlerOf handler_of) {
  std::vector<Target> targets{{"ep_init", init}};
  AddTargets(targets, AllSteps{}, handler_of);
  return targets;
}

}  // namespace jax_ep::ffi_layer
