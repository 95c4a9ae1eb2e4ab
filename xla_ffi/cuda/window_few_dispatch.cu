// The dispatch of calls with few tokens: as window_dispatch.cu, but messages travel in cells that
// need no flag. A block sends a token to every destination, or places one from one source; its
// threads go from registers to the link and from the window to rows.
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/primitives.cuh"
#include "cuda/window_call.cuh"
#include "cuda/window_calls.h"
#include "cuda/window_counts.cuh"
#include "cuda/window_dispatch_place.cuh"
#include "cuda/window_few.h"
#include "cuda/window_grid.h"
#include "cuda/window_groups.cuh"
#include "cuda/window_route.cuh"

namespace jax_ep::cuda {
namespace {

constexpr uint32_t kFewWarps = 16;
constexpr uint32_t kFewThreads = kFewWarps * kWarpSize;
// Cells of a payload that a thread has in its registers at once.
constexpr int kCellsAtOnce = 3;
// Warps that count ids: one up to the block's token, one all of them.
constexpr uint32_t kRouters = 2;

struct FewDispatchPlan {
  CallPlan call;
  Divisor count_cells;
  Divisor top_k;
  RankOfExpert rank_of{1};
  uint32_t row_words;
  uint32_t payload_cells;
  uint32_t message_items;  // place items that have a message; the others only clear
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

struct FewShared {
  CallBlock call;
  bool counts_arrived;
  int32_t slots[kMaxWindowRanks];  // of the block's token at each rank, or -1
  uint32_t entries[kMaxTopK][3];   // expert, position, weight
};

class FewDispatch {
 public:
  __device__ FewDispatch(const WindowDispatchStep& step, const FewDispatchPlan& plan,
                         WindowCall& call, FewShared& shared, uint8_t* memory)
      : step_(step),
        plan_(plan),
        call_(call),
        shared_(shared),
        groups_(step.shape, kFewWarps, memory + kRouters * step.shape.experts() * kIndexBytes),
        router_rows_(reinterpret_cast<int32_t*>(memory)) {}

  // Whole block. False where a wait failed; the block's wait for credits is part of it.
  __device__ bool Send(WorkItem item) {
    bool waited = false;
    for (; item.phase != Phase::kNone; item = call_.TakeForBlock(Queue::kSend)) {
      if (!SendToken(static_cast<int32_t>(item.index), waited)) return false;
      waited = true;
    }
    return waited || call_.AwaitCredits();
  }

  __device__ bool Place(WorkItem item) {
    if (item.phase == Phase::kNone) return true;
    groups_.Build(call_, plan_.count_cells, {threadIdx.x, kFewThreads, 0}, shared_.counts_arrived);
    bool ok = shared_.counts_arrived;
    while (ok && item.phase != Phase::kNone) {
      if (item.index == 0 && Warp() == 0) groups_.Write(step_);
      FillShare(item.index);
      ok = item.index >= plan_.message_items || PlaceToken(item.index);
      ok = __syncthreads_and(ok) != 0;
      if (ok) item = call_.TakeForBlock(Queue::kPlace);
    }
    return ok;
  }

 private:
  __device__ uint32_t payload_begin() const { return 1 + plan_.top_k.value; }

  // This thread's i-th cell of the token's payload.
  __device__ void LoadCell(int32_t token, uint32_t cell, uint32_t (&words)[3]) const {
    const auto* row = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(step_.tokens) +
                                                        token * step_.shape.row_bytes());
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      words[i] = cell * 3 + i < plan_.row_words ? row[cell * 3 + i] : 0;
    }
  }

  __device__ bool SendToken(int32_t token, bool waited) {
    uint32_t words[kCellsAtOnce][3];
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      LoadCell(token, threadIdx.x + i * kFewThreads, words[i]);
    }
    const uint32_t warp = static_cast<uint32_t>(Warp());
    const bool counts = token == 0 && warp == 1;
    int32_t* rows = router_rows_ + (counts ? static_cast<int32_t>(step_.shape.experts()) : 0);
    WarpRouter router(step_.shape, plan_.rank_of, step_.ids, rows);
    InvalidIds invalid;
    if (warp == 0 || counts) {
      router.Restart(0);
      router.CountTo(counts ? static_cast<int32_t>(step_.shape.tokens) : token, invalid);
    }
    if (warp == 0) Assign(router, token);
    // What warp 0 has written is there after either.
    if (waited) {
      __syncthreads();
    } else if (!call_.AwaitCredits()) {
      return false;
    }
    if (counts) PostRouted(step_, call_, router, invalid);
    JAX_EP_NO_UNROLL
    for (uint32_t turn = 1; turn <= call_.ranks(); ++turn) {
      Post(call_.by_ranks().Rest(call_.rank() + turn), token, words);
    }
    return true;
  }

