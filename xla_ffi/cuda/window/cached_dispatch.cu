// The fused dispatch along a known route, for backward passes: no routing and no counts. And its
// halves, for groups over several nodes.
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.cuh"
#include "cuda/window/cached_worker.cuh"
#include "cuda/window/calls.h"
#include "cuda/window/decode.cuh"
#include "cuda/window/grid.h"
#include "cuda/window/halves.cuh"
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

// Whole block, the last of a call along a route that was changed: clears the rows whose slot has
// not been sent or does not name them, so that nothing is left of what memory held before. `memory`
// are the block's zeros.
__device__ __noinline__ void ClearUnsent(const WindowCachedDispatchStep& step,
                                         const CachedPlan& plan, const WindowCall& call,
                                         uint8_t* memory) {
  constexpr uint32_t kSlots = kZeroBytes * 8;  // at a time, a bit each
  auto* const sent = reinterpret_cast<uint32_t*>(memory);
  const EpShape& shape = step.shape;
  const auto tokens = static_cast<uint32_t>(shape.tokens),
             top_k = static_cast<uint32_t>(shape.top_k);
  const uint32_t slots = call.ranks() * tokens;
  BulkWait<0>();  // which may read the zeros
  JAX_EP_NO_UNROLL
  for (uint32_t first = 0;; first += kSlots) {
    __syncthreads();
    JAX_EP_NO_UNROLL
    for (uint32_t i = threadIdx.x; i < kSlots / 32; i += blockDim.x) sent[i] = 0;
    __syncthreads();
    JAX_EP_NO_UNROLL
    for (uint32_t i = threadIdx.x; i < plan.chunk_items; i += blockDim.x) {
      uint32_t source;
      const uint32_t chunk = call.by_ranks().Divide(i, source);
      const FlagCell flag = call.SeenFlag(source, chunk);
      JAX_EP_NO_UNROLL
      for (uint32_t j = 0; j < kMaxSlotSpan; ++j) {
        const bool is_sent = (flag.count >> kSlotCountBits >> j & 1) != 0 &&
                             j < (flag.count & kSlotCountMask) && flag.first_slot < tokens &&
                             j < tokens - flag.first_slot;
        const uint32_t bit = source * tokens + flag.first_slot + j - first;
        if (is_sent && bit < kSlots) atomicOr(&sent[bit / 32], 1u << bit % 32);
      }
    }
    __syncthreads();
    const uint32_t rows = static_cast<uint32_t>(shape.recv_rows);
    JAX_EP_NO_UNROLL
    for (uint32_t begin = threadIdx.x - Lane(); begin < rows; begin += blockDim.x) {
      const uint32_t row = begin + Lane();
      const int32_t slot = row < rows ? step.row_slot[row] : -1;
      const uint32_t bit = static_cast<uint32_t>(slot) - first;
      bool clear = false;
      if (static_cast<uint32_t>(slot) >= slots) {
        clear = slot >= 0;
      } else if (bit < kSlots) {
        bool names = false;
        JAX_EP_NO_UNROLL
        for (uint32_t k = 0; k < top_k; ++k) {
          names |= step.row_of[int64_t{slot} * top_k + k] == static_cast<int32_t>(row);
        }
        clear = !names || (sent[bit / 32] >> bit % 32 & 1) == 0;
      }
      if (clear && step.num_weights != 0) step.row_weights[row] = 0.0f;
      for (unsigned left = __ballot_sync(kFullWarp, clear); left != 0; left &= left - 1) {
        auto* to = reinterpret_cast<uint4*>(step.rows + FromLowest(left, row) * shape.row_bytes());
        JAX_EP_NO_UNROLL
        for (int64_t i = Lane(); i < shape.row_bytes() / kVectorBytes; i += kWarpSize) {
          to[i] = make_uint4(0, 0, 0, 0);
        }
      }
    }
    if (slots - first <= kSlots) break;
  }
}

// The shared memory of a block.
struct CachedShared {
  __device__ CachedShared(uint8_t* memory, const CachedPlan& plan)
      : zeros(memory),
        stages(memory + kZeroBytes),
        block(reinterpret_cast<CallBlock*>(stages + plan.rows.stages.bytes(kRowWarps))),
        jobs(reinterpret_cast<TeamJob*>(block + 1)) {}

  uint8_t* zeros;
  uint8_t* stages;
  CallBlock* block;
  TeamJob* jobs;  // of quantised formats
};

