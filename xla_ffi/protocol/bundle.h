// Dispatches across nodes in bundles: a token crosses to a node only once, for all ranks there that
// need it. A bundle goes to the rank with the sender's local rank on that node, its relay, which
// stores the messages into the windows of the node. A token's message is the same for all
// destinations, so results equal those of one message per rank. tests/cc/internode_test.cc tests it
// together with internode.h.
#pragma once

#include <cstdint>

#include "protocol/internode.h"
#include "protocol/platform.h"

namespace jax_ep {

// The ranks of a group by node. `nodes` is 0 unless all nodes have equally many ranks.
struct NodeMap {
  uint32_t nodes;
  uint32_t size;
  uint8_t node_of[kMaxWindowRanks];
  uint8_t local_rank_of[kMaxWindowRanks];  // index among the ranks of its node
  uint8_t rank_at[kMaxWindowRanks];        // [nodes, size]

  JAX_EP_HOST_DEVICE uint32_t RankAt(uint32_t node, uint32_t local_rank) const {
    return rank_at[node * size + local_rank];
  }
  // Whether this rank sends bundles for the node of `to` to `to` itself.
  JAX_EP_HOST_DEVICE bool Relays(uint32_t rank, uint32_t to) const {
    return node_of[rank] != node_of[to] && local_rank_of[rank] == local_rank_of[to];
  }

  // `numbers` may be any numbers that exactly the ranks of a node have in common.
  static constexpr NodeMap Of(const int32_t* numbers, uint32_t ranks) {
    NodeMap map{};
    uint32_t sizes[kMaxWindowRanks] = {};
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      uint32_t first = 0;
      while (numbers[first] != numbers[rank]) ++first;
      const uint32_t node = first == rank ? map.nodes++ : map.node_of[first];
      map.node_of[rank] = static_cast<uint8_t>(node);
      map.local_rank_of[rank] = static_cast<uint8_t>(sizes[node]++);
    }
    map.size = sizes[0];
    for (uint32_t node = 0; node < map.nodes; ++node) {
      if (sizes[node] != map.size) return NodeMap{};
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      map.rank_at[map.node_of[rank] * map.size + map.local_rank_of[rank]] =
          static_cast<uint8_t>(rank);
    }
    return map;
  }
};

// ---- Layout -------------------------------------------------------------------------------------

// A bundle's table: the number of its messages, and then for each message its slot at every rank of
// the node, or -1.
inline constexpr int64_t kTableHeaderBytes = 16;

// What one side holds of a bundle: offsets from the start of a rank's block, parts [depth, nodes].
struct BundleSide {
  int64_t messages;
  int64_t tables;
};

struct BundleLayout {
  BundleSide staged;  // by the destination's node
  BundleSide inbox;   // by the source's node
  int64_t flags;      // FlagCell [depth, nodes, size, flags_per_source], of the inbox
  int64_t counts;     // CountCell [depth, nodes, size, count_cells], of the inbox
  int64_t table_bytes;
  int64_t bytes;  // of a block

  // Comes last in the block.
  static constexpr BundleLayout Of(const InternodeLayout& internode, const WindowLayout& window,
                                   const WindowSizes& sizes, int64_t nodes, int64_t size) {
    constexpr int64_t kAlign = 128;
    const BufferGroupLayout& group = window.groups[static_cast<int>(CallKind::kDispatch)];
    const int64_t parts = sizes.depth * nodes;
    LayoutCursor cursor;
    cursor.Take(internode.bytes, kAlign);
    BundleLayout layout{};
    layout.table_bytes =
        RoundUp(kTableHeaderBytes + sizes.dispatch_tokens * size * kIndexBytes, kAlign);
    BundleSide* const sides[] = {&layout.staged, &layout.inbox};
    for (BundleSide* side : sides) {
      side->messages = cursor.Take(parts * group.region_bytes, kAlign);
      side->tables = cursor.Take(parts * layout.table_bytes, kAlign);
    }
    layout.flags = cursor.Take(
        parts * size * group.flags_per_source * static_cast<int64_t>(sizeof(FlagCell)), kAlign);
    layout.counts = cursor.Take(
        parts * size * group.count_cells * static_cast<int64_t>(sizeof(CountCell)), kAlign);
    layout.bytes = RoundUp(cursor.end, kAlign);
    return layout;
  }
};

// Offsets in a block.
struct BundleOffsets {
  const BufferGroupLayout& window;
  const BundleLayout& layout;
  const NodeMap& map;

