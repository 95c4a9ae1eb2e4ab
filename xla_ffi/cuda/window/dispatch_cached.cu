// The cached dispatch of the window transports, which backward passes use: it follows a known
// route, so it neither routes nor exchanges counts. Tokens that travel unchanged to the own rank
// are stored to their rows by the senders themselves, since the route says where they go; in
// quantised formats receivers decode all rows, own ones too. The send and receive halves are for
// groups that span several nodes.
#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/quantize.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/window/call.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/encode.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/groups.cuh"
#include "cuda/window/halves.cuh"
#include "cuda/window/items.cuh"
#include "cuda/window/rows.cuh"
#include "cuda/window/team.cuh"
#include "formats/combine_wire.h"
#include "formats/registry.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

struct CachedPlan {
  CallPlan call;
  RowPlan rows;
  EncodePlan encode;  // of quantised formats
  int32_t chunk_tokens;
  uint32_t chunk_items;  // receive items that have a chunk; the others only clear rows
};

// Pieces of codes consist of whole blocks.
constexpr int64_t kPayloadAlign = CombineFormat::kBlock;

// The entries (slot or token, k) of a run, in steps of 32 / K slots. The next step is loaded while
// one is in use.
template <typename Value, typename LoadEntry>
class EntrySteps {
 public:
  __device__ EntrySteps(int32_t top_k, uint32_t count, LoadEntry load)
      : load_(load),
        top_k_(top_k),
        a_step_(kWarpSize / top_k),
        count_(static_cast<int32_t>(count)) {
    next_ = Load(0);
  }
  // Called by the whole warp with indexes that rise by one. Afterwards value() belongs to the step
  // of `index`. Returns the lane of the index's first entry.
  __device__ int32_t Seek(int32_t index) {
    const int32_t in_step = index % a_step_;
    if (in_step == 0) {
      value_ = next_;
      next_ = Load(index + a_step_);
    }
    return in_step * top_k_;
  }
  __device__ const Value& value() const { return value_; }

 private:
  __device__ Value Load(int32_t first) {
    const int32_t lane = Lane();
    const bool active = lane < a_step_ * top_k_ && first + lane / top_k_ < count_;
    return load_(active ? first + lane / top_k_ : -1, lane % top_k_);
  }

  LoadEntry load_;
  int32_t top_k_;
  int32_t a_step_;
  int32_t count_;
  Value value_;
  Value next_;
};

template <typename Format>
class CachedWorker {
  static constexpr bool kEncodes = QuantizedFormat<Format>;

 public:
  // `jobs` is used by quantised formats only.
  __device__ CachedWorker(const DispatchCachedStep& step, const CachedPlan& plan, WindowCall& call,
                          BulkStages& stages, const uint8_t* zeros, TeamJob* jobs)
      : step_(step),
        plan_(plan),
        call_(call),
        stages_(stages),
        zeros_(zeros),
        // Only blocks with senders have send teams.
        send_team_(jobs, kHelperWarps<Format>, static_cast<uint32_t>(Warp()),
                   call.senders() == 0 ? 1 : call.senders()),
        receive_team_(jobs, kHelperWarps<Format>, static_cast<uint32_t>(Warp()), kRowWarps),
        tokens_(static_cast<int32_t>(step.shape.tokens)),
        top_k_(static_cast<int32_t>(step.shape.top_k)) {}

  // Returns false if a wait failed, as does Receive. Send includes the block's wait for credits.
  __device__ bool Send(WorkItem item) {
    bool ok = true;
    if (item.phase == Phase::kNone) {
      ok = AwaitCredits(call_);
    } else {
      bool first = true;
      ok = ForEachItem(call_, Queue::kSend, item, [&](WorkItem current, NextTicket& next) {
        const bool sent = SendChunk(current.index, first, next);
        first = false;
        return sent;
      });
    }
    if constexpr (kEncodes) {
      if (ok) send_team_.Dismiss();
    }
    return ok;
  }

