// Routes and messages that were tampered with: out-of-range values count as absent, bit for bit,
// whatever they are, and nothing outside of a buffer is touched (AddressSanitizer).
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/mixed_calls.h"
#include "steps_world.h"

namespace jax_ep {
namespace {

constexpr int32_t kHostile[] = {INT32_MIN, INT32_MIN + 1, -2, INT32_MAX, INT32_MAX - 1, 1 << 30};

Options AnyOptions(Random& random) {
  Options options;
  options.shape.ranks = random.In(1, 4);
  options.shape.local_experts = random.In(1, 4);
  options.shape.tokens = random.In(1, 9);
  options.shape.top_k = random.In(1, 4);
  options.shape.hidden = 128 * random.In(1, 2);
  options.shape.recv_rows = random.In(1, 60);
  options.format = kFormatNames[random.In(0, std::ssize(kFormatNames) - 1)];
  options.quantized_sums = random.OneIn(3);
  options.weights = random.OneIn(2);
  options.residual = random.OneIn(2);
  return options;
}

void DrawIds(World& world, Random& random) {
  for (Rank& rank : world.ranks) {
    for (int64_t i = 0; i < rank.ids.bytes() / 4; ++i) {
      rank.ids.as<int32_t>()[i] = static_cast<int32_t>(random.In(-1, world.shape().experts() - 1));
    }
    FillElements(random, rank.expert_out.data(), world.options.element,
                 world.shape().recv_rows * world.shape().hidden);
    FillElements(random, rank.row_grads.data(), ElementType::kFloat32, world.shape().recv_rows);
  }
}

// Sets some entries of a table to -1 in `absent` and to hostile values, or values just past `end`,
// in `hostile`.
void Tamper(Buffer Rank::* table, World& absent, World& hostile, int64_t end, Random& random) {
  for (size_t r = 0; r < absent.ranks.size(); ++r) {
    const int64_t count = (absent.ranks[r].*table).bytes() / 4;
    for (int64_t i = 0; i < count; ++i) {
      if (!random.OneIn(4)) continue;
      (absent.ranks[r].*table).as<int32_t>()[i] = -1;
      const int64_t kind = random.In(0, 7);
      (hostile.ranks[r].*table).as<int32_t>()[i] =
          kind < 6 ? kHostile[kind] : static_cast<int32_t>(end + kind - 6);
    }
  }
}

bool Same(const Buffer& a, const Buffer& b) {
  return a.bytes() == b.bytes() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.bytes())) == 0;
}

// Two worlds have the same inputs, except that one has -1 where the other is out of range.
void TestOutOfRangeIsAbsent() {
  Random random(31);
  for (int round = 0; round < 300; ++round) {
    const Options options = AnyOptions(random);
    const uint64_t seed = random.Bits();
    CurrentCase() = "round " + std::to_string(round) + ", " + options.format;
    Random one(seed), other(seed);
    World absent(options, one), hostile(options, other);
    DrawIds(absent, one);
    DrawIds(hostile, other);
    absent.Dispatch();
    hostile.Dispatch();
    Tamper(&Rank::slot_of, absent, hostile, options.shape.slots(), random);
    Tamper(&Rank::row_of, absent, hostile, options.shape.recv_rows, random);
    for (World* world : {&absent, &hostile}) {
      world->DispatchCached();
      world->Combine();
    }
    for (size_t r = 0; r < absent.ranks.size(); ++r) {
      const Rank &a = absent.ranks[r], &b = hostile.ranks[r];
      // A slot that is no longer sent or summed holds the initial bytes of the wire buffer.
      std::vector<bool> whole(static_cast<size_t>(options.shape.slots()), false);
      for (const Rank& source : absent.ranks) {
        const int64_t from = &source - absent.ranks.data();
        for (int64_t i = 0; i < source.slot_of.bytes() / 4; ++i) {
          const int32_t slot = source.slot_of.as<int32_t>()[i];
          if (slot < 0 || slot / options.shape.tokens != int64_t(r)) continue;
          whole[static_cast<size_t>(from * options.shape.tokens + slot % options.shape.tokens)] =
              true;
        }
      }
      for (int64_t row = 0; row < options.shape.recv_rows; ++row) {
        const int32_t slot = a.row_slot.as<int32_t>()[row];
        if (slot < 0 || !whole[static_cast<size_t>(slot)]) continue;
        bool reached = false;
        for (int64_t k = 0; k < options.shape.top_k; ++k) {
          reached |= a.row_of.as<int32_t>()[slot * options.shape.top_k + k] == row;
        }
        const int64_t bytes = options.shape.row_bytes();
        if (reached) {
          CHECK(std::memcmp(a.cached_rows.data() + row * bytes, b.cached_rows.data() + row * bytes,
                            static_cast<size_t>(bytes)) == 0);
        }
      }
      CHECK(Same(a.output, b.output));
      if (options.weights) CHECK(Same(a.weight_grads, b.weight_grads));
    }
  }
}

