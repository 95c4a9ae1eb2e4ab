// The combine of the collective transport. CombinePackKernel sums a slot's rows at the expert rank,
// and CombineUnpackKernel sums what the ranks have sent at the source. A lane holds the float32
// sums of one 16-byte vector of elements. Terms are added in the same order as on the CPU, so
// results are equal bit for bit.
#include "cuda/collective/mixed_calls.cuh"
#include "cuda/collective/steps.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/quantize.cuh"
#include "formats/combine_wire.h"
#include "formats/element_type.h"
#include "formats/numbers.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cuda {
namespace {

// Rows in flight per lane.
constexpr int kRowsAtOnce = 4;
static_assert(kWarpSize % kRowsAtOnce == 0);

// The terms of a sum in order: lane i holds the index and the weight of the i-th row.
struct TermList {
  int32_t row = 0;
  float weight = 1.0f;
  int count = 0;
};

// The rows of the lanes that have one, in lane order.
__device__ TermList TermsOfLanes(int32_t row, float weight) {
  TermList terms;
  for (unsigned left = __ballot_sync(kFullWarp, row >= 0); left != 0; left &= left - 1) {
    const int32_t next_row = FromLowest(left, row);
    const float next_weight = FromLowest(left, weight);
    if (Lane() == terms.count) terms.row = next_row, terms.weight = next_weight;
    ++terms.count;
  }
  return terms;
}

// Adds a vector of each listed row, which `load(vector, row)` fills. `in_row` is false in lanes
// past the row's end, which only take part in the collectives.
template <typename Vector, int kCount, typename Load>
__device__ void AddTerms(float (&sum)[kCount], const TermList& terms, bool in_row, Load load) {
  for (int first = 0; first < terms.count; first += kRowsAtOnce) {
    Vector loaded[kRowsAtOnce];
    float weight[kRowsAtOnce];
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      const int32_t row = __shfl_sync(kFullWarp, terms.row, first + j);
      weight[j] = __shfl_sync(kFullWarp, terms.weight, first + j);
      if (in_row && first + j < terms.count) load(loaded[j], row);
    }
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      if (!in_row || first + j >= terms.count) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sum[i] = MultiplyThenAdd(sum[i], weight[j], loaded[j].Get(i));
      }
    }
  }
}

template <typename Wire, int kCount>
struct WireVectorOf {
  using type = Elements<Wire, kCount>;
};
template <QuantizedFormat Format, int kCount>
struct WireVectorOf<Format, kCount> {
  using type = DecodedVector<Format, kCount>;
};
// kCount elements of a row as they travel.
template <typename Wire, int kCount>
using WireVector = typename WireVectorOf<Wire, kCount>::type;

// Calls visit(vector, in_row) for this lane's vectors of a part. All lanes make the same number of
// calls.
template <typename Visit>
__device__ void ForEachVector(int64_t part, int64_t row_bytes, Visit visit) {
  const int64_t vectors = row_bytes / kVectorBytes;
  const int64_t begin = part * kPartVectors;
  const int64_t end = Min(begin + kPartVectors, vectors);
  for (int64_t first = begin; first < end; first += kWarpSize) {
    visit(first + Lane(), first + Lane() < end);
  }
}

