// The dispatch of the window transports: senders store messages into the destinations' windows
// while receivers move what has arrived to its rows.
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/low_latency/calls.h"
#include "cuda/window/calls.h"
#include "cuda/window/dispatch_plan.cuh"
#include "cuda/window/dispatch_recv.cuh"
#include "cuda/window/dispatch_send.cuh"
#include "cuda/window/grid.h"
#include "formats/registry.h"

namespace jax_ep::cuda {
namespace {

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    DispatchKernel(const __grid_constant__ DispatchStep step,
                   const __grid_constant__ WindowGroup group,
                   const __grid_constant__ DispatchPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const shared = SharedBytes();
  const DispatchShared<Format> memory(shared, step.shape, plan.rows);
  WindowCall call(group, CallKind::kDispatch, plan.call, *memory.call);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  FillWords(memory.zeros, kZeroBytes, 0);
  FenceProxyAsyncShared();
  if (threadIdx.x == 0) *memory.counts_arrived = true;
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format>(call, plan.encode, memory.jobs, step.input_scale);
      AwaitSenders(plan.call.roles, call.senders());
    }
  } else if (ok) {
    const uint32_t senders = call.senders();
    if (warp < senders) {
      int32_t* router_rows =
          memory.router_rows + warp * static_cast<uint32_t>(step.shape.experts());
      const WorkItem item = call.First(Queue::kSend);
      ok = Sender<Format>(step, plan, call, stages, router_rows, memory.jobs).Run(item);
    } else {
      ok = AwaitCredits(call);
    }
    // Only the wait for credits can have failed, and that affects the whole block.
    Team team;
    const bool receives = ReceivingTeam<kHelperWarps<Format> != 0>(plan.call.roles, senders, team);
    if (ok) {
      Receiver<Format> receiver(step, plan, call, stages, memory);
      ok = receives ? receiver.Build(team) : receiver.AwaitTables();
      if (ok) ok = receiver.Run(call.First(Queue::kReceive));
    }
  }
  EndRows(call, ok, [] {}, [&] { Fail<Format>(step, plan.scales); });
#endif
}

template <typename Format>
cudaError_t LaunchDispatch(const DispatchStep& step, const WindowGroup& group,
                           cudaStream_t stream) {
  DispatchPlan plan{};
  if (!MakePlan<Format>(step, plan)) return cudaErrorInvalidConfiguration;
  const WorkPlan& work = plan.call.work;
  plan.call.roles = RowRoles(group, work, step.shape.tokens, 3, QuantizedFormat<Format>);
  const int64_t shared =
      DispatchShared<Format>::FixedBytes(step.shape) + plan.rows.stages.bytes(kRowWarps);
  const dim3 grid(plan.call.roles.blocks);
  return Launch(DispatchKernel<Format>, grid, kRowBlockThreads<Format>, static_cast<size_t>(shared),
                stream, step, group, plan);
}

}  // namespace

template <typename Format>
cudaError_t Dispatch(const DispatchStep& step, const WindowGroup& group, cudaStream_t stream) {
  if (IsLowLatency<Format>(step, group)) return DispatchLowLatency<Format>(step, group, stream);
  return VisitSentTokens<Format>(step, [&]<typename Sent>(TypeTag<Sent>) {
    return LaunchDispatch<Sent>(step, group, stream);
  });
}

cudaError_t PreloadDispatch() {
  cudaError_t error = PreloadDispatchLowLatency();
  ForEachSentTokens([&]<typename Sent>(TypeTag<Sent>) {
    if (error == cudaSuccess) error = PreloadShared(DispatchKernel<Sent>, kMaxSharedBytes);
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format) \
  template cudaError_t Dispatch<Format>(const DispatchStep&, const WindowGroup&, cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
