// The window calls of few tokens, which window/dispatch.cu and window/combine.cu hand on. Which
// calls are theirs is the same on every rank: it follows from what ranks agree on.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// Whether so many messages of so many cells have a place in windows. They have in those of the
// call's own config; a handler lets others pass as well whose messages fit in regions.
inline bool HasCells(const WindowGroup& group, CallKind kind, int64_t messages, int64_t cells) {
  const BufferGroupLayout& layout = group.layout.groups[static_cast<int>(kind)];
  return cells <= layout.message_cells &&
         messages * layout.message_cells <= layout.cells_per_source;
}

bool IsLowLatency(const WindowCombineStep& step, const WindowGroup& group);
cudaError_t WindowLowLatencyCombine(const WindowCombineStep& step, const WindowGroup& group,
                                    cudaStream_t stream);
cudaError_t PreloadWindowLowLatencyCombine();

template <typename Format>
bool IsLowLatency(const WindowDispatchStep& step, const WindowGroup& group);
template <typename Format>
cudaError_t WindowLowLatencyDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                                     cudaStream_t stream);
cudaError_t PreloadWindowLowLatencyDispatch();

}  // namespace jax_ep::cuda
