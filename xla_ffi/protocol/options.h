// The options of a call that its step reads. Each row makes a member of the step and an attribute
// of the call, by one name: that of the field of EPConfig, from which Python takes the value unless
// a transport gives another.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "protocol/scale_tiles.h"

namespace jax_ep {

// Of dispatches that route. Types are bool, int64_t, float, and enumerations with kWordsOf.
#define JAX_EP_DISPATCH_OPTIONS(OPTION) OPTION(bool, zero_tail) OPTION(ScaleLayout, scale_layout)

// Of combines. With `by_entry` rows travel one by one and are weighted at the source.
#define JAX_EP_COMBINE_OPTIONS(OPTION) OPTION(bool, by_entry)

#define JAX_EP_MEMBER(Type, name) Type name{};
struct DispatchOptions {
  JAX_EP_DISPATCH_OPTIONS(JAX_EP_MEMBER)
};
struct CombineOptions {
  JAX_EP_COMBINE_OPTIONS(JAX_EP_MEMBER)
};
#undef JAX_EP_MEMBER

// The attribute's words for the values of an enumeration, in order.
template <typename Enumeration>
inline constexpr std::array<std::string_view, 0> kWordsOf{};
template <>
inline constexpr std::array<std::string_view, 3> kWordsOf<ScaleLayout>{"rows", "tiled_128x4",
                                                                       "columns"};

}  // namespace jax_ep
