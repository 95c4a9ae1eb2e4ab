// The targets on the GPU: decode, then enqueue the step or the call on XLA's stream. All may run
// under graph capture except ep_init and the calls of OnStreamCalls, which must not. XLA has made
// the stream's device current.
#include "ffi/cuda_handlers.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda/collective/steps.h"
#include "cuda/expert_rows.h"
#include "cuda/init.h"
#include "cuda/internode/calls.h"
#include "cuda/matmul/mxfp4.h"
#include "cuda/matmul/quantize_matrices.h"
#include "cuda/matmul/step.h"
#include "cuda/portable/portable.h"
#include "cuda/router.h"
#include "cuda/window/calls.h"
#include "ffi/window_group.h"

namespace jax_ep::ffi_layer {
namespace {

ffi::Error FromCuda(const char* target, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(error));
}

// The decoder has checked that the format exists.
template <typename Launch>
cudaError_t OfFormat(std::string_view format, Launch&& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  VisitFormat(format, [&](auto f) { error = launch(f); });
  return error;
}

cudaError_t Enqueue(DispatchPackCall& call, int32_t ordinal, cudaStream_t stream) {
  const auto group = GroupRegistry::Get().Find(call.key);
  if (group) call.step.report = group->InvalidIdReportOf(ordinal);
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cuda::DispatchPack<F>(call.step, stream); });
}
cudaError_t Enqueue(DispatchUnpackCall& call, int32_t ordinal, cudaStream_t stream) {
  SetCheck(call, ordinal);
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cuda::DispatchUnpack<F>(call.step, stream); });
}
cudaError_t Enqueue(DispatchCachedPackCall& call, int32_t, cudaStream_t stream) {
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cuda::DispatchCachedPack<F>(call.step, stream); });
}
cudaError_t Enqueue(DispatchCachedUnpackCall& call, int32_t ordinal, cudaStream_t stream) {
  SetCheck(call, ordinal);
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cuda::DispatchCachedUnpack<F>(call.step, stream); });
}
cudaError_t Enqueue(CombinePackCall& call, int32_t, cudaStream_t stream) {
  return cuda::CombinePack(call.step, stream);
}
cudaError_t Enqueue(CombineUnpackCall& call, int32_t ordinal, cudaStream_t stream) {
  SetCheck(call, ordinal);
  return cuda::CombineUnpack(call.step, stream);
}

cudaError_t Enqueue(QuantizeCall& call, int32_t, cudaStream_t stream) {
  return OfFormat(call.format, [&]<typename F>(F) {
    if constexpr (QuantizedFormat<F>) return cuda::Quantize<F>(call.step, stream);
    return cudaErrorNotSupported;
  });
}
cudaError_t Enqueue(DequantizeCall& call, int32_t, cudaStream_t stream) {
  return OfFormat(call.format, [&]<typename F>(F) {
    if constexpr (QuantizedFormat<F>) return cuda::Dequantize<F>(call.step, stream);
    return cudaErrorNotSupported;
  });
}

cudaError_t Enqueue(CombineBackCall& call, int32_t, cudaStream_t stream) {
  return cuda::CombineBack(call.step, stream);
}
cudaError_t Enqueue(QuantizeCotangentsCall& call, int32_t, cudaStream_t stream) {
  return cuda::QuantizeCotangents(call.step, stream);
}
cudaError_t Enqueue(DequantizeRowsCall& call, int32_t, cudaStream_t stream) {
  return cuda::DequantizeRows(call.step, stream);
}

cudaError_t Enqueue(RouterCall& call, int32_t, cudaStream_t stream) {
  return cuda::ChooseExperts(call.step, stream);
}

cudaError_t Enqueue(Call<MatmulStep>& call, int32_t, cudaStream_t stream) {
  return call.step.portable ? cuda::PortableMatmul(call.step, stream)
                            : cuda::GroupedMatmul(call.step, stream);
}
cudaError_t Enqueue(Call<ExpertsStep>& call, int32_t, cudaStream_t stream) {
  return cuda::ApplyExperts(call.step, stream);
}
cudaError_t Enqueue(Call<Mxfp4Step>& call, int32_t, cudaStream_t stream) {
  return cuda::MultiplyMxfp4(call.step, stream);
}
cudaError_t Enqueue(QuantizeMatricesCall& call, int32_t, cudaStream_t stream) {
  return cuda::QuantizeMatrices(call.step, stream);
}
cudaError_t Enqueue(Fp8OfMxfp4Call& call, int32_t, cudaStream_t stream) {
  return cuda::Fp8OfMxfp4(call.step, stream);
}
cudaError_t Enqueue(Call<TransposeRowsStep>& call, int32_t, cudaStream_t stream) {
  return cuda::TransposeRows(call.step, stream);
}

