// Launches of kernels that another module has loaded.
#include "cuda/far_calls.h"

#include <bit>

#include "cuda/driver.h"

namespace jax_ep::cuda {

cudaError_t FarRank::Send(CallKind kind, const FarShape& shape, const PendingCall* pending,
                          cudaStream_t stream) const {
  return Launch(kernels_.send, kFarShares, {kind, shape, pending}, stream);
}

cudaError_t FarRank::Arrive(CallKind kind, const FarShape& shape, const PendingCall* pending,
                            cudaStream_t stream) const {
  return Launch(kernels_.arrive, 1, {kind, shape, pending}, stream);
}

cudaError_t FarRank::Return(CallKind kind, cudaStream_t stream) const {
  return Launch(kernels_.send, 1, {kind, {}, nullptr}, stream);
}

cudaError_t FarRank::Launch(uint64_t kernel, unsigned shares, const FarCall& call,
                            cudaStream_t stream) const {
  const auto launch = Driver::Get().launch;
  if (launch == nullptr) return cudaErrorNotSupported;
  void* params[] = {const_cast<FarGroup*>(&far_), const_cast<FarCall*>(&call)};
  const auto far_ranks = static_cast<unsigned>(std::popcount(far_.group.far));
  const CUresult result = launch(reinterpret_cast<CUfunction>(kernel), shares, far_ranks, 1,
                                 kFarThreads, 1, 1, 0, stream, params, nullptr);
  // The two kinds of errors have the same numbers.
  return static_cast<cudaError_t>(result);
}

}  // namespace jax_ep::cuda