  __device__ bool Receive(WorkItem item) {
    const bool ok =
        ForEachItem(call_, Queue::kReceive, item, [&](WorkItem current, NextTicket& next) {
          ClearShare(current.index);
          next.DrawAhead();
          const bool own = !kEncodes && call_.by_ranks().Rest(current.index) == 0;
          return own || current.index >= plan_.chunk_items || PlaceChunk(current.index);
        });
    // Dismiss the helpers even after a failed wait, because they are still waiting for a job.
    if constexpr (kEncodes) receive_team_.Dismiss();
    return ok;
  }

  // A checksum: over all warps of a call it adds up to 0 if each row that has a slot was stored
  // exactly once.
  __device__ uint32_t rows_left() const { return rows_left_; }

 private:
  // Where an entry's token goes: its rank and slot there and, if that is this rank, the entry's
  // row.
  struct Target {
    int32_t rank;
    int32_t slot;
    int32_t own_row;
    float weight;
  };

  __device__ int32_t RowOf(uint32_t source, int32_t slot, int32_t k) const {
    const int64_t flat = static_cast<int64_t>(source) * tokens_ + slot;
    return RowOrDropped(step_.row_of[flat * top_k_ + k], step_.shape.recv_rows);
  }

  __device__ float WeightOf(int64_t entry) const {
    return step_.num_weights != 0 ? step_.weights[entry] : 0.0f;
  }

  // The tables have passed through the caller's program, so whatever is out of range is skipped.
  __device__ Target LoadTarget(int32_t token, int32_t k) const {
    if (token < 0) return {-1, -1, -1, 0.0f};
    const int64_t entry = int64_t{token} * top_k_ + k;
    const uint32_t flat = static_cast<uint32_t>(step_.slot_of[entry]);
    const uint32_t tokens = static_cast<uint32_t>(tokens_);
    if (flat >= call_.ranks() * tokens) return {-1, -1, -1, WeightOf(entry)};
    return {static_cast<int32_t>(flat / tokens), static_cast<int32_t>(flat % tokens), -1,
            WeightOf(entry)};
  }

  __device__ bool SendChunk(uint32_t chunk, bool first, NextTicket& next) {
    const RowPlan& rows = plan_.rows;
    const Divisor& pieces = kEncodes ? plan_.encode.pieces : rows.pieces;
    const int32_t begin = static_cast<int32_t>(chunk) * plan_.chunk_tokens;
    const int32_t end = Min(begin + plan_.chunk_tokens, tokens_);
    const auto load = [&](uint32_t unit) {
      uint32_t piece;
      const int64_t token = begin + pieces.Divide(unit, piece);
      if constexpr (kEncodes) {
        LoadTokenPiece(stages_, plan_.encode, step_.tokens, token, piece);
      } else {
        LoadPiece(stages_, rows, piece,
                  static_cast<const uint8_t*>(step_.tokens) + token * rows.payload_bytes, nullptr);
      }
    };
    const uint32_t units = static_cast<uint32_t>(end - begin) * pieces.value;
    const uint32_t primed = stages_.Prime(units, load);
    EntrySteps<Target, Targets> targets(top_k_, static_cast<uint32_t>(end - begin),
                                        Targets{this, begin});
    if (first && !AwaitCredits(call_)) {
      stages_.Abandon(primed);
      return false;
    }
    const uint32_t destination = DestinationOf(call_, chunk);
    uint32_t first_slot = 0;  // at this lane's destination
    uint32_t sent = 0;        // bit i: slot first_slot + i was sent there
    int32_t slot = -1;        // of the current token at this lane's destination
    int32_t own_row = -1;     // row of the token's entry k in lane k, if at this rank
    stages_.Pass(units, primed, load, [&](uint32_t unit, uint8_t* stage) {
      uint32_t piece;
      const uint32_t index = pieces.Divide(unit, piece);
      uint8_t* side = stage + rows.piece_bytes;
      if constexpr (kEncodes) StartEncoding(send_team_, stage, piece);
      if (piece == 0) {
        const int32_t base = targets.Seek(static_cast<int32_t>(index));
        const Target& target = targets.value();
        slot = SlotAt(destination, call_.ranks(), base, top_k_, target.rank, target.slot);
        // Gaps between slots belong to tokens of other chunks. They exceed kMaxSlotSpan only if the
        // route was changed, and such slots then count as not sent.
        if (slot >= 0) {
          if (sent == 0) first_slot = static_cast<uint32_t>(slot);
          const uint32_t place = static_cast<uint32_t>(slot) - first_slot;
          sent |= place < kMaxSlotSpan ? 1u << place : 0;
        }
        if constexpr (kEncodes) {
          side = FinishEncoding<Format>(send_team_, plan_.encode, stage, piece);
        }
        own_row = Annotate(base, target, side);
      } else if constexpr (kEncodes) {
        FinishEncoding<Format>(send_team_, plan_.encode, stage, piece);
        FenceProxyAsyncShared();
        __syncwarp();
      }
      if (!kEncodes && own_row >= 0) StoreRow(own_row, piece, stage);
      if (slot < 0 || (!kEncodes && destination == call_.rank())) return;
      uint8_t* message =
          call_.Region(destination, call_.PartAt(destination)) + int64_t{slot} * rows.message_bytes;
      if constexpr (kEncodes) {
        StoreEncoded<Format>(plan_.encode, piece, message, stage);
      } else {
        StorePiece(rows, piece, message, stage);
      }
    });
    const uint32_t count = kWarpSize - static_cast<uint32_t>(__clz(static_cast<int>(sent)));
    next.DrawAhead();
    PublishChunk(call_, chunk, first_slot, sent << kSlotCountBits | count);
    return true;
  }

