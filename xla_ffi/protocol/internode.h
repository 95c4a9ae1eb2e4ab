// Regions for ranks on other nodes: what the protocol requires of puts, the layout, and the steps
// on both sides. The source stages a region in its own memory in the layout of the destination,
// puts it there as a whole, and announces it by signals. Cells pass through an inbox, because a put
// may tear them. tests/cc/internode_test.cc runs this over puts that do everything that is not
// forbidden here.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "protocol/pending.h"
#include "protocol/platform.h"
#include "protocol/signals.h"
#include "protocol/window.h"

namespace jax_ep {

// `at` is an offset in a rank's block. The protocol requires no more than this of a back end:
// * Put: the bytes arrive at any later time, in any order and in pieces of any size, and are read
//   from `from` when they leave. Puts are ordered neither with each other nor with signals.
// * Fence: whatever this lane signals to a rank after the fence arrives there after all that this
//   lane has put and signalled to that rank before it. A lane is one thread, or several threads
//   that make the call together; it continues in the corresponding threads of later kernels on the
//   stream.
// * Signal: one aligned word that arrives whole, at any later time, and after all that this lane
//   has read. Two signals without a fence between them are not ordered.
// * Settle, called by whoever has acquired a signal's value at the destination: what arrived before
//   the signal may now be read there.
template <typename P>
concept PutAccess =
    requires(const P& puts, uint32_t rank, int64_t at, const void* from, int64_t bytes) {
      { puts.Put(rank, at, from, bytes) } -> std::same_as<void>;
      { puts.Fence() } -> std::same_as<void>;
      { puts.Signal(rank, at, uint64_t{}) } -> std::same_as<void>;
      { puts.Settle() } -> std::same_as<void>;
    };

// ---- Layout -------------------------------------------------------------------------------------

// A region's messages travel in this many shares side by side, each on a lane of its own and with a
// signal of its own.
inline constexpr uint32_t kInternodeShares = 8;

// One buffer group; offsets from the start of a rank's block.
struct InternodeGroupLayout {
  int64_t arrived;   // uint64 [depth, R sources, kInternodeShares]: the last epoch that arrived
  int64_t returned;  // uint64 [depth, R sources], own: the last credit that was returned
  int64_t flags;     // FlagCell [depth, R sources, flags_per_source]: the inbox
  int64_t counts;    // CountCell [depth, R sources, count_cells]: the inbox
};

// A rank's block is its window, then a staging area in the layout of a window but with parts by
// destination, then the groups below.
struct InternodeLayout {
  int64_t staged;
  InternodeGroupLayout groups[kBufferGroups];
  int64_t bytes;  // of a block

  static constexpr InternodeLayout Of(const WindowLayout& window, const WindowSizes& sizes) {
    constexpr int64_t kAlign = 128;
    LayoutCursor cursor;
    InternodeLayout layout{};
    cursor.Take(window.bytes, kAlign);
    layout.staged = cursor.Take(window.bytes, kAlign);
    const int64_t regions = sizes.depth * sizes.ranks;
    for (int i = 0; i < kBufferGroups; ++i) {
      const auto take = [&](int64_t cells, size_t bytes) {
        return cursor.Take(regions * cells * static_cast<int64_t>(bytes), kAlign);
      };
      InternodeGroupLayout& group = layout.groups[i];
      group.arrived = take(kInternodeShares, sizeof(uint64_t));
      group.returned = take(1, sizeof(uint64_t));
      group.flags = take(window.groups[i].flags_per_source, sizeof(FlagCell));
      group.counts = take(window.groups[i].count_cells, sizeof(CountCell));
    }
    layout.bytes = RoundUp(cursor.end, kAlign);
    return layout;
  }
};

// Offsets in a block for one kind of call. `peer` is the source or, in the staging area, the
// destination.
struct InternodeOffsets {
  const BufferGroupLayout& window;
  const InternodeGroupLayout& internode;
  uint32_t ranks;

