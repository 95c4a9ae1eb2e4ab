// The kernels of shmem/internode.cu as cuda/internode/calls.cc launches them. Compiled as nvcc
// compiles them.
#include "calls_ranks.h"
#include "cuda/memory/driver.h"

namespace jax_ep {
namespace cuda {

extern "C" {
void JaxEpFarBundle(FarGroup far, FarCall call);
void JaxEpFarSend(FarGroup far, FarCall call);
void JaxEpFarArrive(FarGroup far, FarCall call);
void JaxEpFarRelay(FarGroup far, FarCall call);
void JaxEpFarDeliver(FarGroup far, FarCall call);
}

}  // namespace cuda

namespace {

template <auto kKernel>
constexpr EmulatedFunction kFunction{[](void** params) -> std::function<void()> {
  return [far = *static_cast<cuda::FarGroup*>(params[0]),
          call = *static_cast<cuda::FarCall*>(params[1])] { kKernel(far, call); };
}};

}  // namespace

cuda::FarKernels EmulatedFarKernels() {
  const auto number = [](const EmulatedFunction& function) {
    return reinterpret_cast<uint64_t>(&function);
  };
  // In the order of FarKernel.
  return {number(kFunction<cuda::JaxEpFarBundle>), number(kFunction<cuda::JaxEpFarSend>),
          number(kFunction<cuda::JaxEpFarArrive>), number(kFunction<cuda::JaxEpFarRelay>),
          number(kFunction<cuda::JaxEpFarDeliver>)};
}

}  // namespace jax_ep