  struct Targets {
    const CachedWorker* worker;
    int32_t begin;
    __device__ Target operator()(int32_t index, int32_t k) const {
      Target target = worker->LoadTarget(index < 0 ? -1 : begin + index, k);
      if constexpr (kEncodes) return target;
      // A token has one slot at this rank, so any of its entries that go here has it.
      const uint32_t rank = worker->call_.rank();
      const int32_t base = Lane() - k;
      const unsigned here =
          __ballot_sync(kFullWarp, target.rank == static_cast<int32_t>(rank)) >> base &
          ((2u << (worker->top_k_ - 1)) - 1);
      const int32_t slot = __shfl_sync(kFullWarp, target.slot, base + __ffs(here) - 1);
      if (index >= 0 && here != 0) target.own_row = worker->RowOf(rank, slot, k);
      return target;
    }
  };

  // Called by the whole warp. Writes the weights beside the payload and those of own rows to their
  // place. Returns in lane k the own row of entry k.
  __device__ int32_t Annotate(int32_t base, const Target& target, uint8_t* side) {
    const int32_t k = Lane() - base;
    const bool here = k >= 0 && k < top_k_;
    if (here && step_.num_weights != 0) reinterpret_cast<float*>(side)[k] = target.weight;
    if (here && target.own_row >= 0) {
      rows_left_ -= TraceOf(target.own_row);
      if (step_.num_weights != 0) step_.router_weights[target.own_row] = target.weight;
    }
    FenceProxyAsyncShared();
    __syncwarp();
    return here ? target.own_row : -1;
  }

  __device__ void StoreRow(int32_t row, uint32_t piece, const uint8_t* stage) {
    BulkStore(step_.rows + int64_t{row} * plan_.rows.payload_bytes +
                  static_cast<int64_t>(piece) * plan_.rows.piece_bytes,
              stage, plan_.rows.PieceBytes(piece));
  }

  struct Rows {
    const CachedWorker* worker;
    uint32_t source;
    int32_t first_slot;
    uint32_t sent;
    __device__ int32_t operator()(int32_t index, int32_t k) const {
      // The places of slots that were not sent still hold an earlier call's messages.
      if (index < 0 || (sent >> index & 1) == 0) return -1;
      return worker->RowOf(source, first_slot + index, k);
    }
  };

