// One fused call at one rank: its place in the window, its work queues, its bounded waits, and how
// the blocks of its kernel begin and leave it. Used by window_*.cu; protocol/signals.h has the
// rules.
#pragma once

#include <cstdint>

#include "cuda/primitives.cuh"
#include "cuda/ptx.cuh"
#include "cuda/signal_memory.cuh"
#include "protocol/window.h"

namespace jax_ep::cuda {

// Every warp has its own.
class WindowCall {
 public:
  __device__ WindowCall(const WindowGroup& group, CallKind kind, uint16_t tag)
      : group_(group),
        layout_(group.layout.groups[static_cast<int>(kind)]),
        state_(group.control->calls[static_cast<int>(kind)]),
        failed_(group.control->failed[static_cast<int>(kind)]),
        tag_(tag) {}

  // Whole warp. False where the group is closed or poisoned: then no window may be touched.
  __device__ bool Begin() {
    // All words at once: the region depends on the epoch, and a load takes most of a microsecond.
    static_assert(sizeof(CallState) % sizeof(uint64_t) == 0);
    struct Words {
      uint64_t word[sizeof(CallState) / sizeof(uint64_t)];
    } words;
    const auto* from = reinterpret_cast<const volatile uint64_t*>(&state_);
    gate_ = *static_cast<const volatile Gate*>(&group_.control->gate);
#pragma unroll
    for (size_t i = 0; i < sizeof(CallState) / sizeof(uint64_t); ++i) words.word[i] = from[i];
    lease_ = LeaseRegion(__builtin_bit_cast(CallState, words), group_.depth);
    const bool open = gate_ == Gate::kOpen && lease_.region != kNoRegion;
    // Others may have found the gate open a moment before: what this warp leaves undone is theirs
    // too.
    if (!open) StoreRelaxedGpu(&failed_, 1u);
    return open;
  }

  // Whole warp.
  __device__ WorkItem Take(const WorkPlan& plan, Queue queue) {
    return ItemOf(plan, queue, __shfl_sync(kFullWarp, DrawTicket(queue), 0));
  }

  // How many blocks came before; one thread.
  __device__ uint32_t Enter() { return EnterCall(memory_, state_); }

  // Begin and Take at once, so that neither waits for the other.
  __device__ bool BeginAndTake(const WorkPlan& plan, Queue queue, WorkItem& item) {
    const uint32_t ticket = DrawTicket(queue);
    const bool open = Begin();
    item = ItemOf(plan, queue, __shfl_sync(kFullWarp, ticket, 0));
    return open;
  }

  __device__ uint32_t rank() const { return group_.rank; }
  __device__ uint32_t ranks() const { return group_.ranks; }

  // ---- Addresses: in the window of `owner`, for this call's region ----

  __device__ uint8_t* Region(uint32_t owner, uint32_t source) const {
    return group_.windows[owner] + layout_.regions + Part(source) * layout_.region_bytes;
  }
  __device__ CountCell* Counts(uint32_t owner, uint32_t source) const {
    return reinterpret_cast<CountCell*>(group_.windows[owner] + layout_.counts) +
           Part(source) * layout_.count_cells;
  }
  __device__ RouteTotals Totals(int64_t experts) const {
    return {Int32At(group_.windows[group_.rank], group_.layout.route_totals), experts,
            group_.ranks};
  }

  // ---- Signals ----

  // For one lane a destination, after this warp's stores: the lane that issued bulk copies to the
  // destination, once they are complete; plain stores of other lanes before a __syncwarp.
  __device__ void Publish(uint32_t destination, int64_t index, uint32_t first_slot,
                          uint32_t count) const {
    PublishFlag(memory_, Flag(destination, group_.rank, index),
                {lease_.epoch, first_slot, static_cast<uint16_t>(count), tag_});
  }

  // Any lanes, each for its own source. Bulk loads of what arrived need a FenceProxyAsyncGlobal.
  __device__ bool AwaitFlag(Phase phase, uint32_t source, int64_t index, FlagCell& flag) const {
    const FlagCell* cell = Flag(group_.rank, source, index);
    return Await(phase, source,
                 [&] { return ObserveFlag(memory_, cell, lease_.epoch, tag_, flag); });
  }

  // Any lane, after AwaitCredit: one cell of this rank's counts for a destination.
  __device__ void PostCounts(uint32_t destination, int64_t cell, const int32_t (&counts)[3]) const {
    memory_.Post(Counts(destination, group_.rank) + cell,
                 {{counts[0], counts[1], counts[2]}, CellStamp(lease_.epoch)});
  }

  // Any lanes, each for its own cell. The tag is in the first.
  __device__ bool AwaitCounts(uint32_t source, int64_t cell, CountCell& counts) const {
    const CountCell* from = Counts(group_.rank, source) + cell;
    return Await(Phase::kPlace, source, [&] {
      const Observation seen = ObserveCounts(memory_, from, lease_.epoch, counts);
      const bool differs = seen == Observation::kArrived && cell == 0 && counts.counts[1] != tag_;
      return differs ? Observation::kProtocolError : seen;
    });
  }
  __device__ uint16_t tag() const { return tag_; }

