// The options of window_kernels.cu, and the statuses with which it ends.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "formats/registry.h"

namespace jax_ep::window_kernels {

inline constexpr int kWrongResult = 1;
inline constexpr int kWaitFailed = 2;
inline constexpr int kCannotRun = 3;

// Ends at once: other GPUs may still be waiting for what will never come.
[[noreturn]] inline void End(int status, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "window_kernels: %s\n", message.c_str());
  std::_Exit(status);
}

enum class Call : char { kDispatch = 'd', kDispatchCached = 'b', kCombine = 'c' };

inline const char* NameOf(Call call) {
  if (call == Call::kDispatch) return "dispatch";
  return call == Call::kDispatchCached ? "cached dispatch" : "combine";
}

struct Options {
  std::vector<int64_t> tokens{1, 8, 32, 128, 512, 1024, 4096};
  std::vector<int64_t> sms{0};
  std::vector<Call> kinds{Call::kDispatch, Call::kDispatchCached, Call::kCombine};
  int64_t hidden = 7168;
  int64_t experts = 256;
  int64_t top_k = 8;
  int64_t calls = 20;
  int64_t seed = std::random_device{}();
  double capacity_factor = 1.25;  // 0: the worst case
  double zipf = 0;
  std::string format = "bf16";
  int64_t alignment = 1;
  int64_t timeout_s = 2;
  bool tiled = false;
  bool quantized = false;
  bool halves = false;
  bool no_check = false;
};

inline constexpr const char* kHelp = R"(usage: window_kernels [option value]...

Checks and times the fused window calls on all GPUs of this machine, one rank each.

  --tokens N,N,...    tokens of a call (1,8,32,128,512,1024,4096); the windows have room for the
                      largest, so its number of regions is that of all
  --sms N,N,...       blocks of a call, 0: chosen from its shape (0); checked and timed with each
  --kinds LETTERS     what is timed: d dispatch, b cached dispatch, c combine, none nothing (dbc);
                      all three are checked
  --hidden H          elements of a token, in bfloat16 (7168)
  --experts E         of all ranks together (256)
  --top-k K           experts of a token (8)
  --capacity C        rows of an output: "worst" case, or C * tokens * K rounded up to 128 (1.25)
  --zipf S            experts are drawn with probabilities ~ 1 / place^S; 0: uniformly (0)
  --format NAME       dispatch_format (bf16)
  --tiled             scales in scale_layout tiled_128x4
  --quantized         cached dispatch and combine send fp8_block128
  --halves            dispatch and combine in two kernels, one after the other
  --alignment N       expert_alignment (1)
  --timeout-s N       of each wait (2); tools that look at every access need more
  --calls N           calls in the graph that is timed (20)
  --seed N            of ids and weights (random, and printed)
  --no-check          only times
  --help

A call's time is that of the slowest rank, the median of 7 launches of the graph. GB/s are what
the busiest rank sends or receives of other ranks' tokens as they travel, and "floor" is how long that takes at the
speed of bulk stores on H200s.
Status: 1 a wrong result, 2 a wait that timed out or met another call's flag, 3 cannot run.
)";

template <typename T>
bool ParseNumber(std::string_view text, T least, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end && value >= least;
}

inline bool ParseNumbers(std::string_view text, int64_t least, std::vector<int64_t>& values) {
  values.clear();
  for (;;) {
    const size_t comma = text.find(',');
    if (!ParseNumber(text.substr(0, comma), least, values.emplace_back())) return false;
    if (comma == text.npos) return true;
    text.remove_prefix(comma + 1);
  }
}

inline bool ParseKinds(std::string_view text, std::vector<Call>& kinds) {
  kinds.clear();
  if (text == "none") return true;
  for (const char letter : text) {
    if (std::string_view("dbc").find(letter) == std::string_view::npos) return false;
    kinds.push_back(static_cast<Call>(letter));
  }
  return !kinds.empty();
}

inline bool ParseCapacity(std::string_view text, double& factor) {
  if (text == "worst") {
    factor = 0;
    return true;
  }
  return ParseNumber(text, 0.0, factor) && factor > 0;
}

inline bool ParseOption(std::string_view name, std::string_view value, Options& options) {
  const std::pair<std::string_view, int64_t*> numbers[] = {
      {"--hidden", &options.hidden},       {"--experts", &options.experts},
      {"--top-k", &options.top_k},         {"--calls", &options.calls},
      {"--seed", &options.seed},           {"--alignment", &options.alignment},
      {"--timeout-s", &options.timeout_s},
  };
  for (const auto& [known, number] : numbers) {
    if (name == known) return ParseNumber<int64_t>(value, number != &options.seed, *number);
  }
  if (name == "--tokens") return ParseNumbers(value, 1, options.tokens);
  if (name == "--format") {
    options.format = value;
    return VisitFormat(value, [](auto) {});
  }
  if (name == "--sms") return ParseNumbers(value, 0, options.sms);
  if (name == "--kinds") return ParseKinds(value, options.kinds);
  if (name == "--capacity") return ParseCapacity(value, options.capacity_factor);
  if (name == "--zipf") return ParseNumber(value, 0.0, options.zipf);
  return false;
}

inline Options ParseOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    const std::pair<std::string_view, bool*> switches[] = {{"--no-check", &options.no_check},
                                                           {"--tiled", &options.tiled},
                                                           {"--quantized", &options.quantized},
                                                           {"--halves", &options.halves}};
    const auto* known = std::find_if(std::begin(switches), std::end(switches),
                                     [&](const auto& each) { return each.first == name; });
    if (known != std::end(switches)) {
      *known->second = true;
      continue;
    }
    const char* value = i + 1 < argc ? argv[++i] : "";
    if (!ParseOption(name, value, options)) {
      End(kCannotRun, std::string(name) + " '" + value + "' is not understood; see --help");
    }
  }
  return options;
}

}  // namespace jax_ep::window_kernels
