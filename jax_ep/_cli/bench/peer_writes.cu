// Measures what each GPU of a host can write to all others, all GPUs at once, with a plain copy
// kernel. Prints one JSON object. cuda.py builds and runs it where `jax-ep bench` runs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kMaxGpus = 8;
constexpr uint32_t kRowBytes = 14336;  // hidden 7168 in bfloat16
constexpr uint32_t kUnits = kRowBytes / sizeof(uint4);
constexpr uint32_t kSourceRows = 16384;
constexpr uint32_t kRegionRows = 4096;  // of each GPU in the memory of each peer
constexpr uint32_t kRounds = 4;         // over each region, so that starting does not count
constexpr int kRepeats = 5;
constexpr uint32_t kThreads = 1024;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kUnroll = 4;

#define CHECK(call)                                                       \
  do {                                                                    \
    const cudaError_t error = (call);                                     \
    if (error != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
      std::_Exit(1);                                                      \
    }                                                                     \
  } while (false)

struct Peers {
  uint4* regions[kMaxGpus];
  uint32_t count;
};

// One warp per row, through registers; rows go to the peers in turn.
__global__ void __launch_bounds__(kThreads)
    CopyKernel(const uint4* source, const __grid_constant__ Peers peers) {
  const uint32_t warps = gridDim.x * (blockDim.x / kWarp);
  const uint32_t warp = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const uint32_t items = peers.count * kRegionRows * kRounds;
  for (uint32_t item = warp; item < items; item += warps) {
    const uint4* from = source + uint64_t{item % kSourceRows} * kUnits;
    uint4* to =
        peers.regions[item % peers.count] + uint64_t{item / peers.count % kRegionRows} * kUnits;
    for (uint32_t first = threadIdx.x % kWarp; first < kUnits; first += kUnroll * kWarp) {
      uint4 values[kUnroll];
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        if (first + i * kWarp < kUnits) values[i] = from[first + i * kWarp];
      }
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        if (first + i * kWarp < kUnits) to[first + i * kWarp] = values[i];
      }
    }
  }
}

struct Gpu {
  cudaStream_t stream;
  cudaEvent_t begin;
  cudaEvent_t end;
  uint4* source;
  uint4* window;  // a region for each GPU
  Peers peers;
};

std::vector<Gpu> Open(int count) {
  std::vector<Gpu> gpus(static_cast<size_t>(count));
  for (int device = 0; device < count; ++device) {
    Gpu& gpu = gpus[static_cast<size_t>(device)];
    CHECK(cudaSetDevice(device));
    for (int peer = 0; peer < count; ++peer) {
      if (peer != device) CHECK(cudaDeviceEnablePeerAccess(peer, 0));
    }
    CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&gpu.begin));
    CHECK(cudaEventCreate(&gpu.end));
    CHECK(cudaMalloc(&gpu.source, uint64_t{kSourceRows} * kRowBytes));
    CHECK(cudaMemset(gpu.source, device + 1, uint64_t{kSourceRows} * kRowBytes));
    CHECK(cudaMalloc(&gpu.window, uint64_t{kMaxGpus} * kRegionRows * kRowBytes));
    CHECK(cudaDeviceSynchronize());
  }
  for (int device = 0; device < count; ++device) {
    Peers& peers = gpus[static_cast<size_t>(device)].peers;
    peers.count = static_cast<uint32_t>(count - 1);
    for (int i = 0; i < count - 1; ++i) {
      const int peer = (device + 1 + i) % count;
      peers.regions[i] = gpus[static_cast<size_t>(peer)].window +
                         static_cast<uint64_t>(device) * kRegionRows * kUnits;
    }
  }
  return gpus;
}

// Milliseconds of the slowest GPU.
double RunOnce(const std::vector<Gpu>& gpus, uint32_t blocks) {
  for (size_t device = 0; device < gpus.size(); ++device) {
    const Gpu& gpu = gpus[device];
    CHECK(cudaSetDevice(static_cast<int>(device)));
    CHECK(cudaEventRecord(gpu.begin, gpu.stream));
    CopyKernel<<<blocks, kThreads, 0, gpu.stream>>>(gpu.source, gpu.peers);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(gpu.end, gpu.stream));
  }
  float slowest = 0;
  for (const Gpu& gpu : gpus) {
    CHECK(cudaStreamSynchronize(gpu.stream));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
    slowest = std::max(slowest, ms);
  }
  return slowest;
}

double GigabytesPerSecond(const std::vector<Gpu>& gpus, uint32_t blocks) {
  RunOnce(gpus, blocks);
  std::vector<double> times;
  for (int i = 0; i < kRepeats; ++i) times.push_back(RunOnce(gpus, blocks));
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  const double rows = static_cast<double>(gpus.front().peers.count) * kRegionRows * kRounds;
  return rows * kRowBytes / times[kRepeats / 2] / 1e6;
}

}  // namespace

int main() {
  // A lazy load would wait for kernels of other GPUs.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  count = std::min(count, kMaxGpus);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("{\"device\": \"%s\", \"count\": %d, \"processors\": %d", properties.name, count,
              properties.multiProcessorCount);
  if (count > 1) {
    const std::vector<Gpu> gpus = Open(count);
    const char* before = ", \"peer_write\": [";
    for (const uint32_t blocks : {64u, 132u}) {
      std::printf("%s{\"pattern\": \"vector_copy\", \"blocks\": %u, \"gb_s\": %.12g}", before,
                  blocks, GigabytesPerSecond(gpus, blocks));
      before = ", ";
    }
    std::printf("]");
  }
  std::printf("}\n");
  return 0;
}