// The route has wrong values that are in range. The earlier contents of a wire buffer, which may be
// another call's, must not show in any result. Two worlds differ only in these contents; their
// tasks run in the same order, so that bytes that two items write are the same.
void TestNothingOldShows() {
  Random random(33);
  for (int round = 0; round < 300; ++round) {
    const Options options = AnyOptions(random);
    const EpShape& shape = options.shape;
    const uint64_t seed = random.Bits();
    CurrentCase() = "round " + std::to_string(round) + ", " + options.format;
    const auto changed = [&](const Buffer& table, int64_t low, int64_t high, Random& draw) {
      for (int64_t i = 0; i < table.bytes() / 4; ++i) {
        if (!draw.OneIn(3)) continue;
        table.as<int32_t>()[i] = static_cast<int32_t>(draw.OneIn(3) ? low : draw.In(low, high));
      }
    };
    const auto run = [&](World& world, Random& draw, int fill) {
      DrawIds(world, draw);
      world.Dispatch();
      for (Rank& rank : world.ranks) {
        changed(rank.slot_of, -1, shape.slots() - 1, draw);
        changed(rank.slot_counts, 0, shape.tokens + 2, draw);
        changed(rank.row_slot, -1, shape.slots() - 1, draw);
        changed(rank.row_of, -1, shape.recv_rows - 1, draw);
        for (const Buffer* result :
             {&rank.cached_rows, &rank.cached_router_weights, &rank.output, &rank.weight_grads}) {
          std::memset(result->data(), fill, static_cast<size_t>(result->bytes()));
        }
      }
      world.wire_fill = fill;
      world.DispatchCached();
      world.Combine();
    };
    Random one(seed), other(seed);
    World first(options, one), second(options, other);
    run(first, one, 0x11);
    run(second, other, 0x77);
    for (size_t r = 0; r < first.ranks.size(); ++r) {
      const Rank &a = first.ranks[r], &b = second.ranks[r];
      CHECK(Same(a.cached_rows, b.cached_rows));
      CHECK(Same(a.output, b.output));
      if (!options.weights) continue;
      CHECK(Same(a.cached_router_weights, b.cached_router_weights));
      CHECK(Same(a.weight_grads, b.weight_grads));
    }
  }
}

// Arbitrary contents in any table and message: only the sanitizer checks.
void TestAnythingAnywhere() {
  Random random(32);
  for (int round = 0; round < 300; ++round) {
    const Options options = AnyOptions(random);
    CurrentCase() = "round " + std::to_string(round) + ", " + options.format;
    World world(options, random);
    DrawIds(world, random);
    world.Dispatch();
    const auto spoil = [&](const Buffer& buffer) {
      for (int64_t i = 0; i + 4 <= buffer.bytes(); i += 4) {
        if (!random.OneIn(5)) continue;
        const int32_t value = random.OneIn(2)
                                  ? kHostile[random.In(0, 5)]
                                  : static_cast<int32_t>(random.In(-3, options.shape.slots() + 2));
        std::memcpy(buffer.data() + i, &value, sizeof value);
      }
    };
    for (Rank& rank : world.ranks) {
      spoil(rank.recv);
      // With different tags nothing else would be read.
      for (int64_t source = 0; !random.OneIn(4) && source < options.shape.ranks; ++source) {
        cpu::WriteTag(rank.recv.data() + source * world.RegionBytes(), rank.tag);
      }
      world.DispatchUnpack(rank);
    }
    for (Rank& rank : world.ranks) {
      for (const Buffer* table : {&rank.slot_of, &rank.row_of, &rank.row_slot, &rank.slot_counts}) {
        spoil(*table);
      }
    }
    world.DispatchCached();
    world.Combine();
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestOutOfRangeIsAbsent();
  jax_ep::TestNothingOldShows();
  jax_ep::TestAnythingAnywhere();
  std::puts("tampered_test: ok");
}
