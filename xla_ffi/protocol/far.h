// Regions for ranks of other nodes: what must hold of the puts that carry them, and the steps on
// both sides. A region is staged in the source's own memory as it is to lie at its destination, put
// there as a whole, and announced by one signal; its cells come through an inbox, because a put may
// tear them. tests/cc/far_test.cc runs it over puts that do whatever is not forbidden here.
#pragma once

#include <concepts>
#include <cstdint>

#include "protocol/platform.h"
#include "protocol/signals.h"

namespace jax_ep {

// `at` is an offset in the window of a rank. This is all that the protocol needs of a back end:
// * Put: the bytes arrive at any later time, in any order, in pieces of any size, and are read from
//   `from` when they leave. Puts are ordered neither with each other nor with signals.
// * Fence: what this thread signals to a rank after it arrives there after all that this thread has
//   put to that rank before it.
// * Signal: one aligned word that arrives whole, at any later time, and after all that this thread
//   has read. Two signals are not ordered.
// * Whoever acquires a signal's value at the destination reads there what had arrived before it.
template <typename P>
concept PutAccess =
    requires(const P& puts, uint32_t rank, int64_t at, const void* from, int64_t bytes) {
      { puts.Put(rank, at, from, bytes) } -> std::same_as<void>;
      { puts.Fence() } -> std::same_as<void>;
      { puts.Signal(rank, at, uint64_t{}) } -> std::same_as<void>;
    };

// A part of what one source sends to one destination in a call.
struct FarPart {
  int64_t at;          // messages: where they are read; cells: the inbox
  const void* staged;  // at the source
  int64_t bytes;
};

// Sends a staged region off. `arrived` is the destination's word for this source and region. After
// all stores to the parts, which in turn came after ObserveCredit of the region: so the destination
// has seen the puts of the region's last epoch arrive, and nothing reads the staged parts any more.
template <PutAccess P>
JAX_EP_HOST_DEVICE void ForwardRegion(const P& puts, uint32_t rank, const FarPart* parts,
                                      uint32_t num_parts, int64_t arrived, uint64_t epoch) {
  for (uint32_t i = 0; i < num_parts; ++i) {
    if (parts[i].bytes > 0) puts.Put(rank, parts[i].at, parts[i].staged, parts[i].bytes);
  }
  puts.Fence();  // Pairs with Acquire in ObserveRegion at the destination.
  puts.Signal(rank, arrived, epoch);
}

// The region's messages and its cells in the inbox may be read iff the result is kArrived.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveRegion(const M& memory, const uint64_t* arrived,
                                             uint64_t epoch) {
  // Acquire; pairs with the Fence in ForwardRegion at the source.
  const int64_t ahead = EpochsAhead(memory.Acquire(arrived), epoch);
  if (ahead < 0) return Observation::kPending;
  return ahead > 0 ? Observation::kProtocolError : Observation::kArrived;
}

// Passes cells from the inbox to where placers look for them, whole; as if the source had posted
// them there itself. By a thread that has observed the region.
template <typename Cell, SignalMemory M>
JAX_EP_HOST_DEVICE void DeliverCells(const M& memory, Cell* to, const Cell* inbox, int64_t count) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveFlag.
  for (int64_t i = 0; i < count; ++i) memory.Post(to + i, inbox[i]);
}

// As ReturnCredit, to a source on another node: `credit` is in the source's window. Of a region
// that was observed, also where nothing of it was needed: a credit must say that its puts are over.
template <PutAccess P, SignalMemory M>
JAX_EP_HOST_DEVICE void ReturnFarCredit(const P& puts, const M& memory, uint32_t source,
                                        int64_t credit, uint64_t epoch) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveCredit at the source.
  puts.Signal(source, credit, epoch);
}

}  // namespace jax_ep
