// The combine of the window transports: senders sum a slot's rows and store the sum into the window
// of the slot's source, and receivers add up what the ranks have sent for each token.
#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/low_latency/calls.h"
#include "cuda/window/call.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/combine_plan.cuh"
#include "cuda/window/combine_recv.cuh"
#include "cuda/window/combine_send.cuh"
#include "cuda/window/grid.h"

namespace jax_ep::cuda {
namespace {

template <typename Element, typename Wire, bool kOptions>
__global__ void __launch_bounds__(kSumThreads, 1)
    CombineKernel(const __grid_constant__ CombineStep step,
                  const __grid_constant__ WindowGroup group,
                  const __grid_constant__ CombinePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto& block = SharedObject<CallBlock>();
  WindowCall call(group, CallKind::kCombine, plan.call, block);
  call.Begin();
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    const CombineContext combine{step, plan, call};
    const bool sends = static_cast<uint32_t>(Warp()) < call.senders();
    ok = sends ? SendSums<Element, Wire, kOptions>(combine, call.First(Queue::kSend))
               : call.AwaitCredits();
    if (ok) ok = ReceiveSums<Element, Wire, kOptions>(combine);
  }
  bool failed;
  if (!call.Leave(ok, failed)) return;
  call.Commit(failed);
  if (threadIdx.x == 0) *step.done = 0;
  if (failed) FailCombine(step);
#endif
}

// Most blocks start as senders: a sender waits for a fence and has more terms than a receiver, and
// more receivers would only wait for what has not been sent.
constexpr uint32_t kMostReceivingBlocks = 16;
BlockRoles SumRoles(const WindowGroup& group, const WorkPlan& work, int64_t tokens) {
  const uint32_t limit = BlockLimit(group, UINT32_MAX);
  if (tokens <= kShortCombine) return BlockRoles::Alike(limit, kSumWarps, kSumWarps, work);
  return BlockRoles::ByArrival(limit, kSumWarps, limit - std::min(limit / 4, kMostReceivingBlocks));
}

}  // namespace

cudaError_t Combine(const CombineStep& step, const WindowGroup& group, cudaStream_t stream) {
  if (IsLowLatency(step, group)) return CombineLowLatency(step, group, stream);
  CombinePlan plan = MakeCombinePlan(step);
  plan.call.roles = SumRoles(group, plan.call.work, step.shape.tokens);
  const dim3 grid(plan.call.roles.blocks);
  return VisitCombine(step, [&]<typename E, typename W, typename O>(E, W, O) {
    return Launch(CombineKernel<E, W, O::value>, grid, kSumThreads, 0, stream, step, group, plan);
  });
}

cudaError_t PreloadCombine() {
  const cudaError_t error = PreloadCombineLowLatency();
  if (error != cudaSuccess) return error;
  return PreloadCombines([]<typename E, typename W, typename O>(E, W, O) {
    return Preload(CombineKernel<E, W, O::value>);
  });
}

}  // namespace jax_ep::cuda
