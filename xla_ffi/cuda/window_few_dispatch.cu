// The dispatch of calls with few tokens: as window_dispatch.cu, but messages travel in cells that
// need no flag. A block sends a piece of a token, or places one; its workers go from registers to
// the link and from the window to rows.
#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/primitives.cuh"
#include "cuda/window_call.cuh"
#include "cuda/window_calls.h"
#include "cuda/window_counts.cuh"
#include "cuda/window_dispatch_place.cuh"
#include "cuda/window_few.cuh"
#include "cuda/window_few.h"
#include "cuda/window_grid.h"
#include "cuda/window_groups.cuh"
#include "cuda/window_route.cuh"

namespace jax_ep::cuda {
namespace {

// Cells of a payload that a worker has in its registers at once.
constexpr uint32_t kCellsAtOnce = 3;
constexpr uint32_t kFewEntries = kFewDispatchTokens * kMaxTopK;
// Warps that count ids: one up to the block's token, one all of them.
constexpr uint32_t kRouters = 2;

struct FewDispatchPlan {
  CallPlan call;
  Divisor count_cells;
  Divisor top_k;
  RankOfExpert rank_of{1};
  uint32_t row_words;
  uint32_t payload_cells;
  Divisor pieces;  // of a payload
  uint32_t piece_cells;
  Divisor sends;           // items that share the destinations of a piece
  uint32_t turns;          // destinations of each
  uint32_t messages;       // that a rank receives
  uint32_t message_items;  // place items that have a piece; the others only clear
  bool reads_at_once;      // no item reads the window again after its first look
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

struct FewShared {
  FewBlock block;
  bool counts_arrived;
  int32_t ids[kFewEntries];
  float weights[kFewEntries];
  int32_t slots[kMaxWindowRanks];      // of the block's token at each rank, or -1
  int32_t all_slots[kMaxWindowRanks];  // of the call at each rank
  uint32_t entries[kMaxTopK][3];       // expert, position, weight
};

// Whole block, before a barrier. Beside the loads of Begin, which take as long.
__device__ inline void LoadEntries(const WindowDispatchStep& step, FewShared& shared) {
  const uint32_t entries = static_cast<uint32_t>(step.shape.tokens * step.shape.top_k);
  JAX_EP_NO_UNROLL
  for (uint32_t i = threadIdx.x; i < entries; i += kFewThreads) {
    shared.ids[i] = step.ids[i];
    shared.weights[i] = step.weights[i];
  }
}

// The workers' part.
class FewDispatch {
 public:
  __device__ FewDispatch(const WindowDispatchStep& step, const FewDispatchPlan& plan,
                         WindowCall& call, const FewCrew& crew, FewShared& shared, uint8_t* memory)
      : step_(step),
        plan_(plan),
        call_(call),
        crew_(crew),
        shared_(shared),
        groups_(step.shape, kFewWarps, memory + kRouters * step.shape.experts() * kIndexBytes),
        router_rows_(reinterpret_cast<int32_t*>(memory)) {}

  __device__ void Send(uint32_t item) {
    uint32_t piece, first_turn;
    const uint32_t part = plan_.pieces.Divide(item, piece);
    const int32_t token = static_cast<int32_t>(plan_.sends.Divide(part, first_turn));
    const Range cells = PieceCells(piece);
    uint32_t words[kCellsAtOnce][3];
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      LoadCell(token, cells.begin + threadIdx.x + i * kFewWorkers, words[i]);
    }
    const bool counts = token == 0 && piece == 0;
    if (Warp() == 0) Assign(token, part == static_cast<uint32_t>(token) * plan_.sends.value);
    if (Warp() == 1 && counts) CountAll(first_turn == 0);
    if (crew_.AwaitCredits()) {
      if (counts) PostAllCounts(first_turn);
      JAX_EP_NO_UNROLL
      for (uint32_t turn = first_turn; turn < first_turn + plan_.turns; ++turn) {
        Post(Destination(turn), token, cells, words);
      }
    }
    crew_.ReadsOver();
  }

