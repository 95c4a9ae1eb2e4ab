// Calls of ranks on several nodes, on emulated GPUs: the window kernels with those of
// shmem/internode.cu between their halves, over adverse puts (puts.cc). Compares results with the
// CPU steps as in calls_test.cc, with dispatches bundled and not. Also a rank that makes no call or
// another call, spoiled bundles, and first halves that are never ended. Takes the seed of its draws
// and their number, after `layers`, `silent`, `mixed`, `spoiled`, `abandoned` or `drops` to run
// only these. Needs EMULATED_GPUS=4 or more.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "calls_world.h"

namespace jax_ep {
namespace {

// Nodes in which not every rank hears every other.
Draws DrawRelays(Random& random) {
  Draws draws = DrawNodes(random);
  const auto relays = [&] {
    return draws.bundles && draws.node > 1 && draws.options.shape.ranks % draws.node == 0;
  };
  while (!relays()) draws = DrawNodes(random);
  return draws;
}

// The last rank makes one call less than the others: theirs time out, which all ranks report, on
// other nodes too, and further calls end at once.
void RunSilent(Random& random) {
  Draws draws = DrawNodes(random);
  if (random.OneIn(2)) draws = DrawRelays(random);
  // Some rank waits for every rank.
  draws.options.shape.tokens = random.In(1, 20);
  draws.times = 1;
  CurrentCase() = "silent, " + Text(draws);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  Gpus gpus(world, draws, 20 * ShortTimeoutNs());
  const int64_t silent = draws.options.shape.ranks - 1;
  const std::vector<WaitReport> reports = gpus.DispatchWithout(silent);
  bool is_named = false;
  for (int64_t rank = 0; rank < silent; ++rank) {
    const WaitReport& report = reports[static_cast<size_t>(rank)];
    CurrentCase() += "; rank " + std::to_string(report.waiting_rank) + " waited for " +
                     std::to_string(report.awaited_rank);
    CHECK(report.status == WaitStatus::kTimedOut);
    is_named |= report.awaited_rank == silent;
  }
  CHECK(is_named);
  const uint64_t begin = emulator::ClockNs();
  // The silent rank has what it missed. It would wait for the next call if it had not been told.
  for (int call = 0; call < 2; ++call) gpus.DispatchWithout(-1);
  CHECK(emulator::ClockNs() - begin < 10 * ShortTimeoutNs());
}

// The last rank makes another call than the others: all get an error, long before the time limit.
void RunMixed(Random& random) {
  Draws draws = random.OneIn(2) ? DrawNodes(random) : DrawRelays(random);
  draws.times = 1;
  CurrentCase() = "mixed, " + Text(draws);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  Gpus gpus(world, draws, kTimeoutNs);
  const uint64_t begin = emulator::ClockNs();
  const int64_t mixed_up = draws.options.shape.ranks - 1;
  bool is_found = false;
  for (const WaitReport& report : gpus.DispatchWithout(-1, mixed_up)) {
    CHECK(report.status != WaitStatus::kArrived && report.status != WaitStatus::kTimedOut);
    is_found |= report.status == WaitStatus::kProtocolError &&
                (report.waiting_rank == mixed_up || report.awaited_rank == mixed_up);
  }
  CHECK(is_found && emulator::ClockNs() - begin < kTimeoutNs);
}

void Put(uint8_t* to, int32_t value) { std::memcpy(to, &value, sizeof value); }

// Arbitrary tables and messages of bundles. Only the emulator checks, which knows all memory.
void RunSpoiledBundles(Random& random) {
  Draws draws = DrawNodes(random);
  while (draws.options.shape.ranks % draws.node != 0) draws = DrawNodes(random);
  draws.bundles = true;
  draws.halves = !random.OneIn(3);
  CurrentCase() = "spoiled bundles, " + Text(draws);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  FillExpertOutputs(world, random, true);
  const int64_t end = draws.options.shape.tokens + 2, some = random.In(1, 9);
  Gpus gpus(world, draws, 20 * ShortTimeoutNs());
  const BundleLayout& bundles = gpus.bundles();
  gpus.RunSpoiled(-1, [&](uint8_t* block, const WindowGroup&) {
    // Both sides, which are adjacent.
    for (int64_t at = bundles.staged.messages; at < bundles.flags; at += kIndexBytes) {
      if (random.OneIn(some)) Put(block + at, AnyIndex(random, end));
    }
    // The numbers of messages.
    for (int64_t at = bundles.inbox.tables; at < bundles.flags; at += bundles.table_bytes) {
      if (random.OneIn(3)) Put(block + at, AnyIndex(random, end));
    }
  });
}

// Successive first halves that are never ended: each region is used again although its rank has
// placed nothing. The whole call after them still arrives.
void RunAbandoned(Random& random) {
  Draws draws = random.OneIn(2) ? DrawNodes(random) : DrawRelays(random);
  draws.options.shape.tokens = random.In(1, 5);
  CurrentCase() = "abandoned, " + Text(draws);
  World world(draws.options, random);
  DrawIds(world, random);
  world.Dispatch();
  Gpus gpus(world, draws);
  for (uint32_t call = 0; call < 2 * kMaxDepth; ++call) {
    for (const WaitReport& report : gpus.DispatchWithout(-1, -1, true)) {
      CHECK(report.status == WaitStatus::kArrived);
    }
  }
  for (const WaitReport& report : gpus.DispatchWithout(-1)) {
    CHECK(report.status == WaitStatus::kArrived);
  }
}

// Regions that are used again and again, some without a wait for them.
void RunDrops(Random& random) {
  Draws draws = DrawRelays(random);
  draws.options.shape.tokens = random.In(0, 3);
  // Races show in any order of turns, and are slow to look for.
  draws.times = emulator::kRaces ? random.In(3, 5) : random.In(8, 40);
  draws.halves = draws.drops = true;
  RunWholeLayer(draws, random);
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 40);
  Random random(seed), random_of_faults(seed + 1), random_of_first_halves(seed + 2);
  CHECK(emulator::GetSettings().gpus >= 4);
  const auto is_turn = [&](const char* name, int64_t i, int64_t turn) {
    return only.empty() ? i % 6 == turn : only == name;
  };
  for (int64_t i = 0; i < draws; ++i) {
    if (is_turn("silent", i, 1)) RunSilent(random_of_faults);
    if (is_turn("mixed", i, 2)) RunMixed(random_of_faults);
    if (is_turn("spoiled", i, 3)) RunSpoiledBundles(random_of_faults);
    if (is_turn("abandoned", i, 4)) RunAbandoned(random_of_first_halves);
    if (is_turn("drops", i, 5)) RunDrops(random_of_faults);
    if (only.empty()) RunWholeLayer(DrawNodes(random), random);
    // Every other draw has relays.
    if (only != "layers") continue;
    RunWholeLayer(i % 2 == 0 ? DrawNodes(random) : DrawRelays(random), random);
  }
  Random random_of_codes(seed + 3);
  for (int64_t i = 0; only.empty() && i < draws; i += 5) {
    RunWholeLayer(DrawCoded(random_of_codes, DrawNodes), random_of_codes);
  }
  std::printf("%lld layers over nodes: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
