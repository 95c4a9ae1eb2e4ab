// The low-latency dispatch: like window/dispatch.cu, but messages travel in cells that need no
// flags. An item is a piece of a token to send or to receive; workers store from registers to the
// link and from the window to rows.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/quantize.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/low_latency/calls.h"
#include "cuda/low_latency/roles.cuh"
#include "cuda/window/call.cuh"
#include "cuda/window/coded.cuh"
#include "cuda/window/counts.cuh"
#include "cuda/window/dispatch_recv.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/groups.cuh"
#include "cuda/window/route.cuh"
#include "cuda/window/scales.cuh"
#include "formats/registry.h"
#include "formats/token_format.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {
namespace {

// Cells of a payload that a worker keeps in registers.
constexpr uint32_t kCellsAtOnce = 3;
template <typename Format>
constexpr int64_t kLowLatencyTokens =
    QuantizedFormat<Format> ? kLowLatencyEncodedTokens : kLowLatencyDispatchTokens;
// Warps that count ids: one counts up to the block's token, one counts all.
constexpr uint32_t kRouters = 2;

struct LowLatencyDispatchPlan {
  CallPlan call;
  Divisor count_cells;
  Divisor top_k;
  RankOfExpert rank_of{1};
  // A message is a payload and, from `scales_word` on, scales, as in DispatchMessage.
  uint32_t payload_words;
  uint32_t scales_word;
  uint32_t message_words;
  uint32_t payload_cells;  // of payload and scales
  ElementType element;     // of tokens that are encoded
  ScalePlan scales;
  Divisor pieces;
  uint32_t piece_cells;
  Divisor sends;           // items that share the destinations of a piece
  uint32_t turns;          // destinations of each of them
  uint32_t messages;       // that a rank receives
  uint32_t message_items;  // receive items that have a piece; the others only clear
  bool reads_at_once;      // whether an item never reads the window after its first look

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
  int32_t all_slots[kMaxWindowRanks];  // of the whole call at each rank
  uint32_t entries[kMaxTopK][3];       // expert, position, weight
};

// Called by the whole block before a barrier. These loads overlap those of BeginInOrder, which take
// as long.
template <typename Format>
__device__ void LoadEntries(const DispatchStep& step, LowLatencyShared<Format>& shared) {
  const uint32_t entries = static_cast<uint32_t>(step.shape.tokens * step.shape.top_k);
  JAX_EP_NO_UNROLL
  for (uint32_t i = threadIdx.x; i < entries; i += kLowLatencyThreads) {
    shared.ids[i] = step.ids[i];
    shared.weights[i] = step.weights[i];
  }
}

// The words of a token that comes as codes and scales. Codes are whole vectors, and scales follow
// at once.
struct CodedWords {
  const uint32_t* codes;
  const uint8_t* scales;
  uint32_t scale_bytes;
  uint32_t scales_word;

  __device__ uint32_t operator[](uint32_t word) const {
    if (word < scales_word) return codes[word];
    const uint32_t at = (word - scales_word) * 4;
    if (scale_bytes % 4 == 0) return *reinterpret_cast<const uint32_t*>(scales + at);
    uint32_t value = 0;
    JAX_EP_NO_UNROLL
    for (uint32_t i = 0; i < 4 && at + i < scale_bytes; ++i) value |= scales[at + i] << (8 * i);
    return value;
  }
};

// What the workers do as senders.
template <typename Format>
class LowLatencySender {
 public:
  using Range = LowLatencyDispatchPlan::Range;

  // In shared memory: `router_rows` [kRouters, E] and, in formats that encode, `message`.
  __device__ LowLatencySender(const DispatchStep& step, const LowLatencyDispatchPlan& plan,
                              WindowCall& call, const LowLatencyRoles& roles,
                              LowLatencyShared<Format>& shared, int32_t* router_rows,
                              uint8_t* message)
      : step_(step),
        plan_(plan),
        call_(call),
        roles_(roles),
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
    if (roles_.AwaitCredits()) {
      // AwaitCredits was also a barrier: the other workers have encoded their parts.
      if constexpr (kEncodes) LoadCells(token, cells, words);
      if (counts) PostAllCounts(first_turn);
      JAX_EP_NO_UNROLL
      for (uint32_t turn = first_turn; turn < first_turn + plan_.turns; ++turn) {
        Post(Destination(turn), token, cells, words);
      }
    }
    roles_.ReadsOver();
  }

