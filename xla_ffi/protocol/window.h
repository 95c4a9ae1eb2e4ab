// The window: a rank's memory that the ranks of its group store into. This file says where each
// part lies, how calls are cut into chunks, and what a rank keeps of its calls. Sizes in Python are
// derived from it.
//
// A window has a poison cell, scratch of its own rank, and two buffer groups, one for dispatches
// and one for combines. A buffer group has `depth` regions for every source. A region holds the
// messages of a whole call, without the header, whose numbers travel as counts.
#pragma once

#include <cstdint>

#include "protocol/layout.h"
#include "protocol/pending.h"
#include "protocol/signals.h"

namespace jax_ep {

// One per lane of a warp.
inline constexpr int64_t kMaxWindowRanks = 32;

enum class CallKind : uint32_t { kDispatch, kCombine };
inline constexpr int kBufferGroups = 2;

// ---- Chunks -------------------------------------------------------------------------------------

// How a call is cut into chunks. A chunk is what one flag announces. With few tokens a chunk is one
// token, so that many workers share the work. With many tokens chunks are larger, so that fewer
// fences and flags are needed, but not so large that most of a call is still unannounced when its
// last byte is sent. The rules depend on n alone, because source and destination must agree.
struct ChunkRule {
  int64_t wanted;  // chunks per call
  int64_t most;    // tokens per chunk

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

// Combine also cuts rows into pieces, because a warp keeps the sums of a piece in registers.
inline constexpr int64_t kPieceElements = 1024;

JAX_EP_HOST_DEVICE constexpr int64_t Pieces(int64_t hidden) {
  return DivideUp(hidden, kPieceElements);
}

// Limits of low-latency calls, in tokens. Their messages travel in cells that carry the epoch, as
// counts do. That takes one flight to the reader, where a message, its completion and a flag behind
// a fence take three. But epochs take up a quarter of the link, which pays off in the smallest
// calls only.
inline constexpr int64_t kLowLatencyDispatchTokens = 24;
// Dispatches that encode gain for longer: a whole block encodes a token, where larger calls have
// one warp and its helpers per token.
inline constexpr int64_t kLowLatencyEncodedTokens = 32;
inline constexpr int64_t kLowLatencyCombineTokens = 64;

// The most elements of a token. While a token is encoded it lies in shared memory with its codes:
// with 2048 experts and top-32 there is room for 238,592 elements in "nvfp4". Other tokens pass in
// pieces.
inline constexpr int64_t kMaxEncodedHidden = int64_t{1} << 17;
inline constexpr int64_t kMaxWindowHidden = int64_t{1} << 22;

// The number of cells for that many bytes.
JAX_EP_HOST_DEVICE constexpr int64_t CellsOf(int64_t bytes) {
  return DivideUp(bytes, kCountsPerCell * kIndexBytes);
}

// The cells of a dispatched token: one for its slot at the destination or -1; one per k with
// expert, position and weight; and its payload.
JAX_EP_HOST_DEVICE constexpr int64_t DispatchCells(int64_t payload_bytes, int64_t top_k) {
  return 1 + top_k + CellsOf(payload_bytes);
}

// A route item counts one part of the tokens. A sender is told what was counted before the part of
// its chunk and counts only the rest itself, so parts are small and many. Short calls have a single
// part, which is as fast and shares nothing.
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

// The sums of all route items of a call, as int32s. Zero between calls.
struct RouteTotals {
  int32_t* rows;       // [E]
  int32_t* slots;      // [R]
  uint32_t* finished;  // route items that have added theirs
  int32_t* invalid;    // bad ids
  int32_t*
      invalid_from_end;  // n * K minus the first bad id's entry, so that a maximum finds the first

