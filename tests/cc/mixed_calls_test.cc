// An exchange pairs up different calls of its ranks: each of these returns nothing and reports it
// once, and the next call that the ranks make together is right.
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "steps_draws.h"
#include "steps_world.h"

namespace jax_ep {
namespace {

constexpr int64_t kKey = 0x1234'5678'9ABC'DEF0;
const RegionTag kRight = RegionTag::Of(kKey, CallOp::kDispatch, false, 77, 4096);

// Each difference alone changes the tag.
void TestTags() {
  CHECK(kRight == RegionTag::Of(kKey, CallOp::kDispatch, false, 77, 4096));
  CHECK(kRight.op() == CallOp::kDispatch);
  CHECK(!(kRight == RegionTag::Of(kKey, CallOp::kDispatch, false, 77, 4096 + 128)));
  std::set<std::pair<uint32_t, uint32_t>> seen;
  int64_t made = 0;
  for (int64_t key = 0; key < 8; ++key) {
    for (const CallOp op : {CallOp::kDispatch, CallOp::kDispatchCached, CallOp::kCombine}) {
      for (int64_t bit = 0; bit < 63; ++bit) {
        // Keys and sites are 63 bits of a digest; here they differ in one bit.
        const int64_t key_bits = kKey ^ (int64_t{1} << key * 7), site = int64_t{1} << bit;
        for (const bool in_halves : {false, true}) {
          const RegionTag tag = RegionTag::Of(key_bits, op, in_halves, site, 4096);
          CHECK(tag.op() == op);
          seen.insert({tag.handle, tag.call});
          ++made;
        }
      }
    }
  }
  CHECK(static_cast<int64_t>(seen.size()) == made);
}

bool AllOnes(const Buffer& buffer) {
  for (int64_t i = 0; i < buffer.bytes(); ++i) {
    if (buffer.data()[i] != 0xFF) return false;
  }
  return true;
}
bool AllZero(const Buffer& buffer) {
  for (int64_t i = 0; i < buffer.bytes(); ++i) {
    if (buffer.data()[i] != 0) return false;
  }
  return true;
}

void CheckNoDispatch(const Rank& rank, const Options& options) {
  for (const Buffer* buffer : {&rank.rows, &rank.scales, &rank.router_weights, &rank.row_slot,
                               &rank.src_info, &rank.expert_ids, &rank.row_of, &rank.slot_of}) {
    CHECK(AllOnes(*buffer));
  }
  for (const Buffer* buffer : {&rank.row_offsets, &rank.group_sizes, &rank.expert_counts,
                               &rank.slot_counts, &rank.num_dropped, &rank.num_invalid}) {
    CHECK(AllZero(*buffer));
  }
  if (options.tiled) CHECK(AllZero(rank.scales_offsets));
}

// Checks the report of a rank whose exchange is with ranks of `tags`, and takes it.
void TakeReport(World& world, size_t index) {
  Rank& rank = world.ranks[index];
  size_t source = 0;
  while (world.ranks[source].tag == rank.tag) ++source;
  const RegionTag other = world.ranks[source].tag;
  CHECK(rank.mixed.state == MixedCallReport::kSet);
  CHECK(rank.mixed.source == static_cast<int32_t>(source));
  CHECK(rank.mixed.here == static_cast<int32_t>(rank.tag.op()));
  CHECK((rank.mixed.there & static_cast<int32_t>(kCallOpMask)) == static_cast<int32_t>(other.op()));
  CHECK(((rank.mixed.there & MixedCallReport::kSameHandle) != 0) ==
        (other.handle == rank.tag.handle));
  rank.mixed = {};
}

bool Same(const Buffer& a, const Buffer& b) {
  return a.bytes() == b.bytes() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.bytes())) == 0;
}