  JAX_EP_HOST_DEVICE int64_t Part(uint32_t region, uint32_t peer) const {
    return int64_t{region} * ranks + peer;
  }
  JAX_EP_HOST_DEVICE int64_t Messages(uint32_t region, uint32_t peer) const {
    return window.regions + Part(region, peer) * window.region_bytes;
  }
  JAX_EP_HOST_DEVICE int64_t Flags(uint32_t region, uint32_t peer) const {
    return window.flags + FlagsBefore(region, peer);
  }
  JAX_EP_HOST_DEVICE int64_t Counts(uint32_t region, uint32_t peer) const {
    return window.counts + CountsBefore(region, peer);
  }
  JAX_EP_HOST_DEVICE int64_t Credit(uint32_t region, uint32_t peer) const {
    return window.credits + Part(region, peer) * int64_t{sizeof(uint64_t)};
  }
  JAX_EP_HOST_DEVICE int64_t InboxFlags(uint32_t region, uint32_t source) const {
    return internode.flags + FlagsBefore(region, source);
  }
  JAX_EP_HOST_DEVICE int64_t InboxCounts(uint32_t region, uint32_t source) const {
    return internode.counts + CountsBefore(region, source);
  }
  JAX_EP_HOST_DEVICE int64_t Arrived(uint32_t region, uint32_t source, uint32_t share) const {
    return internode.arrived +
           (Part(region, source) * kInternodeShares + share) * int64_t{sizeof(uint64_t)};
  }
  JAX_EP_HOST_DEVICE int64_t Returned(uint32_t region, uint32_t source) const {
    return internode.returned + Part(region, source) * int64_t{sizeof(uint64_t)};
  }

 private:
  JAX_EP_HOST_DEVICE int64_t FlagsBefore(uint32_t region, uint32_t peer) const {
    return Part(region, peer) * window.flags_per_source * int64_t{sizeof(FlagCell)};
  }
  JAX_EP_HOST_DEVICE int64_t CountsBefore(uint32_t region, uint32_t peer) const {
    return Part(region, peer) * window.count_cells * int64_t{sizeof(CountCell)};
  }
};

// What a call sends to each rank; equal on all ranks.
struct InternodeShape {
  int64_t message_bytes;
  uint32_t flags;
  uint32_t counts;
  uint32_t pieces;       // flags per chunk
  uint32_t chunk_slots;  // 0: flags themselves say where their slots start

  static constexpr InternodeShape OfDispatch(int64_t tokens, int64_t message_bytes,
                                             int64_t counts) {
    return {message_bytes, static_cast<uint32_t>(kDispatchChunks.Count(tokens)),
            static_cast<uint32_t>(counts), 1, 0};
  }
  static constexpr InternodeShape OfCombine(int64_t messages, int64_t message_bytes,
                                            int64_t hidden) {
    const int64_t pieces = Pieces(hidden);
    return {message_bytes, static_cast<uint32_t>(kCombineChunks.Count(messages) * pieces), 0,
            static_cast<uint32_t>(pieces), static_cast<uint32_t>(kCombineChunks.Tokens(messages))};
  }
};

// ---- The source ---------------------------------------------------------------------------------

// Returns the end of the slots that flags first, first + step, ... announce in this epoch.
template <SignalMemory M>
JAX_EP_HOST_DEVICE int64_t SlotsEnd(const M& memory, const FlagCell* flags,
                                    const InternodeShape& shape, uint64_t epoch, uint32_t first,
                                    uint32_t step) {
  int64_t end = 0;
  JAX_EP_NO_UNROLL
  for (uint32_t i = first; i < shape.flags; i += step) {
    const FlagCell flag = memory.Peek(flags + i);
    if (flag.epoch != epoch) continue;
    const int64_t start =
        shape.chunk_slots == 0 ? flag.first_slot : int64_t{i / shape.pieces} * shape.chunk_slots;
    const int64_t count = flag.count & kSlotCountMask;
    end = start + count > end ? start + count : end;
  }
  return end;
}

// A share of `end` bytes of messages.
struct ShareOf {
  int64_t begin;
  int64_t bytes;