  __device__ bool PlaceChunk(uint32_t item) {
    const RowPlan& rows = plan_.rows;
    const Arrival chunk = AwaitChunk(call_, item, tokens_);
    if (!chunk.ok) return false;
    const uint8_t* messages =
        call_.Region(call_.rank(), chunk.source) + int64_t{chunk.first_slot} * rows.message_bytes;
    const auto load = [&](uint32_t unit) {
      uint32_t piece;
      const uint32_t index = rows.pieces.Divide(unit, piece);
      const uint8_t* from = messages + int64_t{index} * rows.message_bytes;
      if constexpr (kEncodes) {
        LoadWithSide(stages_, rows, piece, from);
      } else {
        LoadPiece(stages_, rows, piece, from, rows.side_bytes == 0 ? nullptr : from);
      }
    };
    const uint32_t units = chunk.count * rows.pieces.value;
    const uint32_t primed = stages_.Prime(units, load);
    EntrySteps<int32_t, Rows> row_of(
        top_k_, chunk.count,
        Rows{this, chunk.source, static_cast<int32_t>(chunk.first_slot), chunk.sent});
    int32_t row = -1;  // row of the current slot's entry k, in lane k
    stages_.Pass(units, primed, load, [&](uint32_t unit, const uint8_t* stage) {
      uint32_t piece;
      const uint32_t index = rows.pieces.Divide(unit, piece);
      if (piece == 0) {
        const int32_t k = Lane() - row_of.Seek(static_cast<int32_t>(index));
        row = k >= 0 && k < top_k_ ? row_of.value() : -1;
        if (row >= 0) rows_left_ -= TraceOf(row);
        if (row >= 0 && step_.num_weights != 0) {
          const uint32_t weight = kEncodes ? plan_.encode.rest - plan_.encode.scales : 0;
          step_.router_weights[row] = FloatAt(stage + rows.piece_bytes, weight)[k];
        }
      }
      if constexpr (kEncodes) {
        Decode(row, piece, stage);
      } else if (row >= 0) {
        StoreRow(row, piece, stage);
      }
    });
    return true;
  }

  // Called by the whole warp: has its helpers decode a piece of a message and store it to the rows
  // of all lanes that have one.
  __device__ void Decode(int32_t row, uint32_t piece, const uint8_t* stage) {
    const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
    if (lanes == 0) return;
    if (row >= 0) receive_team_.job().rows[__popc(lanes & LanesBelow(Lane()))] = row;
    if (Lane() == 0) receive_team_.SetJob(stage, piece, static_cast<uint32_t>(__popc(lanes)));
    receive_team_.Start();
    receive_team_.AwaitDone();
  }

  // A hash of a row, never 0. Sums over two different sets of rows are equal only with a
  // probability of 2^-32.
  __device__ static uint32_t TraceOf(int32_t row) {
    uint32_t trace = (static_cast<uint32_t>(row) + 1) * 0x9E3779B1u;
    trace = (trace ^ trace >> 15) * 0x85EBCA77u;
    return trace ^ trace >> 13;
  }

  // Clears this item's equal share of the rows that no token reaches, and of their weights.
  __device__ void ClearShare(uint32_t item) {
    const int64_t rows = step_.shape.recv_rows, items = plan_.call.work.receive_items;
    const int64_t bytes = kEncodes ? step_.shape.row_bytes() : plan_.rows.payload_bytes;
    const int64_t end = rows * (item + 1) / items;
    JAX_EP_NO_UNROLL
    for (int64_t first = rows * item / items; first < end; first += kWarpSize) {
      const int64_t row = first + Lane();
      const bool clear = row < end && step_.row_slot[row] < 0;
      if (row < end && !clear) rows_left_ += TraceOf(static_cast<int32_t>(row));
      if (clear && step_.num_weights != 0) step_.router_weights[row] = 0.0f;
      unsigned left = __ballot_sync(kFullWarp, clear && step_.zero_tail);
      while (left != 0) {
        const int begin = __ffs(static_cast<int>(left)) - 1;
        const unsigned kept = ~left & ~LanesBelow(begin);
        const int stop = kept == 0 ? kWarpSize : __ffs(static_cast<int>(kept)) - 1;
        StoreZeros(step_.rows + (first + begin) * bytes, step_.rows + (first + stop) * bytes,
                   zeros_);
        left = stop == kWarpSize ? 0 : left & ~LanesBelow(stop);
      }
    }
  }

