// Calls of a rank with ranks on other nodes, on a stream: the halves of window_calls.h with the
// steps of protocol/far.h between them, as kernels of the native module of NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/far_group.h"

namespace jax_ep::cuda {

class FarRank {
 public:
  FarRank(const FarGroup& far, const FarKernels& kernels) : far_(far), kernels_(kernels) {}

  // Behind a first half.
  cudaError_t Send(CallKind kind, const FarShape& shape, const PendingCall* pending,
                   cudaStream_t stream) const;
  // Before a second half.
  cudaError_t Arrive(CallKind kind, const FarShape& shape, const PendingCall* pending,
                     cudaStream_t stream) const;
  // Behind it.
  cudaError_t Return(CallKind kind, cudaStream_t stream) const;

  // A whole call: `first(pending)` and `second(pending)` launch its halves. All ranks send off what
  // they have before any of them waits for what others send.
  template <typename First, typename Second>
  cudaError_t InHalves(CallKind kind, const FarShape& shape, cudaStream_t stream, First first,
                       Second second) const {
    PendingCall* pending = &far_.group.control->whole[static_cast<int>(kind)];
    cudaError_t error = first(pending);
    if (error == cudaSuccess) error = Send(kind, shape, pending, stream);
    if (error != cudaSuccess) return error;
    return Place(kind, shape, pending, stream, [&] { return second(pending); });
  }

  // A second half, which `place` launches.
  template <typename Launches>
  cudaError_t Place(CallKind kind, const FarShape& shape, const PendingCall* pending,
                    cudaStream_t stream, Launches place) const {
    cudaError_t error = Arrive(kind, shape, pending, stream);
    if (error == cudaSuccess) error = place();
    return error == cudaSuccess ? Return(kind, stream) : error;
  }

 private:
  cudaError_t Launch(uint64_t kernel, unsigned shares, const FarCall& call,
                     cudaStream_t stream) const;

  FarGroup far_;
  FarKernels kernels_;
};

}  // namespace jax_ep::cuda
