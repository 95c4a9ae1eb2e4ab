// Inputs for the ranks of window_kernels.cu: ids of several routings, weights, and elements that
// host and GPU compute alike.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "formats/numbers.h"
#include "protocol/platform.h"

namespace jax_ep::window_kernels {

// ---- Elements -----------------------------------------------------------------------------------

// Element `index` of a stream. All are finite. Most have one of a few magnitudes, so that the order
// of a sum shows; the others go down to denormals.
JAX_EP_HOST_DEVICE BFloat16 ElementAt(uint32_t stream, uint64_t index) {
  uint64_t mixed = (index + 1) * 0x9E3779B97F4A7C15u ^ uint64_t { stream } << 40;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
  const uint32_t bits = static_cast<uint32_t>(mixed >> 32);
  const uint32_t any = bits >> 16 & 0x7F, near = 120 + (bits >> 16 & 7);
  const uint32_t exponent = (bits >> 24 & 0xF) == 0 ? any : near;
  return {static_cast<uint16_t>((bits & 0x807F) | exponent << 7)};
}

__global__ void FillKernel(BFloat16* elements, uint64_t count, uint32_t stream) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    elements[i] = ElementAt(stream, i);
  }
}

inline uint32_t TokenStream(int64_t rank) { return static_cast<uint32_t>(2 * rank); }
inline uint32_t ExpertStream(int64_t rank) { return static_cast<uint32_t>(2 * rank + 1); }

// ---- Routings -----------------------------------------------------------------------------------

// Draws have distinct experts for every token; timed calls take them in turn.
inline constexpr int kDraws = 4;
// Has -1, invalid ids and the same id twice; some ranks have tokens without any expert.
inline constexpr int kRagged = kDraws;
// Every entry goes to one expert: rows are dropped, and a rank receives everything.
inline constexpr int kCrowded = kDraws + 1;
// No entry has an expert.
inline constexpr int kEmpty = kDraws + 2;
inline constexpr int kRoutings = kDraws + 3;

class IdSource {
 public:
  // One source draws for all ranks, which share the experts' popularity.
  IdSource(int64_t experts, int64_t top_k, double zipf, uint64_t seed)
      : experts_(experts), top_k_(top_k), random_(seed) {
    std::vector<double> popularity(experts);
    for (int64_t i = 0; i < experts; ++i) popularity[i] = std::pow(i + 1.0, -zipf);
    // Otherwise the first rank would have all the popular ones.
    std::shuffle(popularity.begin(), popularity.end(), random_);
    expert_ = std::discrete_distribution<int32_t>(popularity.begin(), popularity.end());
  }

  // Returns the ids [tokens, K] of one rank.
  std::vector<int32_t> Draw(int routing, int64_t rank, int64_t tokens) {
    std::vector<int32_t> ids(tokens * top_k_, routing == kCrowded ? 0 : -1);
    if (routing >= kCrowded) return ids;
    for (int64_t token = 0; token < tokens; ++token) {
      int32_t* of_token = &ids[token * top_k_];
      DrawDistinct(of_token);
      if (routing == kRagged) MakeRagged(of_token, rank % 2 == 1 && token % 5 == 4);
    }
    return ids;
  }

  std::vector<float> Weights(int64_t tokens) {
    std::uniform_real_distribution<float> weight(0, 1);
    std::vector<float> weights(tokens * top_k_);
    for (float& each : weights) each = weight(random_);
    return weights;
  }

 private:
  void DrawDistinct(int32_t* ids) {
    for (int64_t k = 0; k < top_k_; ++k) {
      do {
        ids[k] = expert_(random_);
      } while (std::find(ids, ids + k, ids[k]) != ids + k);
    }
  }

  void MakeRagged(int32_t* ids, bool none) {
    for (int64_t k = 0; k < top_k_; ++k) {
      const uint32_t percent = random_() % 100;
      if (none || percent < 25) {
        ids[k] = -1;
      } else if (percent < 45 && k > 0) {
        ids[k] = ids[random_() % k];
      } else if (percent < 50) {
        ids[k] = percent % 2 == 0 ? static_cast<int32_t>(experts_) : -2;
      }
    }
  }

  int64_t experts_;
  int64_t top_k_;
  std::mt19937_64 random_;
  std::discrete_distribution<int32_t> expert_;
};

}  // namespace jax_ep::window_kernels
