// The low-latency combine: like window/combine.cu, but sums travel in cells that need no flags. An
// item is a piece of a sum, and each worker has the elements of one cell.
#include <algorithm>
#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/low_latency/calls.h"
#include "cuda/low_latency/roles.cuh"
#include "cuda/window/call.cuh"
#include "cuda/window/grid.h"
#include "formats/element_type.h"
#include "protocol/routing.h"

namespace jax_ep::cuda {
namespace {

// Rows and ranks whose loads a worker has in flight at once.
constexpr int kRowsAtOnce = 6;
constexpr int kRanksAtOnce = 4;

struct LowLatencyCombinePlan {
  CallPlan call;
  Divisor tokens;
  Divisor pieces;
  int64_t row_bytes;
  uint32_t row_words;
  uint32_t cells;  // per row
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The elements of a row that one cell holds.
template <typename T>
using CellElements = Elements<T, 12 / static_cast<int>(sizeof(T))>;

template <typename T>
__device__ CellElements<T> LoadWords(const uint8_t* row, uint32_t first, uint32_t end) {
  CellElements<T> elements{};
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) {
    const auto* word = reinterpret_cast<const int32_t*>(row) + first + i;
    if (first + i < end) elements.words[i] = static_cast<uint32_t>(LoadAroundL1(word));
  }
  return elements;
}

template <typename Element, typename Wire>
class LowLatencyCombine {
 public:
  __device__ LowLatencyCombine(const CombineStep& step, const LowLatencyCombinePlan& plan,
                               WindowCall& call, const LowLatencyRoles& roles,
                               LowLatencyBlock& block)
      : step_(step), plan_(plan), call_(call), roles_(roles), block_(block) {}

  __device__ void Send(uint32_t item) {
    uint32_t piece, turn;
    const uint32_t part = plan_.pieces.Divide(item, piece);
    const uint32_t slot = call_.by_ranks().Divide(part, turn);
    const uint32_t source = call_.by_ranks().Rest(call_.rank() + 1 + turn);
    const uint32_t cell = piece * kLowLatencyWorkers + threadIdx.x;
    // Loaded at the same time as the count; unused where there is no such slot.
    const int32_t row = LaneRow(source, slot);
    const bool there = static_cast<int32_t>(slot) < step_.slot_counts[source];
    float sums[kCount] = {};
    if (there) SumRows(row, cell, sums);
    if (roles_.AwaitCredits()) {
      if (slot == 0 && piece == 0 && threadIdx.x == 0) {
        call_.PostCounts(source, 0, {0, call_.tag(), 0});
      }
      if (there && cell < plan_.cells) {
        const auto rounded = CellElements<Wire>::Round(sums);
        call_.PostCell(call_.Cells(source, call_.rank(), slot) + cell, rounded.words);
      }
    }
    roles_.ReadsOver();
  }

  __device__ void Receive(uint32_t item) {
    uint32_t piece;
    const uint32_t token = plan_.pieces.Divide(item, piece);
    const uint32_t cell = piece * kLowLatencyWorkers + threadIdx.x;
    float sums[kCount] = {};
    const bool ok = Gather(item, token, cell, sums);
    if (!ok) StoreSame(&block_.failed, true);
    roles_.ReadsOver();
    if (ok && cell < plan_.cells) StoreSums(token, cell, sums);
  }

 private:
  static constexpr int kCount = 12 / static_cast<int>(sizeof(Element));

  // Returns the row of this lane's k, or -1.
  __device__ int32_t LaneRow(uint32_t source, uint32_t slot) const {
    const EpShape& shape = step_.shape;
    if (Lane() >= shape.top_k) return -1;
    const int64_t entry = (int64_t{source} * shape.tokens + slot) * shape.top_k + Lane();
    return RowOrDropped(step_.row_of[entry], shape.recv_rows);
  }