void TestEveryRankIsTold() {
  Random random(51);
  const RegionTag wrong[] = {RegionTag::Of(kKey + 1, CallOp::kDispatch, false, 77, 4096),
                             RegionTag::Of(kKey, CallOp::kCombine, false, 77, 4096),
                             RegionTag::Of(kKey, CallOp::kDispatch, true, 77, 4096),
                             RegionTag::Of(kKey, CallOp::kDispatch, false, 78, 4096), RegionTag{}};
  for (int round = 0; round < 200; ++round) {
    CurrentCase() = "round " + std::to_string(round);
    Options options = DrawOptions(random, 5, 7, [&] { return random.In(1, 14); });
    options.shape.ranks = random.In(2, 5);
    const uint64_t seed = random.Bits();
    Random one(seed), other(seed);
    World right(options, one), mixed(options, other);
    for (World* world : {&right, &mixed}) {
      Random draw(seed);
      for (Rank& rank : world->ranks) {
        for (int64_t i = 0; i < rank.ids.bytes() / 4; ++i) {
          rank.ids.as<int32_t>()[i] =
              static_cast<int32_t>(draw.In(-1, options.shape.experts() - 1));
        }
        FillElements(draw, rank.expert_out.data(), options.element,
                     options.shape.recv_rows * options.shape.hidden);
        FillElements(draw, rank.row_grads.data(), ElementType::kFloat32, options.shape.recv_rows);
        rank.tag = kRight;
      }
    }
    const auto mix = [&] {
      // At least one rank is different, and not all are.
      const int64_t first = random.In(0, options.shape.ranks - 1);
      const RegionTag tag = wrong[random.In(0, 4)];
      for (int64_t i = 0; i < options.shape.ranks; ++i) {
        const bool is_wrong =
            i == first || (i != (first + 1) % options.shape.ranks && random.OneIn(3));
        mixed.ranks[static_cast<size_t>(i)].tag = is_wrong ? tag : kRight;
      }
    };
    const auto mend = [&] {
      for (Rank& rank : mixed.ranks) rank.tag = kRight;
    };
    mix();
    mixed.Dispatch();
    for (size_t i = 0; i < mixed.ranks.size(); ++i) {
      CheckNoDispatch(mixed.ranks[i], options);
      TakeReport(mixed, i);
    }
    mend();
    right.Dispatch(), mixed.Dispatch();
    for (size_t i = 0; i < mixed.ranks.size(); ++i) {
      const Rank &a = right.ranks[i], &b = mixed.ranks[i];
      CHECK(b.mixed.state == MixedCallReport::kFree);
      CHECK(Same(a.row_of, b.row_of) && Same(a.slot_of, b.slot_of) && Same(a.row_slot, b.row_slot));
      CHECK(Same(a.num_invalid, b.num_invalid) && Same(a.expert_ids, b.expert_ids));
    }

    mix();
    mixed.DispatchCached();
    for (size_t i = 0; i < mixed.ranks.size(); ++i) {
      CHECK(AllOnes(mixed.ranks[i].cached_rows));
      if (options.weights) CHECK(AllOnes(mixed.ranks[i].cached_router_weights));
      TakeReport(mixed, i);
    }
    mend();
    right.DispatchCached(), mixed.DispatchCached();
    for (size_t i = 0; i < mixed.ranks.size(); ++i) {
      CHECK(Same(right.ranks[i].cached_rows, mixed.ranks[i].cached_rows));
    }

    mix();
    mixed.Combine();
    for (size_t i = 0; i < mixed.ranks.size(); ++i) {
      CHECK(AllOnes(mixed.ranks[i].output));
      if (options.weights) CHECK(AllOnes(mixed.ranks[i].weight_grads));
      TakeReport(mixed, i);
    }
    mend();
    right.Combine(), mixed.Combine();
    for (size_t i = 0; i < mixed.ranks.size(); ++i) {
      CHECK(Same(right.ranks[i].output, mixed.ranks[i].output));
      CHECK(mixed.ranks[i].mixed.state == MixedCallReport::kFree);
    }
  }
}

// A dispatch on one rank, a combine on the other.
void TestOtherOp() {
  Random random(52);
  Options options;
  options.shape = {
      .ranks = 2, .local_experts = 28, .tokens = 3, .top_k = 1, .hidden = 64, .recv_rows = 6};
  options.weights = false;
  World world(options, random);
  Rank &a = world.ranks[0], &b = world.ranks[1];
  for (Rank& rank : world.ranks) {
    for (int64_t i = 0; i < 3; ++i) rank.ids.as<int32_t>()[i] = static_cast<int32_t>(i);
    rank.tag = kRight;
  }
  world.Dispatch();
  b.tag = RegionTag::Of(kKey, CallOp::kCombine, false, 99, 4096);
  world.DispatchPack(a);
  world.CombinePack(b);
  // Only the tags need to be exchanged; region lengths are up to the exchange.
  for (int64_t from = 0; from < 2; ++from) {
    std::memcpy(a.recv.data() + from * world.RegionBytes(), world.ranks[size_t(from)].send.data(),
                static_cast<size_t>(kTagBytes));
  }
  b.recv = world.Wire(world.CombineRegionBytes());
  for (int64_t from = 0; from < 2; ++from) {
    std::memcpy(b.recv.data() + from * world.CombineRegionBytes(),
                world.ranks[size_t(from)].send.data(), static_cast<size_t>(kTagBytes));
  }
  world.DispatchUnpack(a);
  world.CombineUnpack(b);
  CheckNoDispatch(a, options);
  CHECK(AllOnes(b.output));
  CHECK(a.mixed.source == 1 && a.mixed.here == static_cast<int32_t>(CallOp::kDispatch));
  CHECK(a.mixed.there == (static_cast<int32_t>(CallOp::kCombine) | MixedCallReport::kSameHandle));
  CHECK(b.mixed.source == 0 && b.mixed.here == static_cast<int32_t>(CallOp::kCombine));
}

// The first report is kept until it is taken, and nobody need ask for it.
void TestReports() {
  Random random(53);
  Options options;
  options.shape = {
      .ranks = 3, .local_experts = 1, .tokens = 2, .top_k = 1, .hidden = 8, .recv_rows = 4};
  World world(options, random);
  for (Rank& rank : world.ranks) {
    std::memset(rank.ids.data(), 0, static_cast<size_t>(rank.ids.bytes()));
    rank.tag = kRight;
  }
  world.ranks[2].tag = RegionTag{};
  world.Dispatch();
  CHECK(world.ranks[0].mixed.source == 2 && world.ranks[2].mixed.source == 0);
  world.ranks[1].tag = RegionTag{};
  world.Dispatch();
  CHECK(world.ranks[0].mixed.source == 2);
  world.ranks[0].mixed = {};
  world.Dispatch();
  CHECK(world.ranks[0].mixed.source == 1);
  // The call of a group that has been closed.
  Rank& rank = world.ranks[0];
  CombineUnpackStep step{{.slot_of = rank.slot_of.as<int32_t>()},
                         {},
                         options.shape,
                         options.element,
                         options.wire,
                         false,
                         0,
                         rank.recv.data(),
                         rank.output.data(),
                         nullptr};
  world.Combine();
  step.recv = rank.recv.data();
  step.check = {};
  const cpu::RowTask task = cpu::CombineUnpack(step);
  CHECK(task.items == 0 && AllOnes(rank.output));
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestTags();
  jax_ep::TestEveryRankIsTold();
  jax_ep::TestOtherOp();
  jax_ep::TestReports();
  std::puts("mixed_calls_test: ok");
}
