// A combine of the window transports in two halves: the kernel of window_combine.cu, cut between
// sending and placing.
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window_calls.h"
#include "cuda/window_combine_jobs.cuh"
#include "cuda/window_grid.h"
#include "cuda/window_halves.cuh"

namespace jax_ep::cuda {
namespace {

template <typename Element, typename Wire>
__global__ void __launch_bounds__(kSumThreads, 1)
    WindowCombineSendKernel(const __grid_constant__ WindowCombineStep step,
                            const __grid_constant__ WindowGroup group,
                            const __grid_constant__ CombinePlan plan, PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ CallBlock block;
  WindowSendHalf call(group, CallKind::kCombine, plan.call, block);
  call.Begin();
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    const Combine combine{step, plan, call};
    ok = SendSums<Element, Wire>(combine, call.First(Queue::kSend));
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

template <typename Element, typename Wire>
__global__ void __launch_bounds__(kSumThreads, 1)
    WindowCombinePlaceKernel(const __grid_constant__ WindowCombineStep step,
                             const __grid_constant__ WindowGroup group,
                             const __grid_constant__ CombinePlan plan, const PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ CallBlock block;
  __shared__ CallPlan own;
  WindowPlaceHalf call(group, CallKind::kCombine, plan.call, block, own);
  call.Begin(*pending);
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    const Combine combine{step, plan, call};
    ok = PlaceSums<Element, Wire>(combine);
  }
  bool failed;
  if (!call.Leave(ok, failed)) return;
  call.Commit(failed);
  if (threadIdx.x == 0) *step.done = 0;
  if (failed) FailCombine(step);
#endif
}

}  // namespace

cudaError_t WindowCombineSend(const WindowCombineStep& step, PendingCall* pending,
                              const WindowGroup& group, cudaStream_t stream) {
  CombinePlan plan = MakeCombinePlan(step);
  plan.call.work.place_items = 0;
  plan.call.roles = SendingRoles(group, kSumWarps, plan.call.work, false);
  const dim3 grid(plan.call.roles.blocks);
  return VisitWire(step, [&]<typename Element, typename Wire>(Element, Wire) {
    return Launch(WindowCombineSendKernel<Element, Wire>, grid, kSumThreads, 0, stream, step, group,
                  plan, pending);
  });
}

cudaError_t WindowCombinePlace(const WindowCombineStep& step, const PendingCall* pending,
                               const WindowGroup& group, cudaStream_t stream) {
  CombinePlan plan = MakeCombinePlan(step);
  plan.call.work.send_items = 0;
  plan.call.roles = PlacingRoles(group, kSumWarps, plan.call.work);
  const dim3 grid(plan.call.roles.blocks);
  return VisitWire(step, [&]<typename Element, typename Wire>(Element, Wire) {
    return Launch(WindowCombinePlaceKernel<Element, Wire>, grid, kSumThreads, 0, stream, step,
                  group, plan, pending);
  });
}

cudaError_t PreloadWindowCombineHalves() {
  return PreloadCombines([]<typename Element, typename Wire>(Element, Wire) {
    const cudaError_t error = Preload(WindowCombineSendKernel<Element, Wire>);
    return error != cudaSuccess ? error : Preload(WindowCombinePlaceKernel<Element, Wire>);
  });
}

}  // namespace jax_ep::cuda
