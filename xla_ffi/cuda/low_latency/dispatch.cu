// The dispatch of calls with few tokens: as window/dispatch.cu, but messages travel in cells that
// need no flag. A block sends a piece of a token, or places one; its workers go from registers to
// the link and from the window to rows.
#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/low_latency/calls.h"
#include "cuda/low_latency/crew.cuh"
#include "cuda/low_latency/receive.cuh"
#include "cuda/low_latency/send.cuh"
#include "cuda/window/call.cuh"
#include "cuda/window/dispatch_receive.cuh"
#include "cuda/window/grid.h"
#include "formats/registry.h"

namespace jax_ep::cuda {
namespace {

// What a block keeps in shared memory beside LowLatencyShared.
template <typename Format>
struct LowLatencyMemory {
  static constexpr bool kEncodes = QuantizedFormat<Format>;

  int64_t message;  // of formats that encode, like the next two
  int64_t zeros;
  int64_t first_tiles;
  int64_t router_rows;
  int64_t tables;
  int64_t bytes;

  __host__ __device__ static LowLatencyMemory Of(const EpShape& shape, uint32_t message_words) {
    LayoutCursor cursor;
    LowLatencyMemory memory{};
    constexpr int64_t kAlign = 128;
    memory.message = cursor.Take(kEncodes ? int64_t{message_words} * 4 : 0, kAlign);
    memory.zeros = cursor.Take(kEncodes ? kZeroBytes : 0, kAlign);
    memory.tables = cursor.Take(GroupTable::Bytes(shape, kLowLatencyWarps), kAlign);
    memory.router_rows = cursor.Take(kRouters * shape.experts() * kIndexBytes, kIndexBytes);
    memory.first_tiles =
        cursor.Take(kEncodes ? (shape.local_experts + 1) * kIndexBytes : 0, kIndexBytes);
    memory.bytes = cursor.end;
    return memory;
  }
};

// Longer messages are encoded by senders of window/dispatch.cu.
constexpr int64_t kMostMessageBytes = int64_t{48} << 10;
constexpr int64_t kMostSharedBytes = int64_t{128} << 10;

template <typename Format>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    WindowLowLatencyDispatchKernel(const __grid_constant__ WindowDispatchStep step,
                                   const __grid_constant__ WindowGroup group,
                                   const __grid_constant__ LowLatencyDispatchPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const memory = SharedBytes();
  auto& shared = SharedObject<LowLatencyShared<Format>>();
  WindowCall call(group, CallKind::kDispatch, plan.call, shared.block.call);
  call.BeginInOrder(shared.block.item);
  LoadEntries(step, shared);
  const auto at = LowLatencyMemory<Format>::Of(step.shape, plan.message_words);
  if constexpr (QuantizedFormat<Format>) {
    FillWords(memory + at.zeros, kZeroBytes, 0);
    FenceProxyAsyncShared();
  }
  if (threadIdx.x == 0) {
    shared.counts_arrived = true;
    shared.block.failed = false;
  }
  __syncthreads();
  LowLatencyCrew crew(call, shared.block);
  LowLatencySender<Format> sender(step, plan, call, crew, shared,
                                  reinterpret_cast<int32_t*>(memory + at.router_rows),
                                  memory + at.message);
  LowLatencyReceiver<Format> placer(step, plan, call, crew, shared, memory + at.tables,
                                    reinterpret_cast<int32_t*>(memory + at.first_tiles),
                                    memory + at.zeros);
  const bool fills = crew.Run([&](uint32_t item) { sender.Send(item); },
                              [&](uint32_t item) { placer.Place(item); });
  if (!fills) return;
  call.EndGroup();
  Fail<Format>(step, plan.scales);
#endif
}

}  // namespace

template <typename Format>
bool IsLowLatency(const WindowDispatchStep& step, const WindowGroup& group) {
  // An item each for as many multiprocessors as there are at least: a block's second item comes
  // later than a flag would. Very few tokens win even so.
  constexpr int64_t kItems = 128, kVeryFew = 8;
  const EpShape& shape = step.shape;
  if (shape.tokens <= 0 || shape.tokens > kLowLatencyTokens<Format>) return false;
  const int64_t bytes = MessageOf<Format>(shape).bytes;
  if (!HasCells(group, CallKind::kDispatch, shape.tokens, DispatchCells(bytes, shape.top_k))) {
    return false;
  }
  if (QuantizedFormat<Format> && bytes > kMostMessageBytes) return false;
  return QuantizedFormat<Format> || shape.tokens <= kVeryFew ||
         shape.tokens * (shape.ranks + 1) <= kItems;
}

template <typename Format>
cudaError_t WindowLowLatencyDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                                     cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const uint32_t blocks = BlockLimit(group, UINT32_MAX);
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const uint32_t ranks = static_cast<uint32_t>(shape.ranks);
  const int64_t row_bytes = Format::PayloadBytes(shape.hidden, shape.element_bytes);
  LowLatencyDispatchPlan plan{};
  plan.count_cells = Divisor::Of(CountCells(shape.local_experts));
  plan.top_k = Divisor::Of(shape.top_k);
  plan.rank_of = RankOfExpert(static_cast<int32_t>(shape.local_experts));
  plan.payload_words = plan.scales_word = plan.message_words = static_cast<uint32_t>(row_bytes / 4);
  int64_t clear_bytes = shape.recv_rows * (kTableBytes + (step.zero_tail ? row_bytes : 0));
  if constexpr (QuantizedFormat<Format>) {
    plan.element = step.element;
    plan.scales = ScalePlan::Of<Format>(step);
    const auto message = MessageOf<Format>(shape);
    const int64_t scale_words = DivideUp(Format::ScaleBytes(shape.hidden), 4);
    plan.scales_word = static_cast<uint32_t>(message.scales / 4);
    plan.message_words = plan.scales_word + static_cast<uint32_t>(scale_words);
    clear_bytes += plan.scales.tiles.tiles * plan.scales.TileBytes();
  }
  plan.payload_cells = static_cast<uint32_t>(CellsOf(int64_t{plan.message_words} * 4));
  plan.messages = tokens * ranks;
  // A multiprocessor stores no faster than 50 GB/s: as many of them as there are.
  const bool split = 2 * plan.messages <= blocks;
  plan.sends = Divisor::Of(split ? ranks : 1);
  plan.turns = split ? 1 : ranks;
  const uint32_t most = static_cast<uint32_t>(DivideUp(plan.payload_cells, kLowLatencyWorkers));
  const uint32_t pieces = std::clamp(blocks / (2 * plan.messages), 1u, most);
  plan.pieces = Divisor::Of(pieces);
  plan.piece_cells = static_cast<uint32_t>(DivideUp(plan.payload_cells, pieces));
  plan.message_items = plan.messages * pieces;
  plan.reads_at_once = plan.piece_cells <= kCellsAtOnce * kLowLatencyWorkers &&
                       plan.count_cells.value * ranks <= kLowLatencyWorkers;
  const uint32_t send_items = tokens * plan.sends.value * pieces;
  plan.call.work = {0, send_items, ReceiveItems(plan.message_items, clear_bytes)};
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag = CallTag(TagKind::kDispatch, shape.tokens, MessageOf<Format>(shape).bytes,
                          shape.top_k, step.site);
  const int64_t shared = LowLatencyMemory<Format>::Of(shape, plan.message_words).bytes;
  const dim3 grid(std::min(blocks, send_items + plan.call.work.receive_items));
  return Launch(WindowLowLatencyDispatchKernel<Format>, grid, kLowLatencyThreads,
                static_cast<size_t>(shared), stream, step, group, plan);
}

cudaError_t PreloadWindowLowLatencyDispatch() {
  cudaError_t error = cudaSuccess;
  ForEachFormat([&]<typename Format>(Format) {
    if (error != cudaSuccess) return;
    error = PreloadShared(WindowLowLatencyDispatchKernel<Format>, kMostSharedBytes);
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                   \
  template bool IsLowLatency<Format>(const WindowDispatchStep&, const WindowGroup&); \
  template cudaError_t WindowLowLatencyDispatch<Format>(const WindowDispatchStep&,   \
                                                        const WindowGroup&, cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
