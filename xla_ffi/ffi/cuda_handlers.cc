// The targets on the GPU: decode, then enqueue the step on XLA's stream. All but ep_init may run
// under graph capture. XLA has made the stream's device current.
#include "ffi/cuda_handlers.h"

#include <cuda_runtime_api.h>

#include <exception>
#include <string>
#include <utility>

#include "cuda/steps.h"
#include "ffi/group.h"

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

cudaError_t Enqueue(DecodedPack& call, int32_t ordinal, cudaStream_t stream) {
  const auto group = GroupRegistry::Get().Find(call.key);
  if (group) call.step.report = group->ReportOf(ordinal);
  return OfFormat(call.format, [&]<typename F>(F) { return cuda::Pack<F>(call.step, stream); });
}
cudaError_t Enqueue(DecodedUnpack& call, int32_t, cudaStream_t stream) {
  return OfFormat(call.format, [&]<typename F>(F) { return cuda::Unpack<F>(call.step, stream); });
}
cudaError_t Enqueue(DecodedCachedPack& call, int32_t, cudaStream_t stream) {
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cuda::CachedPack<F>(call.step, stream); });
}
cudaError_t Enqueue(DecodedCachedUnpack& call, int32_t, cudaStream_t stream) {
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cuda::CachedUnpack<F>(call.step, stream); });
}
cudaError_t Enqueue(DecodedCombinePack& call, int32_t, cudaStream_t stream) {
  return cuda::CombinePack(call.step, stream);
}
cudaError_t Enqueue(DecodedCombineUnpack& call, int32_t, cudaStream_t stream) {
  return cuda::CombineUnpack(call.step, stream);
}

template <typename Decoded>
struct Handler {
  template <typename... Operands>
  ffi::Error operator()(cudaStream_t stream, int32_t ordinal, Operands... operands) const {
    // Only allocation can throw; nothing may escape into XLA.
    try {
      Decoded call;
      ffi::Error error = call.Decode(operands...);
      if (error.failure()) return error;
      return FromCuda(Decoded::kTarget, Enqueue(call, ordinal, stream));
    } catch (const std::exception& e) {
      return ffi::Error::Internal(std::string(Decoded::kTarget) + ": " + e.what());
    }
  }
};

ffi::Error Init(cudaStream_t stream, int32_t ordinal, Out<ffi::Buffer<ffi::U32>> dev_ptrs,
                Out<I32> my_rank, int64_t key) {
  try {
    const auto group = GroupRegistry::Get().Find(key);
    const auto rank = group ? group->RankOf(ordinal) : std::nullopt;
    if (!rank || my_rank->element_count() != 1) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "ep_init: device ordinal " + std::to_string(ordinal) +
                            " must belong to the group that jax_ep.init opened");
    }
    const ffi::Error loaded = FromCuda("ep_init", cuda::PreloadKernels());
    if (loaded.failure()) return loaded;
    return FromCuda("ep_init", cuda::WriteInit(dev_ptrs->typed_data(),
                                               static_cast<int64_t>(dev_ptrs->element_count()),
                                               my_rank->typed_data(), *rank, stream));
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("ep_init: ") + e.what());
  }
}

auto Context() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

XLA_FFI_DEFINE_HANDLER(kInit, Init,
                       Context()
                           .Ret<ffi::Buffer<ffi::U32>>()  // dev_ptrs [2, 3, 2], low word first
                           .Ret<I32>()                    // my_rank [1]
                           .Attr<int64_t>("key"));

}  // namespace

std::vector<Target> CudaTargets() {
  return Targets(kInit, []<typename Decoded>(Decoded) {
    XLA_FFI_DEFINE_HANDLER(kStep, Handler<Decoded>{}, Decoded::Bind(Context()),
                           {ffi::Traits::kCmdBufferCompatible});
    return kStep;
  });
}

}  // namespace jax_ep::ffi_layer
