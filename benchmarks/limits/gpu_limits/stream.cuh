// The group of GPUs that gpu_limits.cu measures, its bounded waits, and the kernels that move rows:
// through shared memory by bulk copies, or through registers, 16 bytes per lane.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/signal_memory.cuh"
#include "protocol/signals.h"

namespace jax_ep::cuda {

constexpr uint32_t kMaxGpus = 8;
constexpr uint32_t kRowBytes = 14336;  // hidden 7168 in bfloat16
constexpr uint64_t kWaitLimitNs = 2'000'000'000;
constexpr uint32_t kMaxChannels = 8;
constexpr uint32_t kMaxStreamWarps = 4;

// Names the waits, in WaitReport::tag.
enum class Wait : uint16_t {
  kNone,
  kBulkLoad,
  kPingPong,
  kBarrier,
  kPublish,
  kPublishedRow,
  kCells,
  kLitmusCredit,
  kLitmusFlag,
  kLitmusRow,
};

// 12 bytes of payload that need no flag, since the epoch arrives in the same access.
struct alignas(16) DataCell {
  uint32_t payload[3];
  uint32_t epoch;
};
constexpr uint32_t kCellsPerRow = (kRowBytes + 11) / 12;
constexpr uint32_t kMaxCellRows = 4;

// Gives a signal a line of its own.
template <typename Cell>
struct alignas(128) Line {
  Cell cell;
};

// What a test reports to the host.
struct Results {
  uint64_t total_ns;
  uint64_t total_clocks;
  uint64_t section_clocks[4];
  unsigned long long wrong_cells;
  unsigned long long rounds;       // litmus: rounds read, counted by each reader
  unsigned long long rows;         // litmus: rows read
  unsigned long long bad_rounds;   // litmus: rounds with a unit that is not this round's
  unsigned long long wrong_units;  // litmus: 16-byte units that are not this round's
};

// What a GPU's peers write besides rows, and the GPU's own counters.
struct SignalArea {
  Line<WaitReport> poison;
  Line<FlagCell> signals[kMaxGpus];                // latency tests, by source
  Line<FlagCell> flags[kMaxGpus][kMaxChannels];    // litmus from here on, by source
  Line<uint64_t> credits[kMaxGpus][kMaxChannels];  // by destination
  Line<uint32_t> finished[kMaxGpus][kMaxChannels];
  Line<uint32_t> left;  // blocks that have ended, over all launches
  DataCell cells[2][kMaxGpus][kMaxCellRows][kCellsPerRow];
  Results results;
};

struct Group {
  uint8_t* windows[kMaxGpus];
  SignalArea* areas[kMaxGpus];
  WaitReport* host_report;
  uint32_t ranks;
  uint32_t rank;

