// The dispatch of calls with few tokens: as window_dispatch.cu, but messages travel in cells that
// need no flag. A block sends a piece of a token, or places one; its workers go from registers to
// the link and from the window to rows.
#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window_call.cuh"
#include "cuda/window_calls.h"
#include "cuda/window_dispatch_place.cuh"
#include "cuda/window_few.cuh"
#include "cuda/window_few.h"
#include "cuda/window_few_place.cuh"
#include "cuda/window_few_send.cuh"
#include "cuda/window_grid.h"

namespace jax_ep::cuda {
namespace {

__global__ void __launch_bounds__(kFewThreads, 1)
    WindowFewDispatchKernel(const __grid_constant__ WindowDispatchStep step,
                            const __grid_constant__ WindowGroup group,
                            const __grid_constant__ FewDispatchPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ FewShared shared;
  WindowCall call(group, CallKind::kDispatch, plan.call, shared.block.call);
  call.BeginInOrder(shared.block.item);
  LoadEntries(step, shared);
  if (threadIdx.x == 0) {
    shared.counts_arrived = true;
    shared.block.failed = false;
  }
  __syncthreads();
  FewCrew crew(call, shared.block);
  FewSender sender(step, plan, call, crew, shared, reinterpret_cast<int32_t*>(memory));
  FewPlacer placer(step, plan, call, crew, shared,
                   memory + kRouters * step.shape.experts() * kIndexBytes);
  const bool fills = crew.Run([&](uint32_t item) { sender.Send(item); },
                              [&](uint32_t item) { placer.Place(item); });
  if (!fills) return;
  call.EndGroup();
  Fail<Bf16Format>(step, ScalePlan{});
#endif
}

}  // namespace

bool TakesFewTokens(const WindowDispatchStep& step) {
  // An item each for as many multiprocessors as there are at least: a block's second item comes
  // later than a flag would. Very few tokens win even so.
  constexpr int64_t kItems = 128, kVeryFew = 8;
  const int64_t tokens = step.shape.tokens;
  if (tokens <= 0 || tokens > kFewDispatchTokens) return false;
  return tokens <= kVeryFew || tokens * (step.shape.ranks + 1) <= kItems;
}

cudaError_t WindowFewDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                              cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const uint32_t blocks = BlockLimit(group, UINT32_MAX);
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const uint32_t ranks = static_cast<uint32_t>(shape.ranks);
  FewDispatchPlan plan{};
  plan.count_cells = Divisor::Of(CountCells(shape.local_experts));
  plan.top_k = Divisor::Of(shape.top_k);
  plan.rank_of = RankOfExpert(static_cast<int32_t>(shape.local_experts));
  plan.row_words = static_cast<uint32_t>(shape.row_bytes() / 4);
  plan.payload_cells = static_cast<uint32_t>(CellsOf(shape.row_bytes()));
  plan.messages = tokens * ranks;
  // A multiprocessor stores no faster than 50 GB/s: as many of them as there are.
  const bool split = 2 * plan.messages <= blocks;
  plan.sends = Divisor::Of(split ? ranks : 1);
  plan.turns = split ? 1 : ranks;
  const uint32_t most = static_cast<uint32_t>(DivideUp(plan.payload_cells, kFewWorkers));
  const uint32_t pieces = std::clamp(blocks / (2 * plan.messages), 1u, most);
  plan.pieces = Divisor::Of(pieces);
  plan.piece_cells = static_cast<uint32_t>(DivideUp(plan.payload_cells, pieces));
  plan.message_items = plan.messages * pieces;
  plan.reads_at_once = plan.piece_cells <= kCellsAtOnce * kFewWorkers &&
                       plan.count_cells.value * ranks <= kFewWorkers;
  const int64_t clear_bytes = kTableBytes + (step.zero_tail ? shape.row_bytes() : 0);
  const uint32_t send_items = tokens * plan.sends.value * pieces;
  plan.call.work = {0, send_items, PlaceItems(plan.message_items, shape.recv_rows * clear_bytes)};
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag = CallTag(0, shape.tokens, shape.row_bytes(), shape.top_k, step.site);
  const int64_t shared =
      kRouters * shape.experts() * kIndexBytes + GroupTable::Bytes(shape, kFewWarps);
  const dim3 grid(std::min(blocks, send_items + plan.call.work.place_items));
  return Launch(WindowFewDispatchKernel, grid, kFewThreads, static_cast<size_t>(shared), stream,
                step, group, plan);
}

cudaError_t PreloadWindowFewDispatch() {
  return PreloadShared(WindowFewDispatchKernel, int64_t{64} << 10);
}

}  // namespace jax_ep::cuda
