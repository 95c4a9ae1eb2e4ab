// The litmus test of gpu_limits.cu: the recipe of docs/protocol.md, "Memory order", for bulk copies
// under flags and credits, and mutants of it. Blocks wait for each other and must all be resident.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host.cuh"
#include "stream.cuh"

namespace jax_ep::cuda {

// What a mutant leaves out of the recipe.
enum class Omit : uint8_t {
  kNothing,
  kWaitGroup,       // the flag is posted before the copies are waited for
  kFullWait,        // the flag is posted when the copies have only read their source
  kReleaseFence,    // the fence before flags and before credits
  kReadFence,       // the proxy fence before the bulk loads of what a flag has announced
  kOverwriteFence,  // the proxy fence before the bulk stores that a credit has allowed
  kAcquire,         // flags and credits are only peeked at
};

template <Omit kOmit>
struct LitmusMemory : DeviceSignalMemory {
  __device__ void ReleaseFence() const {
    if constexpr (kOmit != Omit::kReleaseFence) DeviceSignalMemory::ReleaseFence();
  }
  template <typename Cell>
  __device__ Cell Acquire(const Cell* cell) const {
    if constexpr (kOmit == Omit::kAcquire) return Peek(cell);
    return DeviceSignalMemory::Acquire(cell);
  }
};

constexpr uint32_t kLitmusThreads = 128;
constexpr uint32_t kPollThread = 0;
constexpr uint32_t kIssueThread = 32;  // in another warp, so that only the barrier orders the two
constexpr uint32_t kMaxMessageRows = 4;
constexpr uint32_t kLitmusReaders = 2;
constexpr uint32_t kRowUnits = kRowBytes / 16;
constexpr uint32_t kLoadRows = 2048;  // scratch rows per source, behind the litmus regions
constexpr uint64_t kLitmusBytes = uint64_t{kMaxGpus} * kMaxChannels * kMaxMessageRows * kRowBytes;

struct LitmusStep {
  uint64_t first;  // consecutive over all launches, from kFirstEpoch
  uint32_t rounds;
  uint32_t channels;  // from each GPU to each other one
  uint32_t left;      // the value of SignalArea::left once all but the loading blocks have ended
};

__device__ inline uint32_t MessageRows(uint64_t epoch) {
  return 1 + static_cast<uint32_t>(epoch) % kMaxMessageRows;
}

__device__ inline uint32_t StampOf(uint64_t epoch, uint32_t source, uint32_t destination,
                                   uint32_t channel, uint32_t row) {
  const uint32_t place = ((source * kMaxGpus + destination) * kMaxChannels + channel) * 4 + row;
  return Mix(static_cast<uint32_t>(epoch) + Mix(place));
}

// The region in the destination's window.
__device__ inline uint8_t* LitmusRegion(const Group& group, uint32_t destination, uint32_t source,
                                        uint32_t channel) {
  return group.windows[destination] +
         uint64_t{source * kMaxChannels + channel} * kMaxMessageRows * kRowBytes;
}

// Thread kPollThread waits; all threads get its answer after a barrier.
template <typename Observe>
__device__ bool BlockWait(const Group& group, Wait wait, uint32_t awaited, uint64_t epoch,
                          Observe observe) {
  __shared__ bool arrived;
  if (threadIdx.x == kPollThread) arrived = WaitFor(group, wait, awaited, epoch, observe);
  __syncthreads();
  return arrived;
}

template <Omit kOmit>
__device__ void LitmusSend(const Group& group, const LitmusStep& step, uint32_t destination,
                           uint32_t channel, uint8_t* stage) {
  const LitmusMemory<kOmit> memory;
  FlagCell* flag = &group.areas[destination]->flags[group.rank][channel].cell;
  const uint64_t* credit = &group.area().credits[destination][channel].cell;
  uint8_t* region = LitmusRegion(group, destination, group.rank, channel);
  for (uint64_t epoch = step.first; epoch != step.first + step.rounds; ++epoch) {
    const uint32_t rows = MessageRows(epoch);
    for (uint32_t row = 0; row < rows; ++row) {
      const uint32_t stamp = StampOf(epoch, group.rank, destination, channel, row);
      for (uint32_t unit = threadIdx.x; unit < kRowUnits; unit += kLitmusThreads) {
        Units(stage)[row * kRowUnits + unit] = UnitOf(stamp, unit);
      }
    }
    FenceProxyAsyncShared();
    const RegionLease lease{epoch, epoch - 1, 0};
    if (!BlockWait(group, Wait::kLitmusCredit, destination, epoch,
                   [&] { return ObserveCredit(memory, credit, lease); })) {
      return;
    }
    if (threadIdx.x == kIssueThread) {
      if constexpr (kOmit != Omit::kOverwriteFence) FenceProxyAsyncGlobal();
      for (uint32_t row = 0; row < rows; ++row) {
        BulkStore(region + row * kRowBytes, stage + row * kRowBytes, kRowBytes);
      }
      BulkCommit();
      if constexpr (kOmit == Omit::kFullWait) {
        BulkWaitRead<0>();
      } else if constexpr (kOmit != Omit::kWaitGroup) {
        BulkWait<0>();
      }
      PublishFlag(memory, flag,
                  FlagCell{epoch, 0, static_cast<uint16_t>(rows), static_cast<uint16_t>(channel)});
      BulkWait<0>();  // For mutants without the wait above, so that nothing else is wrong in them.
    }
    __syncthreads();
  }
}

template <Omit kOmit>
__device__ void LitmusRead(const Group& group, const LitmusStep& step, uint32_t source,
                           uint32_t channel, uint32_t reader, uint8_t* stage) {
  __shared__ alignas(8) uint64_t barrier;
  const LitmusMemory<kOmit> memory;
  if (threadIdx.x == kIssueThread) MbarrierInit(&barrier, 1);
  FenceProxyAsyncShared();
  __syncthreads();
  const FlagCell* flag = &group.area().flags[source][channel].cell;
  const uint8_t* region = LitmusRegion(group, group.rank, source, channel);
  unsigned long long rows_read = 0, bad_rounds = 0, wrong_units = 0;
  uint32_t parity = 0;
  for (uint64_t epoch = step.first; epoch != step.first + step.rounds; ++epoch) {
    if (!BlockWait(group, Wait::kLitmusFlag, source, epoch, [&] {
          FlagCell arrived;
          return ObserveFlag(memory, flag, epoch, static_cast<uint16_t>(channel), arrived);
        })) {
      return;
    }
    const uint32_t rows = MessageRows(epoch);
    bool good = true;
    uint32_t wrong = 0;
    if (reader < rows) {
      if (threadIdx.x == kIssueThread) {
        if constexpr (kOmit != Omit::kReadFence) FenceProxyAsyncGlobal();
        const uint32_t mine = (rows - reader + kLitmusReaders - 1) / kLitmusReaders;
        MbarrierExpect(&barrier, mine * kRowBytes);
        for (uint32_t row = reader; row < rows; row += kLitmusReaders) {
          BulkLoad(stage + row * kRowBytes, region + row * kRowBytes, kRowBytes, &barrier);
        }
      }
      good = WaitForLoad(group, Wait::kLitmusRow, epoch, &barrier, parity);
      parity ^= 1;
      for (uint32_t row = reader; good && row < rows; row += kLitmusReaders) {
        const uint32_t stamp = StampOf(epoch, source, group.rank, channel, row);
        for (uint32_t unit = threadIdx.x; unit < kRowUnits; unit += kLitmusThreads) {
          const uint4 seen = Units(stage)[row * kRowUnits + unit];
          const uint4 expected = UnitOf(stamp, unit);
          wrong += seen.x != expected.x || seen.y != expected.y || seen.z != expected.z ||
                   seen.w != expected.w;
        }
        ++rows_read;
      }
      FenceProxyAsyncShared();
    }
    if (!__syncthreads_and(good)) return;
    wrong_units += wrong;
    // The credit follows this barrier, which every thread reaches after it has read the stage.
    const bool bad = __syncthreads_or(wrong != 0);
    if (threadIdx.x == kPollThread) {
      bad_rounds += bad;
      if (LastOf(memory, &group.area().finished[source][channel].cell, kLitmusReaders)) {
        ReturnCredit(memory, &group.areas[source]->credits[group.rank][channel].cell, epoch);
      }
    }
  }
  Results& results = group.area().results;
  if (wrong_units != 0) atomicAdd(&results.wrong_units, wrong_units);
  if (threadIdx.x != kPollThread) return;
  atomicAdd(&results.rounds, step.rounds);
  atomicAdd(&results.rows, rows_read);
  if (bad_rounds != 0) atomicAdd(&results.bad_rounds, bad_rounds);
}

// Keeps the links busy until the other blocks of this GPU have ended.
__device__ inline void LitmusLoad(const Group& group, const LitmusStep& step, uint32_t block,
                                  uint32_t blocks, uint8_t* stage) {
  const DeviceSignalMemory memory;
  const uint32_t peers = group.ranks - 1;
  for (uint32_t unit = threadIdx.x; unit < kRowUnits; unit += kLitmusThreads) {
    Units(stage)[unit] = UnitOf(Mix(block), Mix(unit));
  }
  FenceProxyAsyncShared();
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (uint32_t item = block;; item += blocks) {
    const uint32_t peer = (group.rank + 1 + item % peers) % group.ranks;
    const uint64_t row = group.rank * kLoadRows + item / peers % kLoadRows;
    BulkStore(group.windows[peer] + kLitmusBytes + row * kRowBytes, stage, kRowBytes);
    BulkCommit();
    BulkWaitRead<3>();
    if (item / blocks % 16 != 0) continue;
    if (LoadRelaxedGpu(&group.area().left.cell) == step.left) break;
    if (IsPoisoned(memory, &group.area().poison.cell)) break;
  }
  BulkWait<0>();
}

// The blocks are: a sender for each peer and channel, then the readers, then the loading blocks. A
// single GPU is its own peer.
template <Omit kOmit>
__global__ void __launch_bounds__(kLitmusThreads)
    LitmusKernel(const __grid_constant__ Group group, const __grid_constant__ LitmusStep step) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t peers = group.ranks > 1 ? group.ranks - 1 : 1;
  const uint32_t pairs = peers * step.channels;
  const uint32_t index = blockIdx.x % pairs;
  const uint32_t role = blockIdx.x / pairs;
  const uint32_t peer = (group.rank + 1 + index / step.channels) % group.ranks;
  const uint32_t channel = index % step.channels;
  if (role > kLitmusReaders) {
    const uint32_t first = pairs * (1 + kLitmusReaders);
    LitmusLoad(group, step, blockIdx.x - first, gridDim.x - first, shared);
    return;
  }
  if (role == 0) {
    LitmusSend<kOmit>(group, step, peer, channel, shared);
  } else {
    LitmusRead<kOmit>(group, step, peer, channel, role - 1, shared);
  }
  __syncthreads();
  if (threadIdx.x == 0) FetchAddRelaxedGpu(&group.area().left.cell, 1);
}

