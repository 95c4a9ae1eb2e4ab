// A router's choice of experts (cuda/router.cu) on emulated GPUs, bit for bit, with ties, NaN and
// infinities. Takes the seed of its draws and their number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "../cc/check.h"
#include "asked.h"
#include "cuda/router.h"
#include "cuda_runtime.h"
#include "formats/numbers.h"

namespace jax_ep {
namespace {

constexpr int64_t kLanes = kRouterLanes;
constexpr float kInfinity = __builtin_huge_valf();

template <typename T>
T* Allocate(int64_t count) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)) == cudaSuccess);
  std::memset(static_cast<void*>(data), 0x5A, static_cast<size_t>(count) * sizeof(T));
  return data;
}

float Draw(Random& random) {
  switch (random.In(0, 300)) {
    case 0:
      return BitsFloat(0x7FC00000);
    case 1:
      return random.OneIn(2) ? kInfinity : -kInfinity;
    case 2:
      return random.OneIn(2) ? 1e30f : -1e30f;
    default:
      // Few different values, so that some are equal.
      return static_cast<float>(random.In(-40, 40)) / 8.0f;
  }
}

RouterStep DrawStep(Random& random) {
  RouterStep step{};
  step.num_groups = random.OneIn(2) ? 1 : random.In(2, kLanes);
  const int64_t most = kLanes * kMostExpertsPerLane / step.num_groups;
  const int64_t few = std::min<int64_t>(most, random.OneIn(3) ? 1024 : 70);
  const int64_t per_group = random.In(1, std::max<int64_t>(few / (random.OneIn(2) ? 1 : 8), 1));
  step.experts = per_group * step.num_groups;
  step.top_groups = random.In(1, step.num_groups);
  step.best_of_group = random.In(1, std::min<int64_t>(per_group, 4));
  step.top_k = random.In(1, std::min(per_group * step.top_groups, kLanes));
  step.tokens = random.OneIn(6) ? 0 : random.In(1, 20);
  step.score = static_cast<RouterScore>(random.In(0, 2));
  step.least_sum = random.OneIn(2) ? 0.0f : random.OneIn(2) ? 1e-8f : 0.5f;
  step.scale = random.OneIn(2) ? 1.0f : 2.5f;
  return step;
}

// Adds lanes in pairs, like a warp.
float Sum(std::vector<float> lanes) {
  for (size_t by = 1; by < lanes.size(); by *= 2) {
    std::vector<float> sums(lanes.size());
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      sums[lane] = Add(lanes[lane], lanes[lane ^ by]);
    }
    lanes = sums;
  }
  return lanes[0];
}

std::vector<float> Scores(const RouterStep& step, const float* logits) {
  std::vector<float> scores(logits, logits + step.experts);
  if (step.score == RouterScore::kSigmoid) {
    for (float& score : scores) score = Divide(1.0f, Add(1.0f, std::exp(-score)));
    return scores;
  }
  if (step.score == RouterScore::kSqrtSoftplus) {
    for (float& score : scores) {
      const float softplus =
          Add(score > 0 ? score : 0 * score, std::log1p(std::exp(-std::fabs(score))));
      score = score <= kLeastSoftplus ? std::exp(Multiply(score, 0.5f)) : std::sqrt(softplus);
    }
    return scores;
  }
  float largest = -kInfinity;
  for (const float logit : scores) largest = std::fmax(largest, logit);
  std::vector<float> lanes(kLanes);
  for (int64_t i = 0; i < step.experts; ++i) {
    const auto at = static_cast<size_t>(i);
    scores[at] = std::exp(Add(scores[at], -largest));
    lanes[at % kLanes] = Add(lanes[at % kLanes], scores[at]);
  }
  const float sum = Sum(lanes);
  for (float& score : scores) score = Divide(score, sum);
  return scores;
}

// The `count` largest of `values` between `first` and `last`; the first of equal ones.
std::vector<int64_t> Largest(const std::vector<float>& values, int64_t first, int64_t last,
                             int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(last - first));
  std::iota(order.begin(), order.end(), first);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const float left = values[static_cast<size_t>(a)], right = values[static_cast<size_t>(b)];
    return std::isnan(left) ? !std::isnan(right) : left > right;
  });
  order.resize(static_cast<size_t>(count));
  return order;
}

