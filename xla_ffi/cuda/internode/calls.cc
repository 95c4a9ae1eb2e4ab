// Launches kernels that another module has loaded.
#include "cuda/internode/calls.h"

#include <algorithm>
#include <bit>

#include "cuda/memory/driver.h"

namespace jax_ep::cuda {

// Starts before other streams' waiting blocks, as the send half before it does (LaunchAhead in
// launch.h).
cudaError_t InternodeRank::Send(const InternodeCall& call, cudaStream_t stream) const {
  int least = 0;
  int greatest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error == cudaSuccess && Bundled(internode_, call.kind)) {
    const int64_t blocks = std::max<int64_t>(1, DivideUp(call.slots.tokens, kBundleTokens));
    error = Launch(InternodeKernel::kBundle, blocks, call, stream, greatest);
  }
  return error == cudaSuccess
             ? Launch(InternodeKernel::kSend, kInternodeShares, call, stream, greatest)
             : error;
}

cudaError_t InternodeRank::Arrive(const InternodeCall& call, cudaStream_t stream) const {
  const cudaError_t error = Launch(InternodeKernel::kArrive, 1, call, stream);
  if (error != cudaSuccess || !Bundled(internode_, call.kind)) return error;
  // Cells must come after all messages; the order of launches ensures it.
  const cudaError_t relayed = Launch(InternodeKernel::kRelay, kRelayBlocks, call, stream);
  return relayed == cudaSuccess ? Launch(InternodeKernel::kDeliver, 1, call, stream) : relayed;
}

cudaError_t InternodeRank::Return(CallKind kind, cudaStream_t stream) const {
  return Launch(InternodeKernel::kSend, 1, {kind, {}, nullptr, {}}, stream);
}

cudaError_t InternodeRank::Launch(InternodeKernel kernel, int64_t blocks, const InternodeCall& call,
                                  cudaStream_t stream, int priority) const {
  const auto launch = Driver::Get().launch;
  if (launch == nullptr) return cudaErrorNotSupported;
  void* params[] = {const_cast<InternodeGroup*>(&internode_), const_cast<InternodeCall*>(&call)};
  const uint64_t function = kernels_.functions[static_cast<uint32_t>(kernel)];
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  attribute.value.priority = priority;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(blocks);
  config.gridDimY = static_cast<unsigned>(std::popcount(internode_.group.internode));
  config.gridDimZ = 1;
  config.blockDimX = kInternodeThreads;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const CUresult result = launch(&config, reinterpret_cast<CUfunction>(function), params, nullptr);
  // cudaError_t and CUresult use the same numbers.
  return static_cast<cudaError_t>(result);
}

}  // namespace jax_ep::cuda
