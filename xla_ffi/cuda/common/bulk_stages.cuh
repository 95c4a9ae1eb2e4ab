// A warp's stages: buffers in shared memory through which it passes rows. Bulk loads fill them and
// bulk stores empty them, with several of both in flight. Used by the dispatches in window/.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"

namespace jax_ep::cuda {

// An upper bound per warp; each stage costs another 8 bytes for its barrier.
inline constexpr uint32_t kMaxStages = 8;

// Sizes of the stages and barriers of a block. A stage is a multiple of 128 bytes.
struct StagePlan {
  uint32_t stage_bytes;
  uint32_t stages;  // per warp

  __host__ __device__ uint32_t bytes(uint32_t warps) const {
    return warps * stages * (stage_bytes + static_cast<uint32_t>(sizeof(uint64_t)));
  }
};

class BulkStages {
 public:
  // Called by the whole warp. `memory` has plan.bytes(warps) bytes, aligned to 128. Pass `use` =
  // false for warps from `warps` on: they have no stages.
  __device__ BulkStages(const StagePlan& plan, uint8_t* memory, uint32_t warp, uint32_t warps,
                        bool use = true)
      : stages_(memory + warp * plan.stages * plan.stage_bytes),
        barriers_(reinterpret_cast<uint64_t*>(memory + warps * plan.stages * plan.stage_bytes) +
                  warp * plan.stages),
        stage_bytes_(plan.stage_bytes),
        count_(plan.stages) {
    if (use && Lane() == 0) {
      JAX_EP_NO_UNROLL
      for (uint32_t stage = 0; stage < count_; ++stage) MbarrierInit(&barriers_[stage], 1);
    }
    FenceProxyAsyncShared();
    __syncwarp();
  }

  // ---- One stage at a time ----

  // Loads the next stage, which nothing may be reading or writing any more. Lane 0 calls
  // `issue(stage, barrier)`, which issues bulk loads of `bytes` in total; the other lanes only
  // advance the index.
  template <typename Issue>
  __device__ void Load(uint32_t bytes, Issue issue) {
    if (Lane() == 0) {
      MbarrierExpect(&barriers_[load_], bytes);
      issue(stages_ + load_ * stage_bytes_, &barriers_[load_]);
    }
    if (++load_ == count_) load_ = 0;
  }

  // Returns the oldest stage that has not been awaited yet. This wait needs no time limit: a bulk
  // load that was issued completes without help from any other thread or rank.
  __device__ uint8_t* Await() {
    while (!MbarrierTryWait(&barriers_[use_], parity_)) {
    }
    uint8_t* stage = stages_ + use_ * stage_bytes_;
    if (++use_ == count_) use_ = 0, parity_ ^= 1;
    return stage;
  }

  // ---- All of a run ----

  // Passes `units` through the stages. `load(unit)` calls Load once; `use(unit, stage)` issues bulk
  // stores from the stage, any number from any lane. Prime starts the first loads and Pass does the
  // rest. Pass returns while the last stores may still be reading, so that a warp without further
  // work does not wait for them.
  template <typename LoadUnit>
  __device__ uint32_t Prime(uint32_t units, LoadUnit load) {
    // The last run's stores and reads must come before the loads that overwrite its stages.
    BulkWaitRead<0>();
    FenceProxyAsyncShared();
    __syncwarp();
    const uint32_t primed = Min(count_, units);
    JAX_EP_NO_UNROLL
    for (uint32_t unit = 0; unit < primed; ++unit) load(unit);
    return primed;
  }
  template <typename LoadUnit, typename UseUnit>
  __device__ void Pass(uint32_t units, uint32_t primed, LoadUnit load, UseUnit use) {
    uint32_t next = primed;
    // How many units later a stage is reloaded, so that its stores have time to read it.
    const uint32_t lag = count_ > kLongLag + 1 ? kLongLag : 1;
    JAX_EP_NO_UNROLL
    for (uint32_t unit = 0; unit < units; ++unit) {
      use(unit, Await());
      BulkCommit();
      if (unit < lag || next >= units) continue;
      if (lag == 1) {
        BulkWaitRead<1>();
      } else {
        BulkWaitRead<kLongLag>();
      }
      // The lanes' reads of the stage must come before the load that overwrites it.
      FenceProxyAsyncShared();
      __syncwarp();
      load(next++);
    }
  }
  // Call this instead of Pass to give up a run. It waits for the primed loads, which would
  // otherwise write into stages that are in use again.
  __device__ void Abandon(uint32_t primed) {
    JAX_EP_NO_UNROLL
    for (uint32_t unit = 0; unit < primed; ++unit) Await();
  }

 private:
  static constexpr uint32_t kLongLag = 3;

  uint8_t* stages_;
  uint64_t* barriers_;
  uint32_t stage_bytes_;
  uint32_t count_;
  uint32_t load_ = 0;
  uint32_t use_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace jax_ep::cuda
