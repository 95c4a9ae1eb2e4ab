// How a warp walks over the routing entries of consecutive tokens.
#pragma once

#include <cstdint>

#include "cuda/common/divisor.h"
#include "cuda/common/primitives.cuh"

namespace jax_ep::cuda {

// Each step covers whole tokens, and lane l holds entry l of the step. A ballot then suffices to
// find the first entry of a token for a rank.
struct TokenWalk {
  int32_t top_k;
  int32_t tokens;    // per step
  int32_t in_step;   // index of this lane's token within the step
  bool used;         // false in the lanes past the step's last whole token
  unsigned earlier;  // lower lanes that hold the same token

  __device__ explicit TokenWalk(int32_t k) : TokenWalk(k, kWarpSize / k, Lane() / k) {}
  __device__ explicit TokenWalk(const Divisor& k)
      : TokenWalk(k.int_value(), static_cast<int32_t>(k.Quotient(kWarpSize)),
                  static_cast<int32_t>(k.Quotient(static_cast<uint32_t>(Lane())))) {}

 private:
  __device__ TokenWalk(int32_t k, int32_t a_step, int32_t token)
      : top_k(k), tokens(a_step), in_step(token) {
    const int lane = Lane();
    used = lane < tokens * top_k;
    earlier = LanesBelow(lane) & ~LanesBelow(in_step * top_k);
  }
};

}  // namespace jax_ep::cuda
