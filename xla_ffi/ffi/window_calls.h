// The tables of the window transports, for whole calls and for halves. `Fits` compares a decoded
// call with the windows of its group: a call that fits stays inside them.
#pragma once

#include <string>
#include <tuple>

#include "ffi/collective_calls.h"
#include "protocol/pending.h"
#include "protocol/window.h"
#include "protocol/window_steps.h"

namespace jax_ep::ffi_layer {

// int32s of a PendingCall: all that kernels pass from the send half to the receive half.
inline constexpr int64_t kPendingInts = sizeof(PendingCall) / sizeof(int32_t);

template <typename Step, CallKind kKindOfCall>
struct WindowedCall : Call<Step> {
  static constexpr CallKind kKind = kKindOfCall;
  static constexpr bool kRouted = false;  // whether the call routes, so that it counts by expert

  int64_t message_bytes = 0;

  // The most that one rank sends another.
  int64_t messages() const {
    if constexpr (kKind == CallKind::kCombine) return this->step.messages();
    return this->shape.tokens;
  }
};

// A send half writes `pending`, and the receive half reads it.
struct Half {
  PendingCall* pending = nullptr;
};
inline constexpr auto kPendingResult = Ret<I32>("pending", {1, kPendingInts}, &Half::pending);
// The rest of the array belongs to the caller.
inline constexpr auto kPendingOperand =
    Arg<I32>("pending", {1, kPendingInts}, &Half::pending).As(Form::kLonger);

// A call of at most the group's K, H and tokens has a flag for each of its chunks, because the
// window has flags for the most chunks that any such number of tokens needs.
template <typename Call>
ffi::Error Fits(const Call& call, const WindowSizes& sizes, const WindowLayout& layout) {
  Checker check(Call::kTarget);
  const auto is = [&](const char* name, int64_t value, int64_t own) {
    if (value == own) return;
    check.Fail(std::string(name) + " must be the group's " + std::to_string(own) + ", got " +
               std::to_string(value));
  };
  const auto at_most = [&](const char* name, int64_t value, int64_t limit) {
    if (value <= limit) return;
    check.Fail(std::string(name) + " must be at most " + std::to_string(limit) + ", got " +
               std::to_string(value));
  };
  const EpShape& shape = call.shape;
  check.Require(!std::is_base_of_v<Half, Call> || sizes.depth > 1,
                "pending_calls must be at least 1, got 0");
  is("the number of ranks", shape.ranks, sizes.ranks);
  at_most("top_k", shape.top_k, sizes.top_k);
  at_most("hidden_size", shape.hidden, sizes.hidden);
  at_most("the number of tokens", call.messages(),
          Call::kKind == CallKind::kCombine ? sizes.combine_tokens : sizes.dispatch_tokens);
  // Both factors are below 2^31.
  at_most("the bytes for a rank", call.messages() * call.message_bytes,
          layout.groups[static_cast<int>(Call::kKind)].region_bytes);
  if (Call::kRouted) is("the experts of a rank", shape.local_experts, sizes.local_experts);
  return check.error();
}

// ---- Dispatches ---------------------------------------------------------------------------------

struct RoutedWindowCall : WindowedCall<DispatchStep, CallKind::kDispatch> {
  static constexpr bool kFormatted = true;
  static constexpr bool kRouted = true;
  static constexpr auto kSentRows = std::tuple_cat(SentRows<Step>::kRows, std::tuple(kAfter));
  static constexpr auto kTableRows = std::tuple(Ret<I32>("slot_of", {n, K}, &Step::slot_of),
                                                Ret<I32>("num_invalid", {1}, &Step::num_invalid));

  void Infer(Checker&) {
    if (coded) InferHidden(*this);
  }
  void Size(Checker&) { message_bytes = DispatchMessageOf(*this).bytes; }
  void Finish() {
    step.code_bytes = encoding.payload_bytes, step.scale_bytes = encoding.scale_bytes;
  }
};

struct DispatchCall : RoutedWindowCall {
  static constexpr const char* kTarget = "ep_dispatch";
  static constexpr auto kOperands = kSentRows;
  static constexpr auto kResults = std::tuple_cat(ArrivalRows::kRows, kTableRows);
  static constexpr auto kAttributes =
      std::tuple_cat(std::tuple(kKey, kSite, kCoded, kFormat), kDispatchOptions);
};

struct DispatchCachedCall : WindowedCall<DispatchCachedStep, CallKind::kDispatch> {
  static constexpr bool kFormatted = true;
  static constexpr const char* kTarget = "ep_dispatch_cached";
  static constexpr auto kOperands = std::tuple(
      Arg<Token>("tokens", {n, H}, &Step::tokens),
      Arg<F32>("router_weights", {n, K}, &Step::weights).Shows(kWithWeights, 1),
      Arg<I32>("slot_of", {n, K}, &Step::slot_of), Arg<I32>("row_of", {R, n, K}, &Step::row_of),
      Arg<I32>("row_slot", {N}, &Step::row_slot), kAfter);
  static constexpr auto kResults =
      std::tuple(Ret<Token>("rows", {N, H}, &Step::rows),
                 Ret<F32>("router_weights", {N}, &Step::router_weights).When(kWithWeights),
                 Ret<I32>("done", {1}, &Step::done));
  static constexpr auto kAttributes = std::tuple(kKey, kSite, kZeroTail, kFormat);

