// From an element type known at run time to the type that a loop or kernel is compiled for.
#pragma once

#include "formats/numbers.h"
#include "protocol/steps.h"

namespace jax_ep {

inline constexpr ElementType kElementTypes[] = {ElementType::kFloat32, ElementType::kBFloat16,
                                                ElementType::kFloat16};

template <typename Visit>
auto VisitElement(ElementType type, Visit&& visit) {
  if (type == ElementType::kFloat32) return visit(float{});
  if (type == ElementType::kBFloat16) return visit(BFloat16{});
  return visit(Float16{});
}

// Calls `visit(Element{}, Wire{})`.
template <typename Visit>
auto VisitElements(ElementType element, ElementType wire, Visit&& visit) {
  return VisitElement(
      element, [&](auto e) { return VisitElement(wire, [&](auto w) { return visit(e, w); }); });
}

}  // namespace jax_ep