ffi::Error Precondition(const char* target, const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::string(target) + ": " + message);
}

// Returns what the steps for other nodes need to know of a call or of one of its halves.
template <typename Call>
cuda::InternodeCall InternodeCallOf(const Call& call) {
  using Step = decltype(call.step);
  const EpShape& shape = call.step.shape;
  cuda::InternodeCall internode{};
  if constexpr (requires { call.pending; }) internode.pending = call.pending;
  if constexpr (std::is_same_v<Step, CombineStep>) {
    internode.kind = CallKind::kCombine;
    internode.shape =
        InternodeShape::OfCombine(call.step.messages(), call.message_bytes, shape.hidden);
  } else {
    constexpr bool kRouted = std::is_same_v<Step, DispatchStep>;
    internode.kind = CallKind::kDispatch;
    internode.shape = InternodeShape::OfDispatch(shape.tokens, call.message_bytes,
                                                 kRouted ? CountCells(shape.local_experts) : 0);
    internode.slots = {call.step.slot_of, shape.tokens, shape.top_k};
  }
  return internode;
}

cudaError_t Launch(DispatchCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  call.step.report = group.InvalidIdReportOf(ordinal);
  const WindowGroup& own = *group.OfDevice(ordinal);
  return OfFormat(call.format, [&]<typename F>(F) {
    const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
    if (internode == nullptr) return cuda::Dispatch<F>(call.step, own, stream);
    return internode->Whole(
        InternodeCallOf(call), stream,
        [&](auto* to) { return cuda::DispatchSend<F>(call.step, to, own, stream, true); },
        [&](auto* from) { return cuda::DispatchRecv<F>(call.step, from, own, stream); });
  });
}
cudaError_t Launch(DispatchCachedCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  const WindowGroup& own = *group.OfDevice(ordinal);
  return OfFormat(call.format, [&]<typename F>(F) {
    if constexpr (cuda::kDispatchCachedFormat<F>) {
      const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
      if (internode == nullptr) return cuda::DispatchCached<F>(call.step, own, stream);
      return internode->Whole(
          InternodeCallOf(call), stream,
          [&](auto* to) { return cuda::DispatchCachedSend<F>(call.step, to, own, stream); },
          [&](auto* from) { return cuda::DispatchCachedRecv<F>(call.step, from, own, stream); });
    }
    return cudaErrorNotSupported;
  });
}
cudaError_t Launch(CombineCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  const WindowGroup& own = *group.OfDevice(ordinal);
  const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
  if (internode == nullptr) return cuda::Combine(call.step, own, stream);
  return internode->Whole(
      InternodeCallOf(call), stream,
      [&](auto* to) { return cuda::CombineSend(call.step, to, own, stream, true); },
      [&](auto* from) { return cuda::CombineRecv(call.step, from, own, stream); });
}

cudaError_t Launch(DispatchSendCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  call.step.report = group.InvalidIdReportOf(ordinal);
  const auto half = [&] {
    return OfFormat(call.format, [&]<typename F>(F) {
      return cuda::DispatchSend<F>(call.step, call.pending, *group.OfDevice(ordinal), stream);
    });
  };
  const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
  return internode == nullptr ? half() : internode->SendHalf(InternodeCallOf(call), stream, half);
}
cudaError_t Launch(DispatchRecvCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  const auto half = [&] {
    return OfFormat(call.format, [&]<typename F>(F) {
      return cuda::DispatchRecv<F>(call.step, call.pending, *group.OfDevice(ordinal), stream);
    });
  };
  const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
  return internode == nullptr ? half() : internode->RecvHalf(InternodeCallOf(call), stream, half);
}
cudaError_t Launch(CombineSendCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  const auto half = [&] {
    return cuda::CombineSend(call.step, call.pending, *group.OfDevice(ordinal), stream);
  };
  const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
  return internode == nullptr ? half() : internode->SendHalf(InternodeCallOf(call), stream, half);
}
cudaError_t Launch(CombineRecvCall& call, const WindowedGroup& group, int32_t ordinal,
                   cudaStream_t stream) {
  const auto half = [&] {
    return cuda::CombineRecv(call.step, call.pending, *group.OfDevice(ordinal), stream);
  };
  const cuda::InternodeRank* internode = group.InternodeOf(ordinal);
  return internode == nullptr ? half() : internode->RecvHalf(InternodeCallOf(call), stream, half);
}

