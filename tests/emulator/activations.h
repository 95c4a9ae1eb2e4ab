// The activations between the matmuls of experts in float64, with the errors that kernels may make.
#pragma once

#include <cmath>

#include "protocol/matmul_steps.h"

namespace jax_ep {

inline constexpr double kUlp = 0x1p-24;  // float32's relative rounding error

// A number, and the error that a float32 result of a kernel may have.
struct About {
  double value = 0, error = 0;

  bool nan() const { return std::isnan(value); }
};

// The error of float32 operations after sums: a few units in the last place.
inline constexpr double kFewUlps = 8 * kUlp, kTiny = 0x1p-120;

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
// The relative error of the kernels' sigmoid: the rounding error of the exponent grows with |x|.
inline double SigmoidError(double x) { return (std::fabs(x) + 8) * 4 * kUlp; }

// A function of gate, and its derivative, with their errors in float32.
struct OfGate {
  About value, derivative;
};

inline OfGate GateOf(const ActivationOptions& options, About gate) {
  const double x = gate.value;
  if (options.activation == Activation::kReluSquared) {
    const double positive = x < 0 ? 0 : x, steepest = 2 * (positive + gate.error);
    const double value = positive * positive;
    return {{value, steepest * gate.error + value * kFewUlps},
            {2 * positive, 2 * gate.error + positive * kFewUlps}};
  }
  const bool clamped = options.activation == Activation::kSwiGluClamped;
  const double limit = double{options.limit};
  const double g = clamped && x > limit ? limit : x;
  double z = g, slope = 1;  // of z
  if (clamped) z = double{options.alpha} * g, slope = double{options.alpha};
  double z_error = 0;
  if (options.activation == Activation::kGeGlu) {
    constexpr double kTwice = 1.5957691216057308, kCube = 0.044715;
    z = kTwice * (g + kCube * g * g * g), slope = kTwice * (1 + 3 * kCube * g * g);
    z_error = std::fabs(z) * kFewUlps;
  }
  constexpr double kSteepest = 1.15;  // of all these functions
  const double sigmoid = Sigmoid(z), value = g * sigmoid;
  const double relative = SigmoidError(z) + z_error;
  double derivative = sigmoid + g * slope * sigmoid * (1 - sigmoid);
  if (clamped) derivative *= x < limit ? 1 : x == limit ? 0.5 : 0;
  return {{value, kSteepest * gate.error + std::fabs(value) * (relative + kFewUlps)},
          {derivative, (1 + std::fabs(g * slope)) * relative}};
}

// A function of up, and its derivative.
inline About UpOf(const ActivationOptions& options, About up) {
  if (options.activation != Activation::kSwiGluClamped) return up;
  const double limit = double{options.limit};
  const double value = up.value < -limit ? -limit : up.value > limit ? limit : up.value;
  return {value + 1, up.error + (std::fabs(value) + 1) * kUlp};
}
inline double UpDerivative(const ActivationOptions& options, double up) {
  if (options.activation != Activation::kSwiGluClamped) return 1;
  const double x = std::fabs(up), limit = double{options.limit};
  return x < limit ? 1 : x == limit ? 0.5 : 0;
}

inline About Product(const About& a, const About& b) {
  const double value = a.value * b.value;
  return {value, a.error * (std::fabs(b.value) + b.error) + std::fabs(a.value) * b.error +
                     std::fabs(value) * kFewUlps + kTiny};
}

inline About Activated(const ActivationOptions& options, const About& gate, const About& up) {
  return Product(GateOf(options, gate).value, UpOf(options, up));
}

}  // namespace jax_ep
