// The plan of a dispatch of few tokens and what its senders do. Used by low_latency/dispatch.cu.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/quantize.cuh"
#include "cuda/low_latency/crew.cuh"
#include "cuda/window/call.cuh"
#include "cuda/window/counts.cuh"
#include "cuda/window/route.cuh"
#include "cuda/window/scales.cuh"
#include "formats/token_format.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// Cells of a payload that a worker has in its registers at once.
inline constexpr uint32_t kCellsAtOnce = 3;
template <typename Format>
inline constexpr int64_t kLowLatencyTokens =
    QuantizedFormat<Format> ? kLowLatencyEncodedTokens : kLowLatencyDispatchTokens;
// Warps that count ids: one up to the block's token, one all of them.
inline constexpr uint32_t kRouters = 2;

struct LowLatencyDispatchPlan {
  CallPlan call;
  Divisor count_cells;
  Divisor top_k;
  RankOfExpert rank_of{1};
  // A message is payload and, from `scales_word` on, scales, as in DispatchMessage.
  uint32_t payload_words;
  uint32_t scales_word;
  uint32_t message_words;
  uint32_t payload_cells;  // of both
  ElementType element;     // of tokens that are encoded
  ScalePlan scales;
  Divisor pieces;
  uint32_t piece_cells;
  Divisor sends;           // items that share the destinations of a piece
  uint32_t turns;          // destinations of each
  uint32_t messages;       // that a rank receives
  uint32_t message_items;  // place items that have a piece; the others only clear
  bool reads_at_once;      // no item reads the window again after its first look

  // Cells of a payload.
  struct Range {
    uint32_t begin;
    uint32_t end;
  };
  __device__ Range Piece(uint32_t piece) const {
    const uint32_t begin = piece * piece_cells;
    return {begin, min(begin + piece_cells, payload_cells)};
  }
  // Behind a message's head and entries.
  __device__ uint32_t payload_begin() const { return 1 + top_k.value; }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <typename Format>
struct LowLatencyShared {
  static constexpr int64_t kEntries = kLowLatencyTokens<Format> * kMaxTopK;

  LowLatencyBlock block;
  bool counts_arrived;
  int32_t ids[kEntries];
  float weights[kEntries];
  int32_t slots[kMaxWindowRanks];      // of the block's token at each rank, or -1
  int32_t all_slots[kMaxWindowRanks];  // of the call at each rank
  uint32_t entries[kMaxTopK][3];       // expert, position, weight
};

// Whole block, before a barrier. Beside the loads of Begin, which take as long.
template <typename Format>
__device__ void LoadEntries(const WindowDispatchStep& step, LowLatencyShared<Format>& shared) {
  const uint32_t entries = static_cast<uint32_t>(step.shape.tokens * step.shape.top_k);
  JAX_EP_NO_UNROLL
  for (uint32_t i = threadIdx.x; i < entries; i += kLowLatencyThreads) {
    shared.ids[i] = step.ids[i];
    shared.weights[i] = step.weights[i];
  }
}

// The workers as senders.
template <typename Format>
class LowLatencySender {
 public:
  using Range = LowLatencyDispatchPlan::Range;

  // `router_rows` [kRouters, E] and, of formats that encode, `message` in shared memory.
  __device__ LowLatencySender(const WindowDispatchStep& step, const LowLatencyDispatchPlan& plan,
                              WindowCall& call, const LowLatencyCrew& crew,
                              LowLatencyShared<Format>& shared, int32_t* router_rows,
                              uint8_t* message)
      : step_(step),
        plan_(plan),
        call_(call),
        crew_(crew),
        shared_(shared),
        router_rows_(router_rows),
        message_(message) {}

  __device__ void Send(uint32_t item) {
    uint32_t piece, first_turn;
    const uint32_t part = plan_.pieces.Divide(item, piece);
    const int32_t token = static_cast<int32_t>(plan_.sends.Divide(part, first_turn));
    const Range cells = plan_.Piece(piece);
    uint32_t words[kCellsAtOnce][3];
    if constexpr (kEncodes) {
      Encode(token);
    } else {
      LoadCells(token, cells, words);
    }
    const bool counts = token == 0 && piece == 0;
    if (Warp() == 0) Assign(token, part == static_cast<uint32_t>(token) * plan_.sends.value);
    if (Warp() == 1 && counts) CountAll(first_turn == 0);
    if (crew_.AwaitCredits()) {
      // What others have encoded is there.
      if constexpr (kEncodes) LoadCells(token, cells, words);
      if (counts) PostAllCounts(first_turn);
      JAX_EP_NO_UNROLL
      for (uint32_t turn = first_turn; turn < first_turn + plan_.turns; ++turn) {
        Post(Destination(turn), token, cells, words);
      }
    }
    crew_.ReadsOver();
  }