  // As AwaitFlag: after it the destination's region may be overwritten. A rank that comes when the
  // others have given up sends nothing.
  __device__ bool AwaitCredit(Phase phase, uint32_t destination) const {
    const bool poisoned = IsPoisoned(memory_, Poison(group_.rank));
    if (poisoned) {
      GiveUp(phase, destination, WaitStatus::kPoisoned);
      return false;
    }
    const uint64_t* credit = Credit(group_.rank, destination);
    return Await(phase, destination, [&] { return ObserveCredit(memory_, credit, lease_); });
  }

  // ---- The end ----

  // Whole block, when all of its reads of the window are over; `last` is shared. True in the one
  // block that is the last of all; `failed` then says whether a wait of the call failed anywhere.
  __device__ bool Leave(bool& last, bool& failed) {
    __syncthreads();
    if (threadIdx.x == 0) last = LeaveCall(memory_, state_, gridDim.x);
    __syncthreads();
    if (!last) return false;
    failed = gate_ != Gate::kOpen || lease_.region == kNoRegion || LoadRelaxedGpu(&failed_) != 0;
    return true;
  }

  // The last block, after Leave: gives the regions back and makes the next call possible, or ends
  // the group.
  __device__ void Commit(bool failed) {
    if (failed) {
      // Bulk stores of blocks that had no part in the failure may still be on their way.
      constexpr uint64_t kStoresTakeNs = 1'000'000;
      const uint64_t start = memory_.NowNs();
      while (memory_.NowNs() - start < kStoresTakeNs) {
      }
      if (threadIdx.x == 0 && gate_ == Gate::kOpen) group_.control->gate = Gate::kPoisoned;
      return;
    }
    if (threadIdx.x < group_.ranks) {
      ReturnCredit(memory_, Credit(threadIdx.x, group_.rank), lease_.epoch);
    }
    if (threadIdx.x == 0) {
      CommitSend(state_, lease_);
      CommitPlace(state_, lease_);
    }
  }

 private:
  // In lane 0.
  __device__ uint32_t DrawTicket(Queue queue) {
    if (Lane() != 0) return 0;
    return memory_.FetchAddRelaxed(&state_.tickets[static_cast<uint32_t>(queue)], 1u);
  }
  __device__ int64_t Part(uint32_t peer) const {
    return static_cast<int64_t>(lease_.region) * group_.ranks + peer;
  }
  __device__ FlagCell* Flag(uint32_t owner, uint32_t source, int64_t index) const {
    return reinterpret_cast<FlagCell*>(group_.windows[owner] + layout_.flags) +
           Part(source) * layout_.flags_per_source + index;
  }
  __device__ uint64_t* Credit(uint32_t owner, uint32_t destination) const {
    return reinterpret_cast<uint64_t*>(group_.windows[owner] + layout_.credits) + Part(destination);
  }
  __device__ WaitReport* Poison(uint32_t owner) const {
    return reinterpret_cast<WaitReport*>(group_.windows[owner] + group_.layout.poison);
  }

  template <typename Observe>
  __device__ bool Await(Phase phase, uint32_t awaited, Observe observe) const {
    // Without the timer at first: it costs as much as a poll.
    for (uint32_t poll = 0; poll < kPollsPerCheck; ++poll) {
      const Observation seen = observe();
      if (seen == Observation::kArrived) return true;
      if (seen == Observation::kProtocolError) break;
    }
    const WaitBound bound{memory_.NowNs() + group_.timeout_ns, Poison(group_.rank)};
    const WaitStatus status = WaitUntil(memory_, bound, observe);
    if (status == WaitStatus::kArrived) return true;
    GiveUp(phase, awaited, status);
    return false;
  }

  // Out of line: it is cold. Tells every rank and this one's host; a later failure of the rank
  // overwrites the report, and each of them is true.
  __device__ __noinline__ void GiveUp(Phase phase, uint32_t awaited, WaitStatus status) const {
    WaitReport report{lease_.epoch,
                      static_cast<uint16_t>(group_.rank),
                      static_cast<uint16_t>(awaited),
                      tag_,
                      phase,
                      status};
    if (status == WaitStatus::kPoisoned) {
      report = memory_.Peek(Poison(group_.rank));
    } else {
      SpreadPoison(memory_, report, group_.ranks, [&](uint32_t rank) { return Poison(rank); });
    }
    memory_.Post(group_.host_report, report);
    StoreRelaxedGpu(&failed_, 1u);
  }

  const WindowGroup& group_;
  const BufferGroupLayout& layout_;
  CallState& state_;
  uint32_t& failed_;
  Gate gate_ = Gate::kOpen;
  RegionLease lease_{};
  uint16_t tag_;
  DeviceSignalMemory memory_;
};

// Whole block: what a failed call returns. All ones is NaN in every float type and -1 in every id.
inline constexpr uint32_t kNoValue = 0xFFFFFFFFu;

template <typename T>
__device__ void FillWords(T* to, int64_t count, uint32_t word) {
  auto* words = reinterpret_cast<uint32_t*>(to);
  const int64_t end = count * static_cast<int64_t>(sizeof(T)) / 4;
  for (int64_t i = threadIdx.x; i < end; i += blockDim.x) words[i] = word;
}

}  // namespace jax_ep::cuda