 private:
  static constexpr bool kEncodes = QuantizedFormat<Format>;

  // Starts with the next rank and ends with this one.
  __device__ uint32_t Destination(uint32_t turn) const {
    return call_.by_ranks().Rest(call_.rank() + 1 + turn);
  }

  // A token's message as words.
  __device__ auto WordsOf(int32_t token) const {
    const auto* tokens = static_cast<const uint8_t*>(step_.tokens);
    if constexpr (kIsCoded<Format>) {
      return CodedWords{reinterpret_cast<const uint32_t*>(tokens + token * step_.code_bytes),
                        step_.token_scales + token * step_.scale_bytes,
                        static_cast<uint32_t>(step_.scale_bytes), plan_.scales_word};
    } else {
      const auto* message = kEncodes ? message_ : tokens + token * step_.shape.row_bytes();
      return reinterpret_cast<const uint32_t*>(message);
    }
  }
  template <typename Words>
  __device__ void LoadCell(const Words& message, uint32_t cell, uint32_t (&words)[3]) const {
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      words[i] = cell * 3 + i < plan_.message_words ? message[cell * 3 + i] : 0;
    }
  }
  __device__ void LoadCells(int32_t token, const Range& cells,
                            uint32_t (&words)[kCellsAtOnce][3]) const {
    const auto message = WordsOf(token);
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      LoadCell(message, cells.begin + threadIdx.x + i * kLowLatencyWorkers, words[i]);
    }
  }

  // For all workers: encodes the token into shared memory. Read the result after AwaitCredits.
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
    // In reverse order, because the first warps also route.
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

  // Called by one warp: writes the token's entries to shared memory and, if `writes` is set, to the
  // route.
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

  // Called by one warp: counts what every rank gets in this call.
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

  // Posts a piece of the token's message to one rank, or only its slot and entries if the token
  // does not go there.
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
    const auto message = WordsOf(token);
    JAX_EP_NO_UNROLL
    for (uint32_t cell = piece.begin + threadIdx.x + kCellsAtOnce * kLowLatencyWorkers;
         cell < piece.end; cell += kLowLatencyWorkers) {
      uint32_t more[3];
      LoadCell(message, cell, more);
      call_.PostCell(cells + cell, more);
    }
  }

  const DispatchStep& step_;
  const LowLatencyDispatchPlan& plan_;
  WindowCall& call_;
  const LowLatencyRoles& roles_;
  LowLatencyShared<Format>& shared_;
  int32_t* router_rows_;
  uint8_t* message_;
};

// The warp that clears scales.
constexpr int kScalesWarp = 2;

// What the workers do as receivers.
template <typename Format>
class LowLatencyReceiver {
 public:
  using Range = LowLatencyDispatchPlan::Range;

  // In shared memory: `tables` of the GroupTable and, in formats with scales, `first_tiles` [L + 1]
  // and `zeros` [kZeroBytes].
  __device__ LowLatencyReceiver(const DispatchStep& step, const LowLatencyDispatchPlan& plan,
                                WindowCall& call, const LowLatencyRoles& roles,
                                LowLatencyShared<Format>& shared, uint8_t* tables,
                                int32_t* first_tiles, const uint8_t* zeros)
      : step_(step),
        plan_(plan),
        call_(call),
        roles_(roles),
        shared_(shared),
        groups_(step.shape, kLowLatencyWarps, tables),
        scales_(step, plan.scales, groups_, first_tiles, zeros) {}