#endif  // sm_90

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    WindowCachedDispatchKernel(const __grid_constant__ WindowCachedDispatchStep step,
                               const __grid_constant__ WindowGroup group,
                               const __grid_constant__ CachedPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const CachedShared memory(SharedBytes(), plan);
  WindowCall call(group, CallKind::kDispatch, plan.call, *memory.block);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  FillWords(memory.zeros, kZeroBytes, 0);
  FenceProxyAsyncShared();
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format>(call, plan.encode, memory.jobs, nullptr);
      if (ok) HelpReceivers<Format>(plan, step, memory.jobs);
    }
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, memory.zeros, memory.jobs);
    const bool sends = warp < call.senders();
    ok = sends ? worker.Send(call.First(Queue::kSend)) : AwaitCredits(call);
    // Senders need nothing of the others, and place what is left.
    if (ok) ok = worker.Place(call.First(Queue::kReceive));
    AddToSum(*memory.block, worker.rows_left());
  }
  EndRows(
      call, ok, [&] { *step.done = 0; }, [&] { Fail(step); },
      [&] { ClearUnsent(step, plan, call, memory.zeros); });
#endif
}

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    WindowCachedSendKernel(const __grid_constant__ WindowCachedDispatchStep step,
                           const __grid_constant__ WindowGroup group,
                           const __grid_constant__ CachedPlan plan, PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const CachedShared memory(SharedBytes(), plan);
  WindowSendHalf call(group, CallKind::kDispatch, plan.call, *memory.block);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin();
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) {
      ok = HelpSenders<Format>(call, plan.encode, memory.jobs, nullptr);
    }
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, memory.zeros, memory.jobs);
    ok = worker.Send(call.First(Queue::kSend));
    AddToSum(*memory.block, worker.rows_left());
  }
  EndRows(call, ok, [&] { call.Note(pending); }, [&] { FillWords(pending, 1, kNoValue); });
#endif
}

template <typename Format>
__global__ void __launch_bounds__(kRowBlockThreads<Format>, 1)
    WindowCachedReceiveKernel(const __grid_constant__ WindowCachedDispatchStep step,
                              const __grid_constant__ WindowGroup group,
                              const __grid_constant__ CachedPlan plan, const PendingCall* pending) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint8_t* const shared = SharedBytes();
  auto& own = *reinterpret_cast<CallPlan*>(shared);
  const CachedShared memory(shared + kOwnPlanBytes, plan);
  WindowReceiveHalf call(group, CallKind::kDispatch, plan.call, *memory.block, own);
  const uint32_t warp = static_cast<uint32_t>(Warp());
  call.Begin(*pending);
  const bool helps = kHelperWarps<Format> != 0 && warp >= kRowWarps;
  BulkStages stages(plan.rows.stages, memory.stages, warp, kRowWarps, !helps);
  FillWords(memory.zeros, kZeroBytes, 0);
  FenceProxyAsyncShared();
  __syncthreads();
  bool ok = call.Join();
  if (ok && helps) {
    if constexpr (kHelperWarps<Format> != 0) HelpReceivers<Format>(plan, step, memory.jobs);
  } else if (ok) {
    CachedWorker<Format> worker(step, plan, call, stages, memory.zeros, memory.jobs);
    ok = worker.Place(call.First(Queue::kReceive));
    AddToSum(*memory.block, worker.rows_left());
  }
  EndRows(
      call, ok, [&] { *step.done = 0; }, [&] { Fail(step); },
      [&] { ClearUnsent(step, plan, call, memory.zeros); });
#endif
}

// All but the roles, where `spare` bytes of shared memory are left for others. False where it does
// not fit.
template <typename Format>
bool MakePlan(const WindowCachedDispatchStep& step, CachedPlan& plan, int64_t spare = 0) {
  const EpShape& shape = step.shape;
  const int64_t payload_bytes = Format::PayloadBytes(shape.hidden, shape.element_bytes);
  const auto message =
      CachedDispatchMessage::Of(payload_bytes, Format::ScaleBytes(shape.hidden), step.num_weights);
  const int64_t chunks = kDispatchChunks.Count(shape.tokens);
  plan.chunk_tokens = static_cast<int32_t>(kDispatchChunks.Tokens(shape.tokens));
  plan.chunk_items = static_cast<uint32_t>(chunks * shape.ranks);
  plan.call.work = {0, static_cast<uint32_t>(chunks),
                    ReceiveItems(plan.chunk_items, shape.recv_rows * shape.row_bytes())};
  plan.call.ranks = Divisor::Of(shape.ranks);
  plan.call.tag =
      CallTag(TagKind::kCachedDispatch, shape.tokens, message.bytes, step.num_weights, step.site);
  const int64_t budget = kMaxSharedBytes - kFixedBytes<Format> - spare;
  if (!PlanRows(payload_bytes, message.scales, message.bytes, budget, plan.rows,
                QuantizedFormat<Format> ? kPayloadAlign : kRowAlignBytes)) {
    return false;
  }
  if constexpr (QuantizedFormat<Format>) {
    return PlanEncoding<Format>(shape.hidden, step.element, message.scales, message.weight,
                                message.bytes, budget, plan.encode, plan.rows.stages);
  }
  return true;
}

