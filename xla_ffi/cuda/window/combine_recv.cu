// The receive half of a combine of the window transports.
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/combine_plan.cuh"
#include "cuda/window/combine_recv.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/halves.cuh"

namespace jax_ep::cuda {
namespace {

template <typename Element, typename Wire, bool kOptions>
__global__ void __launch_bounds__(kSumThreads, 1)
    CombineRecvKernel(const __grid_constant__ CombineStep step,
                      const __grid_constant__ WindowGroup group,
                      const __grid_constant__ CombinePlan plan, const PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto& block = SharedObject<CallBlock>();
  auto& own = SharedObject<CallPlan>();
  WindowRecvHalf call(group, CallKind::kCombine, plan.call, block, own);
  call.Begin(*pending);
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    const CombineContext combine{step, plan, call};
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

cudaError_t CombineRecv(const CombineStep& step, const PendingCall* pending,
                        const WindowGroup& group, cudaStream_t stream) {
  CombinePlan plan = MakeCombinePlan(step);
  plan.call.work.send_items = 0;
  plan.call.roles = ReceivingRoles(group, kSumWarps, plan.call.work);
  const dim3 grid(plan.call.roles.blocks);
  return VisitCombine(step, [&]<typename E, typename W, typename O>(E, W, O) {
    return Launch(CombineRecvKernel<E, W, O::value>, grid, kSumThreads, 0, stream, step, group,
                  plan, pending);
  });
}

cudaError_t PreloadCombineRecv() {
  return PreloadCombines([]<typename E, typename W, typename O>(E, W, O) {
    return Preload(CombineRecvKernel<E, W, O::value>);
  });
}

}  // namespace jax_ep::cuda
