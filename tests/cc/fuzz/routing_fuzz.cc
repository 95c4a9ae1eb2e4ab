// Fuzz target: protocol/ with arbitrary ids, sizes, flags and credits. Routing must give the tables
// of its definition, whatever the ids; sizes that Validate passes must not overflow; a cell of a
// window is accepted only if it is the awaited one.
#include <set>
#include <utility>
#include <vector>

#include "ffi/window_sizes.h"
#include "formats/registry.h"
#include "input.h"
#include "protocol/layout.h"
#include "protocol/routing.h"
#include "protocol/scale_tiles.h"
#include "protocol/signals.h"
#include "protocol/window.h"

namespace jax_ep {
namespace {

int32_t AnyId(FuzzInput& input, int64_t experts) {
  const uint8_t kind = input.Byte();
  if (kind < 200) return static_cast<int32_t>(kind % (experts + 3)) - 1;
  return input.Take<int32_t>();
}

void Route(FuzzInput& input) {
  EpShape shape;
  shape.ranks = input.In(1, 32);
  shape.local_experts = input.In(1, kMaxExperts / 32);
  shape.tokens = input.In(0, 40);
  shape.top_k = input.In(1, kMaxTopK);
  shape.hidden = 8;
  FUZZ_CHECK(Validate(shape) == nullptr);
  const int64_t n = shape.tokens, top_k = shape.top_k, entries = n * top_k;
  const Buffer ids(entries * 4), slot_of(entries * 4), position(entries * 4);
  const Buffer slots(shape.ranks * 4), rows(shape.experts() * 4);
  std::memset(slots.data(), 0, static_cast<size_t>(slots.bytes()));
  std::memset(rows.data(), 0, static_cast<size_t>(rows.bytes()));
  for (int64_t i = 0; i < entries; ++i) ids.as<int32_t>()[i] = AnyId(input, shape.experts());
  KeptInvalidIds invalid;
  // In one run or in two; the counters continue.
  const int64_t cut = n == 0 ? 0 : input.In(0, n);
  for (const auto& [begin, end] : {std::pair(int64_t{0}, cut), std::pair(cut, n)}) {
    RouteTokens(shape, ids.as<int32_t>(), begin, end, {slots.as<int32_t>(), rows.as<int32_t>()},
                {slot_of.as<int32_t>(), position.as<int32_t>()}, invalid);
  }

  std::vector<int32_t> slots_so_far(static_cast<size_t>(shape.ranks), 0);
  std::vector<int32_t> rows_so_far(static_cast<size_t>(shape.experts()), 0);
  const RankOfExpert rank_of(static_cast<int32_t>(shape.local_experts));
  int32_t bad = 0, first_bad = -1;
  for (int64_t token = 0; token < n; ++token) {
    std::set<int64_t> visited;
    for (int64_t entry = token * top_k; entry < (token + 1) * top_k; ++entry) {
      const int64_t id = ids.as<int32_t>()[entry];
      if (id < 0 || id >= shape.experts()) {
        FUZZ_CHECK(slot_of.as<int32_t>()[entry] == -1 && position.as<int32_t>()[entry] == -1);
        if (id != -1 && bad++ == 0) first_bad = static_cast<int32_t>(entry);
        continue;
      }
      const int64_t rank = id / shape.local_experts;
      FUZZ_CHECK(rank_of(static_cast<int32_t>(id)) == rank);
      if (visited.insert(rank).second) ++slots_so_far[static_cast<size_t>(rank)];
      FUZZ_CHECK(slot_of.as<int32_t>()[entry] ==
                 rank * n + slots_so_far[static_cast<size_t>(rank)] - 1);
      FUZZ_CHECK(position.as<int32_t>()[entry] == rows_so_far[static_cast<size_t>(id)]++);
    }
  }
  FUZZ_CHECK(invalid.count == bad && invalid.first_entry == first_bad);
  FUZZ_CHECK(bad == 0 || invalid.first_id == ids.as<int32_t>()[first_bad]);
  FUZZ_CHECK(std::equal(slots_so_far.begin(), slots_so_far.end(), slots.as<int32_t>()));
  FUZZ_CHECK(std::equal(rows_so_far.begin(), rows_so_far.end(), rows.as<int32_t>()));
}

// Arbitrary sizes: those that Validate passes can be multiplied without overflow.
void Sizes(FuzzInput& input) {
  EpShape shape;
  shape.ranks = input.In(1, 40);
  shape.local_experts = input.In(1, 60);
  shape.top_k = input.In(1, kMaxTopK);
  shape.tokens = kMaxIndex / (shape.ranks * shape.top_k) >> input.In(0, 30);
  shape.hidden = (kMaxIndex >> input.In(0, 27)) & ~int64_t{7};
  shape.element_bytes = input.Flag() ? 4 : 2;
  shape.recv_rows = kMaxIndex >> input.In(0, 31);
  shape.expert_alignment = kMaxIndex >> input.In(0, 30);
  int64_t* const fields[] = {&shape.ranks,     &shape.local_experts,   &shape.tokens,
                             &shape.top_k,     &shape.hidden,          &shape.element_bytes,
                             &shape.recv_rows, &shape.expert_alignment};
  for (int64_t changes = input.In(0, 3) - 1; changes > 0; --changes) {
    *fields[input.In(0, 7)] = input.AnyInt();
  }
  if (Validate(shape) != nullptr) return;
  const int64_t row = shape.row_bytes(), k = shape.top_k, n = shape.tokens;
  FUZZ_CHECK(row > 0 && shape.experts() <= kMaxExperts && shape.slots() * k <= kMaxIndex);
  const auto header = RegionHeader::Of(shape.local_experts);
  for (const int64_t message :
       {DispatchMessage::Of(row, row, k).bytes, DispatchCachedMessage::Of(row, row, k).bytes,
        CombineMessage::Of(row, row, k).bytes}) {
    FUZZ_CHECK(message > 0 && shape.ranks * (header.bytes + n * k * message) >= 0);
  }
  FUZZ_CHECK(shape.ranks *
                 DispatchCachedRegion::Of(n, DispatchCachedMessage::Of(row, row, k).bytes).bytes >=
             0);
  FUZZ_CHECK(shape.ranks * CombineRegion::Of(n * k, CombineMessage::Of(row, row, k).bytes).bytes >=
             0);
  FUZZ_CHECK(shape.recv_rows * row >= 0);
  const auto tiles = ScaleTiles::Of(shape.recv_rows, shape.local_experts, shape.hidden);
  FUZZ_CHECK(tiles.tiles * tiles.column_words * kTileRows * kTileColumns >= 0);
  if (shape.ranks > kMaxWindowRanks) return;
  const int64_t wire_bytes = input.Flag() ? 4 : 2;
  const int64_t pending_calls = input.In(0, kMaxDepth - 1);
  const int64_t dispatch_tokens = input.Flag() ? n * k : n;
  const int64_t combine_tokens = input.Flag() ? n * k : n;
  WindowSizes sizes;
  ForEachFormat([&](auto format) {
    const bool known = ffi_layer::SizesOf(
        {decltype(format)::kName, shape.hidden, shape.element_bytes, wire_bytes, n, dispatch_tokens,
         combine_tokens, k, shape.ranks, shape.local_experts, pending_calls},
        sizes);
    FUZZ_CHECK(known);
    const WindowLayout layout = WindowLayout::Of(sizes);
    int64_t end = 0;
    for (const BufferGroupLayout& group : layout.groups) {
      for (const int64_t offset :
           {group.credits, group.flags, group.counts, group.cells, group.regions}) {
        FUZZ_CHECK(offset >= end);
        end = offset;
      }
    }
    FUZZ_CHECK(layout.bytes >= end);
  });
}

// Rows of any index, groups of any length: nothing is placed outside, and every real row is in one
// tile.
void Rows(FuzzInput& input) {
  const int64_t recv_rows = input.In(0, 255) * 3;
  const int64_t index = input.AnyInt();
  const int32_t row = RowOrDropped(index, recv_rows);
  FUZZ_CHECK(row == (index >= 0 && index < recv_rows ? index : -1));
  const int64_t groups = input.In(1, 20), alignment = input.In(1, 200);
  std::vector<int32_t> row_offsets(static_cast<size_t>(groups + 1), 0);
  std::vector<int32_t> scales_offsets(static_cast<size_t>(groups));
  int64_t start = 0, dropped = 0, real = 0;
  int32_t first_tile = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const auto i = static_cast<size_t>(g);
    const int64_t rows = input.Flag() ? input.In(0, 255) : 0;
    real += rows;
    dropped += DroppedRows(start, rows, recv_rows);
    start = NextGroupStart(start, rows, alignment);
    FUZZ_CHECK(start % alignment == 0);
    row_offsets[i + 1] = static_cast<int32_t>(Min(start, recv_rows));
    scales_offsets[i] = ScalesOffset(first_tile, row_offsets[i]);
    first_tile += TilesOfGroup(row_offsets[i + 1] - row_offsets[i]);
  }
  FUZZ_CHECK(dropped >= 0 && dropped <= real && real - dropped <= recv_rows);
  const auto tiles = ScaleTiles::Of(recv_rows, groups, kTileColumns);
  FUZZ_CHECK(first_tile <= tiles.tiles);
  std::vector<bool> seen(static_cast<size_t>(recv_rows), false);
  for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
    const RowsOfTile rows = FindRowsOfTile(tile, row_offsets.data(), scales_offsets.data(), groups);
    FUZZ_CHECK(rows.count >= 0 && rows.count <= kTileRows);
    for (int32_t i = 0; i < rows.count; ++i) {
      FUZZ_CHECK(rows.first + i >= 0 && rows.first + i < row_offsets.back());
      const auto at = static_cast<size_t>(rows.first + i);
      FUZZ_CHECK(!seen[at]);
      seen[at] = true;
    }
  }
  FUZZ_CHECK(std::count(seen.begin(), seen.end(), true) == row_offsets.back());
}

