// Calls of a rank with ranks on other nodes, on a stream: the halves of window/calls.h with the
// steps of protocol/internode.h and bundle.h between them, as kernels of the native module of
// NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/internode/group.h"

namespace jax_ep::cuda {

class FarRank {
 public:
  FarRank(const FarGroup& far, const FarKernels& kernels) : far_(far), kernels_(kernels) {}

  // A first half, which `half()` launches, of `call.pending`, and what is behind it.
  template <typename Half>
  cudaError_t First(const FarCall& call, cudaStream_t stream, Half half) const {
    const cudaError_t error = half();
    return error == cudaSuccess ? Send(call, stream) : error;
  }
  // A second half, and what is around it.
  template <typename Half>
  cudaError_t Second(const FarCall& call, cudaStream_t stream, Half half) const {
    cudaError_t error = Arrive(call, stream);
    if (error == cudaSuccess) error = half();
    return error == cudaSuccess ? Return(call.kind, stream) : error;
  }
  // A whole call: `first(pending)` and `second(pending)` launch its halves. All ranks send off what
  // they have before any of them waits for what others send.
  template <typename First_, typename Second_>
  cudaError_t Whole(FarCall call, cudaStream_t stream, First_ first, Second_ second) const {
    PendingCall* pending = &far_.group.control->whole[static_cast<int>(call.kind)];
    call.pending = pending;
    const cudaError_t error = First(call, stream, [&] { return first(pending); });
    if (error != cudaSuccess) return error;
    return Second(call, stream, [&] { return second(pending); });
  }

 private:
  cudaError_t Send(const FarCall& call, cudaStream_t stream) const;
  cudaError_t Arrive(const FarCall& call, cudaStream_t stream) const;
  cudaError_t Return(CallKind kind, cudaStream_t stream) const;
  // A row of so many blocks for each far rank. Priority 0 is that of streams by default.
  cudaError_t Launch(FarKernel kernel, int64_t blocks, const FarCall& call, cudaStream_t stream,
                     int priority = 0) const;

  FarGroup far_;
  FarKernels kernels_;
};

}  // namespace jax_ep::cuda
