// The window: the memory of a rank that the ranks of its group store into. Where each part lies,
// how a call is cut into chunks, and what a rank keeps of its calls. Sizes in Python come from
// here.
//
// A window has a poison cell, scratch of its own rank, and two buffer groups: one for dispatches,
// one for combines. A buffer group has `depth` regions from every source; a region holds the
// messages of a whole call, without the header, which lies with the counts.
#pragma once

#include <cstdint>

#include "protocol/layout.h"
#include "protocol/pending.h"
#include "protocol/signals.h"

namespace jax_ep {

// A lane of a warp serves a rank.
inline constexpr int64_t kMaxWindowRanks = 32;

enum class CallKind : uint32_t { kDispatch, kCombine };
inline constexpr int kBufferGroups = 2;

// ---- Chunks -------------------------------------------------------------------------------------

// A chunk is what one flag announces. Few tokens make chunks of one, so that many workers share
// them; many make larger ones, so that a fence and a flag are paid for less often, but not so large
// that most of a call is still unannounced when its last byte is sent. Functions of n alone: source
// and destination must agree.
struct ChunkRule {
  int64_t wanted;  // chunks of a call
  int64_t most;    // tokens of a chunk

  JAX_EP_HOST_DEVICE constexpr int64_t Tokens(int64_t tokens) const {
    const int64_t even = Min(DivideUp(tokens, wanted), most);
    return even < 1 ? 1 : even;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t Count(int64_t tokens) const {
    return DivideUp(tokens, Tokens(tokens));
  }
  // The most that any n <= tokens needs.
  JAX_EP_HOST_DEVICE constexpr int64_t MaxCount(int64_t tokens) const {
    const int64_t long_calls = DivideUp(tokens, most);
    const int64_t short_calls = Min(tokens, wanted);
    return long_calls > short_calls ? long_calls : short_calls;
  }
};

inline constexpr int64_t kMaxChunkTokens = 32;
inline constexpr ChunkRule kDispatchChunks{256, 4};
inline constexpr ChunkRule kCombineChunks{64, 16};
static_assert(kDispatchChunks.most <= kMaxSlotSpan && kCombineChunks.most <= kSlotCountMask);

// Combine cuts rows into pieces as well: a warp keeps the sums of a piece in registers.
inline constexpr int64_t kPieceElements = 1024;

JAX_EP_HOST_DEVICE constexpr int64_t Pieces(int64_t hidden) {
  return DivideUp(hidden, kPieceElements);
}

// Calls of so few tokens send their messages in cells that carry the epoch, as counts do: one
// flight to the reader, where a message, its completion and a flag behind a fence take three. The
// epochs are a quarter of what the link carries, which only the smallest calls can afford.
inline constexpr int64_t kLowLatencyDispatchTokens = 24;
// Of dispatches that encode: a whole block encodes a token, where senders of larger calls have a
// warp and its helpers for each.
inline constexpr int64_t kLowLatencyEncodedTokens = 32;
inline constexpr int64_t kLowLatencyCombineTokens = 64;

// Cells of so many bytes.
JAX_EP_HOST_DEVICE constexpr int64_t CellsOf(int64_t bytes) {
  return DivideUp(bytes, kCountsPerCell * kIndexBytes);
}

// A dispatched token in cells: its slot there, or -1; expert, position and weight of each k; the
// payload.
JAX_EP_HOST_DEVICE constexpr int64_t DispatchCells(int64_t payload_bytes, int64_t top_k) {
  return 1 + top_k + CellsOf(payload_bytes);
}

// A route item counts a part of the tokens. A sender is told what was counted before the part of
// its chunk and counts only the rest, so parts are many and short. A call of one part has nothing
// to tell: shorter ones are as fast that way.
inline constexpr int64_t kRouteParts = 32;
inline constexpr int64_t kLeastRouteTokens = 128;
inline constexpr int64_t kOneRouteItem = 256;  // tokens

JAX_EP_HOST_DEVICE constexpr int64_t RouteItemTokens(int64_t tokens) {
  if (tokens <= kOneRouteItem) return kOneRouteItem;
  const int64_t even = RoundUp(DivideUp(tokens, kRouteParts), 32);
  return even < kLeastRouteTokens ? kLeastRouteTokens : even;
}
JAX_EP_HOST_DEVICE constexpr int64_t RouteItems(int64_t tokens) {
  return tokens == 0 ? 1 : DivideUp(tokens, RouteItemTokens(tokens));
}

// ---- Layout -------------------------------------------------------------------------------------

// What the route items of a call add up; int32s, zero between calls.
struct RouteTotals {
  int32_t* rows;              // [E]
  int32_t* slots;             // [R]
  uint32_t* finished;         // route items that have added theirs
  int32_t* invalid;           // bad ids
  int32_t* invalid_from_end;  // n * K - the first one's entry, so that the largest is the first

