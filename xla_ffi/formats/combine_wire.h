// What a combine's sums travel as: elements of the wire's type, or codes and scales of a wire
// format. Used by handlers and kernels of combine and of dispatches along a route.
#pragma once

#include <cstdint>
#include <string_view>

#include "formats/element_type.h"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/steps.h"

namespace jax_ep {

#define JAX_EP_NEXT(Format) , Format
template <typename, typename First, typename...>
struct FirstOf {
  using type = First;
};
// The first wire format; tests and benchmarks use it as an example of one.
using CombineFormat = FirstOf<void JAX_EP_WIRE_FORMATS(JAX_EP_NEXT)>::type;
#undef JAX_EP_NEXT

// Returns a step's `quantized`: the number of the wire format in the registry, counted from 1, or 0
// for elements.
inline int32_t WireFormatNumber(std::string_view name) {
  int32_t number = 0, found = 0;
  ForEachWireFormat([&]<typename Format>(Format) {
    ++number;
    if (name == Format::kName) found = number;
  });
  return found;
}

// Calls visit(Format{}) with the wire format of that number or, if there is none, the first one.
template <typename Visit>
constexpr auto VisitWireFormat(int32_t quantized, Visit&& visit) {
  int32_t number = 0;
#define JAX_EP_VISIT(Format) \
  if (++number == quantized) return visit(Format{});
  JAX_EP_WIRE_FORMATS(JAX_EP_VISIT)
#undef JAX_EP_VISIT
  return visit(CombineFormat{});
}

constexpr CombineMessage CombineMessageOf(int64_t hidden, ElementType wire, int32_t quantized,
                                          int64_t num_weights) {
  if (quantized == 0) return CombineMessage::Of(hidden * ElementBytes(wire), 0, num_weights);
  return VisitWireFormat(quantized, [&]<typename Format>(Format) {
    return CombineMessage::Of(Format::PayloadBytes(hidden, 0), Format::ScaleBytes(hidden),
                              num_weights);
  });
}

// The same for any step of a combine.
template <typename Step>
constexpr CombineMessage CombineMessageOf(const Step& step) {
  return CombineMessageOf(step.shape.hidden, step.wire, step.quantized, step.num_weights);
}

// Calls visit(Element{}, Wire{}). If the sums travel quantised, Wire is the wire format.
template <typename Step, typename Visit>
auto VisitWire(const Step& step, Visit&& visit) {
  if (step.quantized == 0) return VisitElements(step.element, step.wire, visit);
  return VisitElement(step.element, [&](auto element) {
    return VisitWireFormat(step.quantized, [&](auto format) { return visit(element, format); });
  });
}

}  // namespace jax_ep
