// The ranks of window_kernels.cu, each a GPU with its window, inputs and outputs, and calls on all
// of them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/window/calls.h"
#include "encoded.cuh"
#include "ffi/window_sizes.h"
#include "formats/combine_wire.h"
#include "formats/registry.h"
#include "inputs.cuh"
#include "options.cuh"

namespace jax_ep::window_kernels {

inline void Check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) End(kCannotRun, std::string(call) + ": " + cudaGetErrorString(error));
}
#define CHECK_CUDA(call) Check(call, #call)

struct Rank {
  cudaStream_t stream = nullptr;
  WindowGroup group{};
  // What the calls read and write. Enqueue adds shape, ids and options of each call.
  DispatchStep dispatch{};
  DispatchCachedStep dispatch_cached{};
  CombineStep combine{};
  const int32_t* ids[kRoutings] = {};
  // Copies on the host of what the GPU is given.
  std::vector<int32_t> host_ids[kRoutings];
  std::vector<float> host_weights;
  std::vector<BFloat16> host_tokens;
  Encoded encoded;                // the tokens in the format of dispatch
  std::vector<BFloat16> decoded;  // the tokens as a quantised cached dispatch returns them
  bool quantized = false;
  bool checked = true;
  std::string format;
  PendingCall* pending = nullptr;  // not null if calls run in halves
};

struct World {
  Options options;
  std::vector<Rank> ranks;

  EpShape Shape(int64_t tokens) const {
    EpShape shape;
    shape.ranks = std::ssize(ranks);
    shape.local_experts = options.experts / shape.ranks;
    shape.tokens = tokens;
    shape.top_k = options.top_k;
    shape.hidden = options.hidden;
    shape.element_bytes = sizeof(BFloat16);
    shape.expert_alignment = options.alignment;
    const double wanted = std::ceil(options.capacity_factor * static_cast<double>(tokens) *
                                    static_cast<double>(shape.top_k));
    shape.recv_rows = options.capacity_factor == 0
                          ? shape.slots() * std::min(shape.top_k, shape.local_experts)
                          : RoundUp(static_cast<int64_t>(wanted), 128);
    return shape;
  }
};

// ---- Memory -------------------------------------------------------------------------------------