  JAX_EP_HOST_DEVICE RouteTotals(int32_t* memory, int64_t experts, int64_t ranks)
      : rows(memory),
        slots(rows + experts),
        finished(reinterpret_cast<uint32_t*>(slots + ranks)),
        invalid(slots + ranks + 1),
        invalid_from_end(slots + ranks + 2) {}
  static constexpr int64_t Ints(int64_t experts, int64_t ranks) { return experts + ranks + 3; }
};

// What one of them has counted, in cells that carry the epoch, for the other senders of its rank:
// the rows of the experts, three a cell, then the slots of the ranks, one a cell.
struct RoutePart {
  JAX_EP_HOST_DEVICE static constexpr int64_t RowCells(int64_t experts) {
    return DivideUp(experts, kCountsPerCell);
  }
  JAX_EP_HOST_DEVICE static constexpr int64_t Cells(int64_t experts, int64_t ranks) {
    return RowCells(experts) + ranks;
  }
};

// A source's counts for one destination: a cell of its own with the number of slots and the call's
// tag, then the rows of each local expert.
JAX_EP_HOST_DEVICE constexpr int64_t CountCells(int64_t local_experts) {
  return 1 + DivideUp(local_experts, kCountsPerCell);
}

// What decides the size of a window; equal on all ranks.
struct WindowSizes {
  int64_t ranks;
  int64_t local_experts;
  int64_t dispatch_tokens;  // the most of a dispatch: T, or T * K where rows travel one by one
  int64_t combine_tokens;   // and of a combine
  int64_t top_k;            // the most entries of a token
  int64_t hidden;
  int64_t dispatch_message_bytes;  // the largest that any dispatch of the config sends
  int64_t combine_message_bytes;
  int64_t low_latency_dispatch_tokens;  // the most of a dispatch whose messages go in cells
  int64_t low_latency_message_bytes;    // the largest of those
  int64_t turns;                        // regions that calls go round
  int64_t depth;                        // all of them, with those for calls beside pending ones
};

// One buffer group; offsets from the start of the window.
struct BufferGroupLayout {
  int64_t regions;  // [depth, R sources, region_bytes]
  int64_t region_bytes;
  int64_t counts;  // CountCell [depth, R sources, count_cells]; in combine's only the tag's
  int64_t count_cells;
  int64_t cells;  // CountCell [depth, R sources, few tokens or slots, message_cells]
  int64_t message_cells;
  int64_t cells_per_source;
  int64_t flags;  // FlagCell [depth, R sources, chunk], in combine's [.., chunk, piece]
  int64_t flags_per_source;
  int64_t credits;  // uint64 [depth, R destinations]
};

struct WindowLayout {
  int64_t poison;        // WaitReport
  int64_t route_totals;  // RouteTotals of the own rank
  int64_t route_parts;   // CountCell [parts, then what is before them; cells of a RoutePart], own
  BufferGroupLayout groups[kBufferGroups];
  int64_t bytes;

