// The fused dispatch along a known route, for backward passes: no routing and no counts.
#include "cuda/launch.h"
#include "cuda/shared_memory.cuh"
#include "cuda/window_cached_worker.cuh"
#include "cuda/window_calls.h"
#include "cuda/window_decode.cuh"
#include "cuda/window_grid.h"
#include "formats/registry.h"

namespace jax_ep::cuda {
namespace {

template <typename Format>
constexpr int64_t kFixedBytes =
    kZeroBytes + static_cast<int64_t>(sizeof(CallBlock)) + kTeamBytes<Format>;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Whole block: what a call returns that did not end.
__device__ __noinline__ void Fail(const WindowCachedDispatchStep& step) {
  FillWords(step.rows, step.shape.recv_rows * step.shape.row_bytes(), kNoValue);
  if (step.num_weights != 0) FillWords(step.row_weights, step.shape.recv_rows, kNoValue);
}

#endif  // sm_90

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    WindowCachedDispatchKernel(const __grid_constant__ WindowCachedDispatchStep step,
                               const __grid_constant__ WindowGroup group,
                               const __grid_constant__ CachedPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const shared = SharedBytes();
  uint8_t* stage_memory = shared + kZeroBytes;
  auto& block = *reinterpret_cast<CallBlock*>(stage_memory + plan.rows.stages.bytes(kRowWarps));
  auto* jobs = reinterpret_cast<TeamJob*>(&block + 1);
  WindowCall call(group, CallKind::kDispatch, plan.call, block);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, stage_memory, warp, kRowWarps, !helps);
  FillWords(shared, kZeroBytes, 0);
  FenceProxyAsyncShared();
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format>(call, plan.encode, jobs, nullptr);
      if (ok) HelpPlacers<Format>(plan, step, jobs);
    }
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, shared, jobs);
    const bool sends = warp < call.senders();
    ok = sends ? worker.Send(call.First(Queue::kSend)) : AwaitCredits(call);
    // Senders need nothing of the others, and place what is left.
    if (ok) ok = worker.Place(call.First(Queue::kPlace));
  }
  EndRows(call, ok, [&] { *step.done = 0; }, [&] { Fail(step); });
#endif
}

}  // namespace

template <typename Format>
cudaError_t WindowCachedDispatch(const WindowCachedDispatchStep& step, const WindowGroup& group,
                                 cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const int64_t payload_bytes = Format::PayloadBytes(shape.hidden, shape.element_bytes);
  const auto message =
      CachedDispatchMessage::Of(payload_bytes, Format::ScaleBytes(shape.hidden), step.num_weights);
  const int64_t chunks = kDispatchChunks.Count(shape.tokens);
  CachedPlan plan{};
  plan.chunk_tokens = static_cast<int32_t>(kDispatchChunks.Tokens(shape.tokens));
  plan.chunk_items = static_cast<uint32_t>(chunks * shape.ranks);
  plan.call.work = {0, static_cast<uint32_t>(chunks),
                    PlaceItems(plan.chunk_items, shape.recv_rows * shape.row_bytes())};
  // Senders that do not encode also store the rows of their own rank.
  plan.call.roles = RowRoles(group, plan.call.work, shape.tokens, 2, QuantizedFormat<Format>);
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag = CallTag(1, shape.tokens, message.bytes, step.num_weights, step.site);
  constexpr int64_t kBudget = kMaxSharedBytes - kFixedBytes<Format>;
  bool fits = PlanRows(payload_bytes, message.scales, message.bytes, kBudget, plan.rows,
                       QuantizedFormat<Format> ? kPayloadAlign : kRowAlignBytes);
  if constexpr (QuantizedFormat<Format>) {
    fits = fits && PlanEncoding<Format>(shape.hidden, step.element, message.scales, message.weight,
                                        message.bytes, kBudget, plan.encode, plan.rows.stages);
  }
  if (!fits) return cudaErrorInvalidConfiguration;
  const int64_t shared = kFixedBytes<Format> + plan.rows.stages.bytes(kRowWarps);
  const dim3 grid(plan.call.roles.blocks);
  return Launch(WindowCachedDispatchKernel<Format>, grid, kRowBlockThreads<Format>,
                static_cast<size_t>(shared), stream, step, group, plan);
}

cudaError_t PreloadWindowCachedDispatch() {
  cudaError_t error = cudaSuccess;
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (kAlongRoutes<Format>) {
      if (error == cudaSuccess)
        error = PreloadShared(WindowCachedDispatchKernel<Format>, kMaxSharedBytes);
    }
  });
  return error;
}

template cudaError_t WindowCachedDispatch<Bf16Format>(const WindowCachedDispatchStep&,
                                                      const WindowGroup&, cudaStream_t);
template cudaError_t WindowCachedDispatch<CombineFormat>(const WindowCachedDispatchStep&,
                                                         const WindowGroup&, cudaStream_t);

}  // namespace jax_ep::cuda
