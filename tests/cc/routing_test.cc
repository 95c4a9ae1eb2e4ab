// Tests of protocol/routing.h and protocol/shape.h: routing against its definition, also in runs,
// the checks between a message's contents and a write, and refused sizes.
#include "protocol/routing.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <vector>

#include "check.h"
#include "protocol/shape.h"

namespace jax_ep {
namespace {

struct Routed {
  std::vector<int32_t> slot_of, position, slots, rows;
  int32_t invalid_count = 0;
  int32_t first_invalid = -1;

  bool operator==(const Routed&) const = default;
};

// Ids with duplicates, with -1, just outside of [0, E) and extreme ones.
std::vector<int32_t> DrawIds(Random& random, const EpShape& shape) {
  const int64_t experts = shape.experts();
  const int64_t spread = random.OneIn(3) ? std::min<int64_t>(experts, 3) : experts;
  const bool with_invalid = random.OneIn(2);
  std::vector<int32_t> ids(static_cast<size_t>(shape.tokens * shape.top_k));
  for (int32_t& id : ids) {
    id = static_cast<int32_t>(random.In(0, spread - 1));
    if (random.OneIn(6)) id = -1;
    if (with_invalid && random.OneIn(6)) {
      const int32_t bad[] = {static_cast<int32_t>(experts), static_cast<int32_t>(experts) + 1, -2,
                             INT32_MIN, INT32_MAX};
      id = bad[random.In(0, 4)];
    }
  }
  return ids;
}

Routed Route(const EpShape& shape, std::vector<int32_t> ids, const std::vector<int64_t>& cuts) {
  const auto entries = static_cast<size_t>(shape.tokens * shape.top_k);
  const int32_t poison = -77;
  Routed out{.slot_of = std::vector<int32_t>(entries, poison),
             .position = std::vector<int32_t>(entries, poison),
             .slots = std::vector<int32_t>(static_cast<size_t>(shape.ranks)),
             .rows = std::vector<int32_t>(static_cast<size_t>(shape.experts()))};
  KeptInvalidIds invalid;
  int64_t begin = 0;
  for (const int64_t end : cuts) {
    RouteTokens(shape, ids.data(), begin, end, {out.slots.data(), out.rows.data()},
                {out.slot_of.data(), out.position.data()}, invalid);
    begin = end;
  }
  out.invalid_count = invalid.count;
  out.first_invalid = invalid.first_entry;
  if (invalid.count > 0) CHECK(invalid.first_id == ids[static_cast<size_t>(invalid.first_entry)]);
  return out;
}

// The definition: the slot of an entry is the number of earlier tokens with an entry for the same
// rank, its position the number of earlier entries for the same expert.
Routed RouteByDefinition(const EpShape& shape, const std::vector<int32_t>& ids) {
  const int64_t entries = shape.tokens * shape.top_k;
  const auto id = [&](int64_t entry) { return int64_t{ids[static_cast<size_t>(entry)]}; };
  const auto valid = [&](int64_t entry) { return id(entry) >= 0 && id(entry) < shape.experts(); };
  const auto rank = [&](int64_t entry) { return id(entry) / shape.local_experts; };
  const auto goes_to = [&](int64_t token, int64_t destination) {
    for (int64_t entry = token * shape.top_k; entry < (token + 1) * shape.top_k; ++entry) {
      if (valid(entry) && rank(entry) == destination) return true;
    }
    return false;
  };
  Routed out;
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (!valid(entry)) {
      out.slot_of.push_back(-1);
      out.position.push_back(-1);
      if (id(entry) == -1) continue;
      if (out.invalid_count++ == 0) out.first_invalid = static_cast<int32_t>(entry);
      continue;
    }
    int64_t slot = 0, position = 0;
    for (int64_t token = 0; token < entry / shape.top_k; ++token) {
      slot += goes_to(token, rank(entry));
    }
    for (int64_t earlier = 0; earlier < entry; ++earlier) position += id(earlier) == id(entry);
    out.slot_of.push_back(static_cast<int32_t>(rank(entry) * shape.tokens + slot));
    out.position.push_back(static_cast<int32_t>(position));
  }
  for (int64_t r = 0; r < shape.ranks; ++r) {
    int32_t slots = 0;
    for (int64_t token = 0; token < shape.tokens; ++token) slots += goes_to(token, r);
    out.slots.push_back(slots);
  }
  for (int64_t e = 0; e < shape.experts(); ++e) {
    out.rows.push_back(static_cast<int32_t>(std::count(ids.begin(), ids.end(), e)));
  }
  return out;
}

void TestRoutingAgainstDefinition() {
  Random random(2);
  for (int round = 0; round < 400; ++round) {
    EpShape shape;
    shape.ranks = random.In(1, 9);
    shape.local_experts = random.OneIn(4) ? 1 : random.In(1, 12);
    shape.tokens = random.OneIn(10) ? 0 : random.In(1, 24);
    shape.top_k = random.OneIn(10) ? kMaxTopK : random.In(1, 9);
    CurrentCase() = "round " + std::to_string(round);
    const std::vector<int32_t> ids = DrawIds(random, shape);
    const Routed expected = RouteByDefinition(shape, ids);
    CHECK(Route(shape, ids, {shape.tokens}) == expected);

    std::vector<int64_t> cuts = {0, shape.tokens};
    for (int64_t i = random.In(0, 4); i > 0; --i) cuts.push_back(random.In(0, shape.tokens));
    std::sort(cuts.begin(), cuts.end());
    CHECK(Route(shape, ids, cuts) == expected);
  }
}

void TestPlaces() {
  for (const auto& [ranks, local] : {std::pair{1, 1}, {3, 5}, {8, 32}, {2048, 1}, {1, 2048}}) {
    const int32_t experts = ranks * local;
    for (int32_t id = -3; id < experts + 3; ++id) {
      const ExpertPlace place = PlaceOf(id, ranks, local);
      const bool valid = id >= 0 && id < experts;
      CHECK(valid ? place.rank * local + place.local_expert == id : place.rank < 0);
      if (valid) CHECK(place.rank < ranks && place.local_expert >= 0 && place.local_expert < local);
      CHECK(IsInvalidId(id, ranks, local) == (!valid && id != -1));
    }
    for (const int32_t id : {INT32_MIN, INT32_MIN + 1, INT32_MAX}) {
      CHECK(PlaceOf(id, ranks, local).rank < 0 && IsInvalidId(id, ranks, local));
    }
  }
  for (int32_t local = 1; local <= kMaxExperts; ++local) {
    const RankOfExpert rank_of(local);
    for (int32_t id = 0; id < kMaxExperts; ++id) CHECK(rank_of(id) == id / local);
  }
  const int32_t ids[] = {4, -1, 5, 0, 99, 4};  // 2 experts a rank: ranks 2, -, 2, 0, -, 2
  const bool opens[] = {true, false, false, true, false, false};
  for (int32_t k = 0; k < 6; ++k) {
    const int32_t rank = PlaceOf(ids[k], 4, 2).rank;
    if (rank >= 0) CHECK(OpensSlot(ids, k, rank, 4, 2) == opens[k]);
  }
}

// Compares with counting row by row, for small sizes.
void TestDroppedRowsAgainstDefinition() {
  for (int64_t start = 0; start < 12; ++start) {
    for (int64_t rows = 0; rows < 12; ++rows) {
      for (int64_t capacity = 0; capacity < 14; ++capacity) {
        int64_t dropped = 0;
        for (int64_t row = start; row < start + rows; ++row) dropped += row >= capacity;
        CHECK(DroppedRows(start, rows, capacity) == dropped);
      }
      for (int64_t alignment = 1; alignment < 9; ++alignment) {
        int64_t next = start + rows;
        while ((next - start) % alignment != 0) ++next;
        CHECK(NextGroupStart(start, rows, alignment) == next);
      }
    }
  }
}

void TestGuards() {
  const int64_t capacities[] = {0, 1, 1000, kMaxIndex};
  for (const int64_t capacity : capacities) {
    const int64_t indices[] = {INT64_MIN,
                               INT64_MIN + 1,
                               int64_t{INT32_MIN} - 1,
                               INT32_MIN,
                               -1,
                               0,
                               1,
                               capacity - 1,
                               capacity,
                               capacity + 1,
                               kMaxIndex,
                               kMaxIndex + 1,
                               int64_t{1} << 32,
                               (int64_t{1} << 32) + 1,
                               INT64_MAX};
    for (const int64_t index : indices) {
      const bool inside = 0 <= index && index < capacity;
      CHECK(RowOrDropped(index, capacity) == (inside ? index : -1));
    }
  }
  // The largest group starts and counts that a valid shape can have.
  const int64_t start = kMaxExperts * kMaxIndex;
  CHECK(DroppedRows(start, kMaxIndex, kMaxIndex) == kMaxIndex);
  CHECK(DroppedRows(kMaxIndex - 1, kMaxIndex, kMaxIndex) == kMaxIndex - 1);
  CHECK(DroppedRows(0, kMaxIndex, kMaxIndex) == 0);
  CHECK(NextGroupStart(start, kMaxIndex, kMaxIndex) == start + kMaxIndex);
  CHECK(NextGroupStart(start, 1, kMaxIndex) == start + kMaxIndex);
}

void TestValidate() {
  const EpShape good{.ranks = 4,
                     .local_experts = 8,
                     .tokens = 16,
                     .top_k = 2,
                     .hidden = 64,
                     .element_bytes = 2,
                     .recv_rows = 128,
                     .expert_alignment = 8};
  struct Case {
    int64_t EpShape::* field;
    int64_t value;
    const char* needle;  // nullptr: valid
  };
  const Case cases[] = {
      {&EpShape::ranks, 0, "ranks"},
      {&EpShape::ranks, -1, "ranks"},
      {&EpShape::ranks, 256, nullptr},
      {&EpShape::ranks, 257, "num_experts"},
      {&EpShape::ranks, INT64_MAX, "num_experts"},
      {&EpShape::local_experts, 0, "local experts"},
      {&EpShape::local_experts, INT64_MIN, "local experts"},
      {&EpShape::local_experts, 512, nullptr},
      {&EpShape::local_experts, 513, "num_experts"},
      {&EpShape::local_experts, INT64_MAX, "num_experts"},
      {&EpShape::top_k, 0, "top_k"},
      {&EpShape::top_k, 1, nullptr},
      {&EpShape::top_k, kMaxTopK, nullptr},
      {&EpShape::top_k, kMaxTopK + 1, "top_k"},
      {&EpShape::tokens, -1, "tokens"},
      {&EpShape::tokens, 0, nullptr},
      {&EpShape::tokens, kMaxIndex / 8, nullptr},
      {&EpShape::tokens, kMaxIndex / 8 + 1, "int32"},
      {&EpShape::tokens, INT64_MAX, "int32"},
      {&EpShape::hidden, 0, "hidden_size"},
      {&EpShape::hidden, -64, "hidden_size"},
      {&EpShape::hidden, 8, nullptr},
      {&EpShape::hidden, 63, "16 bytes"},
      {&EpShape::hidden, 4, "16 bytes"},
      {&EpShape::hidden, kMaxHidden, nullptr},
      {&EpShape::hidden, kMaxHidden + 8, "hidden_size"},
      {&EpShape::element_bytes, 4, nullptr},
      {&EpShape::element_bytes, 0, "bytes"},
      {&EpShape::element_bytes, 1, "bytes"},
      {&EpShape::element_bytes, 8, "bytes"},
      {&EpShape::recv_rows, -1, "recv_capacity"},
      {&EpShape::recv_rows, 0, nullptr},
      {&EpShape::recv_rows, kMaxIndex, nullptr},
      {&EpShape::recv_rows, kMaxIndex + 1, "recv_capacity"},
      {&EpShape::expert_alignment, 0, "expert_alignment"},
      {&EpShape::expert_alignment, -8, "expert_alignment"},
      {&EpShape::expert_alignment, kMaxIndex, nullptr},
      {&EpShape::expert_alignment, kMaxIndex + 1, "expert_alignment"},
  };
  CHECK(Validate(good) == nullptr);
  for (const Case& test : cases) {
    CurrentCase() = "case " + std::to_string(&test - std::begin(cases));
    EpShape shape = good;
    shape.*test.field = test.value;
    const char* message = Validate(shape);
    if (test.needle == nullptr) {
      CHECK(message == nullptr);
    } else {
      CHECK(message != nullptr && std::string(message).find(test.needle) != std::string::npos);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestRoutingAgainstDefinition();
  jax_ep::TestPlaces();
  jax_ep::TestDroppedRowsAgainstDefinition();
  jax_ep::TestGuards();
  jax_ep::TestValidate();
  std::printf("routing_test: ok\n");
  return 0;
}