// The shares of e to the logits of the chosen experts, or to halves of them.
std::vector<float> SharesOfPowers(const float* logits, const std::vector<int64_t>& chosen,
                                  bool halved) {
  float largest = -std::numeric_limits<float>::max();
  for (const int64_t expert : chosen) largest = std::fmax(largest, logits[expert]);
  std::vector<float> powers(kLanes);
  for (size_t k = 0; k < chosen.size(); ++k) {
    const float below = Add(logits[chosen[k]], -largest);
    powers[k] = std::exp(halved ? Multiply(below, 0.5f) : below);
  }
  const float sum = Sum(powers);
  for (float& power : powers) power = Divide(power, sum > 0.0f ? sum : 1.0f);
  return powers;
}

void CheckToken(const RouterStep& step, int64_t token) {
  const std::vector<float> scores = Scores(step, step.logits + token * step.experts);
  std::vector<float> wanted = scores;
  for (size_t i = 0; i < wanted.size() && step.bias != nullptr; ++i) {
    wanted[i] = Add(wanted[i], step.bias[i]);
  }
  if (step.top_groups < step.num_groups) {
    const int64_t per_group = step.experts / step.num_groups;
    std::vector<float> sums;
    for (int64_t group = 0; group < step.num_groups; ++group) {
      const auto best =
          Largest(wanted, group * per_group, (group + 1) * per_group, step.best_of_group);
      float sum = wanted[static_cast<size_t>(best[0])];
      for (size_t i = 1; i < best.size(); ++i) sum = Add(sum, wanted[static_cast<size_t>(best[i])]);
      sums.push_back(sum);
    }
    const auto kept = Largest(sums, 0, step.num_groups, step.top_groups);
    for (int64_t i = 0; i < step.experts; ++i) {
      if (std::find(kept.begin(), kept.end(), i / per_group) == kept.end()) {
        wanted[static_cast<size_t>(i)] = -kInfinity;
      }
    }
  }
  const auto chosen = Largest(wanted, 0, step.experts, step.top_k);
  std::vector<float> weights(kLanes);
  for (size_t k = 0; k < chosen.size(); ++k) weights[k] = scores[static_cast<size_t>(chosen[k])];
  const float sum = Sum(weights);
  if (step.least_sum > 0.0f && sum < step.least_sum) {
    weights = SharesOfPowers(step.logits + token * step.experts, chosen,
                             step.score == RouterScore::kSqrtSoftplus);
  } else if (step.least_sum > 0.0f) {
    for (float& weight : weights) weight = Divide(weight, sum);
  }
  for (size_t k = 0; k < chosen.size(); ++k) {
    const auto at = token * step.top_k + static_cast<int64_t>(k);
    const float weight = Multiply(weights[k], step.scale);
    CHECK(step.ids[at] == chosen[k]);
    CHECK(FloatBits(FromFloat<float>(step.weights[at])) == FloatBits(FromFloat<float>(weight)));
  }
}

void Run(Random& random) {
  RouterStep step = DrawStep(random);
  std::string text = "router";
  for (const int64_t size :
       {step.tokens, step.experts, step.top_k, step.num_groups, step.top_groups, step.best_of_group,
        static_cast<int64_t>(step.score)}) {
    text += ' ' + std::to_string(size);
  }
  CurrentCase() = text + " EMULATED_SEED=" + std::to_string(emulator::GetSettings().seed);
  auto* logits = Allocate<float>(step.tokens * step.experts);
  // Low logits have scores whose sum is below `least_sum`.
  const float lower = random.OneIn(3) ? 8.0f * static_cast<float>(random.In(1, 6)) : 0.0f;
  for (int64_t i = 0; i < step.tokens * step.experts; ++i) logits[i] = Draw(random) - lower;
  if (random.OneIn(2)) {
    auto* bias = Allocate<float>(step.experts);
    for (int64_t i = 0; i < step.experts; ++i) bias[i] = Draw(random) / 64.0f;
    step.bias = bias;
  }
  step.logits = logits;
  step.ids = Allocate<int32_t>(step.tokens * step.top_k);
  step.weights = Allocate<float>(step.tokens * step.top_k);
  CHECK(cuda::ChooseExperts(step, nullptr) == cudaSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess);
  for (int64_t token = 0; token < step.tokens; ++token) CheckToken(step, token);
  emulator::Reset();
}

int Main(int argc, char** argv) {
  const auto [only, seed, draws] = Asked(argc, argv, 300);
  Random random(seed);
  CHECK(cuda::PreloadRouterKernels() == cudaSuccess);
  for (int64_t i = 0; i < draws; ++i) Run(random);
  std::printf("%lld: right\n", static_cast<long long>(draws));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
