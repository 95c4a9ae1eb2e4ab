// Goes from logits to experts and weights in one pass. XLA sorts all scores, and each token's
// groups as well, in separate kernels. At decode that costs launches; with many tokens, the sort.
#include "cuda/router.h"

#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "formats/numbers.h"

namespace jax_ep::cuda {
namespace {

static_assert(kRouterLanes == kWarpSize);
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLargestFloat = 3.40282347e38f;

// Maps floats to integers in the same order. NaN is the largest, as in XLA's top-k. No float maps
// to 0.
__device__ uint32_t OrderOf(float value) {
  const uint32_t bits = FloatBits(value);
  if (value != value) return 0xFFFFFFFFu;
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

template <typename Combine>
__device__ float OverWarp(float value, Combine combine) {
#pragma unroll
  for (int by = 1; by < kWarpSize; by *= 2) {
    value = combine(value, __shfl_xor_sync(kFullWarp, value, by));
  }
  return value;
}

struct Taken {
  int number;
  float value;
};

// A warp's candidates: entry i of a lane is candidate number i * 32 + lane. Its order is 0 if there
// is no such candidate or it was taken.
template <int kCount>
struct Candidates {
  uint32_t orders[kCount];

  // Takes out the candidate with the largest order, the first if there are several, and returns its
  // number and its value. There must be a candidate left. `values` has a value for each candidate.
  __device__ Taken Take(const float (&values)[kCount]) {
    uint32_t order = orders[0];
    float value = values[0];
    int entry = 0;
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      if (orders[i] > order) order = orders[i], value = values[i], entry = i;
    }
    const bool best = order == __reduce_max_sync(kFullWarp, order);
    const auto own = static_cast<unsigned>(entry * kWarpSize + Lane());
    const auto first = static_cast<int>(__reduce_min_sync(kFullWarp, best ? own : ~0u));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i * kWarpSize + Lane() == first) orders[i] = 0;
    }
    return {first, __shfl_sync(kFullWarp, value, first % kWarpSize)};
  }
};

// Puts the experts of all but the best groups behind the others.
template <int kCount>
__device__ void LimitGroups(const RouterStep& step, const float (&wanted)[kCount],
                            Candidates<kCount>& all) {
  const auto per_group = static_cast<int>(step.experts / step.num_groups);
  int groups[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int expert = i * kWarpSize + Lane();
    groups[i] = expert < step.experts ? expert / per_group : -1;
  }
  float own[1] = {};  // the score of the group with this lane's number
  for (int group = 0; group < step.num_groups; ++group) {
    Candidates<kCount> inside;
#pragma unroll
    for (int i = 0; i < kCount; ++i) inside.orders[i] = groups[i] == group ? all.orders[i] : 0;
    float sum = inside.Take(wanted).value;
    for (int64_t more = 1; more < step.best_of_group; ++more) {
      sum = Add(sum, inside.Take(wanted).value);
    }
    if (Lane() == group) own[0] = sum;
  }
  Candidates<1> of_groups{{Lane() < step.num_groups ? OrderOf(own[0]) : 0}};
  uint32_t best = 0;
  for (int64_t i = 0; i < step.top_groups; ++i) best |= 1u << of_groups.Take(own).number;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool left_out = groups[i] >= 0 && (best >> groups[i] & 1) == 0;
    if (left_out) all.orders[i] = OrderOf(-kInfinity);
  }
}

__device__ float SqrtSoftplus(float logit) {
  if (logit <= kLeastSoftplus) return expf(Multiply(logit, 0.5f));
  // NaN stays NaN.
  const float positive = logit < 0.0f ? 0.0f : logit;
  return sqrtf(Add(positive, log1pf(expf(-fabsf(logit)))));
}

