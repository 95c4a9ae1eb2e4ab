// The results that the steps must give, computed from the definitions without regard to speed, and
// comparisons with those of a World. Used by steps_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "steps_world.h"

namespace jax_ep {

// The tables and rows of one expert rank. A row without a source is padding, tail or unused.
struct ExpectedRank {
  struct Row {
    int32_t source = -1, token = -1, k = -1, flat_slot = -1;
  };
  std::vector<Row> rows;  // [N]
  std::vector<int32_t> row_offsets, counts, row_of, slot_counts, row_base;
  int32_t num_dropped = 0;
};

class Reference {
 public:
  explicit Reference(const World& world) : world_(world) {
    for (int64_t rank = 0; rank < shape().ranks; ++rank) expected_.push_back(Place(rank));
  }

  const ExpectedRank& at(int64_t rank) const { return expected_[static_cast<size_t>(rank)]; }

  // The expert of an entry, or -1 if it has none.
  int64_t ExpertOf(int64_t source, int64_t token, int64_t k) const {
    const int32_t id = rank(source).ids.as<int32_t>()[token * shape().top_k + k];
    return id >= 0 && id < shape().experts() ? id : -1;
  }
  bool GoesTo(int64_t source, int64_t token, int64_t destination) const {
    for (int64_t k = 0; k < shape().top_k; ++k) {
      const int64_t expert = ExpertOf(source, token, k);
      if (expert >= 0 && expert / shape().local_experts == destination) return true;
    }
    return false;
  }

  void CheckSource(int64_t source) const {
    const Rank& got = rank(source);
    std::vector<int32_t> slots(static_cast<size_t>(shape().ranks), -1);
    int32_t invalid = 0;
    InvalidIdReport report{};
    for (int64_t token = 0; token < shape().tokens; ++token) {
      for (int64_t r = 0; r < shape().ranks; ++r) {
        slots[static_cast<size_t>(r)] += GoesTo(source, token, r);
      }
      for (int64_t k = 0; k < shape().top_k; ++k) {
        const int64_t entry = token * shape().top_k + k, expert = ExpertOf(source, token, k);
        const int64_t to = expert / shape().local_experts;
        CHECK(got.slot_of.as<int32_t>()[entry] ==
              (expert < 0 ? -1 : to * shape().tokens + slots[static_cast<size_t>(to)]));
        const int32_t id = got.ids.as<int32_t>()[entry];
        if (expert >= 0 || id == -1) continue;
        if (invalid++ == 0) report = {int32_t(token), int32_t(k), id, 1};
      }
    }
    CHECK(*got.num_invalid.as<int32_t>() == invalid);
    CHECK(std::memcmp(&got.report, &report, sizeof report) == 0);
  }

  void CheckExpertRank(int64_t index) const {
    const Rank& got = rank(index);
    const ExpectedRank& want = at(index);
    const auto same = [](const Buffer& buffer, const std::vector<int32_t>& values) {
      return std::equal(values.begin(), values.end(), buffer.as<int32_t>());
    };
    CHECK(same(got.row_offsets, want.row_offsets));
    CHECK(same(got.expert_counts, want.counts));
    CHECK(same(got.row_of, want.row_of));
    CHECK(same(got.slot_counts, want.slot_counts));
    CHECK(same(got.row_base, want.row_base));
    CHECK(*got.num_dropped.as<int32_t>() == want.num_dropped);
    for (int64_t e = 0; e < shape().local_experts; ++e) {
      const auto i = static_cast<size_t>(e);
      CHECK(got.expert_ids.as<int32_t>()[e] == e);
      CHECK(got.group_sizes.as<int32_t>()[e] == want.row_offsets[i + 1] - want.row_offsets[i]);
    }
    for (int64_t row = 0; row < shape().recv_rows; ++row) {
      const ExpectedRank::Row& from = want.rows[static_cast<size_t>(row)];
      const int32_t* info = got.src_info.as<int32_t>() + row * 3;
      CHECK(info[0] == from.source && info[1] == from.token && info[2] == from.k);
      CHECK(got.row_slot.as<int32_t>()[row] == from.flat_slot);
      CHECK(got.router_weights.as<uint32_t>()[row] == WeightBits(from));
    }
    const bool whole = world_.options.zero_tail;
    CheckEncodedRows(index, whole ? shape().recv_rows : want.row_offsets.back());
  }