  // Looks for all that comes at once: each look takes half a microsecond.
  __device__ void Place(uint32_t item) {
    const bool has_message = item < plan_.message_items;
    const Message message = MessageOf(has_message ? item : 0);
    const CountCell* from[kSeen] = {};
    uint32_t sources[kSeen];
#pragma unroll
    for (uint32_t i = 0; i < kSeen; ++i) sources[i] = message.source;
    if (has_message) {
      from[kHead] = message.cells;
      if (HasEntry()) from[kEntry] = message.cells + 1 + Lane();
      PayloadCells(message, message.payload.begin, from + kPayload);
    }
    uint32_t cell = 0;
    if (!built_ && threadIdx.x < plan_.count_cells.value * call_.ranks()) {
      sources[kCounts] = plan_.count_cells.Divide(threadIdx.x, cell);
      from[kCounts] = call_.Counts(call_.rank(), sources[kCounts]) + cell;
    }
    CountCell seen[kSeen] = {};
    bool ok = call_.AwaitCells(from, sources, seen, [&](const CountCell(&cells)[kSeen]) {
      return cells[kHead].counts[0] < 0 ? kPayload : kSeen;
    });
    // Another call's: this says so.
    if (ok && from[kCounts] != nullptr && !call_.HasCounts(cell, seen[kCounts])) {
      ok = call_.AwaitCounts(sources[kCounts], cell, seen[kCounts]);
    }
    if (!ok) Fail();
    if (plan_.reads_at_once) crew_.ReadsOver();
    if (built_) {
      crew_.Sync();
    } else {
      groups_.Build(call_, plan_.count_cells, crew_.team(), shared_.counts_arrived, &seen[kCounts]);
      built_ = true;
    }
    if (shared_.counts_arrived) {
      if (has_message && !PlaceMessage(message, seen)) Fail();
      if (item == 0 && Warp() == 1) groups_.Write(step_);
      FillShare(item);
    } else if (threadIdx.x == 0) {
      Fail();  // where it was Build that waited in vain
    }
    if (!plan_.reads_at_once) crew_.ReadsOver();
  }

 private:
  // What a worker sees of a message, and of the counts before the first.
  static constexpr uint32_t kHead = 0, kEntry = 1, kCounts = 2, kPayload = 3;
  static constexpr uint32_t kSeen = kPayload + kCellsAtOnce;

  struct Range {
    uint32_t begin;
    uint32_t end;
  };
  struct Message {
    const CountCell* cells;
    uint32_t source;
    uint32_t token;
    Range payload;
    bool first_piece;
  };

  __device__ void Fail() const {
    shared_.counts_arrived = false;
    shared_.block.failed = true;
  }

  __device__ uint32_t payload_begin() const { return 1 + plan_.top_k.value; }
  __device__ Range PieceCells(uint32_t piece) const {
    const uint32_t begin = piece * plan_.piece_cells;
    return {begin, min(begin + plan_.piece_cells, plan_.payload_cells)};
  }
  // Nearer ranks first, this one last.
  __device__ uint32_t Destination(uint32_t turn) const {
    return call_.by_ranks().Rest(call_.rank() + 1 + turn);
  }

  // A cell of the token's payload.
  __device__ void LoadCell(int32_t token, uint32_t cell, uint32_t (&words)[3]) const {
    const auto* row = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(step_.tokens) +
                                                        token * step_.shape.row_bytes());
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      words[i] = cell * 3 + i < plan_.row_words ? row[cell * 3 + i] : 0;
    }
  }

  __device__ WarpRouter Router(uint32_t number) const {
    int32_t* rows = router_rows_ + number * static_cast<uint32_t>(step_.shape.experts());
    return WarpRouter(step_.shape, plan_.rank_of, shared_.ids, rows);
  }