  JAX_EP_HOST_DEVICE int64_t Part(uint32_t region, uint32_t node) const {
    return int64_t{region} * map.nodes + node;
  }
  JAX_EP_HOST_DEVICE int64_t Messages(const BundleSide& side, uint32_t region,
                                      uint32_t node) const {
    return side.messages + Part(region, node) * window.region_bytes;
  }
  JAX_EP_HOST_DEVICE int64_t Table(const BundleSide& side, uint32_t region, uint32_t node) const {
    return side.tables + Part(region, node) * layout.table_bytes;
  }
  JAX_EP_HOST_DEVICE int64_t Row(const BundleSide& side, uint32_t region, uint32_t node,
                                 int64_t message) const {
    return Table(side, region, node) + kTableHeaderBytes + message * map.size * kIndexBytes;
  }
  // Those for the given rank of this node, from a source's node.
  JAX_EP_HOST_DEVICE int64_t Flags(uint32_t region, uint32_t node, uint32_t local_rank) const {
    return layout.flags + (Part(region, node) * map.size + local_rank) * window.flags_per_source *
                              int64_t{sizeof(FlagCell)};
  }
  JAX_EP_HOST_DEVICE int64_t Counts(uint32_t region, uint32_t node, uint32_t local_rank) const {
    return layout.counts + (Part(region, node) * map.size + local_rank) * window.count_cells *
                               int64_t{sizeof(CountCell)};
  }
};

// ---- Steps --------------------------------------------------------------------------------------

// Which tokens go where, as a send half or a route says.
struct TokenSlots {
  const int32_t* slot_of;  // [n, K] rank * n + slot; any other value means none
  int64_t tokens;
  int64_t top_k;
};

// Calls `visit(local_rank, slot)` for each entry of a token that goes to a node.
template <typename Visit>
JAX_EP_HOST_DEVICE void ForEntriesAt(const NodeMap& map, uint32_t ranks, const TokenSlots& slots,
                                     int64_t token, uint32_t node, Visit visit) {
  const auto tokens = static_cast<uint32_t>(slots.tokens);
  JAX_EP_NO_UNROLL
  for (int64_t k = 0; k < slots.top_k; ++k) {
    const auto flat = static_cast<uint32_t>(slots.slot_of[token * slots.top_k + k]);
    if (flat >= ranks * tokens) continue;
    const uint32_t rank = flat / tokens;
    if (map.node_of[rank] == node) visit(uint32_t{map.local_rank_of[rank]}, flat % tokens);
  }
}

JAX_EP_HOST_DEVICE bool GoesTo(const NodeMap& map, uint32_t ranks, const TokenSlots& slots,
                               int64_t token, uint32_t node) {
  bool goes = false;
  ForEntriesAt(map, ranks, slots, token, node, [&](uint32_t, uint32_t) { goes = true; });
  return goes;
}

// Writes a token's row of a table. Returns the offset in the staging area where the token's message
// is staged for one of the node's ranks.
JAX_EP_HOST_DEVICE int64_t WriteRow(const NodeMap& map, const InternodeOffsets& offsets,
                                    const InternodeShape& shape, const TokenSlots& slots,
                                    int64_t token, uint32_t node, uint32_t region, int32_t* row) {
  JAX_EP_NO_UNROLL
  for (uint32_t local_rank = 0; local_rank < map.size; ++local_rank) row[local_rank] = -1;
  int64_t staged = 0;
  ForEntriesAt(map, offsets.ranks, slots, token, node, [&](uint32_t local_rank, uint32_t slot) {
    row[local_rank] = static_cast<int32_t>(slot);
    staged = offsets.Messages(region, map.RankAt(node, local_rank)) + slot * shape.message_bytes;
  });
  return staged;
}

// Like ForwardShare, for a bundle of `messages` messages to its relay `to`. `staged` is the staging
// area of `block`, which has the cells for all ranks of that node. Call it after all stores to the
// bundle.
template <PutAccess P>
JAX_EP_HOST_DEVICE void ForwardBundle(const P& puts, const InternodeOffsets& offsets,
                                      const BundleOffsets& bundles, const uint8_t* block,
                                      const uint8_t* staged, uint32_t rank, uint32_t to,
                                      const InternodeShape& shape, const PendingCall& call,
                                      int64_t messages, uint32_t share) {
  const NodeMap& map = bundles.map;
  const uint32_t here = map.node_of[rank], there = map.node_of[to], region = call.region;
  const BundleSide &from = bundles.layout.staged, &inbox = bundles.layout.inbox;
  const ShareOf part(Min(messages * shape.message_bytes, offsets.window.region_bytes), share);
  if (part.bytes > 0) {
    puts.Put(to, bundles.Messages(inbox, region, here) + part.begin,
             block + bundles.Messages(from, region, there) + part.begin, part.bytes);
  }
  if (share == 0) {
    puts.Put(to, bundles.Table(inbox, region, here), block + bundles.Table(from, region, there),
             kTableHeaderBytes + messages * map.size * kIndexBytes);
    JAX_EP_NO_UNROLL
    for (uint32_t local_rank = 0; local_rank < map.size; ++local_rank) {
      const uint32_t destination = map.RankAt(there, local_rank);
      if (shape.flags > 0) {
        puts.Put(to, bundles.Flags(region, here, local_rank),
                 staged + offsets.Flags(region, destination),
                 shape.flags * int64_t{sizeof(FlagCell)});
      }
      if (shape.counts > 0) {
        puts.Put(to, bundles.Counts(region, here, local_rank),
                 staged + offsets.Counts(region, destination),
                 shape.counts * int64_t{sizeof(CountCell)});
      }
    }
  }
  puts.Fence();  // Pairs with Acquire in ObserveShare at the relay.
  puts.Signal(to, offsets.Arrived(region, rank, share), call.epoch);
}

}  // namespace jax_ep
