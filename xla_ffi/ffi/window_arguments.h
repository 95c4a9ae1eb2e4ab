// Turns Python's fields of a config into the sizes of its windows, for both native modules: the CPU
// module reports sizes, which needs no GPU, and the CUDA module opens windows.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ffi/window_sizes.h"

namespace jax_ep::ffi_layer {

// Takes a dict with the fields of WindowConfig. A nanobind class would have to be registered by one
// module and found by the other.
inline WindowSizes WindowSizesFrom(const nanobind::dict& fields) {
  const auto number = [&](const char* name) { return nanobind::cast<int64_t>(fields[name]); };
  const WindowConfig config{
      .format = nanobind::cast<std::string>(fields["format"]),
      .hidden = number("hidden"),
      .element_bytes = number("element_bytes"),
      .wire_element_bytes = number("wire_element_bytes"),
      .tokens = number("tokens"),
      .dispatch_tokens = number("dispatch_tokens"),
      .combine_tokens = number("combine_tokens"),
      .top_k = number("top_k"),
      .ranks = number("ranks"),
      .local_experts = number("local_experts"),
      .pending_calls = number("pending_calls"),
  };
  WindowSizes sizes{};
  if (!SizesOf(config, sizes)) throw std::invalid_argument("unknown format " + config.format);
  return sizes;
}

}  // namespace jax_ep::ffi_layer