// close() may come at any time after the look at the registry: the kernel then finds its gate
// closed.
template <typename Call>
ffi::Error Run(Call& call, int32_t ordinal, cudaStream_t stream)
  requires requires { call.message_bytes; }
{
  const auto group = std::dynamic_pointer_cast<WindowedGroup>(GroupRegistry::Get().Find(call.key));
  const WindowGroup* own = group ? group->OfDevice(ordinal) : nullptr;
  if (own == nullptr) {
    return Precondition(Call::kTarget,
                        "ep must be open and hold this device, got a closed one or another mesh, "
                        "on device ordinal " +
                            std::to_string(ordinal) + "; call jax_ep.init again");
  }
  // If any local rank has failed, all of them refuse, even those that never ran the failed call.
  const auto failures = group->Failures();
  if (!failures.empty()) return Precondition(Call::kTarget, failures.front().second);
  ffi::Error error = Fits(call, group->sizes(), own->layout);
  if (error.failure()) return error;
  return FromCuda(Call::kTarget, Launch(call, *group, ordinal, stream));
}

template <typename Step>
ffi::Error Run(Step& call, int32_t ordinal, cudaStream_t stream) {
  return FromCuda(Step::kTarget, Enqueue(call, ordinal, stream));
}

// Launches by the handlers of calls, not by ep_init.
std::atomic<int64_t> captured_launches{0};
std::atomic<int64_t> streamed_launches{0};

void Count(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // The launch will report an error.
  const bool captured = cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
                        status == cudaStreamCaptureStatusActive;
  // Relaxed: nothing is published with the counts.
  (captured ? captured_launches : streamed_launches).fetch_add(1, std::memory_order_relaxed);
}

template <typename Call>
struct Handler {
  template <typename... Operands>
  ffi::Error operator()(cudaStream_t stream, int32_t ordinal, Operands... operands) const {
    // Only allocation can throw; nothing may escape into XLA.
    try {
      Call call;
      ffi::Error error = Decode(call, operands...);
      if (error.failure()) return error;
      Count(stream);
      return Run(call, ordinal, stream);
    } catch (const std::exception& e) {
      return ffi::Error::Internal(std::string(Call::kTarget) + ": " + e.what());
    }
  }
};

// Prepares a device: finds the addresses for users and loads the kernels that its calls will
// launch.
cudaError_t Prepare(const WindowGroup& group, cuda::InitResults& results) {
  const uint8_t* window = group.windows[group.rank];
  for (int i = 0; i < kBufferGroups; ++i) {
    const BufferGroupLayout& buffers = group.layout.groups[i];
    results.dev_ptrs[i][0] = 0;  // calls send from their operands
    results.dev_ptrs[i][1] = reinterpret_cast<uint64_t>(window + buffers.regions);
    results.dev_ptrs[i][2] = reinterpret_cast<uint64_t>(window + buffers.counts);
  }
  return cuda::PreloadWindowKernels();
}