  // A warp: the token's entries, in shared memory and, where `writes`, in the route.
  __device__ void Assign(int32_t token, bool writes) {
    WarpRouter router = Router(0);
    InvalidIds invalid;
    router.Restart(0);
    router.CountTo(token, invalid);
    const TokenWalk walk(plan_.top_k);
    const int32_t end = token + 1, tokens = static_cast<int32_t>(step_.shape.tokens);
    const int64_t at = int64_t{token} * walk.top_k + Lane();
    const RoutedEntry entry = router.Assign(walk, end, router.LoadId(walk, token, end));
    if (Lane() < call_.ranks()) shared_.slots[Lane()] = -1;
    __syncwarp();
    if (Lane() >= walk.top_k) return;
    if (entry.rank >= 0) shared_.slots[entry.rank] = entry.slot;
    uint32_t (&words)[3] = shared_.entries[Lane()];
    words[0] = static_cast<uint32_t>(entry.id);
    words[1] = static_cast<uint32_t>(entry.position);
    words[2] = __float_as_uint(shared_.weights[at]);
    if (writes) step_.slot_of[at] = entry.rank < 0 ? -1 : entry.rank * tokens + entry.slot;
  }

  // A warp: what every rank gets of the call.
  __device__ void CountAll(bool reports) {
    WarpRouter router = Router(1);
    InvalidIds invalid;
    router.Restart(0);
    router.CountTo(static_cast<int32_t>(step_.shape.tokens), invalid);
    if (Lane() < call_.ranks()) shared_.all_slots[Lane()] = router.slots();
    if (reports && Lane() == 0) ReportInvalid(step_, invalid);
  }

  __device__ void PostAllCounts(uint32_t first_turn) const {
    const int32_t* rows = Router(1).rows();
    JAX_EP_NO_UNROLL
    for (uint32_t i = threadIdx.x; i < plan_.turns * plan_.count_cells.value; i += kFewWorkers) {
      uint32_t cell;
      const uint32_t rank = Destination(first_turn + plan_.count_cells.Divide(i, cell));
      PostCountCell(step_, call_, rank, cell, shared_.all_slots[rank], rows);
    }
  }

