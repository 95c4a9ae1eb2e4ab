// Calls in two halves: what the first leaves for the second, and what becomes of those that nobody
// ends. Used by the kernels of halves and by tests/cc; docs/protocol.md, "Calls in two halves".
#pragma once

#include <cstdint>

#include "protocol/platform.h"
#include "protocol/signals.h"

namespace jax_ep {

// The region of the oldest pending call where all `depth` hold one, else kNoRegion. For a call that
// stays pending, once it is committed: it gives that call up, as if it had been placed and nobody
// had needed anything, so that a region is left for the next call. Whoever drops a call that it has
// begun then holds up nothing.
JAX_EP_HOST_DEVICE constexpr uint32_t SurplusRegion(const CallState& state, uint32_t depth) {
  uint32_t oldest = 0;
  JAX_EP_NO_UNROLL
  for (uint32_t region = 0; region < depth; ++region) {
    if (((state.pending >> region) & 1) == 0) return kNoRegion;
    if (EpochsAhead(state.last_epoch[region], state.last_epoch[oldest]) < 0) oldest = region;
  }
  return oldest;
}

// For the last to leave a first half whose second one comes before any other call: the second
// half's sum starts with this one's.
template <SignalMemory M>
JAX_EP_HOST_DEVICE void KeepSum(const M& memory, CallState& state, const Departure& end) {
  memory.StoreRelaxed(&state.leavers, uint64_t{end.sum} << 32);
}

// What the first half of a call leaves for the second, which may be in another program.
struct PendingCall {
  uint64_t epoch;
  uint32_t region;
  uint32_t tag;
};

// The lease of a call that is to be placed; kNoRegion where it is not pending (any more). `pending`
// comes back from the user's program and may hold anything.
JAX_EP_HOST_DEVICE constexpr RegionLease ResumeRegion(const CallState& state,
                                                      const PendingCall& pending, uint32_t depth) {
  const bool held = pending.region < depth && ((state.pending >> pending.region) & 1) != 0 &&
                    state.last_epoch[pending.region] == pending.epoch;
  // Only senders look at `previous`.
  return {pending.epoch, pending.epoch, held ? pending.region : kNoRegion};
}

}  // namespace jax_ep