  __device__ SignalArea& area() const { return *areas[rank]; }
};

// Tells all ranks and the host which wait failed. Out of line because it is cold.
__device__ __noinline__ void GiveUp(const Group& group, Wait wait, uint32_t awaited, uint64_t epoch,
                                    WaitStatus status) {
  const DeviceSignalMemory memory;
  const WaitReport report{epoch,
                          static_cast<uint16_t>(group.rank),
                          static_cast<uint16_t>(awaited),
                          static_cast<uint16_t>(wait),
                          Phase::kNone,
                          status};
  SpreadPoison(memory, report, group.ranks,
               [&](uint32_t rank) { return &group.areas[rank]->poison.cell; });
  memory.Post(group.host_report, report);
}

// Waits for `observe`, at most kWaitLimitNs.
template <typename Observe>
__device__ bool WaitFor(const Group& group, Wait wait, uint32_t awaited, uint64_t epoch,
                        Observe observe) {
  const DeviceSignalMemory memory;
  const WaitBound bound{kWaitLimitNs, &group.area().poison.cell};
  const WaitStatus status = WaitUntil(memory, bound, observe);
  if (status == WaitStatus::kArrived) return true;
  if (status == WaitStatus::kPoisoned) return false;
  GiveUp(group, wait, awaited, epoch, status);
  return false;
}

__device__ inline bool WaitForLoad(const Group& group, Wait wait, uint64_t epoch, uint64_t* barrier,
                                   uint32_t parity) {
  return WaitFor(group, wait, group.rank, epoch, [=] {
    return MbarrierTryWait(barrier, parity) ? Observation::kArrived : Observation::kPending;
  });
}

__device__ inline uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Returns the 16 bytes at index `unit` of a row stamped with `stamp`.
__device__ inline uint4 UnitOf(uint32_t stamp, uint32_t unit) {
  return make_uint4(stamp, stamp ^ (unit * 0x9E3779B1u), stamp + unit * 0x85EBCA6Bu,
                    ~stamp ^ (unit * 0xC2B2AE35u));
}

__device__ inline uint4* Units(void* bytes) { return static_cast<uint4*>(bytes); }

__global__ void FillKernel(uint8_t* bytes, uint64_t units, uint32_t seed) {
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < units;
       i += stride) {
    const uint32_t low = static_cast<uint32_t>(i) * 4 + seed;
    Units(bytes)[i] = make_uint4(Mix(low), Mix(low + 1), Mix(low + 2), Mix(low + 3));
  }
}

__global__ void EmptyKernel() {}

// ---- Rows ---------------------------------------------------------------------------------------

// Reads `items` rows from `source` and writes them to the destinations in turn. Both numbers of
// rows are powers of two, and indices wrap.
struct StreamStep {
  const uint8_t* source;
  uint8_t* destinations[kMaxGpus];
  uint32_t num_destinations;
  uint32_t source_rows;
  uint32_t destination_rows;
  uint32_t row_bytes;
  uint32_t items;
  bool scatter;  // destination rows in random order, each once
};

// A permutation of [0, rows), where `rows` is a power of two.
__device__ inline uint32_t Scramble(uint32_t index, uint32_t rows) {
  const uint32_t mask = rows - 1;
  const int half = (__popc(mask) + 1) / 2;
  uint32_t x = (index * 0x9E3779B1u) & mask;
  x ^= x >> half;
  x = (x * 0x85EBCA6Bu) & mask;
  return x ^ (x >> half);
}

// The items of one worker, and where each goes.
struct ItemWalk {
  uint32_t worker;
  uint32_t workers;
  uint32_t count;
  uint32_t destination;
  uint32_t slot;

  __device__ ItemWalk(const StreamStep& step, uint32_t me, uint32_t of)
      : worker(me),
        workers(of),
        count(step.items > me ? (step.items - me + of - 1) / of : 0),
        destination(me % step.num_destinations),
        slot(me) {}
  __device__ void Next(const StreamStep& step) {
    if (++destination < step.num_destinations) return;
    destination = 0;
    slot += workers;
  }
  __device__ const uint8_t* Source(const StreamStep& step, uint32_t item) const {
    const uint64_t row = (item * workers + worker) & (step.source_rows - 1);
    return step.source + row * step.row_bytes;
  }
  __device__ uint8_t* Destination(const StreamStep& step, uint32_t index) const {
    const uint64_t row =
        step.scatter ? Scramble(index, step.destination_rows) : index & (step.destination_rows - 1);
    return step.destinations[destination] + row * step.row_bytes;
  }
};

