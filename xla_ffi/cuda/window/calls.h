// The fused calls of the window transports on a stream. Each call, or half of one, is one kernel
// that allocates nothing and may run under graph capture. All waits in it are bounded by the
// group's timeout.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/registry.h"
#include "formats/token_format.h"
#include "protocol/pending.h"
#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::cuda {

// The formats of cached dispatches: rows travel unchanged or in grad_format.
template <typename Format>
inline constexpr bool kDispatchCachedFormat = !QuantizedFormat<Format> || kIsWireFormat<Format>;

template <typename Format>
cudaError_t Dispatch(const DispatchStep& step, const WindowGroup& group, cudaStream_t stream);
// For formats with kDispatchCachedFormat.
template <typename Format>
cudaError_t DispatchCached(const DispatchCachedStep& step, const WindowGroup& group,
                           cudaStream_t stream);
cudaError_t Combine(const CombineStep& step, const WindowGroup& group, cudaStream_t stream);

// The same calls in two halves, with the same results. A send half takes the operands that senders
// read, writes the results that they write, and leaves in `pending` what its receive half needs. A
// receive half takes and writes what receivers do and, if tokens are not quantised, takes the
// tokens again. `of_whole_call`: the receive half follows at once, as part of one whole call.
// Cached dispatches have halves for that purpose only.
template <typename Format>
cudaError_t DispatchSend(const DispatchStep& step, PendingCall* pending, const WindowGroup& group,
                         cudaStream_t stream, bool of_whole_call = false);
template <typename Format>
cudaError_t DispatchRecv(const DispatchStep& step, const PendingCall* pending,
                         const WindowGroup& group, cudaStream_t stream);
template <typename Format>
cudaError_t DispatchCachedSend(const DispatchCachedStep& step, PendingCall* pending,
                               const WindowGroup& group, cudaStream_t stream);
template <typename Format>
cudaError_t DispatchCachedRecv(const DispatchCachedStep& step, const PendingCall* pending,
                               const WindowGroup& group, cudaStream_t stream);
cudaError_t CombineSend(const CombineStep& step, PendingCall* pending, const WindowGroup& group,
                        cudaStream_t stream, bool of_whole_call = false);
cudaError_t CombineRecv(const CombineStep& step, const PendingCall* pending,
                        const WindowGroup& group, cudaStream_t stream);

// See PreloadWindowKernels (cuda/init.h).
cudaError_t PreloadDispatch();
cudaError_t PreloadDispatchCached();
cudaError_t PreloadCombine();
cudaError_t PreloadDispatchHalves();
cudaError_t PreloadCombineSend();
cudaError_t PreloadCombineRecv();

}  // namespace jax_ep::cuda