  // Payloads and scales of a first dispatch; docs/formats.md says where tiled scales lie.
  void CheckEncodedRows(int64_t index, int64_t count) const {
    const Rank& got = rank(index);
    const ExpectedRank& want = at(index);
    const int64_t columns = world_.scale_bytes;
    std::vector<uint8_t> tiled(static_cast<size_t>(got.scales.bytes()), 0);
    const int64_t line = ScaleLine(shape().recv_rows);
    for (int64_t i = 0; world_.options.columns && i < line * columns / 4; ++i) {
      if (i % line >= shape().recv_rows) CHECK(got.scales.as<uint32_t>()[i] == 0);
    }
    int64_t group = 0, first_tile = 0;
    for (int64_t row = 0; row < count; ++row) {
      const ExpectedRank::Row& from = want.rows[static_cast<size_t>(row)];
      World::Coded coded{std::vector<uint8_t>(static_cast<size_t>(world_.payload_bytes)),
                         std::vector<uint8_t>(static_cast<size_t>(columns)),
                         {}};
      if (from.source >= 0) {
        coded = world_.Code(rank(from.source).tokens.data() + from.token * shape().row_bytes(),
                            world_.options.input_scale);
      }
      CHECK(std::equal(coded.payload.begin(), coded.payload.end(),
                       got.rows.data() + row * world_.payload_bytes));
      if (world_.options.columns) {
        for (int64_t at = 0; at < columns; ++at) {
          const int64_t to = (at / 4 * line + row) * 4 + at % 4;
          CHECK(got.scales.data()[to] == coded.scales[static_cast<size_t>(at)]);
        }
        continue;
      }
      if (!world_.options.tiled) {
        CHECK(std::equal(coded.scales.begin(), coded.scales.end(),
                         got.scales.data() + row * columns));
        continue;
      }
      const auto end_of = [&](int64_t g) { return want.row_offsets[static_cast<size_t>(g + 1)]; };
      const auto start_of = [&](int64_t g) { return want.row_offsets[static_cast<size_t>(g)]; };
      while (group < shape().local_experts && row >= end_of(group)) {
        first_tile += (end_of(group) - start_of(group) + 127) / 128;
        ++group;
      }
      if (group == shape().local_experts) continue;  // the tail
      const int64_t i = row - start_of(group);
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t at = (((first_tile + i / 128) * (columns / 4) + c / 4) * 32 + i % 32) * 16 +
                           i % 128 / 32 * 4 + c % 4;
        tiled[static_cast<size_t>(at)] = coded.scales[static_cast<size_t>(c)];
      }
    }
    if (!world_.options.tiled) return;
    CHECK(std::equal(tiled.begin(), tiled.end(), got.scales.data()));
    int64_t tiles = 0;
    for (size_t g = 0; g + 1 < want.row_offsets.size(); ++g) {
      CHECK(got.scales_offsets.as<int32_t>()[g] == tiles - want.row_offsets[g] / 128);
      tiles += (want.row_offsets[g + 1] - want.row_offsets[g] + 127) / 128;
    }
  }

  void CheckCachedRank(int64_t index) const {
    const Rank& got = rank(index);
    CheckRows(index, got.cached_rows, shape().recv_rows);
    for (int64_t row = 0; row < shape().recv_rows; ++row) {
      const uint32_t weight = got.cached_router_weights.as<uint32_t>()[row];
      const uint32_t untouched = kPoison * 0x01010101u;
      CHECK(weight ==
            (world_.options.weights ? WeightBits(at(index).rows[size_t(row)]) : untouched));
    }
  }