template <typename Element, typename Wire>
__global__ void __launch_bounds__(kBlockThreads)
    CombinePackKernel(const __grid_constant__ CombinePackStep step, CombineRegion region,
                      CombineMessage message) {
  constexpr int kCount = kLaneElements<Element>;
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int64_t row_bytes = shape.hidden * static_cast<int64_t>(sizeof(Element));
  const int lane = Lane();
  if (blockIdx.x == 0) {
    for (int64_t source = threadIdx.x; source < shape.ranks; source += kBlockThreads) {
      const int64_t sums = Min<int64_t>(step.slot_counts[source], shape.tokens);
      uint8_t* to = step.send + source * region.bytes;
      WriteTag(to, step.tag);
      *Int32At(to, region.num_sums) = static_cast<int32_t>(sums < 0 ? 0 : sums);
    }
  }
  ForEachPart(shape.slots(), row_bytes, [&](int64_t item, int64_t part) {
    const uint32_t source = static_cast<uint32_t>(item) / tokens;
    const uint32_t slot = static_cast<uint32_t>(item) % tokens;
    if (static_cast<int32_t>(slot) >= step.slot_counts[source]) return;
    const int32_t row = lane < shape.top_k
                            ? RowOrDropped(step.row_of[item * shape.top_k + lane], shape.recv_rows)
                            : -1;
    const float weight =
        row >= 0 && step.router_weights != nullptr ? step.router_weights[row] : 1.0f;
    const TermList terms = TermsOfLanes(row, weight);
    uint8_t* to = step.send + source * region.bytes + region.messages + slot * message.bytes;
    ForEachVector(part, row_bytes, [&](int64_t vector, bool in_row) {
      float sum[kCount] = {};
      const auto* base = static_cast<const uint8_t*>(step.expert_out) + vector * kVectorBytes;
      AddTerms<Elements<Element, kCount>>(sum, terms, in_row, [&](auto& loaded, int32_t row) {
        loaded.Load(base + row * row_bytes);
      });
      if constexpr (QuantizedFormat<Wire>) {
        const auto encoded = EncodedVector<Wire, kCount>::Of(sum, step.input_scale);
        if (in_row) encoded.Store(to + message.row, to + message.scales, vector);
      } else if (in_row) {
        Elements<Wire, kCount>::Round(sum).Store(to + message.row +
                                                 vector * Elements<Wire, kCount>::kBytes);
      }
    });
    if (part == 0 && lane < step.num_weights) {
      FloatAt(to, message.weight_grad)[lane] = row < 0 ? 0.0f : step.weight_grads[row];
    }
  });
}

// Returns where the sum of `slot` (rank * slots + slot) begins in `recv`, in lines of
// kMessageStrideBytes, or -1 if that rank sent none. 31 bits of lines cover 256 GiB.
__device__ int32_t LineOfSlot(const CombineUnpackStep& step, const CombineRegion& region,
                              const CombineMessage& message, int32_t slot) {
  if (slot < 0 || slot >= step.messages()) return -1;
  const uint32_t slots = static_cast<uint32_t>(step.slots_of_rank());
  const uint32_t source = static_cast<uint32_t>(slot) / slots;
  const uint32_t at = static_cast<uint32_t>(slot) % slots;
  const int64_t begin = source * region.bytes;
  if (static_cast<int32_t>(at) >= *Int32At(step.recv + begin, region.num_sums)) return -1;
  return static_cast<int32_t>((begin + region.messages + at * message.bytes) / kMessageStrideBytes);
}