  const DispatchCachedStep& step_;
  const CachedPlan& plan_;
  WindowCall& call_;
  BulkStages& stages_;  // shared by both roles, because it tracks the phases of the barriers
  const uint8_t* zeros_;
  // Helpers first serve the block's senders, and then all row warps.
  HelperTeam send_team_;
  HelperTeam receive_team_;
  int32_t tokens_;
  int32_t top_k_;
  uint32_t rows_left_ = 0;
};

// A helper, as a whole warp: decodes its share of a piece of a message and stores it to all of the
// message's rows.
template <typename Format, typename Element>
__device__ __forceinline__ void DecodeElements(const Helper<Format>& helper, const TeamJob& job,
                                               const uint8_t* codes, const RowPlan& plan,
                                               const DispatchCachedStep& step) {
  static_assert(kPayloadAlign == Format::kBlock && Format::Code::kBits == 8);
  constexpr int kCount = kLaneElements<Element>;
  const int64_t begin = static_cast<int64_t>(job.piece) * plan.piece_bytes;
  const uint8_t* scales = codes + plan.piece_bytes + Format::ScaleBytes(begin);
  uint8_t* piece = step.rows + begin * static_cast<int64_t>(sizeof(Element));
  const int64_t row_bytes = step.shape.row_bytes();
  const uint32_t vectors = plan.PieceBytes(job.piece) / kCount, threads = helper.team.threads();
  const uint32_t num_rows = job.num_rows;
  JAX_EP_NO_UNROLL
  for (uint32_t first = helper.thread(); first < vectors; first += kHelperVectors * threads) {
    Elements<Element, kCount> elements[kHelperVectors];
#pragma unroll
    for (uint32_t i = 0; i < kHelperVectors; ++i) {
      // Lanes past the end decode the first vector again and store nothing.
      const uint32_t vector = first + i * threads;
      DecodedVector<Format, kCount> decoded;
      decoded.Load(codes, scales, vector < vectors ? vector : first);
      float values[kCount];
      decoded.Restore(values);
      elements[i] = Elements<Element, kCount>::Round(values);
    }
    JAX_EP_NO_UNROLL
    for (uint32_t row = 0; row < num_rows; ++row) {
      uint8_t* to = piece + job.rows[row] * row_bytes;
#pragma unroll
      for (uint32_t i = 0; i < kHelperVectors; ++i) {
        const uint32_t vector = first + i * threads;
        if (vector < vectors) elements[i].Store(to + int64_t{vector} * kVectorBytes);
      }
    }
  }
}

// A helper: serves receivers after its senders have dismissed it.
template <typename Format>
__device__ void HelpReceivers(const CachedPlan& plan, const DispatchCachedStep& step,
                              TeamJob* jobs) {
  // The named barriers of the send teams now belong to other teams.
  Helper<Format>::AwaitAll();
  const auto helper = Helper<Format>::Of(jobs, kRowWarps);
  helper.team.Help([&](const TeamJob& job, const uint8_t* stage) {
    if (step.element == ElementType::kBFloat16) {
      DecodeElements<Format, BFloat16>(helper, job, stage, plan.rows, step);
    } else if (step.element == ElementType::kFloat16) {
      DecodeElements<Format, Float16>(helper, job, stage, plan.rows, step);
    } else {
      DecodeElements<Format, float>(helper, job, stage, plan.rows, step);
    }
  });
}

