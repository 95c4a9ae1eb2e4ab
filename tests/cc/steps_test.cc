// Tests of the CPU steps: whole dispatches and combines over ranks in one process against the
// definitions (steps_reference.h). Hostile messages and tables may give any result, but must not
// touch anything outside of the buffers (run under AddressSanitizer).
#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/rows.h"
#include "steps_draws.h"
#include "steps_reference.h"
#include "steps_world.h"

namespace jax_ep {
namespace {

Options Draw(Random& random) {
  Options options = DrawOptions(random, 5, 7, [&] { return random.In(1, 14); });
  options.offset = random.OneIn(4) ? options.shape.element_bytes : 0;
  options.threads = random.OneIn(4) ? 3 : 1;
  return options;
}

// Fills rows that exist with values, and everything that combine must not read with NaN.
void FillExpertOutputs(World& world, const Reference& reference, Random& random) {
  const EpShape& shape = world.shape();
  for (int64_t r = 0; r < shape.ranks; ++r) {
    Rank& rank = world.ranks[static_cast<size_t>(r)];
    for (const Buffer* buffer : {&rank.expert_out, &rank.row_grads}) {
      std::memset(buffer->data(), 0xFF, static_cast<size_t>(buffer->bytes()));
    }
    for (int64_t row = 0; row < shape.recv_rows; ++row) {
      if (reference.at(r).rows[static_cast<size_t>(row)].source < 0) {
        rank.router_weights.as<uint32_t>()[row] = 0x7FC00000;
        continue;
      }
      FillElements(random, rank.expert_out.data() + row * shape.row_bytes(), world.options.element,
                   shape.hidden);
      rank.row_grads.as<float>()[row] = static_cast<float>(random.In(-99, 99)) * 0.37f;
    }
  }
}

void RunWholeLayer(const Options& options, Random& random) {
  CurrentCase() = Text(options);
  CHECK(Validate(options.shape) == nullptr);
  World world(options, random);
  DrawIds(world, random);
  const Reference reference(world);
  const int64_t ranks = options.shape.ranks;

  world.Dispatch();
  for (int64_t r = 0; r < ranks; ++r) reference.CheckSource(r);
  for (int64_t r = 0; r < ranks; ++r) reference.CheckExpertRank(r);

  world.DispatchCached();
  for (int64_t r = 0; r < ranks; ++r) reference.CheckCachedRank(r);

  FillExpertOutputs(world, reference, random);
  world.Combine();
  for (int64_t r = 0; r < ranks; ++r) reference.CheckCombined(r);
}

void TestWholeLayers() {
  Random random(11);
  for (int round = 0; round < 400; ++round) RunWholeLayer(Draw(random), random);
}

void TestCodedTokens() {
  Random random(17);
  for (int round = 0; round < 60; ++round) {
    Options options = Draw(random);
    while (!IsQuantized(options)) options = Draw(random);
    options.coded = true;
    RunWholeLayer(options, random);
  }
}

void TestColumnsOfScales() {
  Random random(18);
  for (int round = 0; round < 60; ++round) {
    Options options = Draw(random);
    while (options.format != Fp8Block128Format::kName) options = Draw(random);
    options.columns = true;
    RunWholeLayer(options, random);
  }
}

// Rows longer than one pass of partial sums, and with a remainder.
void TestLongRows() {
  Random random(12);
  for (const ElementType element : {ElementType::kFloat32, ElementType::kBFloat16}) {
    Options options;
    options.element = element;
    options.wire = ElementType::kFloat16;
    options.residual = true;
    options.shape = {.ranks = 3,
                     .local_experts = 2,
                     .tokens = 4,
                     .top_k = 3,
                     .hidden = 2056,
                     .element_bytes = ElementBytes(element),
                     .recv_rows = 40};
    RunWholeLayer(options, random);
  }
}

// Rows of many lengths up to a few cache lines, at every offset in a line.
void TestCopyAndClear() {
  constexpr int64_t kMargin = 64, kMostBytes = 208;
  Random random(16);
  Buffer from(kMargin + kMostBytes), to(2 * kMargin + kMostBytes);
  from.Randomize(random);
  for (int64_t bytes = 0; bytes <= kMostBytes; bytes += random.In(1, 16)) {
    for (int64_t place = 0; place < kMargin; ++place) {
      const uint8_t* source = from.data() + random.In(0, kMargin);
      for (const bool streaming : {false, true}) {
        for (const bool copy : {false, true}) {
          std::memset(to.data(), kPoison, static_cast<size_t>(to.bytes()));
          if (copy) {
            cpu::CopyRow(to.data() + place, source, bytes, streaming);
          } else {
            cpu::ClearRow(to.data() + place, bytes, streaming);
          }
          cpu::FenceStreaming();
          for (int64_t i = 0; i < to.bytes(); ++i) {
            const bool inside = i >= place && i < place + bytes;
            CHECK(to.data()[i] == (!inside ? kPoison : copy ? source[i - place] : 0));
          }
        }
      }
    }
  }
}

// Calls whose rows are stored around the caches, aligned to 16 bytes and not.
void TestStreaming() {
  Random random(13);
  for (const int64_t offset : {0, 4}) {
    Options options;
    options.element = options.wire = ElementType::kFloat32;
    options.offset = offset;
    options.zero_tail = offset == 0;
    options.threads = 2;
    options.shape = {.ranks = 2,
                     .local_experts = 2,
                     .tokens = 3,
                     .top_k = 2,
                     .hidden = (1 << 20) + 12,
                     .element_bytes = 4,
                     .recv_rows = 11,
                     .expert_alignment = 2};
    CHECK(3 * options.shape.row_bytes() > cpu::kStreamingBytes);
    CurrentCase() = Text(options);
    World world(options, random);
    for (Rank& rank : world.ranks) {
      const int32_t ids[] = {0, 2, 3, 3, 1, -1};
      std::copy_n(ids, 6, rank.ids.as<int32_t>());
    }
    const Reference reference(world);
    world.Dispatch();
    world.DispatchCached();
    for (int64_t r = 0; r < 2; ++r) {
      reference.CheckSource(r);
      reference.CheckExpertRank(r);
      reference.CheckCachedRank(r);
    }
  }
}

// Independent calls of one handle may pack on one device at the same time; one of them reports.
void TestInvalidIdReportOfTwoThreads() {
  Random random(15);
  Options options;
  options.shape = {
      .ranks = 1, .local_experts = 4, .tokens = 1, .top_k = 1, .hidden = 8, .recv_rows = 4};
  World worlds[] = {World(options, random), World(options, random)};
  for (World& world : worlds) world.DispatchPack(world.ranks[0]);  // allocates the outputs
  InvalidIdReport shared{};
  for (int round = 0; round < 200; ++round) {
    shared.state = InvalidIdReport::kFree;
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        Rank& rank = worlds[i].ranks[0];
        rank.ids.as<int32_t>()[0] = 100 + i;
        cpu::DispatchPack<Bf16Format>({{},
                                       worlds[i].shape(),
                                       ElementType::kBFloat16,
                                       rank.tokens.data(),
                                       rank.ids.as<int32_t>(),
                                       rank.weights.as<float>(),
                                       nullptr,
                                       rank.send.data(),
                                       rank.slot_of.as<int32_t>(),
                                       rank.position.as<int32_t>(),
                                       rank.num_invalid.as<int32_t>(),
                                       &shared});
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(shared.state == InvalidIdReport::kSet);
    CHECK(shared.value == 100 || shared.value == 101);
  }
}

// The first bad id is kept until it is taken, and nobody need ask for it.
void TestInvalidIdReports() {
  Random random(14);
  Options options;
  options.shape = {
      .ranks = 1, .local_experts = 4, .tokens = 2, .top_k = 2, .hidden = 8, .recv_rows = 4};
  World world(options, random);
  Rank& rank = world.ranks[0];
  const int32_t ids[] = {3, -1, -5, 4};
  std::copy_n(ids, 4, rank.ids.as<int32_t>());
  world.DispatchPack(rank);
  CHECK(*rank.num_invalid.as<int32_t>() == 2);
  CHECK(rank.report.state == InvalidIdReport::kSet && rank.report.token == 1 && rank.report.k == 0);
  CHECK(rank.report.value == -5);
  rank.ids.as<int32_t>()[0] = 77;
  world.DispatchPack(rank);
  CHECK(*rank.num_invalid.as<int32_t>() == 3 && rank.report.value == -5);
  rank.report.state = InvalidIdReport::kFree;
  world.DispatchPack(rank);
  CHECK(rank.report.state == InvalidIdReport::kSet && rank.report.token == 0 &&
        rank.report.value == 77);

  DispatchPackStep step{{},
                        world.shape(),
                        ElementType::kBFloat16,
                        rank.tokens.data(),
                        rank.ids.as<int32_t>(),
                        rank.weights.as<float>(),
                        nullptr,
                        rank.send.data(),
                        rank.slot_of.as<int32_t>(),
                        rank.position.as<int32_t>(),
                        rank.num_invalid.as<int32_t>(),
                        nullptr};
  *step.num_invalid = 0;
  cpu::DispatchPack<Bf16Format>(step);
  CHECK(*step.num_invalid == 3);
}

// ---- Hostile input ------------------------------------------------------------------------------

// Writes either random bits or numbers close to valid ones.
void Corrupt(Random& random, const Buffer& buffer, int64_t limit, bool everywhere) {
  const int64_t words = buffer.bytes() / kIndexBytes;
  int64_t changes = words == 0 ? 0 : everywhere ? words : random.In(1, 6);
  for (; changes > 0; --changes) {
    const int64_t word = everywhere ? changes - 1 : random.In(0, words - 1);
    buffer.as<int32_t>()[word] = random.OneIn(3) ? static_cast<int32_t>(random.Bits())
                                                 : static_cast<int32_t>(random.In(-2, limit + 1));
  }
}

bool AllIn(const Buffer& buffer, int64_t low, int64_t high) {
  const int32_t* values = buffer.as<int32_t>();
  return std::all_of(values, values + buffer.bytes() / kIndexBytes,
                     [&](int32_t value) { return low <= value && value <= high; });
}

// A dispatch from corrupt regions, then the rest of the layer with the tables that result.
void CorruptRegions(World& world, Random& random, bool everywhere) {
  const EpShape& shape = world.shape();
  for (Rank& rank : world.ranks) {
    Corrupt(random, rank.recv, std::max(shape.tokens, shape.local_experts), everywhere);
    world.DispatchUnpack(rank);
    CHECK(AllIn(rank.row_offsets, 0, shape.recv_rows));
    CHECK(std::is_sorted(rank.row_offsets.as<int32_t>(),
                         rank.row_offsets.as<int32_t>() + shape.local_experts + 1));
    CHECK(AllIn(rank.row_of, -1, shape.recv_rows - 1));
    CHECK(AllIn(rank.row_slot, -1, shape.slots() - 1));
    CHECK(AllIn(rank.slot_counts, 0, shape.tokens));
  }
  world.Combine();
  world.DispatchCached();
}

void CorruptTables(World& world, Random& random, bool everywhere) {
  const EpShape& shape = world.shape();
  for (Rank& rank : world.ranks) {
    Corrupt(random, rank.slot_of, shape.slots(), everywhere);
    Corrupt(random, rank.row_of, shape.recv_rows, everywhere);
    Corrupt(random, rank.row_slot, shape.slots(), everywhere);
    Corrupt(random, rank.slot_counts, shape.tokens, everywhere);
  }
  world.Combine();
  world.DispatchCached();
}

void TestHostileInput() {
  Random random(15);
  for (int round = 0; round < 1000; ++round) {
    Options options = Draw(random);
    options.threads = 1;  // two slots may claim one row, and the last one gets it
    CurrentCase() = "round " + std::to_string(round) + ": " + Text(options);
    World world(options, random);
    DrawIds(world, random);
    world.Dispatch();
    const bool everywhere = random.OneIn(3);
    if (round % 2 == 0) {
      CorruptRegions(world, random, everywhere);
    } else {
      CorruptTables(world, random, everywhere);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestWholeLayers();
  jax_ep::TestLongRows();
  jax_ep::TestCopyAndClear();
  jax_ep::TestStreaming();
  jax_ep::TestInvalidIdReports();
  jax_ep::TestInvalidIdReportOfTwoThreads();
  jax_ep::TestHostileInput();
  jax_ep::TestCodedTokens();
  jax_ep::TestColumnsOfScales();
  std::printf("steps_test: ok\n");
  return 0;
}
