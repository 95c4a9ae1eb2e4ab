// The targets on the CPU: decode, run the step, hand the rest to the executor.
#include "ffi/cpu_handlers.h"

#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "cpu/steps.h"
#include "ffi/cpu_executor.h"
#include "ffi/group.h"

namespace jax_ep::ffi_layer {

DeviceReports* AllocateReports(int64_t count) {
  return new DeviceReports[static_cast<size_t>(count)]();
}
void FreeReports(DeviceReports* reports) { delete[] reports; }

namespace {

// The decoder has checked that the format exists.
template <typename MakeTask>
cpu::RowTask OfFormat(std::string_view format, MakeTask&& make_task) {
  cpu::RowTask task;
  VisitFormat(format, [&](auto f) { task = make_task(f); });
  return task;
}

cpu::RowTask Start(DispatchPackCall& call, int32_t ordinal) {
  const auto group = GroupRegistry::Get().Find(call.key);
  if (group) call.step.report = group->InvalidIdReportOf(ordinal);
  return OfFormat(call.format, [&]<typename F>(F) { return cpu::DispatchPack<F>(call.step); });
}
cpu::RowTask Start(DispatchUnpackCall& call, int32_t ordinal) {
  const auto group = SetCheck(call, ordinal);
  return OfFormat(call.format, [&]<typename F>(F) { return cpu::DispatchUnpack<F>(call.step); });
}
cpu::RowTask Start(DispatchCachedPackCall& call, int32_t) {
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cpu::DispatchCachedPack<F>(call.step); });
}
cpu::RowTask Start(DispatchCachedUnpackCall& call, int32_t ordinal) {
  const auto group = SetCheck(call, ordinal);
  return OfFormat(call.format,
                  [&]<typename F>(F) { return cpu::DispatchCachedUnpack<F>(call.step); });
}
cpu::RowTask Start(CombinePackCall& call, int32_t) { return cpu::CombinePack(call.step); }
cpu::RowTask Start(CombineUnpackCall& call, int32_t ordinal) {
  const auto group = SetCheck(call, ordinal);
  return cpu::CombineUnpack(call.step);
}
cpu::RowTask Start(QuantizeCall& call, int32_t) {
  return OfFormat(call.format, [&]<typename F>(F) -> cpu::RowTask {
    if constexpr (QuantizedFormat<F>) return cpu::Quantize<F>(call.step);
    return {};
  });
}
cpu::RowTask Start(DequantizeCall& call, int32_t) {
  return OfFormat(call.format, [&]<typename F>(F) -> cpu::RowTask {
    if constexpr (QuantizedFormat<F>) return cpu::Dequantize<F>(call.step);
    return {};
  });
}

template <typename Call>
struct Handler {
  template <typename... Operands>
  ffi::Future operator()(ffi::ThreadPool pool, int32_t ordinal, Operands... operands) const {
    // Only allocation can throw; nothing may escape into XLA.
    try {
      cpu::ScopedDenormals denormals;
      Call call;
      ffi::Error error = Decode(call, operands...);
      if (error.failure()) return Failed(std::move(error));
      return Run(pool, Start(call, ordinal));
    } catch (const std::exception& e) {
      return Failed(ffi::Error::Internal(std::string(Call::kTarget) + ": " + e.what()));
    }
  }
};

ffi::Error Init(ffi::ThreadPool pool, int32_t ordinal, Out<ffi::Buffer<ffi::U32>> dev_ptrs,
                Out<I32> my_rank, int64_t key) {
  try {
    const auto group = GroupRegistry::Get().Find(key);
    const auto rank = group ? group->RankOf(ordinal) : std::nullopt;
    if (!rank || my_rank->element_count() != 1) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "ep_init: device ordinal " + std::to_string(ordinal) +
                            " must belong to the group that jax_ep.init opened");
    }
    group->set_pool_threads(pool.num_threads());
    std::memset(dev_ptrs->untyped_data(), 0, dev_ptrs->size_bytes());
    *my_rank->typed_data() = *rank;
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("ep_init: ") + e.what());
  }
}

auto Context() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::DeviceOrdinal>(); }

XLA_FFI_DEFINE_HANDLER(kInit, Init,
                       Context()
                           .Ret<ffi::Buffer<ffi::U32>>()  // dev_ptrs [2, 3, 2], low word first
                           .Ret<I32>()                    // my_rank [1]
                           .Attr<int64_t>("key"));

}  // namespace

std::vector<Target> CpuTargets() {
  std::vector<Target> targets{{"ep_init", kInit}};
  AddTargets(targets, StepCalls{}, []<typename Call>() {
    XLA_FFI_DEFINE_HANDLER(kStep, Handler<Call>{}, Bind<Call>(Context()));
    return kStep;
  });
  return targets;
}

}  // namespace jax_ep::ffi_layer
