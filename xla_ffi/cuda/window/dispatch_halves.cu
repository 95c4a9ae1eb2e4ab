// The send half and the receive half of a dispatch of the window transports.
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/dispatch_plan.cuh"
#include "cuda/window/dispatch_recv.cuh"
#include "cuda/window/dispatch_send.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/halves.cuh"
#include "formats/registry.h"

namespace jax_ep::cuda {
namespace {

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    DispatchSendKernel(const __grid_constant__ DispatchStep step,
                       const __grid_constant__ WindowGroup group,
                       const __grid_constant__ DispatchPlan plan, PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const shared = SharedBytes();
  const DispatchShared<Format> memory(shared, step.shape, plan.rows);
  WindowSendHalf call(group, CallKind::kDispatch, plan.call, *memory.call);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format>(call, plan.encode, memory.jobs, step.input_scale);
    }
  } else if (ok) {
    int32_t* router_rows = memory.router_rows + warp * static_cast<uint32_t>(step.shape.experts());
    ok = Sender<Format>(step, plan, call, stages, router_rows, memory.jobs)
             .Run(call.First(Queue::kSend));
  }
  EndRows(
      call, ok, [&] { call.Note(pending); },
      [&] {
        FillWords(pending, 1, kNoValue);
        FillWords(step.slot_of, step.shape.tokens * step.shape.top_k, kNoValue);
        FillWords(step.num_invalid, 1, 0);
      });
#endif
}

template <typename Format>
__global__ void __launch_bounds__(kRowThreads, 1)
    DispatchRecvKernel(const __grid_constant__ DispatchStep step,
                       const __grid_constant__ WindowGroup group,
                       const __grid_constant__ DispatchPlan plan, const PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const shared = SharedBytes();
  auto& own = *reinterpret_cast<CallPlan*>(shared);
  const DispatchShared<Format> memory(shared + kOwnPlanBytes, step.shape, plan.rows);
  WindowRecvHalf call(group, CallKind::kDispatch, plan.call, *memory.call, own);
  call.Begin(*pending);
  BulkStages stages(plan.rows.stages, memory.stages, static_cast<uint32_t>(Warp()), kRowWarps);
  FillWords(memory.zeros, kZeroBytes, 0);
  FenceProxyAsyncShared();
  if (threadIdx.x == 0) *memory.counts_arrived = true;
  __syncthreads();
  bool ok = call.Join();
  if (ok) {
    Receiver<Format> receiver(step, plan, call, stages, memory);
    ok = receiver.Build({threadIdx.x, kRowThreads, 0}) && receiver.Run(call.First(Queue::kReceive));
  }
  EndRows(call, ok, [] {}, [&] { Fail<Format>(step, plan.scales); });
#endif
}

template <typename Format>
int64_t SharedBytes(const DispatchStep& step, const DispatchPlan& plan) {
  return DispatchShared<Format>::FixedBytes(step.shape) + plan.rows.stages.bytes(kRowWarps);
}

template <typename Format>
cudaError_t LaunchSend(const DispatchStep& step, PendingCall* pending, const WindowGroup& group,
                       cudaStream_t stream, bool of_whole_call) {
  DispatchPlan plan{};
  if (!MakePlan<Format>(step, plan)) return cudaErrorInvalidConfiguration;
  plan.call.work.receive_items = 0;
  plan.call.of_whole_call = of_whole_call;
  plan.call.roles = SendingRoles(group, kRowWarps, plan.call, QuantizedFormat<Format>);
  return LaunchAhead(DispatchSendKernel<Format>, dim3(plan.call.roles.blocks),
                     kRowBlockThreads<Format>, static_cast<size_t>(SharedBytes<Format>(step, plan)),
                     stream, step, group, plan, pending);
}

}  // namespace

template <typename Format>
cudaError_t DispatchSend(const DispatchStep& step, PendingCall* pending, const WindowGroup& group,
                         cudaStream_t stream, bool of_whole_call) {
  return VisitSentTokens<Format>(step, [&]<typename Sent>(TypeTag<Sent>) {
    return LaunchSend<Sent>(step, pending, group, stream, of_whole_call);
  });
}

template <typename Format>
cudaError_t DispatchRecv(const DispatchStep& step, const PendingCall* pending,
                         const WindowGroup& group, cudaStream_t stream) {
  DispatchPlan plan{};
  if (!MakePlan<Format>(step, plan, kOwnPlanBytes)) return cudaErrorInvalidConfiguration;
  WorkPlan& work = plan.call.work;
  work.route_items = work.send_items = 0;
  plan.call.roles = ReceivingRoles(group, kRowWarps, work);
  return Launch(DispatchRecvKernel<Format>, dim3(plan.call.roles.blocks), kRowThreads,
                static_cast<size_t>(kOwnPlanBytes + SharedBytes<Format>(step, plan)), stream, step,
                group, plan, pending);
}

cudaError_t PreloadDispatchHalves() {
  cudaError_t error = cudaSuccess;
  ForEachSentTokens([&]<typename Sent>(TypeTag<Sent>) {
    if (error == cudaSuccess) {
      error = PreloadShared(DispatchSendKernel<Sent>, kMaxSharedBytes);
    }
  });
  ForEachFormat([&]<typename Format>(Format) {
    if (error == cudaSuccess) {
      error = PreloadShared(DispatchRecvKernel<Format>, kMaxSharedBytes);
    }
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                                 \
  template cudaError_t DispatchSend<Format>(const DispatchStep&, PendingCall*, const WindowGroup&, \
                                            cudaStream_t, bool);                                   \
  template cudaError_t DispatchRecv<Format>(const DispatchStep&, const PendingCall*,               \
                                            const WindowGroup&, cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