// Allocates elements on the current device; they are never freed.
template <typename T>
T* Allocate(int64_t count) {
  T* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)));
  return memory;
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* memory = Allocate<T>(std::ssize(values));
  CHECK_CUDA(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

template <typename T>
void Download(const T* from, std::vector<T>& values) {
  CHECK_CUDA(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
}

inline BFloat16* Fill(int64_t count, uint32_t stream) {
  BFloat16* memory = Allocate<BFloat16>(count);
  CHECK_CUDA(cuda::Launch(FillKernel, cuda::ItemGrid(count), cuda::kBlockThreads, 0, nullptr,
                          memory, static_cast<uint64_t>(count), stream));
  CHECK_CUDA(cudaDeviceSynchronize());
  return memory;
}

// ---- Opening ------------------------------------------------------------------------------------

inline void GiveBuffers(const EpShape& shape, Rank& rank) {
  const int64_t entries = shape.tokens * shape.top_k, rows = shape.recv_rows;
  DispatchStep& first = rank.dispatch;
  first.tokens = Fill(shape.tokens * shape.hidden, TokenStream(rank.group.rank));
  rank.host_tokens.resize(shape.tokens * shape.hidden);
  Download(static_cast<const BFloat16*>(first.tokens), rank.host_tokens);
  VisitFormat(rank.format, [&]<typename Format>(Format) {
    if constexpr (QuantizedFormat<Format>) {
      if (rank.checked) rank.encoded = Encode<Format>(rank.host_tokens, kInputScale);
      // Room for tiles, if there are any, with one more per group.
      const int64_t scaled = RoundUp(rows + kTileRows * shape.local_experts, kTileRows);
      first.scales = Allocate<uint8_t>(scaled * Format::ScaleBytes(shape.hidden));
    }
  });
  if (rank.quantized && rank.checked) {
    const Encoded encoded = Encode<CombineFormat>(rank.host_tokens, 1.0f);
    rank.decoded = Decode<CombineFormat>(encoded);
  }
  first.element = ElementType::kBFloat16;
  first.input_scale = Upload(std::vector<float>{kInputScale});
  first.scales_offsets = Allocate<int32_t>(shape.local_experts);
  first.weights = Upload(rank.host_weights);
  for (int i = 0; i < kRoutings; ++i) rank.ids[i] = Upload(rank.host_ids[i]);
  first.rows = Allocate<uint8_t>(rows * shape.row_bytes());
  first.row_offsets = Allocate<int32_t>(shape.local_experts + 1);
  first.group_sizes = Allocate<int32_t>(shape.local_experts);
  first.expert_counts = Allocate<int32_t>(shape.local_experts);
  first.expert_ids = Allocate<int32_t>(shape.local_experts);
  first.src_info = Allocate<int32_t>(rows * 3);
  first.router_weights = Allocate<float>(rows);
  first.num_dropped = Allocate<int32_t>(1);
  first.num_invalid = Allocate<int32_t>(1);
  first.slot_of = Allocate<int32_t>(entries);
  first.row_of = Allocate<int32_t>(shape.ranks * entries);
  first.row_slot = Allocate<int32_t>(rows);
  first.slot_counts = Allocate<int32_t>(shape.ranks);

  DispatchCachedStep& cached = rank.dispatch_cached;
  cached.element = ElementType::kBFloat16;
  cached.num_weights = shape.top_k;
  cached.tokens = first.tokens;
  cached.weights = first.weights;
  cached.slot_of = first.slot_of;
  cached.row_of = first.row_of;
  cached.row_slot = first.row_slot;
  cached.rows = first.rows;
  cached.router_weights = first.router_weights;
  cached.done = Allocate<int32_t>(1);

  CombineStep& combine = rank.combine;
  combine.element = ElementType::kBFloat16;
  combine.wire = ElementType::kBFloat16;
  combine.quantized = rank.quantized;
  combine.expert_out = Fill(rows * shape.hidden, ExpertStream(rank.group.rank));
  combine.row_of = first.row_of;
  combine.slot_counts = first.slot_counts;
  combine.slot_of = first.slot_of;
  combine.output = Allocate<BFloat16>(shape.tokens * shape.hidden);
  combine.done = Allocate<int32_t>(1);
}

inline void GiveWindows(const EpShape& shape, const Options& options, std::vector<Rank>& ranks) {
  WindowSizes sizes{};
  ffi_layer::SizesOf({.format = options.format,
                      .hidden = shape.hidden,
                      .element_bytes = shape.element_bytes,
                      .wire_element_bytes = shape.element_bytes,
                      .tokens = shape.tokens,
                      .dispatch_tokens = shape.tokens,
                      .combine_tokens = shape.tokens,
                      .top_k = shape.top_k,
                      .ranks = shape.ranks,
                      .local_experts = shape.local_experts,
                      .pending_calls = 2},
                     sizes);
  WindowGroup group{};
  group.layout = WindowLayout::Of(sizes);
  group.timeout_ns = static_cast<uint64_t>(options.timeout_s) * 1'000'000'000;
  group.ranks = static_cast<uint32_t>(shape.ranks);
  group.turns = static_cast<uint32_t>(sizes.turns);
  group.depth = static_cast<uint32_t>(sizes.depth);
  for (int device = 0; device < shape.ranks; ++device) {
    CHECK_CUDA(cudaSetDevice(device));
    group.windows[device] = Allocate<uint8_t>(group.layout.bytes);
    // A window of zeros is a valid start before kFirstEpoch.
    CHECK_CUDA(cudaMemset(group.windows[device], 0, static_cast<size_t>(group.layout.bytes)));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  WindowControl control{};
  for (CallState& calls : control.calls) calls = StartState(kFirstEpoch);
  for (int device = 0; device < shape.ranks; ++device) {
    CHECK_CUDA(cudaSetDevice(device));
    group.rank = static_cast<uint32_t>(device);
    group.control = Upload(std::vector<WindowControl>{control});
    CHECK_CUDA(cudaHostAlloc(&group.host_report, sizeof(WaitReport),
                             cudaHostAllocPortable | cudaHostAllocMapped));
    *group.host_report = WaitReport{};
    ranks[device].group = group;
  }
}

inline World Open(const Options& options) {
  World world{options, {}};
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  if (count > kMaxWindowRanks) End(kCannotRun, "too many GPUs; set CUDA_VISIBLE_DEVICES");
  if (options.experts % count != 0) End(kCannotRun, "--experts must be a multiple of the GPUs");
  if (options.top_k > options.experts) End(kCannotRun, "--top-k must be at most --experts");
  world.ranks.resize(count);
  const EpShape shape =
      world.Shape(*std::max_element(options.tokens.begin(), options.tokens.end()));
  if (const char* obstacle = Validate(shape)) End(kCannotRun, obstacle);
  for (int device = 0; device < count; ++device) {
    CHECK_CUDA(cudaSetDevice(device));
    CHECK_CUDA(cudaStreamCreateWithFlags(&world.ranks[device].stream, cudaStreamNonBlocking));
    for (int peer = 0; peer < count; ++peer) {
      if (peer != device) CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
    }
    // Loading a kernel later would wait for running kernels, which wait for this device's.
    CHECK_CUDA(cuda::PreloadDispatch());
    CHECK_CUDA(cuda::PreloadDispatchCached());
    CHECK_CUDA(cuda::PreloadCombine());
    CHECK_CUDA(cuda::PreloadDispatchHalves());
    CHECK_CUDA(cuda::PreloadCombineSend());
    CHECK_CUDA(cuda::PreloadCombineRecv());
  }
  VisitFormat(options.format, [&]<typename Format>(Format) {
    const int64_t words = shape.hidden / Format::kBlock % kTileColumns;
    if constexpr (!QuantizedFormat<Format>) {
      if (options.tiled) End(kCannotRun, "--tiled needs a format with scales");
    } else if (options.tiled && (sizeof(typename Format::Scale) != 1 || words != 0)) {
      End(kCannotRun, "--tiled needs scales of a byte, in multiples of 4 a row");
    }
    if (shape.hidden % Format::kBlock != 0) End(kCannotRun, "--hidden must be whole blocks");
  });
  if (options.quantized && shape.hidden % CombineFormat::kBlock != 0) {
    End(kCannotRun, "--hidden must be whole blocks");
  }
  GiveWindows(shape, options, world.ranks);
  IdSource source(options.experts, options.top_k, options.zipf,
                  static_cast<uint64_t>(options.seed));
  for (int device = 0; device < count; ++device) {
    Rank& rank = world.ranks[device];
    CHECK_CUDA(cudaSetDevice(device));
    for (int i = 0; i < kRoutings; ++i) rank.host_ids[i] = source.Draw(i, device, shape.tokens);
    rank.host_weights = source.Weights(shape.tokens);
    rank.quantized = options.quantized;
    rank.checked = !options.no_check;
    rank.format = options.format;
    if (options.halves) rank.pending = Allocate<PendingCall>(1);
    rank.dispatch.scale_layout = options.tiled ? ScaleLayout::kTiled128x4 : ScaleLayout::kRows;
  }
  // In parallel, since the host takes a while to encode.
  std::vector<std::jthread> threads;
  for (int device = 0; device < count; ++device) {
    threads.emplace_back([device, &shape, &rank = world.ranks[device]] {
      CHECK_CUDA(cudaSetDevice(device));
      GiveBuffers(shape, rank);
    });
  }
  threads.clear();
  return world;
}

// ---- Calls --------------------------------------------------------------------------------------

struct Request {
  Call call;
  int64_t tokens;
  int routing = 0;         // of a dispatch; the others use the route that it left
  bool zero_tail = false;  // of a dispatch
  bool weighted = true;    // of a combine
};

// Enqueues a call on the current device, which must be the rank's.
inline void Enqueue(const EpShape& shape, const Request& request, const Rank& rank) {
  if (request.call == Call::kDispatch) {
    DispatchStep step = rank.dispatch;
    step.shape = shape;
    step.ids = rank.ids[request.routing];
    step.zero_tail = request.zero_tail;
    VisitFormat(rank.format, [&]<typename Format>(Format) {
      if (rank.pending == nullptr) {
        CHECK_CUDA(cuda::Dispatch<Format>(step, rank.group, rank.stream));
      } else {
        CHECK_CUDA(cuda::DispatchSend<Format>(step, rank.pending, rank.group, rank.stream));
        CHECK_CUDA(cuda::DispatchRecv<Format>(step, rank.pending, rank.group, rank.stream));
      }
    });
  } else if (request.call == Call::kDispatchCached) {
    DispatchCachedStep step = rank.dispatch_cached;
    step.shape = shape;
    const auto launch = [&]<typename Format>(Format) {
      if (rank.pending == nullptr) {
        CHECK_CUDA(cuda::DispatchCached<Format>(step, rank.group, rank.stream));
        return;
      }
      CHECK_CUDA(cuda::DispatchCachedSend<Format>(step, rank.pending, rank.group, rank.stream));
      CHECK_CUDA(cuda::DispatchCachedRecv<Format>(step, rank.pending, rank.group, rank.stream));
    };
    rank.quantized ? launch(CombineFormat{}) : launch(Bf16Format{});
  } else {
    CombineStep step = rank.combine;
    step.shape = shape;
    step.router_weights = request.weighted ? rank.dispatch.router_weights : nullptr;
    if (rank.pending == nullptr) {
      CHECK_CUDA(cuda::Combine(step, rank.group, rank.stream));
    } else {
      CHECK_CUDA(cuda::CombineSend(step, rank.pending, rank.group, rank.stream));
      CHECK_CUDA(cuda::CombineRecv(step, rank.pending, rank.group, rank.stream));
    }
  }
}

// Waits for all ranks. Ends the program if a wait in a kernel has failed.
inline void Wait(const World& world) {
  for (const Rank& rank : world.ranks) {
    CHECK_CUDA(cudaSetDevice(static_cast<int>(rank.group.rank)));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
  }
  std::string failures;
  for (const Rank& rank : world.ranks) {
    const WaitReport& report = *rank.group.host_report;
    if (report.status == WaitStatus::kArrived) continue;
    char text[160];
    std::snprintf(text, sizeof text,
                  "\n  at rank %u: rank %d waited for rank %d, epoch %llu, tag %04x, phase %d, "
                  "status %d",
                  rank.group.rank, report.waiting_rank, report.awaited_rank,
                  static_cast<unsigned long long>(report.epoch), report.tag,
                  static_cast<int>(report.phase), static_cast<int>(report.status));
    failures += text;
  }
  if (!failures.empty()) End(kWaitFailed, "a wait failed" + failures);
}

inline void Run(const World& world, const Request& request) {
  const EpShape shape = world.Shape(request.tokens);
  for (const Rank& rank : world.ranks) {
    CHECK_CUDA(cudaSetDevice(static_cast<int>(rank.group.rank)));
    Enqueue(shape, request, rank);
  }
  Wait(world);
}

// Runs work(rank) on a thread for each rank, with the rank's device current.
template <typename Work>
void OnEachRank(const World& world, Work work) {
  std::vector<std::jthread> threads;
  for (const Rank& rank : world.ranks) {
    threads.emplace_back([&rank, work] {
      CHECK_CUDA(cudaSetDevice(static_cast<int>(rank.group.rank)));
      work(rank);
    });
  }
}

}  // namespace jax_ep::window_kernels
