// Combines with options on emulated GPUs against the CPU steps: rows that are sent one by one, with
// weights of their entries or without, and rows of a shared expert; whole, in halves, and over
// several nodes. Some tables are tampered with. Takes the seed of its draws and their number. Needs
// EMULATED_GPUS=2 or more.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "calls_world.h"

namespace jax_ep {
namespace {

struct Modes {
  bool by_entry;
  bool entry_weights;  // with by_entry
  bool shared;
  bool changed;  // tampered tables
  int64_t tokens, entries;
};

std::string Text(const Modes& modes) {
  return "by_entry " + std::to_string(modes.by_entry) + " entry_weights " +
         std::to_string(modes.entry_weights) + " shared " + std::to_string(modes.shared) +
         " changed " + std::to_string(modes.changed) + " tokens " + std::to_string(modes.tokens) +
         " entries " + std::to_string(modes.entries) + ", ";
}

struct SharedRows {
  Buffer rows, part;
};

// Makes some entries invalid at the source, and changes some to any value at the destination.
void ChangeTables(World& world, Random& random) {
  const int64_t changes = random.In(2, 40);
  for (Rank& rank : world.ranks) {
    for (int64_t i = 0; i < rank.slot_of.bytes() / kIndexBytes; ++i) {
      if (random.OneIn(changes)) rank.slot_of.as<int32_t>()[i] = kHostile[random.In(0, 3)];
    }
    for (int64_t i = 0; i < rank.row_of.bytes() / kIndexBytes; ++i) {
      if (!random.OneIn(changes)) continue;
      rank.row_of.as<int32_t>()[i] = AnyIndex(random, world.shape().recv_rows);
    }
  }
}

// Makes some weights infinite: dropped rows must add their weight times zero.
void FillEntryWeights(World& world, Random& random) {
  const int64_t finite = random.OneIn(2) ? 1 << 30 : random.In(2, 30);
  for (Rank& rank : world.ranks) {
    for (int64_t i = 0; i < rank.weights.bytes() / kWeightBytes; ++i) {
      if (random.OneIn(finite)) rank.weights.as<float>()[i] = INFINITY;
    }
  }
}

SharedRows DrawSharedRows(const World& world, int64_t tokens, Random& random) {
  const EpShape& shape = world.shape();
  SharedRows shared{Buffer(shape.recv_rows * shape.row_bytes()), Buffer(2 * kIndexBytes)};
  FillElements(random, shared.rows.data(), world.options.element, shape.recv_rows * shape.hidden);
  const bool hostile = random.OneIn(4);
  for (int i = 0; i < 2; ++i) {
    shared.part.as<int32_t>()[i] =
        hostile ? AnyIndex(random, tokens + 1) : static_cast<int32_t>(random.In(0, tokens));
  }
  return shared;
}

// `step` may be of either transport.
template <typename Step>
void SetModes(const Modes& modes, const float* entry_weights, const void* shared_rows,
              const int32_t* shared_part, Step& step) {
  step.shape.tokens = modes.tokens;
  step.shape.top_k = modes.entries;
  step.by_entry = modes.by_entry;
  step.entry_weights = modes.entry_weights ? entry_weights : nullptr;
  step.shared_rows = modes.shared ? shared_rows : nullptr;
  step.shared_part = shared_part;
}

// Adds up what has arrived, according to `modes`.
void UnpackAs(const Modes& modes, const World& world, Rank& rank, const SharedRows& shared,
              Random& random) {
  const Options& options = world.options;
  CombineUnpackStep step{{.slot_of = rank.slot_of.as<int32_t>(),
                          .residual = options.residual ? rank.residual.data() : nullptr},
                         {},
                         world.shape(),
                         options.element,
                         options.wire,
                         options.quantized_sums,
                         world.num_weights(),
                         rank.recv.data(),
                         rank.output.data(),
                         options.weights ? rank.weight_grads.as<float>() : nullptr};
  SetModes(modes, rank.weights.as<float>(), shared.rows.data(), shared.part.as<int32_t>(), step);
  RunTask(cpu::CombineUnpack(step), 1, random);
}

// Draws calls of few tokens, of chunks with several messages, and of rows with several pieces.
Draws DrawCombines(Random& random, bool over_nodes) {
  Draws draws = over_nodes ? DrawNodes(random) : Draw(random);
  Options& options = draws.options;
  EpShape& shape = options.shape;
  options.format = Bf16Format::kName;  // for the dispatch, which is not under test
  options.tiled = false;
  const int64_t pick = random.In(0, 5);
  if (pick == 0) {
    shape.tokens = random.In(1, 16), shape.top_k = random.In(1, 6);
    shape.hidden = random.In(9, 17) * CombineFormat::kBlock;
  } else if (pick < 3) {
    shape.tokens = random.In(60, 300), shape.top_k = random.In(1, 4);
  }
  if (pick < 3) shape.recv_rows = random.In(1, shape.slots() * shape.top_k);
  return draws;
}

void RunCombines(Random& random, bool over_nodes, bool halves) {
  Draws draws = DrawCombines(random, over_nodes);
  draws.halves = halves;
  EpShape& shape = draws.options.shape;
  Modes modes{};
  modes.by_entry = !random.OneIn(4);
  modes.entry_weights = modes.by_entry && random.OneIn(2);
  modes.shared = !modes.by_entry || random.OneIn(2);
  modes.changed = random.OneIn(3);
  modes.tokens = shape.tokens;
  modes.entries = shape.top_k - (modes.by_entry && shape.top_k > 1 && random.OneIn(2));
  if (modes.by_entry) draws.options.weights = false;
  CurrentCase() = Text(modes) + Text(draws);
  CHECK(Validate(shape) == nullptr);

  World routed(draws.options, random);
  DrawIds(routed, random);
  routed.Dispatch();
  World world = modes.by_entry ? OneByOne(routed, modes.entries, random) : std::move(routed);
  if (modes.changed) ChangeTables(world, random);
  FillExpertOutputs(world, random, modes.changed);
  FillEntryWeights(world, random);
  world.Combine();
  std::vector<SharedRows> shared;
  for (Rank& rank : world.ranks) {
    // One row per token, not per entry.
    rank.residual = Buffer(modes.tokens * shape.row_bytes());
    FillElements(random, rank.residual.data(), draws.options.element, modes.tokens * shape.hidden);
    rank.output = Buffer(modes.tokens * shape.row_bytes());
    shared.push_back(DrawSharedRows(world, modes.tokens, random));
    UnpackAs(modes, world, rank, shared.back(), random);
  }

  Gpus gpus(world, draws);
  gpus.FillRegions();
  gpus.RunCombines(draws.times, [&](size_t rank, CombineStep& step) {
    SetModes(modes, Upload<float>(world.ranks[rank].weights), Upload<void>(shared[rank].rows),
             Upload<int32_t>(shared[rank].part), step);
  });
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 40);
  Random random(seed);
  CHECK(emulator::GetSettings().gpus >= 2);
  for (int64_t i = 0; i < draws; ++i) RunCombines(random, i % 4 >= 2, i % 2 == 1);
  std::printf("%lld combines with options: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