  // acc = rn(acc + rn(w * x)) over the rank's rows in k order, rounded to the wire; the ranks'
  // sums ascending, then the residual, rounded to the element.
  void CheckCombined(int64_t source) const {
    const Options& options = world_.options;
    const int64_t hidden = shape().hidden, top_k = shape().top_k;
    const Rank& got = rank(source);
    uint8_t rounded[4];
    std::vector<float> sums(static_cast<size_t>(hidden)), totals(static_cast<size_t>(hidden));
    for (int64_t token = 0; token < shape().tokens; ++token) {
      std::fill(totals.begin(), totals.end(), 0.0f);
      for (int64_t r = 0; r < shape().ranks; ++r) {
        if (!GoesTo(source, token, r)) continue;
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t k = 0; k < top_k; ++k) {
          const int64_t row = RowOf(source, token, k, r);
          if (row < 0) continue;
          const float weight = options.weights ? rank(r).router_weights.as<float>()[row] : 1.0f;
          for (int64_t h = 0; h < hidden; ++h) {
            const float product =
                weight * LoadElement(rank(r).expert_out.data(), options.element, row * hidden + h);
            sums[static_cast<size_t>(h)] = sums[static_cast<size_t>(h)] + product;
          }
        }
        OverWire(sums);
        for (size_t h = 0; h < sums.size(); ++h) totals[h] = totals[h] + sums[h];
      }
      for (int64_t h = 0; h < hidden; ++h) {
        float total = totals[static_cast<size_t>(h)];
        const int64_t index = token * hidden + h;
        if (options.residual) {
          total = total + LoadElement(got.residual.data(), options.element, index);
        }
        StoreElement(rounded, options.element, 0, total);
        CHECK(std::memcmp(rounded, got.output.data() + index * shape().element_bytes,
                          static_cast<size_t>(shape().element_bytes)) == 0);
      }
      for (int64_t k = 0; k < top_k; ++k) {
        uint32_t want = kPoison * 0x01010101u;
        if (options.weights) {
          const int64_t expert = ExpertOf(source, token, k);
          const int64_t owner = expert < 0 ? 0 : expert / shape().local_experts;
          const int64_t row = expert < 0 ? -1 : RowOf(source, token, k, owner);
          want = row < 0 ? 0 : rank(owner).row_grads.as<uint32_t>()[row];
        }
        CHECK(got.weight_grads.as<uint32_t>()[token * top_k + k] == want);
      }
    }
  }

 private:
  // Rounds a rank's sums as the source receives them.
  void OverWire(std::vector<float>& sums) const {
    const auto count = static_cast<int64_t>(sums.size());
    if (world_.options.quantized_sums) {
      std::vector<uint8_t> codes(sums.size()), scales(sums.size());
      cpu::QuantizeRow(CombineFormat{}, sums.data(), count, 1.0f, codes.data(), scales.data());
      cpu::DequantizeRow(CombineFormat{}, codes.data(), scales.data(), count, 1.0f, sums.data());
      return;
    }
    uint8_t rounded[4];
    for (float& sum : sums) {
      StoreElement(rounded, world_.options.wire, 0, sum);
      sum = LoadElement(rounded, world_.options.wire, 0);
    }
  }

  const EpShape& shape() const { return world_.shape(); }
  const Rank& rank(int64_t index) const { return world_.ranks[static_cast<size_t>(index)]; }

  // Row of (source, token, k) at `owner`, or -1 if k goes elsewhere or the row is dropped.
  int64_t RowOf(int64_t source, int64_t token, int64_t k, int64_t owner) const {
    if (!GoesTo(source, token, owner)) return -1;
    int64_t slot = 0;
    for (int64_t earlier = 0; earlier < token; ++earlier) slot += GoesTo(source, earlier, owner);
    const int64_t flat_slot = source * shape().tokens + slot;
    return at(owner).row_of[static_cast<size_t>(flat_slot * shape().top_k + k)];
  }

  uint32_t WeightBits(const ExpectedRank::Row& from) const {
    if (from.source < 0) return 0;
    return rank(from.source).weights.as<uint32_t>()[from.token * shape().top_k + from.k];
  }

  void CheckRows(int64_t index, const Buffer& rows, int64_t count) const {
    const auto bytes = static_cast<size_t>(shape().row_bytes());
    const std::vector<uint8_t> zeros(bytes, 0);
    for (int64_t row = 0; row < count; ++row) {
      const ExpectedRank::Row& from = at(index).rows[static_cast<size_t>(row)];
      const std::vector<uint8_t> want =
          from.source < 0
              ? zeros
              : world_
                    .Code(rank(from.source).tokens.data() + from.token * shape().row_bytes(),
                          world_.route_input_scale())
                    .elements;
      CHECK(std::memcmp(rows.data() + row * shape().row_bytes(), want.data(), bytes) == 0);
    }
  }

  // Rows by expert, source, token, k. Each expert's end is padded, and rows past N are dropped.
  ExpectedRank Place(int64_t owner) const {
    const int64_t N = shape().recv_rows, n = shape().tokens;
    ExpectedRank out;
    out.rows.resize(static_cast<size_t>(N));
    out.row_of.assign(static_cast<size_t>(shape().slots() * shape().top_k), -1);
    out.row_base.resize(static_cast<size_t>(shape().ranks * shape().local_experts));
    for (int64_t source = 0; source < shape().ranks; ++source) {
      int32_t slots = 0;
      for (int64_t token = 0; token < n; ++token) slots += GoesTo(source, token, owner);
      out.slot_counts.push_back(slots);
    }
    out.row_offsets.push_back(0);
    int64_t next = 0;
    for (int64_t e = 0; e < shape().local_experts; ++e) {
      const int64_t start = next;
      for (int64_t source = 0; source < shape().ranks; ++source) {
        out.row_base[static_cast<size_t>(source * shape().local_experts + e)] = int32_t(next);
        int64_t slot = -1;
        for (int64_t token = 0; token < n; ++token) {
          slot += GoesTo(source, token, owner);
          for (int64_t k = 0; k < shape().top_k; ++k) {
            if (ExpertOf(source, token, k) != owner * shape().local_experts + e) continue;
            const int64_t row = next++, flat_slot = source * n + slot;
            out.num_dropped += row >= N;
            if (row >= N) continue;
            out.row_of[static_cast<size_t>(flat_slot * shape().top_k + k)] = int32_t(row);
            out.rows[static_cast<size_t>(row)] = {int32_t(source), int32_t(token), int32_t(k),
                                                  int32_t(flat_slot)};
          }
        }
      }
      out.counts.push_back(int32_t(next - start));
      while ((next - start) % shape().expert_alignment != 0) ++next;
      out.row_offsets.push_back(int32_t(std::min(next, N)));
    }
    return out;
  }

  const World& world_;
  std::vector<ExpectedRank> expected_;
};

}  // namespace jax_ep
