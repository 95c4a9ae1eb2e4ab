// The send half of a combine of the window transports.
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/combine_plan.cuh"
#include "cuda/window/combine_send.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/halves.cuh"

namespace jax_ep::cuda {
namespace {

template <typename Element, typename Wire, bool kOptions>
__global__ void __launch_bounds__(kSumThreads, 1)
    CombineSendKernel(const __grid_constant__ CombineStep step,
                      const __grid_constant__ WindowGroup group,
                      const __grid_constant__ CombinePlan plan, PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto& block = SharedObject<CallBlock>();
  WindowSendHalf call(group, CallKind::kCombine, plan.call, block);
  call.Begin();
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    const CombineContext combine{step, plan, call};
    ok = SendSums<Element, Wire, kOptions>(combine, call.First(Queue::kSend));
  }
  bool failed;
  if (!call.Leave(ok, failed)) return;
  call.Commit(failed);
  if (threadIdx.x != 0) return;
  *step.done = 0;
  call.Note(pending);
  if (failed) *pending = {0, kNoRegion, 0};
#endif
}

}  // namespace

cudaError_t CombineSend(const CombineStep& step, PendingCall* pending, const WindowGroup& group,
                        cudaStream_t stream, bool of_whole_call) {
  CombinePlan plan = MakeCombinePlan(step);
  plan.call.work.receive_items = 0;
  plan.call.of_whole_call = of_whole_call;
  plan.call.roles = SendingRoles(group, kSumWarps, plan.call, false);
  const dim3 grid(plan.call.roles.blocks);
  return VisitCombine(step, [&]<typename E, typename W, typename O>(E, W, O) {
    return LaunchAhead(CombineSendKernel<E, W, O::value>, grid, kSumThreads, 0, stream, step, group,
                       plan, pending);
  });
}

cudaError_t PreloadCombineSend() {
  return PreloadCombines([]<typename E, typename W, typename O>(E, W, O) {
    return Preload(CombineSendKernel<E, W, O::value>);
  });
}

}  // namespace jax_ep::cuda
