// How a router chooses experts; jax_ep/router.py says what it means.
#pragma once

#include <cstdint>

namespace jax_ep {

// A warp chooses for a token: each lane holds so many of its experts, and of the chosen ones and
// of the groups it holds one.
inline constexpr int kRouterLanes = 32;
inline constexpr int kMostExpertsPerLane = 32;
inline constexpr int64_t kMaxRouterExperts = kRouterLanes * kMostExpertsPerLane;
inline constexpr int64_t kMaxRouterChosen = kRouterLanes;
inline constexpr int64_t kMaxRouterGroups = kRouterLanes;

struct RouterStep {
  int64_t tokens;         // n
  int64_t experts;        // E
  int64_t top_k;          // K
  bool sigmoid;           // scores are sigmoids of the logits, else their softmax
  int64_t num_groups;     // of equally many experts, one after the other
  int64_t top_groups;     // how many of them a token's experts may come from
  int64_t best_of_group;  // of whose scores the sum is the group's
  float least_sum;  // weights are divided by their sum, or this if it is larger; 0: they are not
  float scale;      // of the weights, at last
  const float* logits;  // [n, E]
  const float* bias;    // [E], added to scores for the choice alone, or null
  int32_t* ids;         // [n, K], the best first
  float* weights;       // [n, K]
};

}  // namespace jax_ep