// Computes the scores of a token's experts. Entries past the last expert are 0.
template <int kCount>
__device__ void Scores(const RouterStep& step, const float* logits, float (&scores)[kCount]) {
  float largest = -kInfinity;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int expert = i * kWarpSize + Lane();
    scores[i] = expert < step.experts ? logits[expert] : -kInfinity;
    largest = fmaxf(largest, scores[i]);
  }
  if (step.score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = Divide(1.0f, Add(1.0f, expf(-scores[i])));
    return;
  }
  if (step.score == RouterScore::kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = SqrtSoftplus(scores[i]);
    return;
  }
  largest = OverWarp(largest, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool there = i * kWarpSize + Lane() < step.experts;
    scores[i] = there ? expf(Add(scores[i], -largest)) : 0.0f;
    sum = Add(sum, scores[i]);
  }
  sum = OverWarp(sum, [](float a, float b) { return Add(a, b); });
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = Divide(scores[i], sum);
}

// Returns e to the logit of this lane's expert, or to half of it for sqrtsoftplus, divided by the
// sum of those of all chosen ones. Scores that underflow are in these proportions. Without a finite
// logit, all are 0.
__device__ float ShareOfPowers(const RouterStep& step, int64_t token, int expert) {
  const bool chosen = Lane() < step.top_k;
  const float logit = chosen ? step.logits[token * step.experts + expert] : -kInfinity;
  const float largest = OverWarp(logit, [](float a, float b) { return fmaxf(a, b); });
  const float below = Add(logit, -fmaxf(largest, -kLargestFloat));
  const bool halved = step.score == RouterScore::kSqrtSoftplus;
  const float power = expf(halved ? Multiply(below, 0.5f) : below);
  const float sum = OverWarp(power, [](float a, float b) { return Add(a, b); });
  return Divide(power, sum > 0.0f ? sum : 1.0f);
}

// kLimited: whether groups limit the choice, which takes about half as many registers again.
template <int kCount, bool kLimited>
__global__ void __launch_bounds__(kBlockThreads)
    RouterKernel(const __grid_constant__ RouterStep step) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + Warp();
       token < step.tokens; token += stride) {
    float scores[kCount], wanted[kCount];
    Scores(step, step.logits + token * step.experts, scores);
    Candidates<kCount> all;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int expert = i * kWarpSize + Lane();
      const bool there = expert < step.experts;
      wanted[i] = step.bias != nullptr && there ? Add(scores[i], step.bias[expert]) : scores[i];
      all.orders[i] = there ? OrderOf(wanted[i]) : 0;
    }
    if constexpr (kLimited) LimitGroups(step, wanted, all);
    int expert = 0;
    float weight = 0.0f;  // of this lane's expert among the chosen ones
    for (int64_t k = 0; k < step.top_k; ++k) {
      const Taken taken = all.Take(scores);
      if (Lane() == k) expert = taken.number, weight = taken.value;
    }
    if (step.least_sum > 0.0f) {
      const float sum = OverWarp(weight, [](float a, float b) { return Add(a, b); });
      // NaN stays NaN.
      weight = sum < step.least_sum ? ShareOfPowers(step, token, expert) : Divide(weight, sum);
    }
    if (Lane() < step.top_k) {
      step.ids[token * step.top_k + Lane()] = expert;
      step.weights[token * step.top_k + Lane()] = Multiply(weight, step.scale);
    }
  }
}

// Calls `visit` with the kernel for this many experts.
template <typename Visit, int kCount = 1>
cudaError_t VisitKernel(int64_t experts, bool limited, const Visit& visit) {
  if constexpr (kCount < kMostExpertsPerLane) {
    if (experts > kCount * kWarpSize) {
      return VisitKernel<Visit, 2 * kCount>(experts, limited, visit);
    }
  }
  return visit(limited ? RouterKernel<kCount, true> : RouterKernel<kCount, false>);
}

}  // namespace

cudaError_t ChooseExperts(const RouterStep& step, cudaStream_t stream) {
  if (step.tokens == 0) return cudaSuccess;
  return VisitKernel(step.experts, step.top_groups < step.num_groups, [&](auto kernel) {
    return Launch(kernel, RowGrid(step.tokens, kVectorBytes), kBlockThreads, 0, stream, step);
  });
}

cudaError_t PreloadRouterKernels() {
  cudaError_t error = cudaSuccess;
  for (int entries = 1; entries <= kMostExpertsPerLane; entries *= 2) {
    for (const bool limited : {false, true}) {
      if (error != cudaSuccess) return error;
      error =
          VisitKernel(entries * kWarpSize, limited, [](auto kernel) { return Preload(kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
