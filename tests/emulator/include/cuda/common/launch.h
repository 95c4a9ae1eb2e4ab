// xla_ffi/cuda/common/launch.h with launches on emulated GPUs. This header is found before it on
// the include path.
#pragma once

#include "cuda_runtime.h"

// The launch by CUDA's runtime stays a template that nobody instantiates.
#define Launch LaunchByRuntime
#define LaunchAhead LaunchAheadByRuntime
#define LaunchInPairs LaunchInPairsByRuntime
#include_next "cuda/common/launch.h"
#undef Launch
#undef LaunchAhead
#undef LaunchInPairs

namespace jax_ep::cuda {

template <typename... Params>
cudaError_t LaunchClusters(void (*kernel)(Params...), uint32_t cluster, dim3 grid, int threads,
                           size_t shared_bytes, bool early, cudaStream_t stream,
                           const Params&... params) {
  emulator::Launch launch;
  launch.cluster = cluster;
  launch.early = early;
  launch.grid = grid;
  launch.threads = static_cast<uint32_t>(threads);
  launch.shared_bytes = shared_bytes;
  launch.body = [=] { kernel(params...); };
  emulator::Enqueue(std::move(launch), stream);
  return cudaSuccess;
}

template <typename... Params>
cudaError_t Launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                   cudaStream_t stream, std::type_identity_t<Params>... params) {
  return LaunchClusters<Params...>(kernel, 1, grid, threads, shared_bytes, false, stream,
                                   params...);
}

template <typename... Params>
cudaError_t LaunchInPairs(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                          bool early, cudaStream_t stream, std::type_identity_t<Params>... params) {
  return LaunchClusters<Params...>(kernel, 2, grid, threads, shared_bytes, early, stream,
                                   params...);
}

// Emulated blocks all run at once.
template <typename... Params>
cudaError_t LaunchAhead(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                        cudaStream_t stream, std::type_identity_t<Params>... params) {
  return Launch(kernel, grid, threads, shared_bytes, stream, params...);
}

}  // namespace jax_ep::cuda
