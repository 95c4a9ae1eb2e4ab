// Combine on the CPU: sum a slot's rows at the expert rank, sum the ranks at the source.
#include <algorithm>
#include <cstring>

#include "cpu/mixed_calls.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "cpu/steps.h"
#include "formats/combine_wire.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cpu {
namespace {

// Partial sums stay in the first-level cache.
constexpr int64_t kSumElements = 1024;
static_assert(kSumElements % 128 == 0);  // the largest block of a format

// Put stores a run of sums in a message; AddTo adds a run of a message to sums. `first` is the
// run's first element.
template <typename Wire>
void Put(const float* sum, int64_t first, int64_t count, float input_scale, uint8_t* row,
         uint8_t* scales) {
  if constexpr (QuantizedFormat<Wire>) {
    QuantizeRow(Wire{}, sum, count, input_scale, row + Wire::PayloadBytes(first, 0),
                scales + Wire::ScaleBytes(first));
  } else {
    static_cast<void>(input_scale);
    static_cast<void>(scales);
    Round(reinterpret_cast<Wire*>(row) + first, sum, count);
  }
}
template <typename Wire>
void AddTo(float* sum, float weight, int64_t first, int64_t count, const uint8_t* row,
           const uint8_t* scales) {
  if constexpr (QuantizedFormat<Wire>) {
    alignas(64) float values[kSumElements];
    DequantizeRow(Wire{}, row + Wire::PayloadBytes(first, 0), scales + Wire::ScaleBytes(first),
                  count, kNoInputScale, values);
    Accumulate(sum, values, weight, count);
  } else {
    static_cast<void>(scales);
    Accumulate(sum, reinterpret_cast<const Wire*>(row) + first, weight, count);
  }
}

template <typename Element, typename Wire>
void SumRowsOfSlot(const CombinePackStep& step, const CombineMessage& message, const int32_t* rows,
                   uint8_t* to) {
  const EpShape& shape = step.shape;
  alignas(64) float sum[kSumElements];
  for (int64_t begin = 0; begin < shape.hidden; begin += kSumElements) {
    const int64_t count = Min(kSumElements, shape.hidden - begin);
    std::fill_n(sum, count, 0.0f);
    for (int64_t k = 0; k < shape.top_k; ++k) {
      const int32_t row = RowOrDropped(rows[k], shape.recv_rows);
      if (row < 0) continue;
      const float weight = step.router_weights != nullptr ? step.router_weights[row] : 1.0f;
      Accumulate(sum, static_cast<const Element*>(step.expert_out) + row * shape.hidden + begin,
                 weight, count);
    }
    Put<Wire>(sum, begin, count, step.input_scale, to + message.row, to + message.scales);
  }
}

// Returns the sum of a slot, numbered rank * slots + slot, or nullptr if its rank has sent none.
const uint8_t* MessageOf(const CombineUnpackStep& step, const CombineRegion& region,
                         const CombineMessage& message, int32_t slot) {
  if (slot < 0 || slot >= step.messages()) return nullptr;
  const int64_t source = slot / step.slots_of_rank(), at = slot % step.slots_of_rank();
  const uint8_t* from = step.recv + source * region.bytes;
  int32_t num_sums;
  std::memcpy(&num_sums, from + region.num_sums, sizeof num_sums);
  return at < num_sums ? from + region.messages + at * message.bytes : nullptr;
}

// The terms of a token's sum, in the order of addition. Each slot is looked up only once, so that
// what was checked is what is read.
struct Terms {
  const uint8_t* messages[kMaxTopK];
  float weights[kMaxTopK];
  int64_t count = 0;
};

template <typename Element, typename Wire>
void SumTermsOfToken(const CombineUnpackStep& step, const CombineMessage& message, int64_t token,
                     const Terms& terms) {
  const EpShape& shape = step.shape;
  alignas(64) float sum[kSumElements];
  for (int64_t begin = 0; begin < shape.hidden; begin += kSumElements) {
    const int64_t count = Min(kSumElements, shape.hidden - begin);
    std::fill_n(sum, count, 0.0f);
    for (int64_t i = 0; i < terms.count; ++i) {
      const uint8_t* from = terms.messages[i];
      AddTo<Wire>(sum, terms.weights[i], begin, count, from + message.row, from + message.scales);
    }
    const int64_t offset = token * shape.hidden + begin;
    if (const int64_t shared = SharedRowOf(step, token); shared >= 0) {
      Accumulate(sum, static_cast<const Element*>(step.shared_rows) + shared * shape.hidden + begin,
                 1.0f, count);
    }
    if (step.residual != nullptr) {
      Accumulate(sum, static_cast<const Element*>(step.residual) + offset, 1.0f, count);
    }
    Round(static_cast<Element*>(step.output) + offset, sum, count);
  }
}

// Returns the entries of a token, or its distinct slots in ascending order of ranks.
Terms TermsOf(const CombineUnpackStep& step, const CombineMessage& message, int64_t token) {
  const EpShape& shape = step.shape;
  const auto region = CombineRegion::Of(step.slots_of_rank(), message.bytes);
  Terms terms;
  for (int64_t k = 0; k < shape.top_k; ++k) {
    const int64_t entry = token * shape.top_k + k;
    const uint8_t* from = MessageOf(step, region, message, step.slot_of[entry]);
    if (from == nullptr) continue;
    terms.messages[terms.count] = from;
    terms.weights[terms.count++] = step.entry_weights != nullptr ? step.entry_weights[entry] : 1.0f;
  }
  if (step.by_entry) return terms;
  // Regions lie in the order of ranks, so this sorts by rank.
  std::sort(terms.messages, terms.messages + terms.count);
  terms.count = std::unique(terms.messages, terms.messages + terms.count) - terms.messages;
  return terms;
}

}  // namespace

