// Tests of protocol/layout.h, and of what window.h stores for routes: fields are in order, disjoint
// and aligned, whatever the sizes, and the wire has the documented offsets.
#include "protocol/layout.h"

#include <cstdio>
#include <initializer_list>
#include <vector>

#include "check.h"
#include "protocol/window.h"

namespace jax_ep {
namespace {

struct Field {
  int64_t offset;
  int64_t bytes;
  int64_t align;
};

// No field overlaps the next, there are no gaps beyond alignment, and the end is the next multiple.
void CheckFields(std::initializer_list<Field> fields, int64_t bytes,
                 int64_t multiple = kMessageStrideBytes) {
  int64_t end = 0;
  for (const Field& field : fields) {
    CHECK(field.offset >= end && field.offset < end + field.align);
    CHECK(field.offset % field.align == 0);
    end = field.offset + field.bytes;
  }
  CHECK(bytes >= end && bytes < end + multiple && bytes % multiple == 0);
}

void TestRoundUp() {
  for (int64_t align = 1; align < 40; ++align) {
    for (int64_t value = 0; value < 200; ++value) {
      int64_t expected = value;
      while (expected % align != 0) ++expected;
      CHECK(RoundUp(value, align) == expected);
    }
  }
  CHECK(RoundUp(int64_t{INT32_MAX} * 2048, INT32_MAX) == int64_t{INT32_MAX} * 2048);
  CHECK(Min(int64_t{3}, int64_t{2}) == 2 && Min(-1, 1) == -1);
}

void TestFieldsForManySizes() {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const int64_t payload = random.In(0, 70) * 8;
    const int64_t scales = random.OneIn(2) ? 0 : random.In(1, 130);
    const int64_t top_k = random.In(1, 32);
    const int64_t weights = random.OneIn(2) ? 0 : top_k;
    const int64_t experts = random.In(1, 2048);
    CurrentCase() = "payload " + std::to_string(payload) + ", scales " + std::to_string(scales) +
                    ", K " + std::to_string(top_k) + ", L " + std::to_string(experts);

    const auto header = RegionHeader::Of(experts);
    CheckFields(
        {{header.tag, 8, 4}, {header.num_slots, 4, 4}, {header.expert_counts, experts * 4, 4}},
        header.bytes, kMessageAlignBytes);

    const auto first = DispatchMessage::Of(payload, scales, top_k);
    CheckFields({{first.payload, payload, 16},
                 {first.scales, scales, 16},
                 {first.source_token, 4, 16},
                 {first.expert, top_k * 4, 4},
                 {first.position, top_k * 4, 4},
                 {first.weight, top_k * 4, 4}},
                first.bytes);

    const auto cached = DispatchCachedMessage::Of(payload, scales, weights);
    CheckFields({{cached.payload, payload, 16},
                 {cached.scales, scales, 16},
                 {cached.weight, weights * 4, 16}},
                cached.bytes);

    const auto combine = CombineMessage::Of(payload, scales, weights);
    CheckFields({{combine.row, payload, 16},
                 {combine.scales, scales, 4},
                 {combine.weight_grad, weights * 4, 4}},
                combine.bytes);

    const int64_t slots = random.In(0, 300);
    const auto known = DispatchCachedRegion::Of(slots, cached.bytes);
    CheckFields(
        {{known.tag, 8, 4}, {known.sent, slots, 1}, {known.messages, slots * cached.bytes, 128}},
        known.bytes, 1);
    const auto home = CombineRegion::Of(slots, combine.bytes);
    CheckFields(
        {{home.tag, 8, 4}, {home.num_sums, 4, 4}, {home.messages, slots * combine.bytes, 128}},
        home.bytes, 1);
    // The tag of a region has the same place in every op.
    CHECK(header.tag == kTagOffset && known.tag == kTagOffset && home.tag == kTagOffset);
    CHECK((header.bytes + slots * first.bytes) % kMessageAlignBytes == 0);
    CHECK(known.bytes % kMessageStrideBytes == 0 && home.bytes % kMessageStrideBytes == 0);
  }
}

// 32 experts per rank, 7168 bfloat16 elements, top-8: every number is spelt out.
void TestKnownOffsets() {
  const auto header = RegionHeader::Of(32);
  CHECK(header.num_slots == 8 && header.expert_counts == 12 && header.bytes == 144);
  const auto message = DispatchMessage::Of(14336, 0, 8);
  CHECK(message.payload == 0 && message.scales == 14336 && message.source_token == 14336);
  CHECK(message.expert == 14340 && message.position == 14372 && message.weight == 14404);
  CHECK(message.bytes == 14464);
  // A payload with scales: 7168 bytes, one float32 for each 128.
  const auto scaled = DispatchMessage::Of(7168, 224, 8);
  CHECK(scaled.scales == 7168 && scaled.source_token == 7392 && scaled.bytes == 7552);
  CHECK(DispatchCachedMessage::Of(7168, 224, 8).weight == 7392);
  CHECK(DispatchCachedMessage::Of(7168, 224, 8).bytes == 7424);
  // Scales end inside 16 bytes; what comes after them is copied separately.
  CHECK(DispatchMessage::Of(640, 20, 2).source_token == 672);
  CHECK(DispatchMessage::Of(640, 20, 2).expert == 676);
  CHECK(DispatchMessage::Of(640, 20, 2).bytes == 768);
  CHECK(DispatchCachedMessage::Of(640, 20, 2).weight == 672);
  CHECK(DispatchCachedMessage::Of(640, 20, 2).bytes == 768);
  CHECK(CombineMessage::Of(14336, 0, 0).bytes == 14336);
  CHECK(CombineMessage::Of(14336, 0, 8).weight_grad == 14336);
}

// The 32-bit counters that blocks add to, and rows for every expert.
void TestRouteTotals() {
  for (const int64_t ranks : {1, 3, 32}) {
    for (const int64_t experts : {1, 31, 64}) {
      std::vector<int32_t> memory(static_cast<size_t>(RouteTotals::Ints(ranks * experts, ranks)));
      const RouteTotals totals(memory.data(), ranks * experts, ranks);
      const std::vector<const void*> ends = {
          memory.data(),           totals.slots,
          totals.finished,         totals.invalid,
          totals.invalid_from_end, memory.data() + memory.size()};
      const std::vector<int64_t> ints = {ranks * experts, ranks, 1, 1, 1};
      CHECK(totals.rows == memory.data());
      for (size_t i = 0; i < ints.size(); ++i) {
        const auto* begin = static_cast<const int32_t*>(ends[i]);
        CHECK(static_cast<const int32_t*>(ends[i + 1]) == begin + ints[i]);
      }
    }
  }
}

// Parts cover the tokens of a call once, none is empty, and windows have room for each.
void TestRouteParts() {
  for (int64_t tokens = 1; tokens <= 70'000; tokens += tokens < 1'000 ? 1 : 61) {
    const int64_t length = RouteItemTokens(tokens), parts = RouteItems(tokens);
    CHECK(parts <= kRouteParts && parts * length >= tokens && (parts - 1) * length < tokens);
    CHECK(length >= kLeastRouteTokens && length % 32 == 0);
  }
  CHECK(RouteItems(0) == 1);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestRoundUp();
  jax_ep::TestFieldsForManySizes();
  jax_ep::TestKnownOffsets();
  jax_ep::TestRouteTotals();
  jax_ep::TestRouteParts();
  std::printf("layout_test: ok\n");
  return 0;
}