  // Waits for everything that can arrive at the same time, because each look takes half a
  // microsecond.
  __device__ void Receive(uint32_t item) {
    const bool has_message = item < plan_.message_items;
    const Message message = MessageOf(has_message ? item : 0);
    const CountCell* from[kArrivedCells] = {};
    uint32_t sources[kArrivedCells];
#pragma unroll
    for (uint32_t i = 0; i < kArrivedCells; ++i) sources[i] = message.source;
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
    CountCell arrived[kArrivedCells] = {};
    bool ok = call_.AwaitCells(from, sources, arrived, [&](const CountCell(&cells)[kArrivedCells]) {
      return cells[kHead].counts[0] < 0 ? kPayload : kArrivedCells;
    });
    // The cell belongs to another call; this reports it.
    if (ok && from[kCounts] != nullptr && !call_.HasCounts(cell, arrived[kCounts])) {
      ok = call_.AwaitCounts(sources[kCounts], cell, arrived[kCounts]);
    }
    if (!ok) Fail();
    if (plan_.reads_at_once) roles_.ReadsOver();
    if (built_) {
      roles_.Sync();
    } else {
      groups_.Build(call_, plan_.count_cells, roles_.team(), shared_.counts_arrived,
                    &arrived[kCounts]);
      if constexpr (kScaled) {
        if (shared_.counts_arrived) scales_.Build(roles_.team());
      }
      built_ = true;
    }
    if (shared_.counts_arrived) {
      if (has_message && !PlaceMessage(message, arrived)) Fail();
      if (item == 0 && Warp() == 1) {
        groups_.Write(step_);
        if constexpr (kScaled) scales_.WriteOnce();
      }
      FillShare(item);
    } else if (threadIdx.x == 0 && !plan_.reads_at_once) {
      Fail();  // the failed wait was in Build
    }
    if (!plan_.reads_at_once) roles_.ReadsOver();
  }

 private:
  static constexpr bool kScaled = kHasScales<Format>;

  // What a worker reads of a message, and of the counts in front of it.
  static constexpr uint32_t kHead = 0, kEntry = 1, kCounts = 2, kPayload = 3;
  static constexpr uint32_t kArrivedCells = kPayload + kCellsAtOnce;

  struct Message {
    const CountCell* cells;
    uint32_t source;
    uint32_t token;
    Range payload;
    bool first_piece;
  };

  __device__ void Fail() const {
    StoreSame(&shared_.counts_arrived, false);
    StoreSame(&shared_.block.failed, true);
  }

