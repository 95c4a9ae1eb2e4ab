// A warp's stages in shared memory, through which it passes rows: bulk loads fill them, bulk stores
// empty them, several of both in flight. Used by dispatches of window/.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"

namespace jax_ep::cuda {

// Stages of a warp, at most: 8 bytes of barrier each.
inline constexpr uint32_t kMaxStages = 8;

// The stages and their barriers of all warps of a block. A stage is a multiple of 128 bytes.
struct StagePlan {
  uint32_t stage_bytes;
  uint32_t stages;  // a warp

  __host__ __device__ uint32_t bytes(uint32_t warps) const {
    return warps * stages * (stage_bytes + static_cast<uint32_t>(sizeof(uint64_t)));
  }
};

class BulkStages {
 public:
  // Whole warp. `memory` has plan.bytes(warps) and is aligned to 128. A warp beyond those has no
  // `use` for stages, and none.
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

  // Lane 0, for a stage that nothing reads or writes any more: `issue(stage, barrier)` issues bulk
  // loads of `bytes` in all. Every lane counts on.
  template <typename Issue>
  __device__ void Load(uint32_t bytes, Issue issue) {
    if (Lane() == 0) {
      MbarrierExpect(&barriers_[load_], bytes);
      issue(stages_ + load_ * stage_bytes_, &barriers_[load_]);
    }
    if (++load_ == count_) load_ = 0;
  }

  // The stage loaded first of those not yet awaited. The load ends without anybody's help, so the
  // wait has no bound of its own.
  __device__ uint8_t* Await() {
    while (!MbarrierTryWait(&barriers_[use_], parity_)) {
    }
    uint8_t* stage = stages_ + use_ * stage_bytes_;
    if (++use_ == count_) use_ = 0, parity_ ^= 1;
    return stage;
  }

  // ---- All of a run ----

  // Passes `units` through the stages: `load(unit)` calls Load once, `use(unit, stage)` issues bulk
  // stores from the stage, any lane any number. Prime starts the first loads and Pass does the
  // rest; it returns while the last stores may be under way, so that a warp whose run was its last
  // need not wait for them.
  template <typename LoadUnit>
  __device__ uint32_t Prime(uint32_t units, LoadUnit load) {
    // All that the last run stored and read comes before the loads that overwrite it.
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
    // A stage is loaded again when the stores of `lag` later units have been issued.
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
      // What lanes have read of the stage comes before the load that overwrites it.
      FenceProxyAsyncShared();
      __syncwarp();
      load(next++);
    }
  }
  // Instead of Pass: lets the first loads end.
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
