// Combine on the GPU: sum a slot's rows at the expert rank, sum the ranks at the source. A lane
// holds the float32 sums of one 16-byte vector of elements; terms come in the order of the CPU.
#include "cuda/elements.cuh"
#include "cuda/launch.h"
#include "cuda/primitives.cuh"
#include "cuda/steps.h"
#include "formats/element_type.h"
#include "formats/numbers.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cuda {
namespace {

// Rows in flight a lane.
constexpr int kRowsAtOnce = 4;
static_assert(kWarpSize % kRowsAtOnce == 0);

// The terms of a sum in their order: lane i holds the index and the weight of the i-th row.
struct TermList {
  int32_t row = 0;
  float weight = 1.0f;
  int count = 0;
};

// Adds a vector of each listed row. `base` is the vector's address in row 0; `in_row` is false in
// lanes past the row's end, which only take part in the collectives.
template <typename T, int kCount>
__device__ void AddTerms(float (&sum)[kCount], const TermList& terms, const uint8_t* base,
                         int64_t row_stride, bool in_row) {
  for (int first = 0; first < terms.count; first += kRowsAtOnce) {
    Elements<T, kCount> loaded[kRowsAtOnce];
    float weight[kRowsAtOnce];
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      const int32_t row = __shfl_sync(kFullWarp, terms.row, first + j);
      weight[j] = __shfl_sync(kFullWarp, terms.weight, first + j);
      if (in_row && first + j < terms.count) loaded[j].Load(base + row * row_stride);
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

// Calls visit(vector, in_row) for this lane's vectors of a part, with all lanes.
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
    CombinePackKernel(const __grid_constant__ CombinePackStep step, CombineMessage message) {
  constexpr int kCount = kLaneElements<Element>;
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int64_t row_bytes = shape.hidden * static_cast<int64_t>(sizeof(Element));
  const int lane = Lane();
  ForEachPart(shape.slots(), row_bytes, [&](int64_t item, int64_t part) {
    const uint32_t slot = static_cast<uint32_t>(item);
    if (static_cast<int32_t>(slot % tokens) >= step.slot_counts[slot / tokens]) return;
    const int32_t row = lane < shape.top_k
                            ? RowOrDropped(step.row_of[item * shape.top_k + lane], shape.recv_rows)
                            : -1;
    const float weight = row >= 0 && step.row_weights != nullptr ? step.row_weights[row] : 1.0f;
    TermList terms;
    for (unsigned left = __ballot_sync(kFullWarp, row >= 0); left != 0; left &= left - 1) {
      const int32_t next_row = FromLowest(left, row);
      const float next_weight = FromLowest(left, weight);
      if (lane == terms.count) terms.row = next_row, terms.weight = next_weight;
      ++terms.count;
    }
    uint8_t* to = step.send + item * message.bytes;
    ForEachVector(part, row_bytes, [&](int64_t vector, bool in_row) {
      float sum[kCount] = {};
      const auto* base = static_cast<const uint8_t*>(step.expert_out) + vector * kVectorBytes;
      AddTerms<Element>(sum, terms, base, row_bytes, in_row);
      if (!in_row) return;
      Elements<Wire, kCount>::Round(sum).Store(to + message.row +
                                               vector * Elements<Wire, kCount>::kBytes);
    });
    if (part == 0 && lane < step.num_weights) {
      FloatAt(to, message.weight_grad)[lane] = row < 0 ? 0.0f : step.weight_grads[row];
    }
  });
}

template <typename Element, typename Wire>
__global__ void __launch_bounds__(kBlockThreads)
    CombineUnpackKernel(const __grid_constant__ CombineUnpackStep step, CombineMessage message) {
  constexpr int kCount = kLaneElements<Element>;
  const EpShape& shape = step.shape;
  const int64_t row_bytes = shape.hidden * static_cast<int64_t>(sizeof(Element));
  const int lane = Lane();
  ForEachPart(shape.tokens, row_bytes, [&](int64_t token, int64_t part) {
    int32_t slot = lane < shape.top_k ? step.slot_of[token * shape.top_k + lane] : -1;
    if (slot >= shape.slots()) slot = -1;
    // The distinct slots, ascending, which is by rank: slots are numbered rank * n + slot.
    TermList terms;
    for (int32_t floor = 0;; ++terms.count) {
      const unsigned candidate = slot >= floor ? static_cast<unsigned>(slot) : UINT32_MAX;
      const unsigned next = __reduce_min_sync(kFullWarp, candidate);
      if (next == UINT32_MAX) break;
      if (lane == terms.count) terms.row = static_cast<int32_t>(next);
      floor = static_cast<int32_t>(next) + 1;
    }
    ForEachVector(part, row_bytes, [&](int64_t vector, bool in_row) {
      float sum[kCount] = {};
      const uint8_t* base = step.recv + message.row + vector * Elements<Wire, kCount>::kBytes;
      AddTerms<Wire>(sum, terms, base, message.bytes, in_row);
      if (!in_row) return;
      const int64_t offset = token * row_bytes + vector * kVectorBytes;
      if (step.residual != nullptr) {
        Elements<Element, kCount> residual;
        residual.Load(static_cast<const uint8_t*>(step.residual) + offset);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = Add(sum[i], residual.Get(i));
      }
      Elements<Element, kCount>::Round(sum).Store(static_cast<uint8_t*>(step.output) + offset);
    });
    if (part == 0 && lane < step.num_weights) {
      step.weight_grads[token * step.num_weights + lane] =
          slot < 0 ? 0.0f : FloatAt(step.recv + slot * message.bytes, message.weight_grad)[lane];
    }
  });
}

}  // namespace

cudaError_t CombinePack(const CombinePackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  if (shape.slots() == 0) return cudaSuccess;
  const auto message = CombineMessage::Of(shape.hidden * ElementBytes(step.wire), step.num_weights);
  return VisitElements(
      step.element, step.wire, [&]<typename Element, typename Wire>(Element, Wire) {
        return Launch(CombinePackKernel<Element, Wire>, RowGrid(shape.slots(), shape.row_bytes()),
                      kBlockThreads, 0, stream, step, message);
      });
}

cudaError_t CombineUnpack(const CombineUnpackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  if (shape.tokens == 0) return cudaSuccess;
  const auto message = CombineMessage::Of(shape.hidden * ElementBytes(step.wire), step.num_weights);
  return VisitElements(
      step.element, step.wire, [&]<typename Element, typename Wire>(Element, Wire) {
        return Launch(CombineUnpackKernel<Element, Wire>, RowGrid(shape.tokens, shape.row_bytes()),
                      kBlockThreads, 0, stream, step, message);
      });
}

cudaError_t PreloadCombineKernels() {
  cudaError_t error = cudaSuccess;
  constexpr ElementType kTypes[] = {ElementType::kFloat32, ElementType::kBFloat16,
                                    ElementType::kFloat16};
  for (const ElementType element : kTypes) {
    for (const ElementType wire : kTypes) {
      if (error != cudaSuccess) return error;
      error = VisitElements(element, wire, [&]<typename Element, typename Wire>(Element, Wire) {
        const cudaError_t pack = Preload(CombinePackKernel<Element, Wire>);
        return pack != cudaSuccess ? pack : Preload(CombineUnpackKernel<Element, Wire>);
      });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
