// The senders of a window dispatch: they route, post counts, encode tokens and store messages into
// the destinations' windows.
#pragma once

#include <cstdint>

#include "cuda/window/call.cuh"
#include "cuda/window/counts.cuh"
#include "cuda/window/dispatch_plan.cuh"
#include "cuda/window/items.cuh"
#include "cuda/window/route.cuh"
#include "cuda/window/rows.cuh"
#include "cuda/window/team.cuh"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

template <typename Format>
class Sender {
  static constexpr bool kEncodes = QuantizedFormat<Format>;
  static constexpr bool kCoded = kIsCoded<Format>;

 public:
  // `jobs` is used by senders that encode only.
  __device__ Sender(const DispatchStep& step, const DispatchPlan& plan, WindowCall& call,
                    BulkStages& stages, int32_t* router_rows, TeamJob* jobs)
      : step_(step),
        plan_(plan),
        call_(call),
        stages_(stages),
        team_(jobs, kHelperWarps<Format>, static_cast<uint32_t>(Warp()), call.senders()),
        walk_(plan.top_k),
        router_(step.shape, plan.rank_of, step.ids, router_rows) {}

  // Returns false if a wait failed. Includes the block's wait for credits.
  __device__ bool Run(WorkItem item) {
    const bool sent =
        ForEachItem(call_, Queue::kSend, item, [&](WorkItem current, NextTicket& next) {
          const bool routes = current.phase == Phase::kRoute;
          const Chunk chunk = routes ? Chunk{} : Start(current.index);
          const InvalidIds invalid = Count(routes, current.index);
          if (!routes) return Send(current.index, chunk, next);
          next.DrawAhead();
          if (!Route(current.index, invalid)) return false;
          if (current.index != 0) TellBefore(current.index);
          return true;
        });
    const bool ok = sent && MayStore();
    if constexpr (kEncodes) {
      if (ok) team_.Dismiss();
    }
    return ok;
  }

 private:
  __device__ int32_t experts() const { return static_cast<int32_t>(step_.shape.experts()); }

  // Waits for credits before the first store; later calls return at once.
  __device__ bool MayStore() {
    if (!may_store_) free_ = AwaitCredits(call_);
    may_store_ = true;
    return free_;
  }

  // Counts the tokens of a route item, or those before a chunk.
  __device__ InvalidIds Count(bool routes, uint32_t item) {
    const int32_t tokens = static_cast<int32_t>(step_.shape.tokens), part = plan_.route_tokens;
    const int32_t begin =
        Min(static_cast<int32_t>(item) * (routes ? part : plan_.chunk_tokens), tokens);
    InvalidIds invalid;
    if (routes) {
      router_.Restart(begin);
    } else if (!counts_ || begin - router_.counted() > part) {
      const uint32_t in = static_cast<uint32_t>(begin / part);
      const int32_t before = static_cast<int32_t>(in) * part;
      if (in == 0 || !CountBefore(call_, router_, experts(), in, before)) router_.Restart(0);
    }
    counts_ = !routes;
    router_.CountTo(routes ? Min(begin + part, tokens) : begin, invalid);
    return invalid;
  }

  // Adds a counted part to the rank's totals; the sender that adds the last part posts the totals.
  __device__ bool Route(uint32_t item, InvalidIds invalid) {
    const EpShape& shape = step_.shape;
    if (plan_.call.work.route_items == 1) return PostCounts(invalid);
    PostCounted(call_, router_, experts(), OfPart(item));
    const RouteTotals totals = call_.Totals(experts());
    JAX_EP_NO_UNROLL
    for (int32_t expert = Lane(); expert < experts(); expert += kWarpSize) {
      if (router_.rows(expert) != 0) atomicAdd(totals.rows + expert, router_.rows(expert));
    }
    if (Lane() < shape.ranks) atomicAdd(totals.slots + Lane(), router_.slots());
    if (Lane() == 0 && invalid.count != 0) {
      atomicAdd(totals.invalid, invalid.count);
      const int64_t entries = shape.tokens * shape.top_k;
      atomicMax(totals.invalid_from_end, static_cast<int32_t>(entries) - invalid.first_entry);
    }
    __syncwarp();
    bool last = false;
    if (Lane() == 0) {
      last = LastOf(DeviceSignalMemory{}, totals.finished, plan_.call.work.route_items);
    }
    // From the acquire in LastOf to the accesses of every lane.
    __syncwarp();
    if (__shfl_sync(kFullWarp, static_cast<int>(last), 0) == 0) {
      return true;
    }
    // Leave the scratch at zero for the next call.
    JAX_EP_NO_UNROLL
    for (int32_t expert = Lane(); expert < experts(); expert += kWarpSize) {
      router_.Set(expert, LoadAroundL1(totals.rows + expert));
      totals.rows[expert] = 0;
    }
    if (Lane() < shape.ranks) {
      router_.SetSlots(LoadAroundL1(totals.slots + Lane()));
      totals.slots[Lane()] = 0;
    }
    invalid.count = LoadAroundL1(totals.invalid);
    invalid.first_entry =
        static_cast<int32_t>(shape.tokens * shape.top_k) - LoadAroundL1(totals.invalid_from_end);
    __syncwarp();
    if (Lane() == 0) *totals.invalid = *totals.invalid_from_end = 0;
    return PostCounts(invalid);
  }