template <typename Element, typename Wire>
__global__ void __launch_bounds__(kBlockThreads)
    CombineUnpackKernel(const __grid_constant__ CombineUnpackStep step, CombineRegion region,
                        CombineMessage message) {
  constexpr int kCount = kLaneElements<Element>;
  const EpShape& shape = step.shape;
  const int64_t row_bytes = shape.hidden * static_cast<int64_t>(sizeof(Element));
  const int lane = Lane();
  if (!OfOneCall(step.check, step.recv, shape.ranks, region.bytes)) {
    FillNoValue(step.output, shape.tokens * row_bytes);
    FillNoValue(step.weight_grads, shape.tokens * step.num_weights * kWeightBytes);
    return;
  }
  ForEachPart(shape.tokens, row_bytes, [&](int64_t token, int64_t part) {
    const int64_t entry = token * shape.top_k + lane;
    const int32_t slot = lane < shape.top_k ? step.slot_of[entry] : -1;
    const int32_t line = LineOfSlot(step, region, message, slot);
    TermList terms;
    if (step.by_entry) {
      const bool weighted = line >= 0 && step.entry_weights != nullptr;
      terms = TermsOfLanes(line, weighted ? step.entry_weights[entry] : 1.0f);
    } else {
      // The distinct messages in ascending order, which is the order of ranks.
      for (int32_t floor = 0;; ++terms.count) {
        const unsigned candidate = line >= floor ? static_cast<unsigned>(line) : UINT32_MAX;
        const unsigned next = __reduce_min_sync(kFullWarp, candidate);
        if (next == UINT32_MAX) break;
        if (lane == terms.count) terms.row = static_cast<int32_t>(next);
        floor = static_cast<int32_t>(next) + 1;
      }
    }
    const int64_t shared_row = SharedRowOf(step, token);
    ForEachVector(part, row_bytes, [&](int64_t vector, bool in_row) {
      float sum[kCount] = {};
      AddTerms<WireVector<Wire, kCount>>(sum, terms, in_row, [&](auto& loaded, int32_t line) {
        const uint8_t* from = step.recv + line * kMessageStrideBytes;
        if constexpr (QuantizedFormat<Wire>) {
          loaded.Load(from + message.row, from + message.scales, vector);
        } else {
          loaded.Load(from + message.row + vector * Elements<Wire, kCount>::kBytes);
        }
      });
      if (!in_row) return;
      const int64_t offset = token * row_bytes + vector * kVectorBytes;
      const auto add = [&](const void* rows, int64_t at) {
        Elements<Element, kCount> loaded;
        loaded.Load(static_cast<const uint8_t*>(rows) + at);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = Add(sum[i], loaded.Get(i));
      };
      if (shared_row >= 0) add(step.shared_rows, shared_row * row_bytes + vector * kVectorBytes);
      if (step.residual != nullptr) add(step.residual, offset);
      Elements<Element, kCount>::Round(sum).Store(static_cast<uint8_t*>(step.output) + offset);
    });
    if (part == 0 && lane < step.num_weights) {
      step.weight_grads[token * step.num_weights + lane] =
          line < 0 ? 0.0f
                   : FloatAt(step.recv + line * kMessageStrideBytes, message.weight_grad)[lane];
    }
  });
}

}  // namespace

cudaError_t CombinePack(const CombinePackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const CombineMessage message = CombineMessageOf(step);
  return VisitWire(step, [&]<typename Element, typename Wire>(Element, Wire) {
    // Also without slots, because the regions' tags must be written.
    return Launch(CombinePackKernel<Element, Wire>, SomeRowGrid(shape.slots(), shape.row_bytes()),
                  kBlockThreads, 0, stream, step, CombineRegion::Of(shape.tokens, message.bytes),
                  message);
  });
}

cudaError_t CombineUnpack(const CombineUnpackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const CombineMessage message = CombineMessageOf(step);
  return VisitWire(step, [&]<typename Element, typename Wire>(Element, Wire) {
    return Launch(CombineUnpackKernel<Element, Wire>, SomeRowGrid(shape.tokens, shape.row_bytes()),
                  kBlockThreads, 0, stream, step,
                  CombineRegion::Of(step.slots_of_rank(), message.bytes), message);
  });
}

cudaError_t PreloadCombineKernels() {
  cudaError_t error = cudaSuccess;
  const auto preload = [&]<typename Element, typename Wire>(Element, Wire) {
    if (error == cudaSuccess) error = Preload(CombinePackKernel<Element, Wire>);
    if (error == cudaSuccess) error = Preload(CombineUnpackKernel<Element, Wire>);
  };
  for (const ElementType element : kElementTypes) {
    for (const ElementType wire : kElementTypes) VisitElements(element, wire, preload);
    VisitElement(element, [&](auto type) {
      ForEachWireFormat([&](auto format) { preload(type, format); });
    });
  }
  return error;
}

}  // namespace jax_ep::cuda