  // Warp 0: the token's entries, in shared memory and in the route.
  __device__ void Assign(WarpRouter& router, int32_t token) {
    const TokenWalk walk(plan_.top_k);
    const int32_t end = token + 1, tokens = static_cast<int32_t>(step_.shape.tokens);
    const int64_t at = int64_t{token} * walk.top_k + Lane();
    const bool used = Lane() < walk.top_k;
    const float weight = used ? step_.weights[at] : 0.0f;
    const RoutedEntry entry = router.Assign(walk, end, router.LoadId(walk, token, end));
    if (Lane() < call_.ranks()) shared_.slots[Lane()] = -1;
    __syncwarp();
    if (!used) return;
    if (entry.rank >= 0) shared_.slots[entry.rank] = entry.slot;
    uint32_t (&words)[3] = shared_.entries[Lane()];
    words[0] = static_cast<uint32_t>(entry.id);
    words[1] = static_cast<uint32_t>(entry.position);
    words[2] = __float_as_uint(weight);
    step_.slot_of[at] = entry.rank < 0 ? -1 : entry.rank * tokens + entry.slot;
  }

  // Whole block: the token's message to one rank. Where it does not go only its slot and entries.
  __device__ void Post(uint32_t destination, int32_t token,
                       const uint32_t (&words)[kCellsAtOnce][3]) const {
    const int32_t slot = shared_.slots[destination];
    CountCell* cells = call_.Cells(destination, call_.rank(), token);
    if (threadIdx.x == 0) call_.PostCell(cells, {static_cast<uint32_t>(slot), 0, 0});
    if (threadIdx.x >= kWarpSize && threadIdx.x - kWarpSize < plan_.top_k.value) {
      const uint32_t k = threadIdx.x - kWarpSize;
      call_.PostCell(cells + 1 + k, shared_.entries[k]);
    }
    if (slot < 0) return;
    cells += payload_begin();
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      const uint32_t cell = threadIdx.x + i * kFewThreads;
      if (cell < plan_.payload_cells) call_.PostCell(cells + cell, words[i]);
    }
    JAX_EP_NO_UNROLL
    for (uint32_t cell = threadIdx.x + kCellsAtOnce * kFewThreads; cell < plan_.payload_cells;
         cell += kFewThreads) {
      uint32_t more[3];
      LoadCell(token, cell, more);
      call_.PostCell(cells + cell, more);
    }
  }

  // Whole block; false in threads of which a wait failed.
  __device__ bool PlaceToken(uint32_t item) {
    const EpShape& shape = step_.shape;
    uint32_t turn;
    const uint32_t token = call_.by_ranks().Divide(item, turn);
    const uint32_t source = call_.by_ranks().Rest(call_.rank() + turn);
    const CountCell* message = call_.Cells(call_.rank(), source, token);
    const int k = Lane();
    const bool has_entry = k < shape.top_k;
    CountCell cells[2];
    const bool arrived = call_.AwaitCells<2>({message, has_entry ? message + 1 + k : nullptr},
                                             {source, source}, cells);
    if (!__all_sync(kFullWarp, arrived)) return false;
    const int32_t slot = cells[0].counts[0];
    if (slot < 0 || slot >= shape.tokens) return true;
    int32_t row = -1;
    if (has_entry) {
      const int32_t expert =
          cells[1].counts[0] - static_cast<int32_t>(call_.rank() * shape.local_experts);
      row = groups_.RowOf(source, expert, cells[1].counts[1]);
      if (Warp() == 0) Record(source, token, slot, row, cells[1]);
    }
    return PlacePayload(message + payload_begin(), source, row);
  }

  __device__ void Record(uint32_t source, uint32_t token, int32_t slot, int32_t row,
                         const CountCell& entry) const {
    const EpShape& shape = step_.shape;
    const int64_t flat = source * shape.tokens + slot;
    step_.row_of[flat * shape.top_k + Lane()] = row;
    if (row < 0) return;
    step_.row_slot[row] = static_cast<int32_t>(flat);
    int32_t* info = step_.src_info + int64_t{row} * 3;
    info[0] = static_cast<int32_t>(source);
    info[1] = static_cast<int32_t>(token);
    info[2] = Lane();
    step_.row_weights[row] = __int_as_float(entry.counts[2]);
  }

  // To the rows of the warp's lanes.
  __device__ bool PlacePayload(const CountCell* payload, uint32_t source, int32_t row) const {
    const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
    if (lanes == 0) return true;
    bool ok = true;
    JAX_EP_NO_UNROLL
    for (uint32_t first = 0; first < plan_.payload_cells; first += kCellsAtOnce * kFewThreads) {
      const CountCell* from[kCellsAtOnce];
      uint32_t at[kCellsAtOnce], sources[kCellsAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
        at[i] = first + threadIdx.x + i * kFewThreads;
        sources[i] = source;
        from[i] = at[i] < plan_.payload_cells ? payload + at[i] : nullptr;
      }
      CountCell cells[kCellsAtOnce];
      ok = ok && call_.AwaitCells(from, sources, cells);
      JAX_EP_NO_UNROLL
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        const int64_t to = FromLowest(left, row);
        auto* words = reinterpret_cast<int32_t*>(step_.rows + to * step_.shape.row_bytes());
#pragma unroll
        for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
#pragma unroll
          for (uint32_t j = 0; j < 3; ++j) {
            if (ok && at[i] * 3 + j < plan_.row_words) words[at[i] * 3 + j] = cells[i].counts[j];
          }
        }
      }
    }
    return ok;
  }

  // An equal share of everything that no message fills: padding, the tail, slots without a token.
  __device__ void FillShare(uint32_t item) const {
    const EpShape& shape = step_.shape;
    const int64_t items = plan_.call.work.place_items;
    if (shape.expert_alignment > 1) {
      JAX_EP_NO_UNROLL
      for (int64_t expert = item; expert < shape.local_experts; expert += items) {
        Clear(groups_.PaddingOf(expert), true);
      }
    }
    const int64_t end = groups_.End(), share = CeilDiv(shape.recv_rows - end, items);
    const int64_t begin = Min(end + item * share, shape.recv_rows);
    Clear({begin, Min(begin + share, shape.recv_rows)}, step_.zero_tail);
    if (item >= plan_.message_items || Warp() != 0 || Lane() >= shape.top_k) return;
    uint32_t source;
    const int32_t slot = static_cast<int32_t>(call_.by_ranks().Divide(item, source));
    if (slot < groups_.Slots(source)) return;
    step_.row_of[(source * shape.tokens + slot) * shape.top_k + Lane()] = -1;
  }

  __device__ void Clear(const GroupTable::Range& range, bool payload) const {
    JAX_EP_NO_UNROLL
    for (int64_t row = range.begin + threadIdx.x; row < range.end; row += kFewThreads) {
      step_.row_slot[row] = -1;
      step_.row_weights[row] = 0.0f;
    }
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * 3 + threadIdx.x; i < range.end * 3; i += kFewThreads) {
      step_.src_info[i] = -1;
    }
    if (!payload) return;
    const int64_t vectors = step_.shape.row_bytes() / kVectorBytes;
    auto* rows = reinterpret_cast<uint4*>(step_.rows);
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * vectors + threadIdx.x; i < range.end * vectors;
         i += kFewThreads) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }

  const WindowDispatchStep& step_;
  const FewDispatchPlan& plan_;
  WindowCall& call_;
  FewShared& shared_;
  GroupTable groups_;
  int32_t* router_rows_;  // [kRouters, E]
};

