// Calls in halves: what the send half leaves for the receive half, and what becomes of calls that
// are never received. See docs/protocol.md, "Calls in two halves".
#pragma once

#include <cstdint>

#include "protocol/platform.h"
#include "protocol/signals.h"

namespace jax_ep {

// If all `depth` regions hold pending calls, returns the region of the oldest, else kNoRegion. Call
// it after committing a call that stays pending, and give the returned call up as if it had been
// received and nothing of it had been needed. The next call then has a region, and a program that
// never receives a call it has begun blocks nobody.
JAX_EP_HOST_DEVICE constexpr uint32_t SurplusRegion(const CallState& state, uint32_t depth) {
  uint32_t oldest = 0;
  JAX_EP_NO_UNROLL
  for (uint32_t region = 0; region < depth; ++region) {
    if (((state.pending >> region) & 1) == 0) return kNoRegion;
    if (EpochsAhead(state.last_epoch[region], state.last_epoch[oldest]) < 0) oldest = region;
  }
  return oldest;
}

// For the last worker to leave a send half whose receive half comes before any other call: the
// receive half's sum starts with this one's.
template <SignalMemory M>
JAX_EP_HOST_DEVICE void KeepSum(const M& memory, CallState& state, const Departure& end) {
  memory.StoreRelaxed(&state.leavers, uint64_t{end.sum} << 32);
}

// What the send half of a call leaves for the receive half, which may be in another program.
struct PendingCall {
  uint64_t epoch;
  uint32_t region;
  uint32_t tag;
};

// The lease of a call that is to be received, with kNoRegion if it is not pending (any more).
// `pending` has passed through the user's program and may hold anything.
JAX_EP_HOST_DEVICE constexpr RegionLease ResumeRegion(const CallState& state,
                                                      const PendingCall& pending, uint32_t depth) {
  const bool is_pending = pending.region < depth && ((state.pending >> pending.region) & 1) != 0 &&
                          state.last_epoch[pending.region] == pending.epoch;
  // Only senders use `previous`.
  return {pending.epoch, pending.epoch, is_pending ? pending.region : kNoRegion};
}

}  // namespace jax_ep
