// The table of the router's kernel. Like the passes of row_calls.h, it runs on GPUs only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>

#include "ffi/operand_table.h"
#include "protocol/router_step.h"

namespace jax_ep::ffi_layer {

struct RouterCall : Call<RouterStep> {
  static constexpr const char* kTarget = "ep_router";
  static constexpr Flag kWithBias = Attr("with_bias", &CallState::with_bias);
  static constexpr auto kOperands = std::tuple(Arg<F32>("logits", {n, E}, &Step::logits),
                                               Arg<F32>("bias", {E}, &Step::bias).When(kWithBias));
  static constexpr auto kResults =
      std::tuple(Ret<I32>("ids", {n, K}, &Step::ids), Ret<F32>("weights", {n, K}, &Step::weights));
  static constexpr auto kAttributes = std::tuple(
      kWithBias, Attr("score", &CallState::score), Attr("num_groups", &CallState::num_groups),
      Attr("top_groups", &CallState::top_groups), Attr("best_of_group", &CallState::best_of_group),
      Attr("least_sum", &CallState::least_sum), Attr("scale", &CallState::scale));

  void Size(Checker& check) {
    const auto within = [&](const char* name, int64_t value, int64_t most) {
      if (value >= 1 && value <= most) return;
      check.Fail(std::string(name) + " must be in [1, " + std::to_string(most) + "], got " +
                 std::to_string(value));
    };
    const int64_t experts = sizes[E];
    within("E", experts, kMaxRouterExperts);
    within("K", sizes[K], kMaxRouterChosen);
    within("num_groups", num_groups, kMaxRouterGroups);
    within("top_groups", top_groups, num_groups);
    if (score == "softmax") {
      step.score = RouterScore::kSoftmax;
    } else if (score == "sigmoid") {
      step.score = RouterScore::kSigmoid;
    } else if (score == "sqrtsoftplus") {
      step.score = RouterScore::kSqrtSoftplus;
    } else {
      check.Fail("score must be softmax, sigmoid or sqrtsoftplus, got " + std::string(score));
    }
    if (!check.ok()) return;
    const int64_t per_group = experts / num_groups;
    if (per_group * num_groups != experts) {
      check.Fail("num_groups must divide E, " + std::to_string(experts) + ", got " +
                 std::to_string(num_groups));
    }
    // If groups set no limit, their scores do not matter.
    if (top_groups < num_groups) within("best_of_group", best_of_group, per_group);
    within("K", sizes[K], per_group * top_groups);
    step.tokens = sizes[n];
    step.experts = experts;
    step.top_k = sizes[K];
    step.num_groups = num_groups;
    step.top_groups = top_groups;
    step.best_of_group = best_of_group;
    step.least_sum = least_sum;
    step.scale = scale;
  }
};

}  // namespace jax_ep::ffi_layer