// One lane of each warp keeps kStages rows in flight. It loads each row, or takes what the stages
// hold from the beginning, and stores it kStores times.
template <uint32_t kStages, bool kLoad, uint32_t kStores>
__device__ void StreamRows(const Group& group, const StreamStep& step, uint32_t block,
                           uint32_t blocks) {
  // Groups of stores that may still be reading while this waits for the next item.
  constexpr uint32_t kLag = kStores == 0 ? 0 : kLoad ? kStages / 2 : kStages - 1;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[kMaxStreamWarps][kStages];
  const uint32_t warps = blockDim.x / kWarpSize;
  uint8_t* stages = shared + static_cast<uint32_t>(Warp()) * kStages * step.row_bytes;
  uint64_t* loaded = barriers[Warp()];
  if constexpr (kLoad) {
    if (Lane() == 0) {
      for (uint32_t stage = 0; stage < kStages; ++stage) MbarrierInit(&loaded[stage], 1);
    }
  } else {
    for (uint32_t unit = Lane(); unit < kStages * step.row_bytes / 16; unit += kWarpSize) {
      Units(stages)[unit] = UnitOf(Mix(block * warps + Warp()), Mix(unit));
    }
  }
  FenceProxyAsyncShared();
  __syncwarp();
  if (Lane() != 0) return;

  ItemWalk walk(step, block * warps + Warp(), blocks * warps);
  const auto load = [&](uint32_t item, uint32_t stage) {
    MbarrierExpect(&loaded[stage], step.row_bytes);
    BulkLoad(stages + stage * step.row_bytes, walk.Source(step, item), step.row_bytes,
             &loaded[stage]);
  };
  if constexpr (kLoad) {
    for (uint32_t item = 0; item < Min(kStages, walk.count); ++item) load(item, item);
  }
  uint32_t stage = 0;
  uint32_t parity = 0;
  for (uint32_t item = 0; item < walk.count; ++item) {
    if constexpr (kLoad) {
      if (!WaitForLoad(group, Wait::kBulkLoad, item, &loaded[stage], parity)) return;
    }
    if constexpr (kStores > 0) {
      for (uint32_t store = 0; store < kStores; ++store) {
        BulkStore(walk.Destination(step, walk.slot * kStores + store),
                  stages + stage * step.row_bytes, step.row_bytes);
      }
      BulkCommit();
      BulkWaitRead<kLag>();
    }
    if constexpr (kLoad) {
      // The stores of item - kLag have read its stage.
      if (item + 1 > kLag && item - kLag + kStages < walk.count) {
        load(item - kLag + kStages, (stage + kStages - kLag) % kStages);
      }
    }
    walk.Next(step);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  BulkWait<0>();
}

template <uint32_t kStages, bool kLoad, uint32_t kStores>
__global__ void StreamKernel(const __grid_constant__ Group group,
                             const __grid_constant__ StreamStep step) {
  StreamRows<kStages, kLoad, kStores>(group, step, blockIdx.x, gridDim.x);
}

// The first `senders` blocks send rows to the peers while the others place rows.
template <uint32_t kStages>
__global__ void SendAndPlaceKernel(const __grid_constant__ Group group,
                                   const __grid_constant__ StreamStep send,
                                   const __grid_constant__ StreamStep place, uint32_t senders) {
  if (blockIdx.x < senders) {
    StreamRows<kStages, true, 1>(group, send, blockIdx.x, senders);
  } else {
    StreamRows<kStages, true, 2>(group, place, blockIdx.x - senders, gridDim.x - senders);
  }
}

// Copies rows through registers, one warp per row.
__global__ void __launch_bounds__(1024) VectorKernel(const __grid_constant__ StreamStep step) {
  constexpr uint32_t kUnroll = 4;
  const uint32_t warps = blockDim.x / kWarpSize;
  ItemWalk walk(step, blockIdx.x * warps + Warp(), gridDim.x * warps);
  const uint32_t units = step.row_bytes / 16;
  for (uint32_t item = 0; item < walk.count; ++item, walk.Next(step)) {
    const uint4* from = reinterpret_cast<const uint4*>(walk.Source(step, item));
    uint4* to = Units(walk.Destination(step, walk.slot));
    for (uint32_t first = Lane(); first < units; first += kUnroll * kWarpSize) {
      uint4 value[kUnroll];
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpSize < units) value[i] = from[first + i * kWarpSize];
      }
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpSize < units) to[first + i * kWarpSize] = value[i];
      }
    }
  }
}

}  // namespace jax_ep::cuda
