// The low-latency calls, for few tokens. window/dispatch.cu and window/combine.cu hand calls over
// to them; all ranks decide alike, because the conditions use only values on which they agree.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// Whether windows have room for `messages` messages of `cells` cells each. They always do for calls
// of the group's own config, but handlers also accept other calls whose messages fit into regions.
inline bool HasCells(const WindowGroup& group, CallKind kind, int64_t messages, int64_t cells) {
  const BufferGroupLayout& layout = group.layout.groups[static_cast<int>(kind)];
  return cells <= layout.message_cells &&
         messages * layout.message_cells <= layout.cells_per_source;
}

bool IsLowLatency(const CombineStep& step, const WindowGroup& group);
cudaError_t CombineLowLatency(const CombineStep& step, const WindowGroup& group,
                              cudaStream_t stream);
cudaError_t PreloadCombineLowLatency();

template <typename Format>
bool IsLowLatency(const DispatchStep& step, const WindowGroup& group);
template <typename Format>
cudaError_t DispatchLowLatency(const DispatchStep& step, const WindowGroup& group,
                               cudaStream_t stream);
cudaError_t PreloadDispatchLowLatency();

}  // namespace jax_ep::cuda