// ---- Runs ---------------------------------------------------------------------------------------

using LitmusFunction = void (*)(Group, LitmusStep);

struct LitmusVariant {
  const char* name;
  LitmusFunction kernel;
};
constexpr LitmusFunction kRecipe = LitmusKernel<Omit::kNothing>;
constexpr LitmusVariant kMutants[] = {
    {"no wait_group", LitmusKernel<Omit::kWaitGroup>},
    {"wait_group.read only", LitmusKernel<Omit::kFullWait>},
    {"no fence.acq_rel.sys", LitmusKernel<Omit::kReleaseFence>},
    {"no fence.proxy.async before reading", LitmusKernel<Omit::kReadFence>},
    {"no fence.proxy.async before overwriting", LitmusKernel<Omit::kOverwriteFence>},
    {"relaxed instead of acquire", LitmusKernel<Omit::kAcquire>},
};

inline void AddLitmusKernels(std::vector<const void*>& kernels) {
  kernels.push_back(Entry(kRecipe));
  for (const LitmusVariant& mutant : kMutants) kernels.push_back(Entry(mutant.kernel));
}

// Makes launches of about a quarter of a second, every other one with more load on the links.
inline JsonObject RunLitmus(Gpus gpus, LitmusFunction kernel, double seconds) {
  static uint64_t next = kFirstEpoch;
  static uint32_t left = 0;
  constexpr double kLaunchMs = 250;
  constexpr uint32_t kLoadingBlocks = 32;
  const uint32_t ranks = static_cast<uint32_t>(gpus.size());
  const uint32_t peers = std::max(ranks, 2u) - 1;
  const uint32_t channels = ranks > 4 ? kMaxChannels / 2 : kMaxChannels;
  const uint32_t blocks = peers * channels * (1 + kLitmusReaders);
  ClearResults(gpus);
  const uint64_t first = next;
  double rounds = 500;
  double round_us[2] = {};
  const double start = Seconds();
  double elapsed = 0;
  for (int launch = 0; launch < 2 || elapsed < seconds; ++launch) {
    const bool loading = ranks > 1 && launch % 2 == 1;
    left += blocks;
    const LitmusStep step{next, static_cast<uint32_t>(rounds), channels, left};
    next += step.rounds;
    const double ms = RunOnce(gpus, [&](const Gpu& gpu) {
      StartResident(kernel, gpu, blocks + (loading ? kLoadingBlocks : 0), kLitmusThreads,
                    size_t{kMaxMessageRows} * kRowBytes, gpu.group, step);
    });
    round_us[launch % 2] = ms * 1e3 / step.rounds;
    rounds = std::clamp(rounds * kLaunchMs / ms, 100.0, std::min(rounds * 4, 1e6));
    elapsed = Seconds() - start;
  }
  Results sum{};
  for (const Gpu& gpu : gpus) {
    const Results results = ReadResults(gpu);
    sum.rounds += results.rounds;
    sum.rows += results.rows;
    sum.bad_rounds += results.bad_rounds;
    sum.wrong_units += results.wrong_units;
  }
  return JsonObject()
      .Add("seconds", elapsed)
      .Add("channels", peers * ranks * channels)
      .Add("rounds_a_channel", static_cast<double>(next - first))
      .Add("messages", static_cast<double>(sum.rounds) / kLitmusReaders)
      .Add("rows", static_cast<double>(sum.rows))
      .Add("bad_reads", static_cast<double>(sum.bad_rounds))
      .Add("wrong_units", static_cast<double>(sum.wrong_units))
      .Add("round_us", round_us[0])
      .Add("round_under_load_us", round_us[1]);
}

}  // namespace jax_ep::cuda