  static constexpr WindowLayout Of(const WindowSizes& sizes) {
    // Signals of different writers on lines of their own; TMA wants 16 bytes.
    constexpr int64_t kAlign = 128;
    LayoutCursor cursor;
    WindowLayout layout{};
    layout.poison = cursor.Take(sizeof(WaitReport), kAlign);
    layout.route_totals = cursor.Take(
        RouteTotals::Ints(sizes.ranks * sizes.local_experts, sizes.ranks) * kIndexBytes, kAlign);
    layout.route_parts = cursor.Take(
        2 * kRouteParts * RoutePart::Cells(sizes.ranks * sizes.local_experts, sizes.ranks) *
            static_cast<int64_t>(sizeof(CountCell)),
        kAlign);
    for (int i = 0; i < kBufferGroups; ++i) {
      const bool combine = i == static_cast<int>(CallKind::kCombine);
      const int64_t regions = sizes.depth * sizes.ranks;
      const int64_t tokens = combine ? sizes.combine_tokens : sizes.dispatch_tokens;
      BufferGroupLayout& group = layout.groups[i];
      group.count_cells = combine ? 1 : CountCells(sizes.local_experts);
      group.flags_per_source = combine ? kCombineChunks.MaxCount(tokens) * Pieces(sizes.hidden)
                                       : kDispatchChunks.MaxCount(tokens);
      group.region_bytes = RoundUp(
          tokens * (combine ? sizes.combine_message_bytes : sizes.dispatch_message_bytes), kAlign);
      group.message_cells = combine ? CellsOf(sizes.combine_message_bytes)
                                    : DispatchCells(sizes.low_latency_message_bytes, sizes.top_k);
      group.cells_per_source =
          Min(tokens, combine ? kLowLatencyCombineTokens : sizes.low_latency_dispatch_tokens) *
          group.message_cells;
      group.credits = cursor.Take(regions * static_cast<int64_t>(sizeof(uint64_t)), kAlign);
      group.flags = cursor.Take(
          regions * group.flags_per_source * static_cast<int64_t>(sizeof(FlagCell)), kAlign);
      group.counts = cursor.Take(
          regions * group.count_cells * static_cast<int64_t>(sizeof(CountCell)), kAlign);
      group.cells = cursor.Take(
          regions * group.cells_per_source * static_cast<int64_t>(sizeof(CountCell)), kAlign);
      group.regions = cursor.Take(regions * group.region_bytes, kAlign);
    }
    layout.bytes = RoundUp(cursor.end, kAlign);
    return layout;
  }
};

// ---- What a rank keeps of its calls -------------------------------------------------------------

enum class Gate : uint32_t { kOpen, kPoisoned, kClosed };

// Lives as long as the process, because a captured graph may replay a call after close(): it then
// finds the gate closed and touches no window.
struct alignas(128) WindowControl {
  Gate gate;
  CallState calls[kBufferGroups];
  PendingCall whole[kBufferGroups];  // of whole calls that are run as their halves
};

// What a kernel knows of its group at one rank.
struct WindowGroup {
  uint8_t* windows[kMaxWindowRanks];
  WindowControl* control;   // of this rank
  WaitReport* host_report;  // of this rank, in memory that the host reads
  WindowLayout layout;
  uint64_t timeout_ns;
  uint32_t rank;
  uint32_t ranks;
  uint32_t turns;
  uint32_t depth;
  uint32_t num_sms;  // blocks of a call; 0: chosen from its shape
  // Bits of the ranks that are on other nodes. Their place in `windows` is a staging area of this
  // rank (protocol/internode.h): laid out like a window, with parts by destination. Calls are then
  // run as their halves.
  uint32_t internode;
};

enum class TagKind : uint16_t { kDispatch, kCachedDispatch, kCombine };

// The tag of a call of which nothing else is known.
JAX_EP_HOST_DEVICE constexpr uint16_t KindTag(TagKind kind) {
  return static_cast<uint16_t>(static_cast<uint16_t>(kind) << 14);
}
JAX_EP_HOST_DEVICE constexpr TagKind KindOf(uint16_t tag) {
  return static_cast<TagKind>(tag >> 14);
}

// The tag of a call's flags: its kind and a digest of its shape. Ranks that are in different calls
// then see an error, not each other's data.
JAX_EP_HOST_DEVICE constexpr uint16_t CallTag(TagKind kind, int64_t tokens, int64_t payload_bytes,
                                              int64_t num_weights, int64_t site) {
  uint64_t digest = 0x9E3779B97F4A7C15u;
  const int64_t parts[] = {tokens, payload_bytes, num_weights, site};
  for (const int64_t part : parts) {
    digest = (digest ^ static_cast<uint64_t>(part)) * 0xD6E8FEB86659FD93u;
    digest ^= digest >> 32;
  }
  return static_cast<uint16_t>(KindTag(kind) | (digest & 0x3FFF));
}

static_assert(kDispatchChunks.Count(0) == 0 && kDispatchChunks.Count(128) == 128);
static_assert(kCombineChunks.Tokens(32) == 1 && kCombineChunks.Tokens(8192) == 16);
static_assert(RouteItems(256) == 1 && RouteItems(257) == 3 && RouteItems(8192) == kRouteParts);
static_assert(Pieces(7168) == 7 && Pieces(16) == 1);

}  // namespace jax_ep