  __device__ bool HasEntry() const { return Lane() < step_.shape.top_k; }
  __device__ Message MessageOf(uint32_t item) const {
    uint32_t piece, turn;
    const uint32_t part = plan_.pieces.Divide(item, piece);
    const uint32_t token = call_.by_ranks().Divide(part, turn);
    const uint32_t source = call_.by_ranks().Rest(call_.rank() + turn);
    return {call_.Cells(call_.rank(), source, token), source, token, plan_.Piece(piece),
            piece == 0};
  }
  // Fills in this worker's cells of a message's payload, from cell `first` on.
  __device__ void PayloadCells(const Message& message, uint32_t first,
                               const CountCell** from) const {
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
      const uint32_t cell = first + threadIdx.x + i * kLowLatencyWorkers;
      from[i] = cell < message.payload.end ? message.cells + plan_.payload_begin() + cell : nullptr;
    }
  }

  // Returns false in workers whose wait failed.
  __device__ bool PlaceMessage(const Message& message,
                               const CountCell (&arrived)[kArrivedCells]) const {
    const EpShape& shape = step_.shape;
    const int32_t slot = arrived[kHead].counts[0];
    if (slot < 0 || slot >= shape.tokens) return true;
    int32_t row = -1, expert = 0;
    if (HasEntry()) {
      const CountCell& entry = arrived[kEntry];
      // Unsigned, so that whatever a peer has stored wraps around instead of overflowing.
      const auto first = static_cast<uint32_t>(call_.rank() * shape.local_experts);
      expert = static_cast<int32_t>(static_cast<uint32_t>(entry.counts[0]) - first);
      row = groups_.RowOf(message.source, expert, entry.counts[1]);
      if (message.first_piece && Warp() == 0) Record(message, slot, row, entry);
    }
    const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
    if (lanes == 0) return true;
    uint8_t* scales = nullptr;  // of this lane's row
    if constexpr (kScaled) scales = row < 0 ? nullptr : scales_.At(row, expert);
    CountCell cells[kCellsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kCellsAtOnce; ++i) cells[i] = arrived[kPayload + i];
    bool ok = true;
    JAX_EP_NO_UNROLL
    for (uint32_t first = message.payload.begin; ok;) {
      StoreCells(first, message.payload.end, cells, lanes, row, scales);
      first += kCellsAtOnce * kLowLatencyWorkers;
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
    step_.router_weights[row] = __int_as_float(entry.counts[2]);
  }

  // Called by the whole warp: stores a message's cells, from `first` on, to the rows of the lanes
  // and to their scales.
  __device__ void StoreCells(uint32_t first, uint32_t end, const CountCell (&cells)[kCellsAtOnce],
                             unsigned lanes, int32_t row, uint8_t* scales) const {
    const int64_t row_bytes = PayloadBytesOf<Format>(step_);
    JAX_EP_NO_UNROLL
    for (; lanes != 0; lanes &= lanes - 1) {
      auto* words = reinterpret_cast<int32_t*>(step_.rows + FromLowest(lanes, row) * row_bytes);
      const uint64_t scale_words = FromLowest(lanes, reinterpret_cast<uint64_t>(scales));
#pragma unroll
      for (uint32_t i = 0; i < kCellsAtOnce; ++i) {
        const uint32_t at = first + threadIdx.x + i * kLowLatencyWorkers;
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
          const uint32_t word = at * 3 + j;
          if (at >= end) continue;
          if (word < plan_.payload_words) {
            words[word] = cells[i].counts[j];
          } else if constexpr (kScaled) {
            if (word >= plan_.scales_word && word < plan_.message_words) {
              scales_.StoreWord(reinterpret_cast<uint8_t*>(scale_words), word - plan_.scales_word,
                                static_cast<uint32_t>(cells[i].counts[j]));
            }
          }
        }
      }
    }
  }

  // Fills this item's equal share of whatever no message fills: padding, the tail, and slots
  // without a token.
  __device__ void FillShare(uint32_t item) const {
    const EpShape& shape = step_.shape;
    const int64_t items = plan_.call.work.receive_items;
    bool by_group = shape.expert_alignment > 1;
    if constexpr (kScaled) by_group |= plan_.scales.tiled();
    if (by_group) {
      JAX_EP_NO_UNROLL
      for (int64_t expert = item; expert < shape.local_experts; expert += items) {
        Clear(groups_.PaddingOf(expert), true);
        if constexpr (kScaled) {
          if (Warp() == kScalesWarp) scales_.ClearTilesOf(expert);
        }
      }
    }
    const int64_t end = groups_.End(), share = DivideUp(shape.recv_rows - end, items);
    const int64_t begin = Min(end + item * share, shape.recv_rows);
    Clear({begin, Min(begin + share, shape.recv_rows)}, step_.zero_tail);
    if constexpr (kScaled) {
      if (Warp() == kScalesWarp) {
        scales_.ClearTailTiles(item, items);
        // The zeros disappear with the block.
        BulkWaitRead<0>();
      }
    }
    if (item >= plan_.messages || Warp() != 0 || Lane() >= shape.top_k) return;
    uint32_t source;
    const int32_t slot = static_cast<int32_t>(call_.by_ranks().Divide(item, source));
    if (slot < groups_.Slots(source)) return;
    step_.row_of[(source * shape.tokens + slot) * shape.top_k + Lane()] = -1;
  }

  __device__ void Clear(const GroupTable::Range& range, bool payload) const {
    JAX_EP_NO_UNROLL
    for (int64_t row = range.begin + threadIdx.x; row < range.end; row += kLowLatencyWorkers) {
      step_.row_slot[row] = -1;
      step_.router_weights[row] = 0.0f;
    }
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * 3 + threadIdx.x; i < range.end * 3; i += kLowLatencyWorkers) {
      step_.src_info[i] = -1;
    }
    if (!payload) return;
    if constexpr (kScaled) {
      if (Warp() == kScalesWarp) scales_.Clear(range);
    }
    const int64_t vectors = PayloadBytesOf<Format>(step_) / kVectorBytes;
    auto* rows = reinterpret_cast<uint4*>(step_.rows);
    JAX_EP_NO_UNROLL
    for (int64_t i = range.begin * vectors + threadIdx.x; i < range.end * vectors;
         i += kLowLatencyWorkers) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }

  const DispatchStep& step_;
  const LowLatencyDispatchPlan& plan_;
  WindowCall& call_;
  const LowLatencyRoles& roles_;
  LowLatencyShared<Format>& shared_;
  GroupTable groups_;
  std::conditional_t<kScaled, ScaleWriter<Format>, NoScales> scales_;
  bool built_ = false;
};