 private:
  static constexpr bool kEncodes = QuantizedFormat<Format>;

  // Nearer ranks first, this one last.
  __device__ uint32_t Destination(uint32_t turn) const {
    return call_.by_ranks().Rest(call_.rank() + 1 + turn);
  }

  // What is sent of a token, as words.
  __device__ const uint32_t* MessageOf(int32_t token) const {
    if constexpr (kEncodes) return reinterpret_cast<const uint32_t*>(message_);
    const auto* tokens = static_cast<const uint8_t*>(step_.tokens);
    return reinterpret_cast<const uint32_t*>(tokens + token * step_.shape.row_bytes());
  }
  __device__ void LoadCell(const uint32_t* message, uint32_t cell, uint32_t (&words)[3]) const {
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      words[i] = cell * 3 + i < plan_.message_words ? message[cell * 3 + i] : 0;
    }
  }
  __device__ void LoadCells(int32_t token, const Range& cells,
                            uint32_t (&words)[kCellsAtOnce][3]) const {
    const uint32_t* message = MessageOf(token);
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      LoadCell(message, cells.begin + threadIdx.x + i * kLowLatencyWorkers, words[i]);
    }
  }

  // All workers: the token's codes and scales, in shared memory before AwaitCredits.
  __device__ void Encode(int32_t token) const {
    if (plan_.element == ElementType::kBFloat16) {
      EncodeAs<BFloat16>(token);
    } else if (plan_.element == ElementType::kFloat16) {
      EncodeAs<Float16>(token);
    } else {
      EncodeAs<float>(token);
    }
  }
  template <typename Element>
  __device__ void EncodeAs(int32_t token) const {
    const int64_t row_bytes = step_.shape.row_bytes();
    const uint8_t* row = static_cast<const uint8_t*>(step_.tokens) + token * row_bytes;
    float input_scale = kNoInputScale;
    if constexpr (Format::kTakesInputScale) input_scale = *step_.input_scale;
    const int64_t parts = DivideUp(row_bytes, int64_t{kPartVectors} * kVectorBytes);
    // The first warps, which route, have the fewest parts.
    JAX_EP_NO_UNROLL
    for (int64_t part = static_cast<int>(kLowLatencyWarps) - 1 - Warp(); part < parts;
         part += kLowLatencyWarps) {
      EncodedPart<Format, Element> encoded(part, row_bytes);
      encoded.Load(row, input_scale);
      encoded.Store(message_, message_ + plan_.scales_word * 4);
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
    if (entry.rank >= 0) StoreSame(&shared_.slots[entry.rank], entry.slot);
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
    for (uint32_t i = threadIdx.x; i < plan_.turns * plan_.count_cells.value;
         i += kLowLatencyWorkers) {
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
      if (Lane() < step_.shape.top_k) call_.PostCell(cells + 1 + Lane(), shared_.entries[Lane()]);
    }
    if (slot < 0) return;
    cells += plan_.payload_begin();
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      const uint32_t cell = piece.begin + threadIdx.x + i * kLowLatencyWorkers;
      if (cell < piece.end) call_.PostCell(cells + cell, words[i]);
    }
    const uint32_t* message = MessageOf(token);
    JAX_EP_NO_UNROLL
    for (uint32_t cell = piece.begin + threadIdx.x + kCellsAtOnce * kLowLatencyWorkers;
         cell < piece.end; cell += kLowLatencyWorkers) {
      uint32_t more[3];
      LoadCell(message, cell, more);
      call_.PostCell(cells + cell, more);
    }
  }

  const WindowDispatchStep& step_;
  const LowLatencyDispatchPlan& plan_;
  WindowCall& call_;
  const LowLatencyCrew& crew_;
  LowLatencyShared<Format>& shared_;
  int32_t* router_rows_;
  uint8_t* message_;
};

#endif  // sm_90

}  // namespace jax_ep::cuda