  // Posts the counts before a part, for the senders of its chunks.
  __device__ void TellBefore(uint32_t part) {
    const int32_t begin = static_cast<int32_t>(part) * plan_.route_tokens;
    PostBefore(call_, router_, experts(), part, begin);
  }

  // Posts the router's counts as those of the whole call.
  __device__ bool PostCounts(const InvalidIds& invalid) {
    if (!MayStore()) return false;
    PostRouted(step_, call_, router_, invalid);
    return true;
  }

  // A chunk whose first loads are in flight.
  struct Chunk {
    int32_t begin;
    int32_t end;
    uint32_t units;
    uint32_t primed;
    float weight;  // of this lane's entry in the first step
    int32_t id;    // likewise
  };

  __device__ const Divisor& pieces() const {
    if constexpr (kEncodes) return plan_.encode.pieces;
    return plan_.rows.pieces;
  }

  __device__ void LoadUnit(const Chunk& chunk, uint32_t unit) {
    uint32_t piece;
    const int64_t token = chunk.begin + pieces().Divide(unit, piece);
    if constexpr (kEncodes) {
      LoadTokenPiece(stages_, plan_.encode, step_.tokens, token, piece);
    } else if constexpr (kCoded) {
      LoadCodes(token, piece);
    } else {
      const auto* tokens = static_cast<const uint8_t*>(step_.tokens);
      LoadPiece(stages_, plan_.rows, piece, tokens + token * plan_.rows.payload_bytes, nullptr);
    }
  }

  // Bulk copies take whole vectors; other scales are copied when their stage is used (CopyScales).
  __device__ bool ScalesInBulk() const { return step_.scale_bytes % kVectorBytes == 0; }
  __device__ void LoadCodes(int64_t token, uint32_t piece) {
    const RowPlan& rows = plan_.rows;
    const auto* codes = static_cast<const uint8_t*>(step_.tokens) + token * rows.payload_bytes;
    const uint32_t bytes = rows.PieceBytes(piece);
    const uint32_t scale_bytes =
        piece == 0 && ScalesInBulk() ? static_cast<uint32_t>(step_.scale_bytes) : 0;
    stages_.Load(bytes + scale_bytes, [&](uint8_t* stage, uint64_t* barrier) {
      BulkLoad(stage, codes + static_cast<int64_t>(piece) * rows.piece_bytes, bytes, barrier);
      if (scale_bytes == 0) return;
      BulkLoad(stage + rows.piece_bytes, step_.token_scales + token * step_.scale_bytes,
               scale_bytes, barrier);
    });
  }
  // Called by the whole warp before Annotate, whose fence these stores need as well.
  __device__ void CopyScales(int64_t token, uint8_t* scales) const {
    if (ScalesInBulk()) return;
    using Scale = typename Format::Scale;
    const int64_t count = step_.scale_bytes / static_cast<int64_t>(sizeof(Scale));
    const auto* from = reinterpret_cast<const Scale*>(step_.token_scales) + token * count;
    JAX_EP_NO_UNROLL
    for (int64_t i = Lane(); i < count; i += kWarpSize) {
      reinterpret_cast<Scale*>(scales)[i] = from[i];
    }
  }

  __device__ Chunk Start(uint32_t item) {
    Chunk chunk{};
    chunk.begin = static_cast<int32_t>(item) * plan_.chunk_tokens;
    chunk.end = Min(chunk.begin + plan_.chunk_tokens, static_cast<int32_t>(step_.shape.tokens));
    chunk.units = static_cast<uint32_t>(chunk.end - chunk.begin) * pieces().value;
    chunk.primed = stages_.Prime(chunk.units, [&](uint32_t unit) { LoadUnit(chunk, unit); });
    chunk.weight = LoadWeight(chunk.begin, chunk.end);
    chunk.id = router_.LoadId(walk_, chunk.begin, chunk.end);
    return chunk;
  }

