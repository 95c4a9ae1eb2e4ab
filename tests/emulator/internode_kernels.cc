// The kernels of shmem/internode.cu as cuda/internode/calls.cc launches them. Compiled like the
// kernels.
#include "calls_ranks.h"
#include "cuda/memory/driver.h"

namespace jax_ep {
namespace cuda {

extern "C" {
void JaxEpInternodeBundle(InternodeGroup internode, InternodeCall call);
void JaxEpInternodeSend(InternodeGroup internode, InternodeCall call);
void JaxEpInternodeArrive(InternodeGroup internode, InternodeCall call);
void JaxEpInternodeRelay(InternodeGroup internode, InternodeCall call);
void JaxEpInternodeDeliver(InternodeGroup internode, InternodeCall call);
}

}  // namespace cuda

namespace {

template <auto kKernel>
constexpr EmulatedFunction kFunction{[](void** params) -> std::function<void()> {
  return [internode = *static_cast<cuda::InternodeGroup*>(params[0]),
          call = *static_cast<cuda::InternodeCall*>(params[1])] { kKernel(internode, call); };
}};

}  // namespace

cuda::InternodeKernels EmulatedInternodeKernels() {
  const auto number = [](const EmulatedFunction& function) {
    return reinterpret_cast<uint64_t>(&function);
  };
  // In the order of InternodeKernel.
  return {
      number(kFunction<cuda::JaxEpInternodeBundle>), number(kFunction<cuda::JaxEpInternodeSend>),
      number(kFunction<cuda::JaxEpInternodeArrive>), number(kFunction<cuda::JaxEpInternodeRelay>),
      number(kFunction<cuda::JaxEpInternodeDeliver>)};
}

}  // namespace jax_ep
