// Calls of the window kernels on emulated GPUs against the CPU steps (tests/cc/steps_world.h):
// every table and row byte for byte, in all formats, element types and wire types, with residuals
// and weight gradients, whole and in halves; dispatches whose rows are sent one by one; and calls
// in windows of another config. Takes the seed of its draws and their number; with `tampered`
// before them, tables and windows are spoiled.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "calls_world.h"

namespace jax_ep {
namespace {

// Cached dispatches along any routes of `world`, with old contents in regions.
void RunAlongRoutes(World& world, const Draws& draws) {
  world.DispatchCached();
  Gpus gpus(world, draws);
  gpus.FillRegions();
  for (int64_t i = 0; i < draws.times; ++i) gpus.DispatchCached();
}

// Rows that are sent one by one, in chunks of several. With a shared expert, the last entry of each
// token belongs to it.
void RunByEntry(Random& random) {
  Draws draws = Draw(random);
  if (draws.options.format != CombineFormat::kName) draws.options.format = Bf16Format::kName;
  draws.options.tiled = false;
  draws.times = random.In(1, 2);
  EpShape& shape = draws.options.shape;
  const bool shared = random.OneIn(2);
  shape.top_k = random.In(2, 5);
  shape.tokens = 3 * 256 / (shape.top_k - shared) + random.In(1, 50);
  shape.recv_rows = random.In(1, shape.slots());
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();

  World one_by_one = OneByOne(world, shape.top_k - shared, random);
  draws.options.shape = one_by_one.shape();
  CurrentCase() = "by entry, " + Text(draws);
  RunAlongRoutes(one_by_one, draws);
}

// In windows that were made for shorter, but more messages, which handlers allow.
void RunInOtherWindows(Random& random) {
  Draws draws = Draw(random);
  Options& options = draws.options;
  EpShape& shape = options.shape;
  const bool encodes = random.OneIn(2);
  options.format = encodes ? MxFp8Format::kName : Bf16Format::kName;
  options.tiled = options.weights = options.quantized_sums = draws.halves = false;
  options.element = options.wire = ElementType::kFloat32;
  shape.element_bytes = 4, shape.hidden = 512;
  shape.tokens = encodes ? random.In(kLowLatencyDispatchTokens + 1, kLowLatencyEncodedTokens)
                         : random.In(2, 8);
  shape.recv_rows = random.In(1, shape.slots());
  draws.window_format = encodes ? Bf16Format::kName : MxFp4Format::kName;
  draws.window_element_bytes = 2, draws.window_tokens = 3 * shape.tokens;
  draws.window_widths = 1;
  RunWholeLayer(draws, random);
}

// ---- Tables that came back changed, and bytes that others spoil ---------------------------------

// A count of one slot less than were sent, in a chunk with others: the slot counts as absent, and
// what an earlier call has left in its place is not read.
void RunCutCounts(Random& random) {
  Draws draws = Draw(random);
  EpShape& shape = draws.options.shape;
  shape.tokens = random.In(65, 150), shape.top_k = random.In(1, 3);
  shape.recv_rows = shape.slots() * shape.top_k;
  draws.halves = random.OneIn(3);
  CurrentCase() = "cut counts, " + Text(draws);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  FillExpertOutputs(world, random, true);
  for (Rank& rank : world.ranks) {
    for (int64_t source = 0; source < shape.ranks; ++source) {
      int32_t& count = rank.slot_counts.as<int32_t>()[source];
      if (count % kCombineChunks.Tokens(shape.tokens) > 1) --count;
    }
  }
  world.Combine();
  Gpus gpus(world, draws);
  gpus.FillRegions();
  CHECK(gpus.Combine());
}

// Some entries are removed at the source or the destination: rows that no message fills become
// zero, and what earlier calls have left is not read.
void RunChangedRoute(Random& random) {
  Draws draws = Draw(random);
  if (draws.options.format != CombineFormat::kName) draws.options.format = Bf16Format::kName;
  draws.options.tiled = false;
  EpShape& shape = draws.options.shape;
  if (random.OneIn(3)) shape.tokens = random.In(257, 700), shape.top_k = random.In(1, 3);
  draws.halves = random.OneIn(3);
  CurrentCase() = "changed route, " + Text(draws);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  for (const bool at_source : {true, false}) {
    if (random.OneIn(4)) continue;
    const int64_t changes = random.In(2, 40);
    for (Rank& rank : world.ranks) {
      const Buffer& table = at_source ? rank.slot_of : rank.row_of;
      const int64_t end = at_source ? shape.slots() : shape.recv_rows;
      for (int64_t i = 0; i < table.bytes() / kIndexBytes; ++i) {
        if (!random.OneIn(changes)) continue;
        table.as<int32_t>()[i] = random.OneIn(2) ? -1 : static_cast<int32_t>(end);
      }
    }
  }
  RunAlongRoutes(world, draws);
}

// Arbitrary contents everywhere. Only the emulator checks, which knows all allocated memory.
void RunSpoiled(Random& random) {
  Draws draws = Draw(random);
  CurrentCase() = "spoiled, " + Text(draws);
  const EpShape& shape = draws.options.shape;
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  FillExpertOutputs(world, random, true);
  const int64_t tables = random.OneIn(3) ? 1 << 30 : random.In(2, 20);
  const int64_t bytes = random.OneIn(3) ? 1 << 30 : random.In(2, 40);
  for (Rank& rank : world.ranks) {
    const std::pair<const Buffer*, int64_t> ends[] = {{&rank.slot_of, shape.slots()},
                                                      {&rank.row_of, shape.recv_rows},
                                                      {&rank.row_slot, shape.slots()},
                                                      {&rank.slot_counts, shape.tokens + 1}};
    for (const auto& [table, end] : ends) {
      for (int64_t i = 0; i < table->bytes() / kIndexBytes; ++i) {
        if (random.OneIn(tables)) table->as<int32_t>()[i] = AnyIndex(random, end);
      }
    }
  }
  const int64_t end = std::max({shape.slots(), shape.recv_rows, shape.experts()}) + 2;
  const int64_t silent = draws.halves || random.OneIn(2) ? -1 : shape.ranks - 1;
  Gpus gpus(world, draws, ShortTimeoutNs());
  gpus.RunSpoiled(silent, [&](uint8_t* window, const WindowGroup& group) {
    const int64_t regions = int64_t{group.depth} * group.ranks;
    const auto spoil = [&](int64_t at, int64_t length, int64_t cells_of_source) {
      for (int64_t i = 0; i < length; i += kIndexBytes) {
        int32_t value = AnyIndex(random, end);
        if (cells_of_source != 0 && i % 16 == 12) {
          // A stamp: that of the first call if no rank stores the cell.
          const int64_t source = i / 16 / cells_of_source % group.ranks;
          if (source == silent) value = static_cast<int32_t>(CellStamp(kFirstEpoch));
          if (source != silent || random.OneIn(50)) continue;
        } else if (!random.OneIn(bytes)) {
          continue;
        }
        std::memcpy(window + at + i, &value, sizeof value);
      }
    };
    for (const BufferGroupLayout& calls : group.layout.groups) {
      spoil(calls.regions, regions * calls.region_bytes, 0);
      spoil(calls.counts, regions * calls.count_cells * 16, calls.count_cells);
      spoil(calls.cells, regions * calls.cells_per_source * 16, calls.cells_per_source);
    }
  });
}

void RunTampered(int64_t draws, Random& random) {
  for (int64_t i = 0; i < draws; ++i) {
    const int64_t pick = random.In(0, 5);
    pick == 0 ? RunCutCounts(random) : pick == 1 ? RunChangedRoute(random) : RunSpoiled(random);
  }
  std::printf("%lld tampered layers: nothing else touched\n", static_cast<long long>(draws));
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 60);
  Random random(seed);
  if (only == "tampered") {
    RunTampered(draws, random);
    return 0;
  }
  Random random_of_entries(seed + 1);
  for (int64_t i = 0; i < draws; ++i) {
    if (i % 30 == 0) RunByEntry(random_of_entries);
    if (i % 20 == 0) RunInOtherWindows(random_of_entries);
    RunWholeLayer(Draw(random), random);
  }
  Random random_of_codes(seed + 2);
  for (int64_t i = 0; i < draws; i += 3) {
    RunWholeLayer(DrawCoded(random_of_codes, Draw), random_of_codes);
  }
  Random random_of_columns(seed + 3);
  // Not for races, as the same warps write the same data as with scales in rows.
  for (int64_t i = 0; !emulator::kRaces && i < draws; i += 6) {
    RunWholeLayer(DrawColumns(random_of_columns), random_of_columns);
  }
  std::printf("%lld layers: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