// Cells with any contents, compared with the state of a rank whose calls are partly in halves.
void Signals(FuzzInput& input) {
  const auto depth = static_cast<uint32_t>(input.In(1, kMaxDepth));
  const auto turns = static_cast<uint32_t>(input.In(1, depth));
  const auto first = static_cast<uint64_t>(input.AnyInt());
  CallState state = StartState(first);
  std::vector<RegionLease> pending;
  for (int step = 0; step < 64 && !input.empty(); ++step) {
    const uint8_t act = input.Byte() % 4;
    if (act == 0) {
      const RegionLease lease = LeaseRegion(state, turns, depth);
      FUZZ_CHECK((lease.region == kNoRegion) == (pending.size() == depth));
      if (lease.region == kNoRegion) continue;
      FUZZ_CHECK(lease.region < depth && EpochsAhead(lease.epoch, lease.previous) > 0);
      for (const RegionLease& other : pending) FUZZ_CHECK(other.region != lease.region);
      if (pending.empty()) FUZZ_CHECK(lease.region == lease.epoch % turns);
      CommitSend(state, lease);
      pending.push_back(lease);
    } else if (act == 1 && !pending.empty()) {
      const auto at = static_cast<size_t>(input.Byte()) % pending.size();
      CommitRecv(state, pending[at]);
      pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (act == 2) {
      const FlagCell cell{static_cast<uint64_t>(input.AnyInt()), input.Take<uint32_t>(),
                          input.Take<uint16_t>(), input.Take<uint16_t>()};
      const auto epoch = static_cast<uint64_t>(input.AnyInt());
      const auto tag = input.Take<uint16_t>();
      FUZZ_CHECK((ClassifyFlag(cell, epoch, tag) == Observation::kArrived) ==
                 (cell.epoch == epoch && cell.tag == tag));
      CountCell counts{{0, 0, 0}, input.Take<uint32_t>()};
      FUZZ_CHECK((counts.stamp == CellStamp(epoch)) ==
                 (counts.stamp == (static_cast<uint32_t>(epoch) * 2 | 1)));
    } else if (!pending.empty()) {
      const auto consumed = static_cast<uint64_t>(input.AnyInt());
      const RegionLease& lease = pending.back();
      const Observation seen = ClassifyCredit(consumed, lease);
      // Only an epoch from the region's last one to this one frees it.
      FUZZ_CHECK((seen == Observation::kArrived) ==
                 (consumed - lease.previous <= lease.epoch - lease.previous));
    }
  }
  const WorkPlan plan{input.Byte(), input.Byte(), input.Byte()};
  const auto ticket = input.Take<uint32_t>();
  for (const Queue queue : {Queue::kSend, Queue::kReceive}) {
    const WorkItem item = ItemOf(plan, queue, ticket);
    const uint32_t sizes[] = {plan.route_items, plan.send_items, plan.receive_items, 1};
    FUZZ_CHECK(item.index < sizes[static_cast<int>(item.phase)]);
  }
}

}  // namespace
}  // namespace jax_ep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  jax_ep::FuzzInput input(data, size);
  switch (input.Byte() % 4) {
    case 0:
      jax_ep::Route(input);
      break;
    case 1:
      jax_ep::Sizes(input);
      break;
    case 2:
      jax_ep::Rows(input);
      break;
    default:
      jax_ep::Signals(input);
  }
  return 0;
}
