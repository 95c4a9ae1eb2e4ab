// The receive half of a combine of the window transports.
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/combine_plan.cuh"
#include "cuda/window/combine_receive.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/halves.cuh"

namespace jax_ep::cuda {
namespace {

template <typename Element, typename Wire, bool kOptions>
__global__ void __launch_bounds__(kSumThreads, 1)
    WindowCombineReceiveKernel(const __grid_constant__ WindowCombineStep step,
                               const __grid_constant__ WindowGroup group,
                               const __grid_constant__ CombinePlan plan,
                               const PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto& block = SharedObject<CallBlock>();
  auto& own = SharedObject<CallPlan>();
  WindowReceiveHalf call(group, CallKind::kCombine, plan.call, block, own);
  call.Begin(*pending);
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    const Combine combine{step, plan, call};
    ok = ReceiveSums<Element, Wire, kOptions>(combine);
  }
  bool failed;
  if (!call.Leave(ok, failed)) return;
  call.Commit(failed);
  if (threadIdx.x == 0) *step.done = 0;
  if (failed) FailCombine(step);
#endif
}

}  // namespace

cudaError_t WindowCombineReceive(const WindowCombineStep& step, const PendingCall* pending,
                                 const WindowGroup& group, cudaStream_t stream) {
  CombinePlan plan = MakeCombinePlan(step);
  plan.call.work.send_items = 0;
  plan.call.roles = ReceivingRoles(group, kSumWarps, plan.call.work);
  const dim3 grid(plan.call.roles.blocks);
  return VisitCombine(step, [&]<typename E, typename W, typename O>(E, W, O) {
    return Launch(WindowCombineReceiveKernel<E, W, O::value>, grid, kSumThreads, 0, stream, step,
                  group, plan, pending);
  });
}

cudaError_t PreloadWindowCombineReceive() {
  return PreloadCombines([]<typename E, typename W, typename O>(E, W, O) {
    return Preload(WindowCombineReceiveKernel<E, W, O::value>);
  });
}

}  // namespace jax_ep::cuda
