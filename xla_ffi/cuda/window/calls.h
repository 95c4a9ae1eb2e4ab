// The fused calls of the window transports on a stream: a kernel each, or for each half, which
// allocates nothing and may run under graph capture. Every wait in them is bounded by the group's
// timeout.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "formats/combine_wire.h"
#include "formats/token_format.h"
#include "protocol/pending.h"
#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// What goes along a known route: rows as they are, or in grad_format.
template <typename Format>
inline constexpr bool kCachedFormat =
    !QuantizedFormat<Format> || std::is_same_v<Format, CombineFormat>;

template <typename Format>
cudaError_t WindowDispatch(const WindowDispatchStep& step, const WindowGroup& group,
                           cudaStream_t stream);
// Of the formats of kCachedFormat.
template <typename Format>
cudaError_t WindowCachedDispatch(const WindowCachedDispatchStep& step, const WindowGroup& group,
                                 cudaStream_t stream);
cudaError_t WindowCombine(const WindowCombineStep& step, const WindowGroup& group,
                          cudaStream_t stream);

// In two halves, with the results of the whole calls. A first half takes what senders of the step
// read and writes what they write, and what the second is to be given; that takes and writes what
// placers do, and of unquantised tokens the tokens again. `of_whole_call`: the second half follows
// at once, as a whole call, which along a route there is no other use of.
template <typename Format>
cudaError_t WindowDispatchSend(const WindowDispatchStep& step, PendingCall* pending,
                               const WindowGroup& group, cudaStream_t stream,
                               bool of_whole_call = false);
template <typename Format>
cudaError_t WindowDispatchReceive(const WindowDispatchStep& step, const PendingCall* pending,
                                  const WindowGroup& group, cudaStream_t stream);
template <typename Format>
cudaError_t WindowCachedDispatchSend(const WindowCachedDispatchStep& step, PendingCall* pending,
                                     const WindowGroup& group, cudaStream_t stream);
template <typename Format>
cudaError_t WindowCachedDispatchReceive(const WindowCachedDispatchStep& step,
                                        const PendingCall* pending, const WindowGroup& group,
                                        cudaStream_t stream);
cudaError_t WindowCombineSend(const WindowCombineStep& step, PendingCall* pending,
                              const WindowGroup& group, cudaStream_t stream,
                              bool of_whole_call = false);
cudaError_t WindowCombineReceive(const WindowCombineStep& step, const PendingCall* pending,
                                 const WindowGroup& group, cudaStream_t stream);

// As PreloadKernels of steps.h.
cudaError_t PreloadWindowDispatch();
cudaError_t PreloadWindowCachedDispatch();
cudaError_t PreloadWindowCombine();
cudaError_t PreloadWindowDispatchHalves();
cudaError_t PreloadWindowCombineSend();
cudaError_t PreloadWindowCombineReceive();

}  // namespace jax_ep::cuda