  JAX_EP_HOST_DEVICE RouteTotals(int32_t* memory, int64_t experts, int64_t ranks)
      : rows(memory),
        slots(rows + experts),
        finished(reinterpret_cast<uint32_t*>(slots + ranks)),
        invalid(slots + ranks + 1),
        invalid_from_end(slots + ranks + 2) {}
  static constexpr int64_t Ints(int64_t experts, int64_t ranks) { return experts + ranks + 3; }
};

// What one route item has counted, for the other senders of its rank: first the rows per expert,
// three per cell, then the slots per rank, one per cell. The cells carry the epoch.
struct RoutePart {
  JAX_EP_HOST_DEVICE static constexpr int64_t RowCells(int64_t experts) {
    return DivideUp(experts, kCountsPerCell);
  }
  JAX_EP_HOST_DEVICE static constexpr int64_t Cells(int64_t experts, int64_t ranks) {
    return RowCells(experts) + ranks;
  }
};

// A source's counts for one destination: a cell with the number of slots and the call's tag, and
// then the rows per local expert.
JAX_EP_HOST_DEVICE constexpr int64_t CountCells(int64_t local_experts) {
  return 1 + DivideUp(local_experts, kCountsPerCell);
}

// What determines the size of a window; equal on all ranks.
struct WindowSizes {
  int64_t ranks;
  int64_t local_experts;
  int64_t dispatch_tokens;  // the most per dispatch: T, or T * K where rows travel one by one
  int64_t combine_tokens;   // the most per combine
  int64_t top_k;            // the most entries per token
  int64_t hidden;
  int64_t dispatch_message_bytes;  // the largest that any dispatch of the config sends
  int64_t combine_message_bytes;
  int64_t low_latency_dispatch_tokens;  // the most per low-latency dispatch
  int64_t low_latency_message_bytes;    // the largest message of one
  int64_t turns;                        // regions that calls cycle through
  int64_t depth;  // all regions, including those for calls beside pending ones
};

// One buffer group; offsets from the start of the window.
struct BufferGroupLayout {
  int64_t regions;  // [depth, R sources, region_bytes]
  int64_t region_bytes;
  int64_t counts;  // CountCell [depth, R sources, count_cells]; for combine only the tag's
  int64_t count_cells;
  int64_t
      cells;  // CountCell [depth, R sources, tokens or slots of low-latency calls, message_cells]
  int64_t message_cells;
  int64_t cells_per_source;
  int64_t flags;  // FlagCell [depth, R sources, chunk], for combine [.., chunk, piece]
  int64_t flags_per_source;
  int64_t credits;  // uint64 [depth, R destinations]
};

struct WindowLayout {
  int64_t poison;        // WaitReport
  int64_t route_totals;  // RouteTotals, of the own rank
  int64_t route_parts;   // CountCell [parts, then the sums before them; cells of a RoutePart], own
  BufferGroupLayout groups[kBufferGroups];
  int64_t bytes;

  static constexpr WindowLayout Of(const WindowSizes& sizes) {
    // Signals of different writers are on different lines; TMA needs 16 bytes.
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

// Lives as long as the process: a captured graph may replay a call after close(), which then finds
// the gate closed and touches no window.
struct alignas(128) WindowControl {
  Gate gate;
  CallState calls[kBufferGroups];
  PendingCall whole[kBufferGroups];  // of whole calls that run as two halves
};

// What a kernel knows about its group at one rank.
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
  uint32_t num_sms;  // blocks per call; 0: derived from its shape
  // Bits of the ranks on other nodes. For those `windows` has a staging area of this rank instead
  // (protocol/internode.h), in the layout of a window but with parts by destination. Groups with
  // such ranks run every call as two halves.
  uint32_t internode;
};

enum class TagKind : uint16_t { kDispatch, kDispatchCached, kCombine };

// The tag of a call of which only the kind is known.
JAX_EP_HOST_DEVICE constexpr uint16_t KindTag(TagKind kind) {
  return static_cast<uint16_t>(static_cast<uint16_t>(kind) << 14);
}
JAX_EP_HOST_DEVICE constexpr TagKind KindOf(uint16_t tag) {
  return static_cast<TagKind>(tag >> 14);
}

// The tag of a call's flags: its kind and a digest of its shape. Ranks that are in different calls
// then get an error instead of each other's data.
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