  JAX_EP_HOST_DEVICE ShareOf(int64_t end, uint32_t share) {
    const int64_t length = RoundUp(DivideUp(end, kInternodeShares), kMessageAlignBytes);
    begin = Min(share * length, end);
    bytes = Min(length, end - begin);
  }
};

// Sends a share of a staged region, which has `slots` messages. Call it after all stores to the
// staged parts. Those stores came after ObserveCredit of the region, so the destination has seen
// the puts of the region's last epoch arrive, and nothing reads the staged parts any more.
template <PutAccess P>
JAX_EP_HOST_DEVICE void ForwardShare(const P& puts, const InternodeOffsets& offsets,
                                     const uint8_t* staged, uint32_t rank, uint32_t to,
                                     const InternodeShape& shape, const PendingCall& call,
                                     int64_t slots, uint32_t share) {
  const ShareOf part(Min(slots * shape.message_bytes, offsets.window.region_bytes), share);
  if (part.bytes > 0) {
    puts.Put(to, offsets.Messages(call.region, rank) + part.begin,
             staged + offsets.Messages(call.region, to) + part.begin, part.bytes);
  }
  if (share == 0 && shape.flags > 0) {
    puts.Put(to, offsets.InboxFlags(call.region, rank), staged + offsets.Flags(call.region, to),
             shape.flags * int64_t{sizeof(FlagCell)});
  }
  if (share == 0 && shape.counts > 0) {
    puts.Put(to, offsets.InboxCounts(call.region, rank), staged + offsets.Counts(call.region, to),
             shape.counts * int64_t{sizeof(CountCell)});
  }
  puts.Fence();  // Pairs with Acquire in ObserveShare at the destination.
  puts.Signal(to, offsets.Arrived(call.region, rank, share), call.epoch);
}

// Ends the group at a rank on another node, whose poison cell is at offset `cell`. The half with
// the status is sent last, because a nonzero status declares the report complete.
template <PutAccess P>
JAX_EP_HOST_DEVICE void SpreadInternodePoison(const P& puts, uint32_t rank, int64_t cell,
                                              const WaitReport& report) {
  constexpr int64_t kHalf = sizeof(uint64_t);
  static_assert(sizeof(WaitReport) == 2 * kHalf && offsetof(WaitReport, status) >= kHalf);
  uint64_t words[2];
  __builtin_memcpy(words, &report, sizeof(report));
  puts.Signal(rank, cell, words[0]);
  puts.Fence();
  puts.Signal(rank, cell + kHalf, words[1]);
}

// ---- The destination ----------------------------------------------------------------------------

// When all shares have arrived and settled, the region's messages and its cells in the inbox may be
// read.
template <SignalMemory M>
JAX_EP_HOST_DEVICE Observation ObserveShare(const M& memory, const uint64_t* arrived,
                                            uint64_t epoch) {
  // Acquire; pairs with the Fence in ForwardShare at the source.
  const int64_t ahead = EpochsAhead(memory.Acquire(arrived), epoch);
  if (ahead < 0) return Observation::kPending;
  return ahead > 0 ? Observation::kProtocolError : Observation::kArrived;
}

// Copies cells first, first + step, ... from the inbox to where receivers look for them, each in
// one access, as if the source had posted them there. Call it after the region was observed.
template <typename Cell, SignalMemory M>
JAX_EP_HOST_DEVICE void DeliverCells(const M& memory, Cell* to, const Cell* inbox, uint32_t count,
                                     uint32_t first, uint32_t step) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveFlag.
  JAX_EP_NO_UNROLL
  for (uint32_t i = first; i < count; i += step) memory.Post(to + i, memory.Peek(inbox + i));
}

// Like ReturnCredit, to a source on another node, in whose window `credit` is. A credit declares
// that the puts of its region are over, so all shares of the region must have been observed and
// settled before, even if none of them was needed. Where a relay observes them instead (bundle.h),
// call Fence before: the region's previous credit may still be in flight and must not overtake this
// one.
template <PutAccess P, SignalMemory M>
JAX_EP_HOST_DEVICE void ReturnInternodeCredit(const P& puts, const M& memory, uint32_t source,
                                              int64_t credit, uint64_t epoch) {
  memory.ReleaseFence();  // Release; pairs with Acquire in ObserveCredit at the source.
  puts.Signal(source, credit, epoch);
}

}  // namespace jax_ep
