// The activations between the two matmuls of experts, and their derivatives. Each is a product of a
// function of gate and one of up: h = OfGate(gate) * OfUp(up). A NaN stays a NaN.
#pragma once

#include <cstdint>

#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "formats/numbers.h"
#include "protocol/matmul_steps.h"

namespace jax_ep::cuda {

__device__ __forceinline__ float Sigmoid(float z) {
  constexpr float kLog2E = 1.44269504f;
  return FastReciprocal(Add(1.0f, ExpTwo(Multiply(z, -kLog2E))));
}

// A function of gate, and its derivative.
struct GateAndDerivative {
  float value;
  float derivative;
};

// 1 below the limit, 0 above it, and 1/2 at it, as JAX differentiates minima.
__device__ __forceinline__ float IsBelow(float x, float limit) {
  return x < limit ? 1.0f : x == limit ? 0.5f : 0.0f;
}

template <Activation kActivation>
class ActivationOf {
 public:
  __device__ explicit ActivationOf(const ActivationOptions& options)
      : alpha_(options.alpha), limit_(options.limit) {}

  __device__ __forceinline__ float OfGate(float gate) const {
    if constexpr (kActivation == Activation::kReluSquared) {
      const float positive = Positive(gate);
      return Multiply(positive, positive);
    } else {
      const float g = Bounded(gate);
      return Multiply(g, Sigmoid(Inside(g)));
    }
  }

  __device__ __forceinline__ GateAndDerivative Both(float gate) const {
    if constexpr (kActivation == Activation::kReluSquared) {
      const float positive = Positive(gate);
      return {Multiply(positive, positive), Add(positive, positive)};
    } else {
      const float g = Bounded(gate);
      const float sigmoid = Sigmoid(Inside(g));
      const float value = Multiply(g, sigmoid);
      // With z = Inside(g): sigmoid + g * z' * sigmoid * (1 - sigmoid).
      const float rest = Multiply(value, InsideDerivative(g));
      float derivative = FusedMultiplyAdd(rest, Add(1.0f, -sigmoid), sigmoid);
      if constexpr (kClamped) derivative = Multiply(derivative, IsBelow(gate, limit_));
      return {value, derivative};
    }
  }

  __device__ __forceinline__ float OfUp(float up) const {
    if constexpr (!kClamped) return up;
    const float low = up < -limit_ ? -limit_ : up;
    return Add(low > limit_ ? limit_ : low, 1.0f);
  }
  // Whether OfUp is up itself, with a derivative of 1.
  static constexpr bool kUpIsPlain = kActivation != Activation::kSwiGluClamped;
  __device__ __forceinline__ float UpDerivative(float up) const {
    if constexpr (!kClamped) return 1.0f;
    return IsBelow(up < 0.0f ? -up : up, limit_);
  }

 private:
  static constexpr bool kClamped = kActivation == Activation::kSwiGluClamped;
  // gelu(x) by tanh is x * sigmoid(2 * c * (x + kCube * x^3)), c = sqrt(2 / pi).
  static constexpr float kTwice = 1.5957691216057308f;
  static constexpr float kCube = 0.044715f;

  __device__ __forceinline__ static float Positive(float gate) { return gate < 0.0f ? 0.0f : gate; }
  __device__ __forceinline__ float Bounded(float gate) const {
    return kClamped && gate > limit_ ? limit_ : gate;
  }
  // What the sigmoid is of, and its derivative.
  __device__ __forceinline__ float Inside(float g) const {
    if constexpr (kActivation == Activation::kGeGlu) {
      const float cubic = FusedMultiplyAdd(Multiply(kCube, Multiply(g, g)), g, g);
      return Multiply(kTwice, cubic);
    }
    return kClamped ? Multiply(alpha_, g) : g;
  }
  __device__ __forceinline__ float InsideDerivative(float g) const {
    if constexpr (kActivation == Activation::kGeGlu) {
      return Multiply(kTwice, FusedMultiplyAdd(3.0f * kCube, Multiply(g, g), 1.0f));
    }
    return kClamped ? alpha_ : 1.0f;
  }

  float alpha_;
  float limit_;
};

// Calls `run(ActivationOf)` of the options. Around a loop rather than all of an epilogue it costs
// no registers.
template <typename Run>
__device__ __forceinline__ void WithActivation(const ActivationOptions& options, Run run) {
  if (options.activation == Activation::kSwiGluClamped) {
    run(ActivationOf<Activation::kSwiGluClamped>(options));
  } else if (options.activation == Activation::kGeGlu) {
    run(ActivationOf<Activation::kGeGlu>(options));
  } else if (options.activation == Activation::kReluSquared) {
    run(ActivationOf<Activation::kReluSquared>(options));
  } else {
    run(ActivationOf<Activation::kSwiGlu>(options));
  }
}

// Adds two neighbouring columns of a group's bias to a lane's sums of two rows.
__device__ __forceinline__ void AddTwo(float* sums, const float* bias) {
  const float2 two = *reinterpret_cast<const float2*>(bias);
  sums[0] = Add(sums[0], two.x), sums[1] = Add(sums[1], two.y);
  sums[2] = Add(sums[2], two.x), sums[3] = Add(sums[3], two.y);
}

}  // namespace jax_ep::cuda
