// The parallel part of a step: items that may run in any order on any thread. Kernels return one,
// and the handler decides who runs it.
#pragma once

#include <cstdint>
#include <functional>

namespace jax_ep::cpu {

struct RowTask {
  int64_t items = 0;
  int64_t bytes = 0;  // moved by all items together, to size the chunks
  // Runs items [begin, end). Captures operands by value: it may outlive the handler's frame.
  std::function<void(int64_t begin, int64_t end)> run;
};

}  // namespace jax_ep::cpu