  __device__ void SumRows(int32_t row, uint32_t cell, float (&sums)[kCount]) const {
    const float weight = row >= 0 && step_.router_weights != nullptr
                             ? LoadAroundL1(step_.router_weights + row)
                             : 1.0f;
    const auto* rows = static_cast<const uint8_t*>(step_.expert_out);
    unsigned left = __ballot_sync(kFullWarp, row >= 0);
    JAX_EP_NO_UNROLL
    while (left != 0) {
      CellElements<Element> loaded[kRowsAtOnce];
      float weights[kRowsAtOnce];
      unsigned present = 0;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (left == 0) break;
        const int lane = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        present |= 1u << i;
        weights[i] = __shfl_sync(kFullWarp, weight, lane);
        const int64_t from = __shfl_sync(kFullWarp, row, lane);
        loaded[i] = LoadWords<Element>(rows + from * plan_.row_bytes, cell * 3, plan_.row_words);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if ((present >> i & 1) == 0) break;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          sums[j] = MultiplyThenAdd(sums[j], weights[i], loaded[i].Get(j));
        }
      }
    }
  }

  // Adds what came for a token, rank after rank. Returns false if a wait failed. The call's first
  // item also checks the tags, so that sums of another call end this one.
  __device__ bool Gather(uint32_t item, uint32_t token, uint32_t cell, float (&sums)[kCount]) {
    // rank * n + slot of this lane's entry
    uint32_t flat = UINT32_MAX;
    if (Lane() < step_.shape.top_k) {
      flat = static_cast<uint32_t>(step_.slot_of[int64_t{token} * step_.shape.top_k + Lane()]);
    }
    const bool valid = flat < call_.ranks() * plan_.tokens.value;
    uint32_t slot;
    const uint32_t source = plan_.tokens.Divide(valid ? flat : 0, slot);
    bool ok = true;
    JAX_EP_NO_UNROLL
    for (uint32_t first = 0; first < call_.ranks(); first += kRanksAtOnce) {
      const CountCell* from[kRanksAtOnce + 1];
      uint32_t sources[kRanksAtOnce + 1];
#pragma unroll
      for (uint32_t i = 0; i < kRanksAtOnce; ++i) {
        const unsigned lanes = __ballot_sync(kFullWarp, valid && source == first + i);
        const int lane = lanes == 0 ? 0 : __ffs(static_cast<int>(lanes)) - 1;
        const int64_t message = __shfl_sync(kFullWarp, slot, lane);
        sources[i] = first + i;
        from[i] = lanes == 0 || cell >= plan_.cells
                      ? nullptr
                      : call_.Cells(call_.rank(), first + i, message) + cell;
      }
      const bool looks_at_tag = item == 0 && first == 0 && threadIdx.x < call_.ranks();
      sources[kRanksAtOnce] = threadIdx.x;
      from[kRanksAtOnce] = looks_at_tag ? call_.Counts(call_.rank(), threadIdx.x) : nullptr;
      CountCell cells[kRanksAtOnce + 1];
      ok = ok && call_.AwaitCells(from, sources, cells);
      // The cell belongs to another call; this reports it.
      if (ok && looks_at_tag && !call_.HasCounts(0, cells[kRanksAtOnce])) {
        ok = call_.AwaitCounts(threadIdx.x, 0, cells[kRanksAtOnce]);
      }
      if (!ok) continue;
#pragma unroll
      for (int i = 0; i < kRanksAtOnce; ++i) {
        if (from[i] == nullptr) continue;
        CellElements<Wire> elements;
#pragma unroll
        for (int j = 0; j < 3; ++j) elements.words[j] = static_cast<uint32_t>(cells[i].counts[j]);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sums[j] = Add(sums[j], elements.Get(j));
      }
    }
    return ok;
  }

  __device__ void StoreSums(uint32_t token, uint32_t cell, float (&sums)[kCount]) {
    const int64_t row = int64_t{token} * plan_.row_bytes;
    if (step_.residual != nullptr) {
      const auto* residual = static_cast<const uint8_t*>(step_.residual) + row;
      const auto loaded = LoadWords<Element>(residual, cell * 3, plan_.row_words);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] = Add(sums[j], loaded.Get(j));
    }
    const auto rounded = CellElements<Element>::Round(sums);
    auto* output = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(step_.output) + row);
