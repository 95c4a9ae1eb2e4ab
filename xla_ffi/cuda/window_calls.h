// The fused calls of the window transports on a stream: one kernel each, which allocates nothing
// and may run under graph capture. Every wait in them is bounded by the group's timeout.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "formats/bf16.h"
#include "protocol/window.h"
#include "protocol/window_steps.h"

// The formats whose tokens go through windows.
#define JAX_EP_WINDOW_FORMATS(FORMAT) FORMAT(Bf16Format)

namespace jax_ep::cuda {

template <typename Format>
inline constexpr bool kInWindows = std::is_same_v<Format, Bf16Format>;

template <typename Format>
cudaError_t WindowDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                           cudaStream_t stream);
template <typename Format>
cudaError_t WindowCachedDispatch(const WindowCachedDispatchStep& step, const WindowGroup& group,
                                 cudaStream_t stream);
cudaError_t WindowCombine(const WindowCombineStep& step, const WindowGroup& group,
                          cudaStream_t stream);

// As PreloadKernels of steps.h.
cudaError_t PreloadWindowDispatch();
cudaError_t PreloadWindowCachedDispatch();
cudaError_t PreloadWindowCombine();

}  // namespace jax_ep::cuda
