// Kernels that measure the latency of signals and of small messages between GPUs. Used by
// gpu_limits.cu; their blocks wait for each other and must all be resident.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host.cuh"
#include "stream.cuh"

namespace jax_ep::cuda {

// The rounds of a latency kernel, numbered by consecutive epochs. The first quarter is not timed.
struct Rounds {
  uint64_t first;
  uint32_t count;

  __device__ uint32_t warm() const { return count / 4; }
};

__device__ inline FlagCell* SignalAt(const Group& group, uint32_t at, uint32_t from) {
  return &group.areas[at]->signals[from].cell;
}

// Runs on one lane of each of two GPUs. With kFenced each side publishes and observes, otherwise it
// only stores and polls.
template <bool kFenced>
__global__ void PingPongKernel(const __grid_constant__ Group group, uint32_t peer, Rounds rounds) {
  if (threadIdx.x != 0) return;
  const DeviceSignalMemory memory;
  FlagCell* there = SignalAt(group, peer, group.rank);
  const FlagCell* here = SignalAt(group, group.rank, peer);
  const bool leads = group.rank < peer;
  uint64_t start = 0;
  for (uint32_t round = 0; round < rounds.count; ++round) {
    if (round == rounds.warm()) start = memory.NowNs();
    const FlagCell flag{rounds.first + round, 0, 0, 0};
    const auto send = [&] {
      if constexpr (kFenced) {
        PublishFlag(memory, there, flag);
      } else {
        memory.Post(there, flag);
      }
    };
    if (leads) send();
    if (!WaitFor(group, Wait::kPingPong, peer, flag.epoch, [&] {
          FlagCell arrived;
          if constexpr (kFenced) return ObserveFlag(memory, here, flag.epoch, 0, arrived);
          return ClassifyFlag(memory.Peek(here), flag.epoch, 0);
        })) {
      return;
    }
    if (!leads) send();
  }
  group.area().results.total_ns = memory.NowNs() - start;
}

__device__ inline bool WaitForFlag(const Group& group, Wait wait, uint32_t from, uint64_t epoch) {
  const DeviceSignalMemory memory;
  return WaitFor(group, wait, from, epoch, [&] {
    FlagCell arrived;
    return ObserveFlag(memory, SignalAt(group, group.rank, from), epoch, 0, arrived);
  });
}

// Every GPU signals every other and waits for all, with one warp per GPU and one lane per peer.
__global__ void BarrierKernel(const __grid_constant__ Group group, Rounds rounds) {
  const DeviceSignalMemory memory;
  const uint32_t peer = threadIdx.x;
  const bool active = peer < group.ranks && peer != group.rank;
  uint64_t start = 0;
  for (uint32_t round = 0; round < rounds.count; ++round) {
    if (round == rounds.warm()) start = memory.NowNs();
    const uint64_t epoch = rounds.first + round;
    memory.ReleaseFence();  // Release, one for all lanes; pairs with Acquire in WaitForFlag.
    bool arrived = true;
    if (active) {
      memory.Post(SignalAt(group, peer, group.rank), FlagCell{epoch, 0, 0, 0});
      arrived = WaitForFlag(group, Wait::kBarrier, peer, epoch);
    }
    if (!__all_sync(kFullWarp, arrived)) return;
  }
  if (peer == 0) group.area().results.total_ns = memory.NowNs() - start;
}

// One warp per GPU publishes one row to every peer and waits for theirs, with one lane per peer or
// one lane for all; with kLoad it then loads the rows. Two regions used in turn need no credit: a
// peer's flag of the next round says that it is done with the last one.
template <bool kLanePerPeer, bool kLoad>
__global__ void PublishKernel(const __grid_constant__ Group group, Rounds rounds, uint32_t bytes) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[kMaxGpus];
  const DeviceSignalMemory memory;
  const uint32_t lane = threadIdx.x;
  const bool active = lane < group.ranks && lane != group.rank;
  const uint32_t issuers = kLanePerPeer ? kFullWarp : 1u;
  const bool issues = (issuers >> lane & 1) != 0;
  for (uint32_t unit = lane; unit < bytes / 16; unit += kWarpSize) {
    Units(shared)[unit] = UnitOf(Mix(group.rank), Mix(unit));
  }
  if (lane < kMaxGpus) MbarrierInit(&barriers[lane], 1);
  FenceProxyAsyncShared();
  __syncwarp();