  // Sends a chunk. The tokens before it have been counted.
  __device__ bool Send(uint32_t item, const Chunk& chunk, NextTicket& next) {
    const int32_t first_slot = router_.slots();
    const uint32_t destination = DestinationOf(call_, item);
    // Assign while the first token is being loaded.
    RoutedEntry entry = router_.Assign(walk_, chunk.end, chunk.id);
    float weight = chunk.weight;
    int32_t slot = -1;  // of the token at this lane's destination
    if (!MayStore()) {
      stages_.Abandon(chunk.primed);
      return false;
    }
    const auto load = [&](uint32_t unit) { LoadUnit(chunk, unit); };
    stages_.Pass(chunk.units, chunk.primed, load, [&](uint32_t unit, uint8_t* stage) {
      uint32_t piece;
      const int32_t in_chunk = static_cast<int32_t>(pieces().Divide(unit, piece));
      const int32_t token = chunk.begin + in_chunk;
      // Most chunks are a single step; a comparison is cheaper than a division.
      const int32_t in_step = in_chunk < walk_.tokens ? in_chunk : in_chunk % walk_.tokens;
      uint8_t* side = stage + plan_.rows.piece_bytes;
      if constexpr (kEncodes) StartEncoding(team_, stage, piece);
      if (piece == 0) {
        if (in_step == 0 && in_chunk != 0) {
          weight = LoadWeight(token, chunk.end);
          entry = router_.Assign(walk_, chunk.end, router_.LoadId(walk_, token, chunk.end));
        }
        if constexpr (kEncodes) side = FinishEncoding<Format>(team_, plan_.encode, stage, piece);
        if constexpr (kCoded) {
          CopyScales(token, side);
          const auto message = MessageOf<Format>(step_);
          side += message.source_token - message.scales;
        }
        Annotate(token, in_step * walk_.top_k, entry, weight, side);
        slot = SlotAt(destination, call_.ranks(), in_step * walk_.top_k, walk_.top_k, entry.rank,
                      entry.slot);
      } else if constexpr (kEncodes) {
        FinishEncoding<Format>(team_, plan_.encode, stage, piece);
        FenceProxyAsyncShared();
        __syncwarp();
      }
      if (slot >= 0) Store(destination, piece, slot, stage);
      // Only after the bulk stores: the fence in front of those would have to wait for these stores
      // too.
      if (piece == 0 && in_step == 0) RecordSlots(token, chunk.end, entry);
    });
    // Lane r of the router has the count of rank r.
    const int32_t at = static_cast<int32_t>(destination);
    const int32_t first = __shfl_sync(kFullWarp, first_slot, at);
    const int32_t count = __shfl_sync(kFullWarp, router_.slots() - first_slot, at);
    next.DrawAhead();
    PublishChunk(call_, item, static_cast<uint32_t>(first), static_cast<uint32_t>(count));
    return true;
  }

  __device__ bool InStep(int32_t token, int32_t end) const {
    return walk_.used && token + walk_.in_step < end;
  }
  __device__ float LoadWeight(int32_t token, int32_t end) const {
    return InStep(token, end) ? step_.weights[int64_t{token} * walk_.top_k + Lane()] : 0.0f;
  }
  __device__ void RecordSlots(int32_t token, int32_t end, const RoutedEntry& entry) const {
    if (!InStep(token, end)) return;
    const int32_t tokens = static_cast<int32_t>(step_.shape.tokens);
    step_.slot_of[int64_t{token} * walk_.top_k + Lane()] =
        entry.rank < 0 ? -1 : entry.rank * tokens + entry.slot;
  }

  // Writes what lies beside the payload and the scales of a token, whose entries are in the lanes
  // from `base` on. Expert ids are global here, so that the same message serves all destinations.
  __device__ void Annotate(int32_t token, int32_t base, const RoutedEntry& entry, float weight,
                           uint8_t* side) {
    const auto message = MessageOf<Format>(step_);
    uint8_t* stage = side - message.source_token;
    const int32_t k = Lane() - base;
    if (k >= 0 && k < walk_.top_k) {
      Int32At(stage, message.expert)[k] = entry.id;
      Int32At(stage, message.position)[k] = entry.position;
      FloatAt(stage, message.weight)[k] = weight;
      if (k == 0) *Int32At(stage, message.source_token) = token;
    }
    FenceProxyAsyncShared();
    __syncwarp();
  }

  __device__ void Store(uint32_t destination, uint32_t piece, int32_t slot, const uint8_t* stage) {
    const RowPlan& rows = plan_.rows;
    uint8_t* message =
        call_.Region(destination, call_.PartAt(destination)) + int64_t{slot} * rows.message_bytes;
    if constexpr (kEncodes) {
      StoreEncoded<Format>(plan_.encode, piece, message, stage);
    } else if (kCoded || destination != call_.rank()) {
      StorePiece(rows, piece, message, stage);
    } else if (piece == 0) {
      // Own rows are copied from the tokens themselves.
      BulkStore(message + rows.side, stage + rows.piece_bytes, rows.side_bytes);
    }
  }

  const DispatchStep& step_;
  const DispatchPlan& plan_;
  WindowCall& call_;
  BulkStages& stages_;  // shared by both roles, because it tracks the phases of the barriers
  HelperTeam team_;     // of senders that encode
  TokenWalk walk_;
  WarpRouter router_;
  bool counts_ = false;  // whether the router counts from token 0 on
  bool may_store_ = false;
  bool free_ = false;
};

}  // namespace jax_ep::cuda
