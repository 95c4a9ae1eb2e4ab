// Launches of kernels that another module has loaded.
#include "cuda/far_calls.h"

#include <algorithm>
#include <bit>

#include "cuda/driver.h"

namespace jax_ep::cuda {

cudaError_t FarRank::Send(const FarCall& call, cudaStream_t stream) const {
  if (Bundled(far_, call.kind)) {
    const int64_t blocks = std::max<int64_t>(1, DivideUp(call.slots.tokens, kBundleTokens));
    const cudaError_t error = Launch(FarKernel::kBundle, blocks, call, stream);
    if (error != cudaSuccess) return error;
  }
  return Launch(FarKernel::kSend, kFarShares, call, stream);
}

cudaError_t FarRank::Arrive(const FarCall& call, cudaStream_t stream) const {
  const cudaError_t error = Launch(FarKernel::kArrive, 1, call, stream);
  if (error != cudaSuccess || !Bundled(far_, call.kind)) return error;
  // Cells after all messages, which launches keep in order.
  const cudaError_t relayed = Launch(FarKernel::kRelay, kRelayBlocks, call, stream);
  return relayed == cudaSuccess ? Launch(FarKernel::kDeliver, 1, call, stream) : relayed;
}

cudaError_t FarRank::Return(CallKind kind, cudaStream_t stream) const {
  return Launch(FarKernel::kSend, 1, {kind, {}, nullptr, {}}, stream);
}

cudaError_t FarRank::Launch(FarKernel kernel, int64_t blocks, const FarCall& call,
                            cudaStream_t stream) const {
  const auto launch = Driver::Get().launch;
  if (launch == nullptr) return cudaErrorNotSupported;
  void* params[] = {const_cast<FarGroup*>(&far_), const_cast<FarCall*>(&call)};
  const uint64_t function = kernels_.functions[static_cast<uint32_t>(kernel)];
  const auto rows = static_cast<unsigned>(std::popcount(far_.group.far));
  const CUresult result =
      launch(reinterpret_cast<CUfunction>(function), static_cast<unsigned>(blocks), rows, 1,
             kFarThreads, 1, 1, 0, stream, params, nullptr);
  // The two kinds of errors have the same numbers.
  return static_cast<cudaError_t>(result);
}

}  // namespace jax_ep::cuda