#pragma unroll
    for (uint32_t j = 0; j < 3; ++j) {
      if (cell * 3 + j < plan_.row_words) output[cell * 3 + j] = rounded.words[j];
    }
  }

  const CombineStep& step_;
  const LowLatencyCombinePlan& plan_;
  WindowCall& call_;
  const LowLatencyRoles& roles_;
  LowLatencyBlock& block_;
};

#endif  // sm_90

template <typename Element, typename Wire>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    CombineLowLatencyKernel(const __grid_constant__ CombineStep step,
                            const __grid_constant__ WindowGroup group,
                            const __grid_constant__ LowLatencyCombinePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto& block = SharedObject<LowLatencyBlock>();
  WindowCall call(group, CallKind::kCombine, plan.call, block.call);
  call.BeginInOrder(block.item);
  if (threadIdx.x == 0) block.failed = false;
  if (blockIdx.x == 0 && threadIdx.x == 0) *step.done = 0;
  __syncthreads();
  LowLatencyRoles roles(call, block);
  LowLatencyCombine<Element, Wire> combine(step, plan, call, roles, block);
  const bool fills = roles.Run([&](uint32_t item) { combine.Send(item); },
                               [&](uint32_t item) { combine.Receive(item); });
  if (!fills) return;
  call.EndGroup();
  FillWords(static_cast<uint8_t*>(step.output), step.shape.tokens * step.shape.row_bytes(),
            kNoValue);
#endif
}

}  // namespace

bool IsLowLatency(const CombineStep& step, const WindowGroup& group) {
  return !step.has_options() && step.shape.tokens > 0 &&
         step.shape.tokens <= kLowLatencyCombineTokens && step.num_weights == 0 &&
         !step.quantized && ElementBytes(step.element) == ElementBytes(step.wire) &&
         HasCells(group, CallKind::kCombine, step.shape.tokens, CellsOf(step.shape.row_bytes()));
}

cudaError_t CombineLowLatency(const CombineStep& step, const WindowGroup& group,
                              cudaStream_t stream) {
  const EpShape& shape = step.shape;
  LowLatencyCombinePlan plan{};
  plan.row_bytes = shape.row_bytes();
  plan.row_words = static_cast<uint32_t>(plan.row_bytes / 4);
  plan.cells = static_cast<uint32_t>(CellsOf(plan.row_bytes));
  const int64_t pieces = DivideUp(plan.cells, kLowLatencyWorkers);
  plan.tokens = Divisor::Of(shape.tokens);
  plan.pieces = Divisor::Of(pieces);
  plan.call.work = {0, static_cast<uint32_t>(shape.ranks * shape.tokens * pieces),
                    static_cast<uint32_t>(shape.tokens * pieces)};
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag =
      CallTag(TagKind::kCombine, shape.tokens, plan.row_bytes, step.num_weights, step.site);
  const uint32_t items = plan.call.work.send_items + plan.call.work.receive_items;
  const dim3 grid(std::min(BlockLimit(group, UINT32_MAX), items));
  return VisitElements(step.element, step.wire,
                       [&]<typename Element, typename Wire>(Element, Wire) {
                         if constexpr (sizeof(Element) == sizeof(Wire)) {
                           return Launch(CombineLowLatencyKernel<Element, Wire>, grid,
                                         kLowLatencyThreads, 0, stream, step, group, plan);
                         } else {
                           return cudaErrorNotSupported;
                         }
                       });
}

cudaError_t PreloadCombineLowLatency() {
  cudaError_t error = cudaSuccess;
  for (const ElementType element : kElementTypes) {
    for (const ElementType wire : kElementTypes) {
      if (error != cudaSuccess) return error;
      error = VisitElements(element, wire, []<typename Element, typename Wire>(Element, Wire) {
        if constexpr (sizeof(Element) == sizeof(Wire)) {
          return Preload(CombineLowLatencyKernel<Element, Wire>);
        } else {
          return cudaSuccess;
        }
      });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