// Sets the current device of the calling thread for a scope.
class CurrentDevice {
 public:
  // A negative ordinal leaves it as it is.
  explicit CurrentDevice(int32_t ordinal) : error_(cudaGetDevice(&before_)) {
    if (error_ == cudaSuccess && ordinal >= 0) error_ = cudaSetDevice(ordinal);
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

// Loads the kernels of calls that need no handle, on the current device. Those of matmuls are
// loaded only if the device has them; on other devices matmul calls report that they cannot run.
cudaError_t PreloadLayers() {
  cudaError_t error = cuda::PreloadRouterKernels();
  if (error == cudaSuccess) error = cuda::PreloadExpertRowKernels();
  if (error == cudaSuccess && cuda::PortableSupported()) error = cuda::PreloadPortableKernels();
  if (error != cudaSuccess || !cuda::MatmulSupported()) return error;
  error = cuda::PreloadMatmulKernels();
  if (error == cudaSuccess) error = cuda::PreloadMxfp4Kernels();
  return error == cudaSuccess ? cuda::PreloadQuantizeMatrices() : error;
}

// XLA runs this before each execution of a program, and before it captures one: routers and
// experts are used without ep_init, too.
ffi::Error InitializeLayers(int32_t ordinal) {
  static std::atomic<uint64_t> loaded{0};  // by ordinal, if XLA gives one
  const uint64_t bit = ordinal >= 0 && ordinal < 64 ? uint64_t{1} << ordinal : 0;
  // Relaxed: CUDA itself orders loads, and another one does no harm.
  if ((loaded.load(std::memory_order_relaxed) & bit) != 0) return ffi::Error::Success();
  const CurrentDevice device(ordinal);
  cudaError_t error = device.error();
  if (error == cudaSuccess) error = PreloadLayers();
  if (error == cudaSuccess) loaded.fetch_or(bit, std::memory_order_relaxed);
  return FromCuda("jax_ep's kernels of routers and experts", error);
}

ffi::Error Init(cudaStream_t stream, int32_t ordinal, Out<ffi::Buffer<ffi::U32>> dev_ptrs,
                Out<I32> my_rank, int64_t key) {
  try {
    const auto group = GroupRegistry::Get().Find(key);
    const auto rank = group ? group->RankOf(ordinal) : std::nullopt;
    cuda::InitResults results{};
    constexpr size_t kWords = sizeof(results.dev_ptrs) / sizeof(uint32_t);
    if (!rank || my_rank->element_count() != 1 || dev_ptrs->element_count() != kWords) {
      return Precondition("ep_init", "device ordinal " + std::to_string(ordinal) +
                                         " must belong to the group that jax_ep.init opened");
    }
    results.rank = *rank;
    cudaError_t error = cuda::PreloadKernels();
    if (error == cudaSuccess) error = PreloadLayers();
    const auto windowed = std::dynamic_pointer_cast<WindowedGroup>(group);
    if (error == cudaSuccess && windowed) error = Prepare(*windowed->OfDevice(ordinal), results);
    if (error == cudaSuccess) {
      error = cuda::WriteInit(results, dev_ptrs->typed_data(), my_rank->typed_data(), stream);
    }
    return FromCuda("ep_init", error);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("ep_init: ") + e.what());
  }
}

XLA_FFI_DEFINE_HANDLER(kInitializeLayers, InitializeLayers,
                       ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>());

auto Context() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

XLA_FFI_DEFINE_HANDLER(kInit, Init,
                       Context()
                           .Ret<ffi::Buffer<ffi::U32>>()  // dev_ptrs [2, 3, 2], low word first
                           .Ret<I32>()                    // my_rank [1]
                           .Attr<int64_t>("key"));

}  // namespace

std::pair<int64_t, int64_t> LaunchCounts() {
  return {captured_launches.load(std::memory_order_relaxed),
          streamed_launches.load(std::memory_order_relaxed)};
}

std::vector<Target> CudaTargets() {
  const auto handler_of = []<typename Call>() {
    XLA_FFI_DEFINE_HANDLER(kCall, Handler<Call>{}, Bind<Call>(Context()),
                           {ffi::Traits::kCmdBufferCompatible});
    return kCall;
  };
  const auto streamed_of = []<typename Call>() {
    XLA_FFI_DEFINE_HANDLER(kCall, Handler<Call>{}, Bind<Call>(Context()));
    return kCall;
  };
  std::vector<Target> targets{{"ep_init", kInit}};
  AddTargets(targets, StepCalls{}, handler_of);
  AddTargets(targets, WindowCalls{}, handler_of);
  AddTargets(targets, OnStreamCalls{}, streamed_of);
  const size_t others = targets.size();
  AddTargets(targets, RouterCalls{}, handler_of);
  AddTargets(targets, RowCalls{}, handler_of);
  AddTargets(targets, MatmulCalls{}, handler_of);
  for (size_t i = others; i < targets.size(); ++i) targets[i].initialize = kInitializeLayers;
  return targets;
}

}  // namespace jax_ep::ffi_layer