RowTask CombinePack(const CombinePackStep& step) {
  const EpShape& shape = step.shape;
  const CombineMessage message = CombineMessageOf(step);
  const auto region = CombineRegion::Of(shape.tokens, message.bytes);
  for (int64_t source = 0; source < shape.ranks; ++source) {
    uint8_t* to = step.send + source * region.bytes;
    const int32_t num_sums =
        std::clamp<int32_t>(step.slot_counts[source], 0, static_cast<int32_t>(shape.tokens));
    WriteTag(to, step.tag);
    std::memcpy(to + region.num_sums, &num_sums, sizeof num_sums);
  }
  auto run = [=](int64_t begin, int64_t end) {
    const EpShape& shape = step.shape;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t source = item / shape.tokens, slot = item % shape.tokens;
      if (slot >= step.slot_counts[source]) continue;
      const int32_t* rows = step.row_of + item * shape.top_k;
      uint8_t* to = step.send + source * region.bytes + region.messages + slot * message.bytes;
      VisitWire(step, [&]<typename Element, typename Wire>(Element, Wire) {
        SumRowsOfSlot<Element, Wire>(step, message, rows, to);
      });
      for (int64_t k = 0; k < step.num_weights; ++k) {
        const int32_t row = RowOrDropped(rows[k], shape.recv_rows);
        const float grad = row < 0 ? 0.0f : step.weight_grads[row];
        std::memcpy(to + message.weight_grad + k * kWeightBytes, &grad, kWeightBytes);
      }
    }
  };
  const int64_t rows = Min(shape.recv_rows, shape.slots() * shape.top_k);
  return {shape.slots(), rows * shape.row_bytes(), std::move(run)};
}

RowTask CombineUnpack(const CombineUnpackStep& step) {
  const EpShape& shape = step.shape;
  const CombineMessage message = CombineMessageOf(step);
  const auto region = CombineRegion::Of(step.slots_of_rank(), message.bytes);
  if (!OfOneCall(step.check, step.recv, shape.ranks, region.bytes)) {
    FillNoValue(step.output, shape.tokens * shape.row_bytes());
    FillNoValue(step.weight_grads, shape.tokens * step.num_weights * kWeightBytes);
    return {};
  }
  auto run = [=](int64_t begin, int64_t end) {
    const EpShape& shape = step.shape;
    for (int64_t token = begin; token < end; ++token) {
      const int32_t* slot_of = step.slot_of + token * shape.top_k;
      const Terms terms = TermsOf(step, message, token);
      VisitWire(step, [&]<typename Element, typename Wire>(Element, Wire) {
        SumTermsOfToken<Element, Wire>(step, message, token, terms);
      });
      for (int64_t k = 0; k < step.num_weights; ++k) {
        float grad = 0.0f;
        if (const uint8_t* from = MessageOf(step, region, message, slot_of[k]); from != nullptr) {
          std::memcpy(&grad, from + message.weight_grad + k * kWeightBytes, kWeightBytes);
        }
        step.weight_grads[token * step.num_weights + k] = grad;
      }
    }
  };
  const int64_t slots = Min(step.messages(), shape.tokens * shape.top_k);
  return {shape.tokens, slots * message.bytes, std::move(run)};
}

}  // namespace jax_ep::cpu