  // Calls to(peer) for each of this lane's peers.
  const auto for_peers = [&](auto to) {
    if constexpr (kLanePerPeer) {
      if (active) to(lane);
    } else if (issues) {
      for (uint32_t step = 1; step < group.ranks; ++step) to((group.rank + step) % group.ranks);
    }
  };
  uint64_t sections[4] = {};
  uint64_t start_ns = 0;
  int64_t start_clock = 0;
  for (uint32_t round = 0; round < rounds.count; ++round) {
    if (round == rounds.warm()) {
      start_ns = memory.NowNs();
      start_clock = clock64();
    }
    const uint64_t epoch = rounds.first + round;
    const uint64_t region = (epoch & 1) * kMaxGpus;
    const int64_t begin = clock64();
    if (issues) FenceProxyAsyncGlobal();
    for_peers([&](uint32_t peer) {
      BulkStore(group.windows[peer] + (region + group.rank) * kRowBytes, shared, bytes);
    });
    BulkCommit();
    BulkWait<0>();
    __syncwarp();
    const int64_t written = clock64();
    if (issues) memory.ReleaseFence();  // Release; pairs with Acquire in WaitForFlag.
    __syncwarp();
    const int64_t fenced = clock64();
    for_peers([&](uint32_t peer) {
      memory.Post(SignalAt(group, peer, group.rank), FlagCell{epoch, 0, 0, 0});
    });
    bool good = !active || WaitForFlag(group, Wait::kPublish, lane, epoch);
    if (!__all_sync(kFullWarp, good)) return;
    const int64_t arrived = clock64();
    if constexpr (kLoad) {
      if (active) {
        FenceProxyAsyncGlobal();
        MbarrierExpect(&barriers[lane], bytes);
        BulkLoad(shared + (lane + 1) * bytes,
                 group.windows[group.rank] + (region + lane) * kRowBytes, bytes, &barriers[lane]);
        good = WaitForLoad(group, Wait::kPublishedRow, epoch, &barriers[lane], round & 1);
      }
      if (!__all_sync(kFullWarp, good)) return;
    }
    if (round < rounds.warm()) continue;
    sections[0] += written - begin;
    sections[1] += fenced - written;
    sections[2] += arrived - fenced;
    sections[3] += clock64() - arrived;
  }
  if (lane != 0) return;
  Results& results = group.area().results;
  results.total_ns = memory.NowNs() - start_ns;
  results.total_clocks = clock64() - start_clock;
  for (int i = 0; i < 4; ++i) results.section_clocks[i] = sections[i];
}

__device__ inline DataCell CellOf(uint32_t epoch, uint32_t source, uint32_t row, uint32_t cell) {
  const uint32_t stamp = Mix(epoch ^ (source << 28) ^ (row << 24)) + cell;
  return {{stamp, stamp * 0x9E3779B1u, ~stamp}, epoch};
}

// A block exchanges a part of one row with one peer in cells that carry their epoch, and checks
// that no cell is ever torn. Two buffers are used in turn, as in PublishKernel.
__global__ void __launch_bounds__(1024)
    CellsKernel(const __grid_constant__ Group group, Rounds rounds, uint32_t rows, uint32_t parts) {
  const DeviceSignalMemory memory;
  const uint32_t part = blockIdx.x % parts;
  const uint32_t row = blockIdx.x / parts % rows;
  const uint32_t peer = (group.rank + 1 + blockIdx.x / parts / rows) % group.ranks;
  const uint32_t first = part * blockDim.x + threadIdx.x;
  const uint32_t stride = parts * blockDim.x;
  unsigned long long wrong = 0;
  uint64_t start = 0;
  for (uint32_t round = 0; round < rounds.count; ++round) {
    if (round == rounds.warm()) start = memory.NowNs();
    const uint32_t epoch = static_cast<uint32_t>(rounds.first) + round;
    DataCell* there = group.areas[peer]->cells[epoch & 1][group.rank][row];
    const DataCell* here = group.area().cells[epoch & 1][peer][row];
    for (uint32_t cell = first; cell < kCellsPerRow; cell += stride) {
      memory.Post(there + cell, CellOf(epoch, group.rank, row, cell));
    }
    bool good = true;
    for (uint32_t cell = first; good && cell < kCellsPerRow; cell += stride) {
      DataCell seen{};
      good = WaitFor(group, Wait::kCells, peer, epoch, [&] {
        seen = memory.Peek(here + cell);
        const int32_t ahead = static_cast<int32_t>(seen.epoch - epoch);
        return ahead < 0    ? Observation::kPending
               : ahead == 0 ? Observation::kArrived
                            : Observation::kProtocolError;
      });
      const DataCell expected = CellOf(epoch, peer, row, cell);
      for (int word = 0; word < 3; ++word) wrong += seen.payload[word] != expected.payload[word];
    }
    if (!__syncthreads_and(good)) return;
  }
  if (wrong != 0) atomicAdd(&group.area().results.wrong_cells, wrong);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    group.area().results.total_ns = memory.NowNs() - start;
  }
}

// ---- Measurements -------------------------------------------------------------------------------

using PublishFunction = void (*)(Group, Rounds, uint32_t);

struct PublishVariant {
  const char* name;
  PublishFunction kernel;
};
constexpr PublishVariant kPublishVariants[] = {{"lane_a_peer", PublishKernel<true, false>},
                                               {"lane_a_peer_and_load", PublishKernel<true, true>},
                                               {"one_lane", PublishKernel<false, false>},
                                               {"one_lane_and_load", PublishKernel<false, true>}};