#endif  // sm_90

// A block's shared memory beside LowLatencyShared.
template <typename Format>
struct LowLatencyMemory {
  static constexpr bool kEncodes = QuantizedFormat<Format>;

  int64_t message;  // for senders that encode
  int64_t zeros;    // this and the next one: for formats with scales
  int64_t first_tiles;
  int64_t router_rows;
  int64_t tables;
  int64_t bytes;

  __host__ __device__ static LowLatencyMemory Of(const EpShape& shape, uint32_t message_words) {
    LayoutCursor cursor;
    LowLatencyMemory memory{};
    constexpr int64_t kAlign = 128;
    memory.message = cursor.Take(kEncodes ? int64_t{message_words} * 4 : 0, kAlign);
    memory.zeros = cursor.Take(kHasScales<Format> ? kZeroBytes : 0, kAlign);
    memory.tables = cursor.Take(GroupTable::Bytes(shape, kLowLatencyWarps), kAlign);
    memory.router_rows = cursor.Take(kRouters * shape.experts() * kIndexBytes, kIndexBytes);
    memory.first_tiles =
        cursor.Take(kHasScales<Format> ? (shape.local_experts + 1) * kIndexBytes : 0, kIndexBytes);
    memory.bytes = cursor.end;
    return memory;
  }
};

// Longer messages are better encoded by the senders of window/dispatch.cu.
constexpr int64_t kMostMessageBytes = int64_t{48} << 10;
constexpr int64_t kMostSharedBytes = int64_t{128} << 10;

template <typename Format>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    DispatchLowLatencyKernel(const __grid_constant__ DispatchStep step,
                             const __grid_constant__ WindowGroup group,
                             const __grid_constant__ LowLatencyDispatchPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const memory = SharedBytes();
  auto& shared = SharedObject<LowLatencyShared<Format>>();
  WindowCall call(group, CallKind::kDispatch, plan.call, shared.block.call);
  call.BeginInOrder(shared.block.item);
  LoadEntries(step, shared);
  const auto at = LowLatencyMemory<Format>::Of(step.shape, plan.message_words);
  if constexpr (kHasScales<Format>) {
    FillWords(memory + at.zeros, kZeroBytes, 0);
    FenceProxyAsyncShared();
  }
  if (threadIdx.x == 0) {
    shared.counts_arrived = true;
    shared.block.failed = false;
  }
  __syncthreads();
  LowLatencyRoles roles(call, shared.block);
  LowLatencySender<Format> sender(step, plan, call, roles, shared,
                                  reinterpret_cast<int32_t*>(memory + at.router_rows),
                                  memory + at.message);
  LowLatencyReceiver<Format> receiver(step, plan, call, roles, shared, memory + at.tables,
                                      reinterpret_cast<int32_t*>(memory + at.first_tiles),
                                      memory + at.zeros);
  const bool fills = roles.Run([&](uint32_t item) { sender.Send(item); },
                               [&](uint32_t item) { receiver.Receive(item); });
  if (!fills) return;
  call.EndGroup();
  Fail<Format>(step, plan.scales);
#endif
}

