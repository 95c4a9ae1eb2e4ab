// Host side of the .cu files: launching and preloading kernels, and grids for kernels that work on
// rows.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "protocol/platform.h"

namespace jax_ep::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpsPerBlock = 8;
inline constexpr int kBlockThreads = kWarpsPerBlock * kWarpSize;

// Enough blocks to fill any GPU several times over; kernels loop over the rest.
inline constexpr int64_t kMaxGridX = 8192;
inline constexpr int64_t kMaxGridY = 64;

// A warp takes one part of one row: 16-byte vectors, kVectorsPerLane of them per lane.
inline constexpr int64_t kVectorBytes = 16;
inline constexpr int kVectorsPerLane = 4;
inline constexpr int64_t kPartVectors = kVectorsPerLane * kWarpSize;

// One thread per item.
inline dim3 ItemGrid(int64_t items) {
  return dim3(static_cast<unsigned>(Min(DivideUp(items, kBlockThreads), kMaxGridX)));
}

// One warp per (row, part), as ForEachPart of primitives.cuh walks them.
inline dim3 RowGrid(int64_t rows, int64_t row_bytes) {
  return dim3(
      static_cast<unsigned>(Min(DivideUp(rows, kWarpsPerBlock), kMaxGridX)),
      static_cast<unsigned>(Min(DivideUp(row_bytes, kPartVectors * kVectorBytes), kMaxGridY)));
}

// At least one block, for kernels that do more than work on rows.
inline dim3 SomeRowGrid(int64_t rows, int64_t row_bytes) {
  return RowGrid(rows == 0 ? 1 : rows, row_bytes);
}

template <typename... Params>
cudaError_t Launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                   cudaStream_t stream, std::type_identity_t<Params>... params) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                          dim3(static_cast<unsigned>(threads)), pointers, shared_bytes, stream);
}

// Like Launch, but its blocks start before waiting blocks of kernels on other streams. Other GPUs
// wait for what an exchange sends, and a kernel with enough blocks to fill the device many times
// would otherwise delay the exchange until that kernel ends.
template <typename... Params>
cudaError_t LaunchAhead(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                        cudaStream_t stream, std::type_identity_t<Params>... params) {
  int least = 0;
  cudaLaunchAttribute priority{};
  priority.id = cudaLaunchAttributePriority;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &priority.val.priority);
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t config{
      grid, dim3(static_cast<unsigned>(threads)), shared_bytes, stream, &priority, 1};
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
}

// Launches clusters of two blocks. `grid` has an even number of blocks, all in x. With `early` they
// may begin while the previous kernel on the stream still runs, if that one lets them; the kernel
// itself waits for what it needs of it.
template <typename... Params>
cudaError_t LaunchInPairs(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                          bool early, cudaStream_t stream, std::type_identity_t<Params>... params) {
  cudaLaunchAttribute attributes[2]{};
  auto& [cluster, overlap] = attributes;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{grid,         dim3(static_cast<unsigned>(threads)),
                                  shared_bytes, stream,
                                  attributes,   early ? 2u : 1u};
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
}

template <typename... Params>
cudaError_t Preload(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

}  // namespace jax_ep::cuda
