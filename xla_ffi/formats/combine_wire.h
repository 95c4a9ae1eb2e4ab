// What a combine's sums travel as: elements of the wire's type, or codes and scales of the one
// format that combine_format and grad_format take. Used by handlers and kernels
// of combine and of dispatches along a route.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "formats/fp8_block128.h"
#include "protocol/layout.h"
#include "protocol/steps.h"

namespace jax_ep {

using CombineFormat = Fp8Block128Format;

constexpr CombineMessage CombineMessageOf(int64_t hidden, ElementType wire, bool quantized,
                                          int64_t num_weights) {
  if (!quantized) return CombineMessage::Of(hidden * ElementBytes(wire), 0, num_weights);
  return CombineMessage::Of(CombineFormat::PayloadBytes(hidden, 0),
                            CombineFormat::ScaleBytes(hidden), num_weights);
}

// Of any of the steps of a combine.
template <typename Step>
constexpr CombineMessage CombineMessageOf(const Step& step) {
  return CombineMessageOf(step.shape.hidden, step.wire, step.quantized, step.num_weights);
}

// Calls visit(Element{}, Wire{}); Wire is CombineFormat where the sums travel quantised.
template <typename Step, typename Visit>
auto VisitWire(const Step& step, Visit&& visit) {
  if (!step.quantized) return VisitElements(step.element, step.wire, visit);
  return VisitElement(step.element, [&](auto element) { return visit(element, CombineFormat{}); });
}

}  // namespace jax_ep