namespace {

template <typename Format>
constexpr int64_t kFixedBytes =
    kZeroBytes + static_cast<int64_t>(sizeof(CallBlock)) + kTeamBytes<Format>;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Called by the whole block: fills in the results of a failed call.
__device__ __noinline__ void Fail(const DispatchCachedStep& step) {
  FillWords(step.rows, step.shape.recv_rows * step.shape.row_bytes(), kNoValue);
  if (step.num_weights != 0) FillWords(step.router_weights, step.shape.recv_rows, kNoValue);
}

// Called by the last block if the route was changed: clears the rows whose slot was not sent or
// does not name them, so that no result shows what its memory held before. `memory` is the block's
// area of zeros.
__device__ __noinline__ void ClearUnsent(const DispatchCachedStep& step, const CachedPlan& plan,
                                         const WindowCall& call, uint8_t* memory) {
  constexpr uint32_t kSlots = kZeroBytes * 8;  // per pass, one bit each
  auto* const sent = reinterpret_cast<uint32_t*>(memory);
  const EpShape& shape = step.shape;
  const auto tokens = static_cast<uint32_t>(shape.tokens),
             top_k = static_cast<uint32_t>(shape.top_k);
  const uint32_t slots = call.ranks() * tokens;
  BulkWait<0>();  // earlier bulk stores may still read the zeros
  JAX_EP_NO_UNROLL
  for (uint32_t first = 0;; first += kSlots) {
    __syncthreads();
    JAX_EP_NO_UNROLL
    for (uint32_t i = threadIdx.x; i < kSlots / 32; i += blockDim.x) sent[i] = 0;
    __syncthreads();
    JAX_EP_NO_UNROLL
    for (uint32_t i = threadIdx.x; i < plan.chunk_items; i += blockDim.x) {
      uint32_t source;
      const uint32_t chunk = call.by_ranks().Divide(i, source);
      const FlagCell flag = call.SeenFlag(source, chunk);
      JAX_EP_NO_UNROLL
      for (uint32_t j = 0; j < kMaxSlotSpan; ++j) {
        const bool is_sent = (flag.count >> kSlotCountBits >> j & 1) != 0 &&
                             j < (flag.count & kSlotCountMask) && flag.first_slot < tokens &&
                             j < tokens - flag.first_slot;
        const uint32_t bit = source * tokens + flag.first_slot + j - first;
        if (is_sent && bit < kSlots) atomicOr(&sent[bit / 32], 1u << bit % 32);
      }
    }
    __syncthreads();
    const uint32_t rows = static_cast<uint32_t>(shape.recv_rows);
    JAX_EP_NO_UNROLL
    for (uint32_t begin = threadIdx.x - Lane(); begin < rows; begin += blockDim.x) {
      const uint32_t row = begin + Lane();
      const int32_t slot = row < rows ? step.row_slot[row] : -1;
      const uint32_t bit = static_cast<uint32_t>(slot) - first;
      bool clear = false;
      if (static_cast<uint32_t>(slot) >= slots) {
        clear = slot >= 0;
      } else if (bit < kSlots) {
        bool names = false;
        JAX_EP_NO_UNROLL
        for (uint32_t k = 0; k < top_k; ++k) {
          names |= step.row_of[int64_t{slot} * top_k + k] == static_cast<int32_t>(row);
        }
        clear = !names || (sent[bit / 32] >> bit % 32 & 1) == 0;
      }
      if (clear && step.num_weights != 0) step.router_weights[row] = 0.0f;
      for (unsigned left = __ballot_sync(kFullWarp, clear); left != 0; left &= left - 1) {
        auto* to = reinterpret_cast<uint4*>(step.rows + FromLowest(left, row) * shape.row_bytes());
        JAX_EP_NO_UNROLL
        for (int64_t i = Lane(); i < shape.row_bytes() / kVectorBytes; i += kWarpSize) {
          to[i] = make_uint4(0, 0, 0, 0);
        }
      }
    }
    if (slots - first <= kSlots) break;
  }
}

// The shared memory of a block.
struct CachedShared {
  __device__ CachedShared(uint8_t* memory, const CachedPlan& plan)
      : zeros(memory),
        stages(memory + kZeroBytes),
        block(reinterpret_cast<CallBlock*>(stages + plan.rows.stages.bytes(kRowWarps))),
        jobs(reinterpret_cast<TeamJob*>(block + 1)) {}

