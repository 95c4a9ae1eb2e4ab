// The window calls of few tokens, which window_dispatch.cu and window_combine.cu hand on. Which
// calls are theirs is the same on every rank: it follows from what ranks agree on.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

bool TakesFewTokens(const WindowCombineStep& step);
cudaError_t WindowFewCombine(const WindowCombineStep& step, const WindowGroup& group,
                             cudaStream_t stream);
cudaError_t PreloadWindowFewCombine();

template <typename Format>
bool TakesFewTokens(const WindowDispatchStep& step);
template <typename Format>
cudaError_t WindowFewDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                              cudaStream_t stream);
cudaError_t PreloadWindowFewDispatch();

}  // namespace jax_ep::cuda
