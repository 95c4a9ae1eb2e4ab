// The host side of gpu_limits.cu: its GPUs with their memory, and launches on all of them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "report.cuh"
#include "stream.cuh"

namespace jax_ep::cuda {

constexpr uint32_t kSourceRows = 16384;
constexpr uint64_t kSourceBytes = uint64_t{kSourceRows} * kRowBytes;
constexpr uint64_t kWindowBytes = 2 * kSourceBytes;
constexpr uint64_t kRegionBytes = kWindowBytes / kMaxGpus;
constexpr int kRepeats = 5;

// ---- The GPUs -----------------------------------------------------------------------------------

struct Gpu {
  int device;
  int processors;
  int max_shared;
  cudaStream_t stream;
  cudaEvent_t begin;
  cudaEvent_t end;
  uint8_t* source;
  Group group;
};
using Gpus = std::span<Gpu>;

template <typename... Params>
const void* Entry(void (*kernel)(Params...)) {
  return reinterpret_cast<const void*>(kernel);
}

// Loads every kernel on the current device. Loading one later would wait for running kernels, which
// wait for this device's.
inline void LoadKernels(const Gpu& gpu, std::span<const void* const> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    CHECK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    const int dynamic = gpu.max_shared - static_cast<int>(attributes.sharedSizeBytes);
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic));
  }
}

inline std::vector<Gpu> OpenGpus(std::span<const void* const> kernels) {
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  count = std::min(count, static_cast<int>(kMaxGpus));
  std::vector<Gpu> gpus(static_cast<size_t>(count));
  Group group{};
  group.ranks = static_cast<uint32_t>(count);
  CHECK_CUDA(cudaHostAlloc(&group.host_report, sizeof(WaitReport), cudaHostAllocPortable));
  *group.host_report = WaitReport{};
  for (int device = 0; device < count; ++device) {
    Gpu& gpu = gpus[static_cast<size_t>(device)];
    gpu.device = device;
    CHECK_CUDA(cudaSetDevice(device));
    CHECK_CUDA(cudaDeviceGetAttribute(&gpu.processors, cudaDevAttrMultiProcessorCount, device));
    CHECK_CUDA(
        cudaDeviceGetAttribute(&gpu.max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    for (int peer = 0; peer < count; ++peer) {
      if (peer == device) continue;
      int can = 0;
      CHECK_CUDA(cudaDeviceCanAccessPeer(&can, device, peer));
      if (can == 0) {
        Fail("no peer access between GPUs " + std::to_string(device) + " and " +
             std::to_string(peer));
      }
      CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
    }
    CHECK_CUDA(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreate(&gpu.begin));
    CHECK_CUDA(cudaEventCreate(&gpu.end));
    CHECK_CUDA(cudaMalloc(&gpu.source, kSourceBytes));
    CHECK_CUDA(cudaMalloc(&group.windows[device], kWindowBytes));
    CHECK_CUDA(cudaMalloc(&group.areas[device], sizeof(SignalArea)));
    CHECK_CUDA(cudaMemset(group.areas[device], 0, sizeof(SignalArea)));
    LoadKernels(gpu, kernels);
    const uint32_t seed = static_cast<uint32_t>(device) << 28;
    const dim3 grid(1024);
    CHECK_CUDA(Launch(FillKernel, grid, 256, 0, gpu.stream, gpu.source, kSourceBytes / 16, seed));
    CHECK_CUDA(Launch(FillKernel, grid, 256, 0, gpu.stream, group.windows[device],
                      kWindowBytes / 16, ~seed));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  for (Gpu& gpu : gpus) {
    gpu.group = group;
    gpu.group.rank = static_cast<uint32_t>(gpu.device);
  }
  return gpus;
}

inline void CheckWaits(const Gpu& gpu) {
  static constexpr const char* kNames[] = {
      "none",         "bulk load", "ping-pong",     "barrier",     "publish, flag",
      "publish, row", "cells",     "litmus credit", "litmus flag", "litmus row"};
  const volatile WaitReport& seen = *gpu.group.host_report;
  if (seen.status == WaitStatus::kArrived) return;
  const size_t wait = seen.tag;
  Fail(std::string(seen.status == WaitStatus::kTimedOut ? "timed out" : "protocol error") +
       " in the wait for '" + (wait < std::size(kNames) ? kNames[wait] : "?") + "': GPU " +
       std::to_string(seen.waiting_rank) + " for GPU " + std::to_string(seen.awaited_rank) +
       ", epoch " + std::to_string(seen.epoch));
}

// Enqueues work on all GPUs, each between two events of its own, and waits for it. Returns
// milliseconds of the slowest GPU.
template <typename Enqueue>
double RunOnce(Gpus gpus, Enqueue enqueue) {
  for (Gpu& gpu : gpus) {
    CHECK_CUDA(cudaSetDevice(gpu.device));
    CHECK_CUDA(cudaEventRecord(gpu.begin, gpu.stream));
    enqueue(gpu);
    CHECK_CUDA(cudaEventRecord(gpu.end, gpu.stream));
  }
  float slowest = 0;
  for (Gpu& gpu : gpus) {
    CHECK_CUDA(cudaSetDevice(gpu.device));
    CHECK_CUDA(cudaStreamSynchronize(gpu.stream));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
    slowest = std::max(slowest, ms);
  }
  CheckWaits(gpus.front());
  return slowest;
}

template <typename Enqueue>
double MedianMs(Gpus gpus, Enqueue enqueue) {
  RunOnce(gpus, enqueue);
  std::vector<double> times;
  for (int i = 0; i < kRepeats; ++i) times.push_back(RunOnce(gpus, enqueue));
  return Median(times);
}

template <typename... Params>
void Start(void (*kernel)(Params...), const Gpu& gpu, uint32_t blocks, uint32_t threads,
           size_t shared, std::type_identity_t<Params>... params) {
  CHECK_CUDA(
      Launch(kernel, dim3(blocks), static_cast<int>(threads), shared, gpu.stream, params...));
}

// Like Start, for kernels whose blocks wait for each other: all of them must be resident.
template <typename... Params>
void StartResident(void (*kernel)(Params...), const Gpu& gpu, uint32_t blocks, uint32_t threads,
                   size_t shared, std::type_identity_t<Params>... params) {
  int resident = 0;
  CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, Entry(kernel),
                                                           static_cast<int>(threads), shared));
  if (static_cast<int64_t>(resident) * gpu.processors < blocks) {
    Fail("the blocks of a waiting kernel do not fit the GPU");
  }
  Start(kernel, gpu, blocks, threads, shared, params...);
}

inline Results ReadResults(const Gpu& gpu) {
  Results results;
  CHECK_CUDA(cudaMemcpy(&results, &gpu.group.areas[gpu.group.rank]->results, sizeof results,
                        cudaMemcpyDeviceToHost));
  return results;
}

inline void ClearResults(Gpus gpus) {
  const Results zero{};
  for (const Gpu& gpu : gpus) {
    CHECK_CUDA(cudaMemcpy(&gpu.group.areas[gpu.group.rank]->results, &zero, sizeof zero,
                          cudaMemcpyHostToDevice));
  }
}

}  // namespace jax_ep::cuda