  uint8_t* zeros;
  uint8_t* stages;
  CallBlock* block;
  TeamJob* jobs;  // of quantised formats
};

#endif  // sm_90

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    DispatchCachedKernel(const __grid_constant__ DispatchCachedStep step,
                         const __grid_constant__ WindowGroup group,
                         const __grid_constant__ CachedPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const CachedShared memory(SharedBytes(), plan);
  WindowCall call(group, CallKind::kDispatch, plan.call, *memory.block);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  FillWords(memory.zeros, kZeroBytes, 0);
  FenceProxyAsyncShared();
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format, kRouteInputScale<Format>>(call, plan.encode, memory.jobs, nullptr);
      if (ok) HelpReceivers<Format>(plan, step, memory.jobs);
    }
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, memory.zeros, memory.jobs);
    const bool sends = warp < call.senders();
    ok = sends ? worker.Send(call.First(Queue::kSend)) : AwaitCredits(call);
    // Senders are independent of other warps and receive what is left.
    if (ok) ok = worker.Receive(call.First(Queue::kReceive));
    AddToSum(*memory.block, worker.rows_left());
  }
  EndRows(
      call, ok, [&] { *step.done = 0; }, [&] { Fail(step); },
      [&] { ClearUnsent(step, plan, call, memory.zeros); });
#endif
}

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    DispatchCachedSendKernel(const __grid_constant__ DispatchCachedStep step,
                             const __grid_constant__ WindowGroup group,
                             const __grid_constant__ CachedPlan plan, PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const CachedShared memory(SharedBytes(), plan);
  WindowSendHalf call(group, CallKind::kDispatch, plan.call, *memory.block);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format, kRouteInputScale<Format>>(call, plan.encode, memory.jobs, nullptr);
    }
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, memory.zeros, memory.jobs);
    ok = worker.Send(call.First(Queue::kSend));
    AddToSum(*memory.block, worker.rows_left());
  }
  EndRows(call, ok, [&] { call.Note(pending); }, [&] { FillWords(pending, 1, kNoValue); });
#endif
}

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    DispatchCachedRecvKernel(const __grid_constant__ DispatchCachedStep step,
                             const __grid_constant__ WindowGroup group,
                             const __grid_constant__ CachedPlan plan, const PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const shared = SharedBytes();
  auto& own = *reinterpret_cast<CallPlan*>(shared);
  const CachedShared memory(shared + kOwnPlanBytes, plan);
  WindowRecvHalf call(group, CallKind::kDispatch, plan.call, *memory.block, own);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin(*pending);
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  FillWords(memory.zeros, kZeroBytes, 0);
  FenceProxyAsyncShared();
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) HelpReceivers<Format>(plan, step, memory.jobs);
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, memory.zeros, memory.jobs);
    ok = worker.Receive(call.First(Queue::kReceive));
    AddToSum(*memory.block, worker.rows_left());
  }
  EndRows(
      call, ok, [&] { *step.done = 0; }, [&] { Fail(step); },
      [&] { ClearUnsent(step, plan, call, memory.zeros); });
#endif
}

// Makes all of the plan except the roles, leaving `spare` bytes of shared memory for others.
// Returns false if it does not fit.
template <typename Format>
bool MakePlan(const DispatchCachedStep& step, CachedPlan& plan, int64_t spare = 0) {
  const EpShape& shape = step.shape;
  const int64_t payload_bytes = Format::PayloadBytes(shape.hidden, shape.element_bytes);
  const auto message =
      DispatchCachedMessage::Of(payload_bytes, Format::ScaleBytes(shape.hidden), step.num_weights);
  const int64_t chunks = kDispatchChunks.Count(shape.tokens);
  plan.chunk_tokens = static_cast<int32_t>(kDispatchChunks.Tokens(shape.tokens));
  plan.chunk_items = static_cast<uint32_t>(chunks * shape.ranks);
  plan.call.work = {0, static_cast<uint32_t>(chunks),
                    ReceiveItems(plan.chunk_items, shape.recv_rows * shape.row_bytes())};
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag =
      CallTag(TagKind::kDispatchCached, shape.tokens, message.bytes, step.num_weights, step.site);
  const int64_t budget = kMaxSharedBytes - kFixedBytes<Format> - spare;
  if (!PlanRows(payload_bytes, message.scales, message.bytes, budget, plan.rows,
                QuantizedFormat<Format> ? kPayloadAlign : kRowAlignBytes)) {
    return false;
  }
  if constexpr (QuantizedFormat<Format>) {
    return PlanEncoding<Format>(shape.hidden, step.element, message.scales, message.weight,
                                message.bytes, budget, plan.encode, plan.rows.stages);
  }
  return true;
}