#endif  // sm_90

__global__ void __launch_bounds__(kFewThreads, 1)
    WindowFewDispatchKernel(const __grid_constant__ WindowDispatchStep step,
                            const __grid_constant__ WindowGroup group,
                            const __grid_constant__ FewDispatchPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ FewShared shared;
  WindowCall call(group, CallKind::kDispatch, plan.call, shared.call);
  call.Begin();
  if (threadIdx.x == 0) shared.counts_arrived = true;
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    FewDispatch dispatch(step, plan, call, shared, memory);
    const bool sends = call.senders() != 0;
    ok = sends ? dispatch.Send(call.FirstOfBlock(Queue::kSend)) : call.AwaitCredits();
    if (ok) ok = dispatch.Place(call.FirstOfBlock(Queue::kPlace));
  }
  bool failed;
  if (!call.Leave(ok, failed)) return;
  call.Commit(failed);
  if (failed) Fail<Bf16Format>(step, ScalePlan{});
#endif
}

}  // namespace

bool TakesFewTokens(const WindowDispatchStep& step) {
  return step.shape.tokens > 0 && step.shape.tokens <= kFewTokens;
}

cudaError_t WindowFewDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                              cudaStream_t stream) {
  const EpShape& shape = step.shape;
  FewDispatchPlan plan{};
  plan.count_cells = Divisor::Of(CountCells(shape.local_experts));
  plan.top_k = Divisor::Of(shape.top_k);
  plan.rank_of = RankOfExpert(static_cast<int32_t>(shape.local_experts));
  plan.row_words = static_cast<uint32_t>(shape.row_bytes() / 4);
  plan.payload_cells = static_cast<uint32_t>(CellsOf(shape.row_bytes()));
  plan.message_items = static_cast<uint32_t>(shape.tokens * shape.ranks);
  const int64_t clear_bytes = kTableBytes + (step.zero_tail ? shape.row_bytes() : 0);
  plan.call.work = {0, static_cast<uint32_t>(shape.tokens),
                    PlaceItems(plan.message_items, shape.recv_rows * clear_bytes)};
  plan.call.roles = BlockRoles::OneItem(BlockLimit(group, UINT32_MAX), plan.call.work);
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag = CallTag(0, shape.tokens, shape.row_bytes(), shape.top_k, step.site);
  const int64_t shared =
      kRouters * shape.experts() * kIndexBytes + GroupTable::Bytes(shape, kFewWarps);
  const dim3 grid(plan.call.roles.blocks);
  return Launch(WindowFewDispatchKernel, grid, kFewThreads, static_cast<size_t>(shared), stream,
                step, group, plan);
}

cudaError_t PreloadWindowFewDispatch() {
  return PreloadShared(WindowFewDispatchKernel, int64_t{64} << 10);
}

}  // namespace jax_ep::cuda