  void Size(Checker&) { message_bytes = DispatchCachedMessageOf(*this).bytes; }
  void Finish() { step.zero_tail = zero_tail; }
};

// ---- Combines -----------------------------------------------------------------------------------

// With `by_entry` slots are like those of tokens with one row each.
struct SummingWindowCall : WindowedCall<CombineStep, CallKind::kCombine> {
  using Rows = CombineRows<Step>;
  static constexpr auto kDone = Ret<I32>("done", {1}, &Step::done);

  void Size(Checker& check) {
    CheckCombineOptions(check, *this);
    message_bytes = CombineMessageOf(step).bytes;
  }
};

struct CombineCall : SummingWindowCall {
  static constexpr const char* kTarget = "ep_combine";
  static constexpr auto kOperands = std::tuple_cat(
      Rows::kRows, std::tuple(Rows::kWeightGrads, Rows::kRowOf.If(kByEntry, {R, n * K, 1})),
      SumRows<Step>::kRows, std::tuple(kAfter));
  static constexpr auto kResults = std::tuple(
      Ret<Token>("output", {n, H}, &Step::output),
      Ret<F32>("weight_grads", {n, K}, &Step::output_weight_grads).When(kWithWeightGrads, 1),
      kDone);
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kKey, kSite), kCombineOptions);
};

// ---- Halves -------------------------------------------------------------------------------------

struct DispatchSendCall : RoutedWindowCall, Half {
  static constexpr const char* kTarget = "ep_dispatch_send";
  static constexpr auto kOperands = kSentRows;
  static constexpr auto kResults = std::tuple_cat(std::tuple(kPendingResult), kTableRows);
  static constexpr auto kAttributes = std::tuple_cat(
      std::tuple(kKey, kSite, kRanks, kLocalExperts, kCoded, kFormat), kDispatchOptions);
};

struct DispatchRecvCall : RoutedWindowCall, Half {
  static constexpr const char* kTarget = "ep_dispatch_recv";
  static constexpr auto kOperands =
      std::tuple(kPendingOperand, Arg<Token>("tokens", {n, H}, &Step::tokens).When(kPlain), kAfter);
  static constexpr auto kResults = ArrivalRows::kRows;
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kKey, kFormat), kDispatchOptions);
};

struct CombineSendCall : SummingWindowCall, Half {
  static constexpr const char* kTarget = "ep_combine_send";
  static constexpr auto kOperands = std::tuple_cat(Rows::kRows, std::tuple(Rows::kRowOf, kAfter));
  static constexpr auto kResults = std::tuple(kPendingResult, kDone);
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kKey, kSite), kCombineOptions);

  void Size(Checker& check) {
    check.Require(!by_entry || shape.top_k == 1,
                  "rows that travel one by one must be of tokens with one");
    SummingWindowCall::Size(check);
  }
};

struct CombineRecvCall : SummingWindowCall, Half {
  static constexpr const char* kTarget = "ep_combine_recv";
  static constexpr auto kOperands =
      std::tuple_cat(std::tuple(kPendingOperand), SumRows<Step>::kRows, std::tuple(kAfter));
  static constexpr auto kResults = std::tuple(Ret<Token>("output", {n, H}, &Step::output), kDone);
  static constexpr auto kAttributes = std::tuple_cat(std::tuple(kKey, kRanks), kCombineOptions);
};

// First halves that run where XLA runs its collectives, beside other work. They must not be
// captured, because XLA makes one chain of what is in a CUDA graph (docs/overlap.md). Their results
// are packed: if there were several, XLA would count taking one of them as work of that stream and
// make all that follows wait for it.
struct DispatchSendOnStreamCall : DispatchSendCall {
  static constexpr const char* kTarget = "ep_dispatch_send_on_stream";
  static constexpr bool kPacked = true;
};
struct CombineSendOnStreamCall : CombineSendCall {
  static constexpr const char* kTarget = "ep_combine_send_on_stream";
  static constexpr bool kPacked = true;
};

}  // namespace jax_ep::ffi_layer