template <typename Format>
size_t SharedBytes(const CachedPlan& plan, int64_t spare = 0) {
  return static_cast<size_t>(kFixedBytes<Format> + spare + plan.rows.stages.bytes(kRowWarps));
}

}  // namespace

template <typename Format>
cudaError_t DispatchCached(const DispatchCachedStep& step, const WindowGroup& group,
                           cudaStream_t stream) {
  CachedPlan plan{};
  if (!MakePlan<Format>(step, plan)) return cudaErrorInvalidConfiguration;
  // Senders that do not encode also store the rows of their own rank.
  plan.call.roles = RowRoles(group, plan.call.work, step.shape.tokens, 2, QuantizedFormat<Format>);
  return Launch(DispatchCachedKernel<Format>, dim3(plan.call.roles.blocks),
                kRowBlockThreads<Format>, SharedBytes<Format>(plan), stream, step, group, plan);
}

template <typename Format>
cudaError_t DispatchCachedSend(const DispatchCachedStep& step, PendingCall* pending,
                               const WindowGroup& group, cudaStream_t stream) {
  CachedPlan plan{};
  if (!MakePlan<Format>(step, plan)) return cudaErrorInvalidConfiguration;
  plan.call.of_whole_call = true;
  plan.call.work.receive_items = 0;
  plan.call.roles = SendingRoles(group, kRowWarps, plan.call, QuantizedFormat<Format>);
  return Launch(DispatchCachedSendKernel<Format>, dim3(plan.call.roles.blocks),
                kRowBlockThreads<Format>, SharedBytes<Format>(plan), stream, step, group, plan,
                pending);
}

template <typename Format>
cudaError_t DispatchCachedRecv(const DispatchCachedStep& step, const PendingCall* pending,
                               const WindowGroup& group, cudaStream_t stream) {
  CachedPlan plan{};
  if (!MakePlan<Format>(step, plan, kOwnPlanBytes)) return cudaErrorInvalidConfiguration;
  plan.call.work.send_items = 0;
  plan.call.roles = ReceivingRoles(group, kRowWarps, plan.call.work);
  return Launch(DispatchCachedRecvKernel<Format>, dim3(plan.call.roles.blocks),
                kRowBlockThreads<Format>, SharedBytes<Format>(plan, kOwnPlanBytes), stream, step,
                group, plan, pending);
}

cudaError_t PreloadDispatchCached() {
  cudaError_t error = cudaSuccess;
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (kDispatchCachedFormat<Format>) {
      const auto preload = [&](auto kernel) {
        if (error == cudaSuccess) error = PreloadShared(kernel, kMaxSharedBytes);
      };
      preload(DispatchCachedKernel<Format>);
      preload(DispatchCachedSendKernel<Format>);
      preload(DispatchCachedRecvKernel<Format>);
    }
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                               \
  template cudaError_t DispatchCached<Format>(const DispatchCachedStep&, const WindowGroup&,     \
                                              cudaStream_t);                                     \
  template cudaError_t DispatchCachedSend<Format>(const DispatchCachedStep&, PendingCall*,       \
                                                  const WindowGroup&, cudaStream_t);             \
  template cudaError_t DispatchCachedRecv<Format>(const DispatchCachedStep&, const PendingCall*, \
                                                  const WindowGroup&, cudaStream_t);
JAX_EP_INSTANTIATE(Bf16Format)
JAX_EP_WIRE_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