template <typename Format>
size_t SharedBytes(const CachedPlan& plan, int64_t spare = 0) {
  return static_cast<size_t>(kFixedBytes<Format> + spare + plan.rows.stages.bytes(kRowWarps));
}

}  // namespace

template <typename Format>
cudaError_t WindowCachedDispatch(const WindowCachedDispatchStep& step, const WindowGroup& group,
                                 cudaStream_t stream) {
  CachedPlan plan{};
  if (!MakePlan<Format>(step, plan)) return cudaErrorInvalidConfiguration;
  // Senders that do not encode also store the rows of their own rank.
  plan.call.roles = RowRoles(group, plan.call.work, step.shape.tokens, 2, QuantizedFormat<Format>);
  return Launch(WindowCachedDispatchKernel<Format>, dim3(plan.call.roles.blocks),
                kRowBlockThreads<Format>, SharedBytes<Format>(plan), stream, step, group, plan);
}

template <typename Format>
cudaError_t WindowCachedDispatchSend(const WindowCachedDispatchStep& step, PendingCall* pending,
                                     const WindowGroup& group, cudaStream_t stream) {
  CachedPlan plan{};
  if (!MakePlan<Format>(step, plan)) return cudaErrorInvalidConfiguration;
  plan.call.of_whole_call = true;
  plan.call.work.receive_items = 0;
  plan.call.roles = SendingRoles(group, kRowWarps, plan.call.work, QuantizedFormat<Format>);
  return Launch(WindowCachedSendKernel<Format>, dim3(plan.call.roles.blocks),
                kRowBlockThreads<Format>, SharedBytes<Format>(plan), stream, step, group, plan,
                pending);
}

template <typename Format>
cudaError_t WindowCachedDispatchReceive(const WindowCachedDispatchStep& step,
                                        const PendingCall* pending, const WindowGroup& group,
                                        cudaStream_t stream) {
  CachedPlan plan{};
  if (!MakePlan<Format>(step, plan, kOwnPlanBytes)) return cudaErrorInvalidConfiguration;
  plan.call.work.send_items = 0;
  plan.call.roles = ReceivingRoles(group, kRowWarps, plan.call.work);
  return Launch(WindowCachedReceiveKernel<Format>, dim3(plan.call.roles.blocks),
                kRowBlockThreads<Format>, SharedBytes<Format>(plan, kOwnPlanBytes), stream, step,
                group, plan, pending);
}

cudaError_t PreloadWindowCachedDispatch() {
  cudaError_t error = cudaSuccess;
  ForEachFormat([&]<typename Format>(Format) {
    if constexpr (kCachedFormat<Format>) {
      const auto preload = [&](auto kernel) {
        if (error == cudaSuccess) error = PreloadShared(kernel, kMaxSharedBytes);
      };
      preload(WindowCachedDispatchKernel<Format>);
      preload(WindowCachedSendKernel<Format>);
      preload(WindowCachedReceiveKernel<Format>);
    }
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                      \
  template cudaError_t WindowCachedDispatch<Format>(const WindowCachedDispatchStep&,    \
                                                    const WindowGroup&, cudaStream_t);  \
  template cudaError_t WindowCachedDispatchSend<Format>(                                \
      const WindowCachedDispatchStep&, PendingCall*, const WindowGroup&, cudaStream_t); \
  template cudaError_t WindowCachedDispatchReceive<Format>(                             \
      const WindowCachedDispatchStep&, const PendingCall*, const WindowGroup&, cudaStream_t);
JAX_EP_INSTANTIATE(Bf16Format)
JAX_EP_INSTANTIATE(CombineFormat)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
