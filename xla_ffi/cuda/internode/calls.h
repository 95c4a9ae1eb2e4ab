// Calls of a rank with ranks on other nodes, on a stream: the halves of window/calls.h and between
// them the steps of protocol/internode.h and bundle.h, whose kernels the NVSHMEM module has loaded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/internode/group.h"

namespace jax_ep::cuda {

class InternodeRank {
 public:
  InternodeRank(const InternodeGroup& internode, const InternodeKernels& kernels)
      : internode_(internode), kernels_(kernels) {}

  // Launches the send half of `call.pending`, by calling `half()`, and what follows it.
  template <typename Half>
  cudaError_t SendHalf(const InternodeCall& call, cudaStream_t stream, Half half) const {
    const cudaError_t error = half();
    return error == cudaSuccess ? Send(call, stream) : error;
  }
  // Launches the receive half, by calling `half()`, and what surrounds it.
  template <typename Half>
  cudaError_t RecvHalf(const InternodeCall& call, cudaStream_t stream, Half half) const {
    cudaError_t error = Arrive(call, stream);
    if (error == cudaSuccess) error = half();
    return error == cudaSuccess ? Return(call.kind, stream) : error;
  }
  // Launches a whole call; `send(pending)` and `receive(pending)` launch its halves. Every rank
  // sends all it has before it waits for what others send.
  template <typename SendHalf_, typename RecvHalf_>
  cudaError_t Whole(InternodeCall call, cudaStream_t stream, SendHalf_ send,
                    RecvHalf_ receive) const {
    PendingCall* pending = &internode_.group.control->whole[static_cast<int>(call.kind)];
    call.pending = pending;
    const cudaError_t error = SendHalf(call, stream, [&] { return send(pending); });
    if (error != cudaSuccess) return error;
    return RecvHalf(call, stream, [&] { return receive(pending); });
  }

 private:
  cudaError_t Send(const InternodeCall& call, cudaStream_t stream) const;
  cudaError_t Arrive(const InternodeCall& call, cudaStream_t stream) const;
  cudaError_t Return(CallKind kind, cudaStream_t stream) const;
  // The grid has `blocks` blocks for each internode rank. Priority 0 is the default of streams.
  cudaError_t Launch(InternodeKernel kernel, int64_t blocks, const InternodeCall& call,
                     cudaStream_t stream, int priority = 0) const;

  InternodeGroup internode_;
  InternodeKernels kernels_;
};

}  // namespace jax_ep::cuda