inline void AddLatencyKernels(std::vector<const void*>& kernels) {
  kernels.insert(kernels.end(), {Entry(PingPongKernel<false>), Entry(PingPongKernel<true>),
                                 Entry(BarrierKernel), Entry(CellsKernel)});
  for (const PublishVariant& variant : kPublishVariants) kernels.push_back(Entry(variant.kernel));
}

// Returns the first of `count` new epochs; a signal never sees an older one again.
inline uint64_t NextEpochs(uint32_t count) {
  static uint64_t next = kFirstEpoch;
  const uint64_t first = next;
  next += count;
  return first;
}

// Microseconds of one round. MeasureLatency runs `enqueue(gpu, rounds)` several times with fresh
// epochs. It takes the slowest GPU of each run, and returns the run in which this was the median.
struct Latency {
  double us = 0;
  double section_us[4] = {};
};
template <typename Enqueue>
Latency MeasureLatency(Gpus gpus, uint32_t count, Enqueue enqueue) {
  std::vector<Latency> runs;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    const Rounds rounds{NextEpochs(count), count};
    RunOnce(gpus, [&](const Gpu& gpu) { enqueue(gpu, rounds); });
    Latency slowest;
    for (const Gpu& gpu : gpus) {
      const Results results = ReadResults(gpu);
      const double timed = count - count / 4;
      const double us = static_cast<double>(results.total_ns) / timed / 1e3;
      if (us <= slowest.us) continue;
      slowest.us = us;
      for (int i = 0; i < 4 && results.total_clocks != 0; ++i) {
        slowest.section_us[i] = us * static_cast<double>(results.section_clocks[i]) /
                                static_cast<double>(results.total_clocks);
      }
    }
    if (repeat > 0) runs.push_back(slowest);
  }
  std::sort(runs.begin(), runs.end(),
            [](const Latency& a, const Latency& b) { return a.us < b.us; });
  return runs[runs.size() / 2];
}

inline void MeasureSignals(Gpus gpus) {
  const uint32_t ranks = static_cast<uint32_t>(gpus.size());
  std::vector<JsonObject> pairs;
  for (uint32_t peer = 1; peer < ranks; ++peer) {
    std::vector<Gpu> two = {gpus[0], gpus[peer]};
    const auto one_way = [&](void (*kernel)(Group, uint32_t, Rounds)) {
      const auto enqueue = [&](const Gpu& gpu, const Rounds& rounds) {
        const uint32_t other = gpu.device == 0 ? peer : 0;
        StartResident(kernel, gpu, 1, kWarpSize, 0, gpu.group, other, rounds);
      };
      return MeasureLatency(two, 4000, enqueue).us / 2;
    };
    pairs.push_back(JsonObject()
                        .Add("peer", peer)
                        .Add("relaxed_us", one_way(PingPongKernel<false>))
                        .Add("publish_observe_us", one_way(PingPongKernel<true>)));
  }
  const Latency barrier = MeasureLatency(gpus, 4000, [](const Gpu& gpu, const Rounds& rounds) {
    StartResident(BarrierKernel, gpu, 1, kWarpSize, 0, gpu.group, rounds);
  });
  std::vector<JsonObject> publishes;
  for (const PublishVariant& variant : kPublishVariants) {
    for (const uint32_t bytes : {256u, 3584u, kRowBytes}) {
      const Latency latency = MeasureLatency(gpus, 2000, [&](const Gpu& gpu, const Rounds& rounds) {
        StartResident(variant.kernel, gpu, 1, kWarpSize, size_t{bytes} * (kMaxGpus + 1), gpu.group,
                      rounds, bytes);
      });
      publishes.push_back(JsonObject()
                              .Add("variant", variant.name)
                              .Add("bytes_a_peer", bytes)
                              .Add("us", latency.us)
                              .Add("store_and_wait_us", latency.section_us[0])
                              .Add("fence_us", latency.section_us[1])
                              .Add("flags_us", latency.section_us[2])
                              .Add("load_us", latency.section_us[3]));
    }
  }
  std::vector<JsonObject> cells;
  ClearResults(gpus);
  for (const uint32_t rows : {1u, 2u, 4u}) {
    for (const uint32_t parts : {1u, 2u, 4u}) {
      const uint32_t threads = Min(1024u, (kCellsPerRow / parts / kWarpSize + 1) * kWarpSize);
      const Latency latency = MeasureLatency(gpus, 2000, [&](const Gpu& gpu, const Rounds& rounds) {
        StartResident(CellsKernel, gpu, (ranks - 1) * rows * parts, threads, 0, gpu.group, rounds,
                      rows, parts);
      });
      cells.push_back(JsonObject()
                          .Add("rows_a_peer", rows)
                          .Add("blocks_a_row", parts)
                          .Add("threads", threads)
                          .Add("us", latency.us));
    }
  }
  double wrong = 0;
  for (const Gpu& gpu : gpus) wrong += static_cast<double>(ReadResults(gpu).wrong_cells);
  Report()
      .Add("one_way", pairs)
      .Add("barrier_us", barrier.us)
      .Add("publish", publishes)
      .Add("cells", cells)
      .Add("wrong_cells", wrong);
}

}  // namespace jax_ep::cuda
