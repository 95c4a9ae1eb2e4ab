// How a router chooses experts; jax_ep/router.py says what it means.
#pragma once

#include <cstdint>

namespace jax_ep {

// One warp chooses a token's experts. Each lane holds at most kMostExpertsPerLane of all experts,
// one of the chosen experts and one of the groups.
inline constexpr int kRouterLanes = 32;
inline constexpr int kMostExpertsPerLane = 32;
inline constexpr int64_t kMaxRouterExperts = kRouterLanes * kMostExpertsPerLane;
inline constexpr int64_t kMaxRouterChosen = kRouterLanes;
inline constexpr int64_t kMaxRouterGroups = kRouterLanes;

enum class RouterScore : int8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

// Below this logit, sqrtsoftplus is e to half of it, within rounding.
inline constexpr float kLeastSoftplus = -20.0f;

struct RouterStep {
  int64_t tokens;         // n
  int64_t experts;        // E
  int64_t top_k;          // K
  RouterScore score;      // what scores are of logits
  int64_t num_groups;     // of equally many consecutive experts
  int64_t top_groups;     // how many of them a token's experts may come from
  int64_t best_of_group;  // a group's score is the sum of this many of its best ones
  float least_sum;        // weights are divided by their sum, or shares of powers of e if that is
                          // less than this; 0: not divided
  float scale;            // multiplies the weights at the end
  const float* logits;    // [n, E]
  const float* bias;      // [E], added to scores for the choice only, or null
  int32_t* ids;           // [n, K], the best first
  float* weights;         // [n, K]
};

}  // namespace jax_ep
