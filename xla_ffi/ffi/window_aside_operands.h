// The first halves of window_half_operands.h where XLA runs its collectives, beside other work.
// They are not to be captured: XLA makes one chain of what is in a CUDA graph (docs/overlap.md).
// And their results are one int32 array, in the same order: XLA would take an element of several
// for work of that stream, and have all that follows wait for it.
#pragma once

#include <utility>

#include "ffi/window_half_operands.h"

namespace jax_ep::ffi_layer {

struct DecodedWindowDispatchSendAside : DecodedWindowDispatchSend {
  static constexpr const char* kTarget = "ep_dispatch_send_aside";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return BindAttributes(
        BindOperands(std::move(binding)).template Ret<I32>());  // all [1, 4 + n * K + 1]
  }
  ffi::Error Decode(const AnyBuffer& tokens, const I32& ids, const F32& weights,
                    const F32& input_scale, const I32& after, Out<I32> all, int64_t group_key,
                    int64_t site, int64_t ranks, int64_t local_experts,
                    std::string_view format_name) {
    Checker check(kTarget);
    DecodeOperands(check, tokens, ids, weights, input_scale, after, ranks, local_experts,
                   format_name);
    if (!check.ok()) return check.error();
    const int64_t entries = step.shape.tokens * step.shape.top_k;
    check.Dims("the results", *all, {1, kPendingInts + entries + 1});
    if (!check.ok()) return check.error();
    key = group_key;
    step.site = site;
    pending = PendingOf(*all);
    step.slot_of = all->typed_data() + kPendingInts;
    step.num_invalid = step.slot_of + entries;
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    return FitsAs(kTarget, sizes, layout);
  }
};
struct DecodedWindowCombineSendAside : DecodedWindowCombineSend {
  static constexpr const char* kTarget = "ep_combine_send_aside";
  template <typename Binding>
  static auto Bind(Binding binding) {
    return BindAttributes(BindOperands(std::move(binding)).template Ret<I32>());  // all [1, 4 + 1]
  }
  ffi::Error Decode(const AnyBuffer& expert_out, const F32& row_weights, const I32& row_of,
                    const I32& slot_counts, const I32& after, Out<I32> all, int64_t group_key,
                    int64_t site, bool weighted, bool by_entry, std::string_view combine_dtype) {
    Checker check(kTarget);
    DecodeOperands(check, expert_out, row_weights, row_of, slot_counts, after, weighted, by_entry,
                   combine_dtype);
    check.Dims("the results", *all, {1, kPendingInts + 1});
    if (!check.ok()) return check.error();
    key = group_key;
    step.site = site;
    pending = PendingOf(*all);
    step.done = all->typed_data() + kPendingInts;
    return ffi::Error::Success();
  }
  ffi::Error Fits(const WindowSizes& sizes, const WindowLayout& layout) const {
    return FitsAs(kTarget, sizes, layout);
  }
};
using WindowAsides = TargetList<DecodedWindowDispatchSendAside, DecodedWindowCombineSendAside>;

}  // namespace jax_ep::ffi_layer
