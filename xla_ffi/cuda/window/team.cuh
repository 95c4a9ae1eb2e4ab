// Helper warps, which do the arithmetic of quantised formats for a block's row warps: a row warp
// loads and stores, and its helpers encode or decode what is in its stage. A single warp would take
// longer for a token than the link does, and five warps leave most of a multiprocessor's issue
// slots idle.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/window/rows.cuh"
#include "formats/combine_wire.h"
#include "formats/token_format.h"

namespace jax_ep::cuda {

// Helpers per block, behind its row warps. With 15 of them the registers of a multiprocessor allow
// 96 per thread.
template <typename Format>
inline constexpr uint32_t kHelperWarps = QuantizedFormat<Format> ? 15 : 0;
static_assert(kHelperWarps<CombineFormat> >= kRowWarps, "each row warp has a helper");
template <typename Format>
inline constexpr uint32_t kRowBlockThreads = kRowThreads + kHelperWarps<Format> * kWarpSize;

// Named barriers: two per row warp, and one for all helpers.
inline constexpr uint32_t kTeamBarriers = kTablesBarrier + 1;
inline constexpr uint32_t kHelpersBarrier = kTeamBarriers + 2 * kRowWarps;
static_assert(kHelpersBarrier < kCreditsBarrier);

// What a row warp asks of its helpers, in shared memory.
struct TeamJob {
  // The stage, in bytes from the block's first job, so that the compiler knows that the address is
  // in shared memory. kDismissed: there are no more jobs.
  int32_t stage;
  uint32_t piece;
  uint32_t num_rows;
  uint32_t padding;
  int32_t rows[kWarpSize];

  static constexpr int32_t kDismissed = INT32_MIN;
};
template <typename Format>
inline constexpr int64_t kTeamBytes =
    QuantizedFormat<Format> ? kRowWarps * static_cast<int64_t>(sizeof(TeamJob)) : 0;
static_assert(sizeof(TeamJob) % 16 == 0);

// The helpers of row warp `leader`, one of `leaders` that share the block's helpers evenly.
class HelperTeam {
 public:
  __device__ HelperTeam(TeamJob* jobs, uint32_t helpers, uint32_t leader, uint32_t leaders)
      : jobs_(jobs),
        job_(jobs + leader),
        barrier_(kTeamBarriers + 2 * leader),
        warps_((helpers + leaders - 1 - leader) / leaders) {}

  // ---- The leader, whole warp ----

  // Valid after AwaitDone. The whole warp fills in a job's rows, one lane the rest.
  __device__ TeamJob& job() const { return *job_; }
  __device__ void SetJob(const uint8_t* stage, uint32_t piece, uint32_t num_rows) const {
    job_->stage = static_cast<int32_t>(stage - reinterpret_cast<const uint8_t*>(jobs_));
    job_->piece = piece;
    job_->num_rows = num_rows;
  }
  // What this warp has written, including its stage, comes before what the helpers read.
  __device__ void Start() const {
    __syncwarp();
    ArriveAtBarrier(barrier_, LeaderAndHelpers());
  }
  // What the helpers have read and written comes before what this warp does next.
  __device__ void AwaitDone() const {
    __syncwarp();  // barriers count whole warps
    NamedBarrier(barrier_ + 1, LeaderAndHelpers());
  }
  // Afterwards another team may use the barriers.
  __device__ void Dismiss() const {
    if (Lane() == 0) job_->stage = TeamJob::kDismissed;
    Start();
    AwaitDone();
  }

  // ---- A helper, whole warp ----

  // Calls `work(job, stage)` for each job until dismissed.
  template <typename Work>
  __device__ void Help(Work work) const {
    while (true) {
      __syncwarp();
      NamedBarrier(barrier_, LeaderAndHelpers());
      const int32_t stage = job_->stage;
      const bool dismissed = stage == TeamJob::kDismissed;
      if (!dismissed) {
        work(static_cast<const TeamJob&>(*job_), reinterpret_cast<uint8_t*>(jobs_) + stage);
      }
      // Bulk stores from the stage and bulk loads into it come next.
      FenceProxyAsyncShared();
      __syncwarp();
      ArriveAtBarrier(barrier_ + 1, LeaderAndHelpers());
      if (dismissed) return;
    }
  }
  // For all helpers of the team. It can use this barrier, because the leader waits at the other
  // one.
  __device__ void Sync() const {
    __syncwarp();
    NamedBarrier(barrier_, threads());
  }
  __device__ uint32_t threads() const { return warps_ * kWarpSize; }

 private:
  __device__ uint32_t LeaderAndHelpers() const { return threads() + kWarpSize; }

  TeamJob* jobs_;
  TeamJob* job_;
  uint32_t barrier_;
  uint32_t warps_;
};

// A helper warp: its team and its index there.
template <typename Format>
struct Helper {
  HelperTeam team;
  uint32_t member;

  __device__ static Helper Of(TeamJob* jobs, uint32_t leaders) {
    const uint32_t helper = static_cast<uint32_t>(Warp()) - kRowWarps;
    return {HelperTeam(jobs, kHelperWarps<Format>, helper % leaders, leaders), helper / leaders};
  }
  // Called by the whole warp: waits for all helpers of the block.
  __device__ static void AwaitAll() {
    __syncwarp();
    NamedBarrier(kHelpersBarrier, kHelperWarps<Format> * kWarpSize);
  }
  __device__ uint32_t thread() const { return member * kWarpSize + static_cast<uint32_t>(Lane()); }
};

}  // namespace jax_ep::cuda