template <typename Format>
bool FitsLowLatency(const DispatchStep& step, const WindowGroup& group) {
  // Low latency pays as long as every item has a multiprocessor of its own: a block's second item
  // comes later than a flag would. Very few tokens gain even without that.
  constexpr int64_t kItems = 128, kVeryFew = 8;
  const EpShape& shape = step.shape;
  if (shape.tokens <= 0 || shape.tokens > kLowLatencyTokens<Format>) return false;
  const int64_t bytes = MessageOf<Format>(step).bytes;
  if (!HasCells(group, CallKind::kDispatch, shape.tokens, DispatchCells(bytes, shape.top_k))) {
    return false;
  }
  if (QuantizedFormat<Format> && bytes > kMostMessageBytes) return false;
  return QuantizedFormat<Format> || shape.tokens <= kVeryFew ||
         shape.tokens * (shape.ranks + 1) <= kItems;
}

template <typename Format>
cudaError_t LaunchLowLatency(const DispatchStep& step, const WindowGroup& group,
                             cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const uint32_t blocks = BlockLimit(group, UINT32_MAX);
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const uint32_t ranks = static_cast<uint32_t>(shape.ranks);
  const int64_t row_bytes = PayloadBytesOf<Format>(step);
  LowLatencyDispatchPlan plan{};
  plan.count_cells = Divisor::Of(CountCells(shape.local_experts));
  plan.top_k = Divisor::Of(shape.top_k);
  plan.rank_of = RankOfExpert(static_cast<int32_t>(shape.local_experts));
  plan.payload_words = plan.scales_word = plan.message_words = static_cast<uint32_t>(row_bytes / 4);
  int64_t clear_bytes = shape.recv_rows * (kTableBytes + (step.zero_tail ? row_bytes : 0));
  if constexpr (kHasScales<Format>) {
    plan.element = step.element;
    plan.scales = ScalePlan::Of<Format>(step);
    const auto message = MessageOf<Format>(step);
    const int64_t scale_words = DivideUp(ScaleBytesOf<Format>(step), 4);
    plan.scales_word = static_cast<uint32_t>(message.scales / 4);
    plan.message_words = plan.scales_word + static_cast<uint32_t>(scale_words);
    clear_bytes += plan.scales.tiles.tiles * plan.scales.TileBytes();
  }
  plan.payload_cells = static_cast<uint32_t>(CellsOf(int64_t{plan.message_words} * 4));
  plan.messages = tokens * ranks;
  // A multiprocessor stores at most 50 GB/s, so spread the work over as many as there are.
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
  plan.call.tag = CallTag(TagKind::kDispatch, shape.tokens, MessageOf<Format>(step).bytes,
                          shape.top_k, step.site);
  const int64_t shared = LowLatencyMemory<Format>::Of(shape, plan.message_words).bytes;
  const dim3 grid(std::min(blocks, send_items + plan.call.work.receive_items));
  return Launch(DispatchLowLatencyKernel<Format>, grid, kLowLatencyThreads,
                static_cast<size_t>(shared), stream, step, group, plan);
}

}  // namespace

template <typename Format>
bool IsLowLatency(const DispatchStep& step, const WindowGroup& group) {
  return VisitSentTokens<Format>(
      step, [&]<typename Sent>(TypeTag<Sent>) { return FitsLowLatency<Sent>(step, group); });
}

template <typename Format>
cudaError_t DispatchLowLatency(const DispatchStep& step, const WindowGroup& group,
                               cudaStream_t stream) {
  return VisitSentTokens<Format>(step, [&]<typename Sent>(TypeTag<Sent>) {
    return LaunchLowLatency<Sent>(step, group, stream);
  });
}

cudaError_t PreloadDispatchLowLatency() {
  cudaError_t error = cudaSuccess;
  ForEachSentTokens([&]<typename Sent>(TypeTag<Sent>) {
    if (error != cudaSuccess) return;
    error = PreloadShared(DispatchLowLatencyKernel<Sent>, kMostSharedBytes);
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                         \
  template bool IsLowLatency<Format>(const DispatchStep&, const WindowGroup&);             \
  template cudaError_t DispatchLowLatency<Format>(const DispatchStep&, const WindowGroup&, \
                                                  cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