  // A piece of the token's message to one rank. Where it does not go only its slot and entries.
  __device__ void Post(uint32_t destination, int32_t token, const Range& piece,
                       const uint32_t (&words)[kCellsAtOnce][3]) const {
    const int32_t slot = shared_.slots[destination];
    CountCell* cells = call_.Cells(destination, call_.rank(), token);
    if (piece.begin == 0 && Warp() == 0) {
      if (Lane() == 0) call_.PostCell(cells, {static_cast<uint32_t>(slot), 0, 0});
      if (HasEntry()) call_.PostCell(cells + 1 + Lane(), shared_.entries[Lane()]);
    }
    if (slot < 0) return;
    cells += payload_begin();
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      const uint32_t cell = piece.begin + threadIdx.x + i * kFewWorkers;
      if (cell < piece.end) call_.PostCell(cells + cell, words[i]);
    }
    JAX_EP_NO_UNROLL
    for (uint32_t cell = piece.begin + threadIdx.x + kCellsAtOnce * kFewWorkers; cell < piece.end;
         cell += kFewWorkers) {
      uint32_t more[3];
      LoadCell(token, cell, more);
      call_.PostCell(cells + cell, more);
    }
  }

  __device__ bool HasEntry() const { return Lane() < step_.shape.top_k; }
  __device__ Message MessageOf(uint32_t item) const {
    uint32_t piece, turn;
    const uint32_t part = plan_.pieces.Divide(item, piece);
    const uint32_t token = call_.by_ranks().Divide(part, turn);
    const uint32_t source = call_.by_ranks().Rest(call_.rank() + turn);
    return {call_.Cells(call_.rank(), source, token), source, token, PieceCells(piece), piece == 0};
  }
  // This worker's cells of a message's payload from cell `first` on.
  __device__ void PayloadCells(const Message& message, uint32_t first,
                               const CountCell** from) const {
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      const uint32_t cell = first + threadIdx.x + i * kFewWorkers;
      from[i] = cell < message.payload.end ? message.cells + payload_begin() + cell : nullptr;
    }
  }

  // False in workers of which a wait failed.
  __device__ bool PlaceMessage(const Message& message, const CountCell (&seen)[kSeen]) const {
    const EpShape& shape = step_.shape;
    const int32_t slot = seen[kHead].counts[0];
    if (slot < 0 || slot >= shape.tokens) return true;
    int32_t row = -1;
    if (HasEntry()) {
      const CountCell& entry = seen[kEntry];
      const int32_t expert =
          entry.counts[0] - static_cast<int32_t>(call_.rank() * shape.local_experts);
      row = groups_.RowOf(message.source, expert, entry.counts[1]);
      if (message.first_piece && Warp() == 0) Record(message, slot, row, entry);
    }
    const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
    if (lanes == 0) return true;
    CountCell cells[kCellsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) cells[i] = seen[kPayload + i];
    bool ok = true;
    JAX_EP_NO_UNROLL
    for (uint32_t first = message.payload.begin; ok;) {
      StoreCells(first, message.payload.end, cells, lanes, row);
      first += kCellsAtOnce * kFewWorkers;
      if (first >= message.payload.end) break;
      const CountCell* from[kCellsAtOnce];
      uint32_t sources[kCellsAtOnce];
      PayloadCells(message, first, from);
#pragma unroll
      for (uint32_t i = 0; i < kCellsAtOnce; ++i) sources[i] = message.source;
      ok = __all_sync(kFullWarp, call_.AwaitCells(from, sources, cells)) != 0;
    }
    return ok;
  }

  __device__ void Record(const Message& message, int32_t slot, int32_t row,
                         const CountCell& entry) const {
    const EpShape& shape = step_.shape;
    const int64_t flat = message.source * shape.tokens + slot;
    step_.row_of[flat * shape.top_k + Lane()] = row;
    if (row < 0) return;
    step_.row_slot[row] = static_cast<int32_t>(flat);
    int32_t* info = step_.src_info + int64_t{row} * 3;
    info[0] = static_cast<int32_t>(message.source);
    info[1] = static_cast<int32_t>(message.token);
    info[2] = Lane();
    step_.row_weights[row] = __int_as_float(entry.counts[2]);
  }

  // Whole warp: cells of a payload from `first` on, to the rows of its lanes.
  __device__ void StoreCells(uint32_t first, uint32_t end, const CountCell (&cells)[kCellsAtOnce],
                             unsigned lanes, int32_t row) const {
    JAX_EP_NO_UNROLL
    for (; lanes != 0; lanes &= lanes - 1) {
      const int64_t to = FromLowest(lanes, row);
      auto* words = reinterpret_cast<int32_t*>(step_.rows + to * step_.shape.row_bytes());
#pragma unroll
      for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
        const uint32_t at = first + threadIdx.x + i * kFewWorkers;
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
          if (at < end && at * 3 + j < plan_.row_words) words[at * 3 + j] = cells[i].counts[j];
        }
      }
    }
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
    if (item >= plan_.messages || Warp() != 0 || Lane() >= shape.top_k) return;
    uint32_t source;
    const int32_t slot = static_cast<int32_t>(call_.by_ranks().Divide(item, source));
    if (slot < groups_.Slots(source)) return;
    step_.row_of[(source * shape.tokens + slot) * shape.top_k + Lane()] = -1;
  }

  __device__ void Clear(const GroupTable::Range& range, bool payload) const {
    JAX_EP_NO_UNROLL
    for (int64_t row = range.begin + threadIdx.x; row < range.end; row += kFewWorkers) {
      step_.row_slot[row] = -1;
      step_.row_weights[row] = 0.0f;
    }
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * 3 + threadIdx.x; i < range.end * 3; i += kFewWorkers) {
      step_.src_info[i] = -1;
    }
    if (!payload) return;
    const int64_t vectors = step_.shape.row_bytes() / kVectorBytes;
    auto* rows = reinterpret_cast<uint4*>(step_.rows);
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * vectors + threadIdx.x; i < range.end * vectors;
         i += kFewWorkers) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }

  const WindowDispatchStep& step_;
  const FewDispatchPlan& plan_;
  WindowCall& call_;
  const FewCrew& crew_;
  FewShared& shared_;
  GroupTable groups_;
  int32_t* router_rows_;  // [kRouters, E]
  bool built_ = false;
};

#endif  // sm_90

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
  FewDispatch dispatch(step, plan, call, crew, shared, memory);
  const bool fills = crew.Run([&](uint32_t item) { dispatch.Send(item); },
                              [&](uint32_t item) { dispatch.Place(item); });
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
