// Turns the fields of a config into the sizes of its windows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "formats/registry.h"
#include "protocol/bundle.h"
#include "protocol/internode.h"
#include "protocol/layout.h"
#include "protocol/window.h"

namespace jax_ep::ffi_layer {

// Fields of EPConfig, and the number of ranks in the group.
struct WindowConfig {
  std::string format;
  int64_t hidden;
  int64_t element_bytes;       // of dtype
  int64_t wire_element_bytes;  // of combine_dtype
  int64_t tokens;              // T
  int64_t dispatch_tokens;     // the most per dispatch: entries if rows travel one by one
  int64_t combine_tokens;      // the most per combine; likewise
  int64_t top_k;               // including a shared expert, as in local_experts
  int64_t ranks;
  int64_t local_experts;
  int64_t pending_calls;  // the most per kind of call
};

// Up to this many tokens, calls alternate between two regions, which are cheap in short calls.
inline constexpr int64_t kMaxTokensOfTwoRegions = 512;

// Makes room for every use: a first dispatch in the format, tokens or cotangents along a route, and
// sums in the wire's type or, for cotangents, in the tokens' own. Returns false if there is no such
// format.
inline bool SizesOf(const WindowConfig& config, WindowSizes& sizes) {
  const int64_t row_bytes = config.hidden * config.element_bytes;
  int64_t dispatch_bytes = -1, few_tokens = 0;
  VisitFormat(config.format, [&](auto f) {
    using Format = decltype(f);
    dispatch_bytes = DispatchMessage::Of(Format::PayloadBytes(config.hidden, config.element_bytes),
                                         Format::ScaleBytes(config.hidden), config.top_k)
                         .bytes;
    few_tokens = QuantizedFormat<Format> ? kLowLatencyEncodedTokens : kLowLatencyDispatchTokens;
  });
  const int64_t cached_bytes = DispatchCachedMessage::Of(row_bytes, 0, config.top_k).bytes;
  const int64_t turns = config.tokens <= kMaxTokensOfTwoRegions ? 2 : 1;
  const int64_t widest = std::max(config.element_bytes, config.wire_element_bytes);
  sizes = {
      .ranks = config.ranks,
      .local_experts = config.local_experts,
      .dispatch_tokens = config.dispatch_tokens,
      .combine_tokens = config.combine_tokens,
      .top_k = config.top_k,
      .hidden = config.hidden,
      .dispatch_message_bytes = std::max(dispatch_bytes, cached_bytes),
      .combine_message_bytes = CombineMessage::Of(config.hidden * widest, 0, config.top_k).bytes,
      .low_latency_dispatch_tokens = few_tokens,
      .low_latency_message_bytes = dispatch_bytes,
      .turns = turns,
      .depth = std::max(turns, config.pending_calls + 1),
  };
  return dispatch_bytes >= 0;
}

// Returns the bytes of a window that is given. `internode`: with the areas for ranks on other
// nodes, and for bundles between `nodes` nodes of `node_size` ranks each, or no bundles if both are
// 0.
inline int64_t GivenWindowBytes(const WindowSizes& sizes, bool internode, int64_t nodes,
                                int64_t node_size) {
  const WindowLayout window = WindowLayout::Of(sizes);
  if (!internode) return window.bytes;
  return BundleLayout::Of(InternodeLayout::Of(window, sizes), window, sizes, nodes, node_size)
      .bytes;
}

}  // namespace jax_ep::ffi_layer
