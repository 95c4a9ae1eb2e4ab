// main() for fuzz targets without libFuzzer: g++'s trace-pc coverage, mutation of inputs that found
// new edges, and those of libFuzzer's arguments that are used here:
//   TARGET [-runs=0] [-seed=S] [-max_total_time=SECONDS] [-merge_to=DIR] CORPUS...
// Inputs of CORPUS (files and folders) run first; with -runs=0 that is all. -merge_to writes a
// small corpus of the same coverage. The last line of output is JSON. An input that fails is
// written to crash-<seed>-<execution> in the working folder.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Sanitizers end the process with SIGABRT, which OnSignal handles.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kEdges = size_t{1} << 16;
constexpr size_t kLongest = 512;
constexpr unsigned kSecondsAnInput = 20;
constexpr size_t kMerged = 40;  // inputs of a small corpus

std::array<uint8_t, kEdges> hits;  // of the run under way
uintptr_t last_place = 0;

// What the signal handler needs.
const Bytes* running = nullptr;
uint64_t seed = 1, executions = 0;

void KeepInput() {
  if (running == nullptr) return;
  char name[64];
  std::snprintf(name, sizeof name, "crash-%" PRIu64 "-%" PRIu64, seed, executions);
  const int file = open(name, O_CREAT | O_WRONLY | O_TRUNC, 0644);
  if (file < 0) return;
  const ssize_t written = write(file, running->data(), running->size());
  close(file);
  std::fprintf(stderr, "input kept in %s (%zd bytes)\n", name, written);
}

void OnSignal(int number) {
  KeepInput();
  _exit(128 + number);
}

void Execute(const Bytes& input) {
  hits.fill(0);
  last_place = 0;
  running = &input;
  ++executions;
  alarm(kSecondsAnInput);
  // A copy of the exact size, so that AddressSanitizer sees reads past the end.
  const jax_ep::Buffer exact(static_cast<int64_t>(input.size()));
  std::copy(input.begin(), input.end(), exact.data());
  LLVMFuzzerTestOneInput(exact.data(), input.size());
  running = nullptr;
}

// Counts of an edge fall into buckets: 1, 2, 3, 4 to 7, up to 128 and more.
uint8_t BucketBit(uint8_t count) {
  if (count < 4) return static_cast<uint8_t>(1 << (count - 1));
  if (count < 8) return 8;
  if (count < 16) return 16;
  if (count < 32) return 32;
  return count < 128 ? 64 : 128;
}

// Edges and counts seen by all inputs so far.
class Coverage {
 public:
  // Whether the last run shows something new, which is then added.
  bool Add() {
    bool found = false;
    for (size_t i = 0; i < kEdges; ++i) {
      // Most are zero: look at eight at once.
      uint64_t eight;
      std::memcpy(&eight, &hits[i & ~size_t{7}], sizeof eight);
      if (eight == 0) {
        i |= 7;
        continue;
      }
      if (hits[i] == 0) continue;
      const uint8_t bit = BucketBit(hits[i]);
      if ((seen_[i] & bit) != 0) continue;
      edges_ += seen_[i] == 0;
      seen_[i] |= bit;
      found = true;
    }
    return found;
  }
  size_t edges() const { return edges_; }

 private:
  std::array<uint8_t, kEdges> seen_{};
  size_t edges_ = 0;
};

Bytes Mutated(const std::vector<Bytes>& corpus, jax_ep::Random& random) {
  const auto pick = [&]() -> const Bytes& {
    return corpus[static_cast<size_t>(random.In(0, static_cast<int64_t>(corpus.size()) - 1))];
  };
  Bytes input = pick();
  for (int64_t change = random.In(1, 6); change > 0; --change) {
    const auto size = static_cast<int64_t>(input.size());
    const int64_t at = size == 0 ? 0 : random.In(0, size - 1);
    const auto place = input.begin() + at;
    switch (size == 0 ? 2 : random.In(0, 6)) {
      case 0:
        *place = static_cast<uint8_t>(random.Bits());
        break;
      case 1:
        *place ^= static_cast<uint8_t>(1 << random.In(0, 7));
        break;
      case 2: {
        Bytes more(static_cast<size_t>(random.In(1, 8)));
        for (uint8_t& byte : more) byte = static_cast<uint8_t>(random.Bits());
        input.insert(place, more.begin(), more.end());
        break;
      }
      case 3:
        input.erase(place, place + random.In(1, std::min<int64_t>(8, size - at)));
        break;
      case 4:
        *place = static_cast<uint8_t>(*place + random.In(-3, 3));
        break;
      case 5: {
        const Bytes& other = pick();
        const auto from = std::min(static_cast<size_t>(at), other.size());
        input.resize(static_cast<size_t>(at));
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        break;
      }
      default:
        std::fill(place, place + random.In(1, size - at), random.OneIn(2) ? 0x00 : 0xFF);
    }
  }
  if (input.size() > kLongest) input.resize(kLongest);
  return input;
}

void Load(const std::string& path, std::vector<Bytes>& inputs) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  } else {
    files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) {
      std::fprintf(stderr, "cannot read %s\n", file.c_str());
      std::exit(2);
    }
    inputs.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
}

// Writes at most `kept` inputs, each time the one that adds the most edges.
size_t Merge(const std::vector<Bytes>& inputs, const std::string& folder, size_t kept) {
  std::vector<std::vector<uint32_t>> edges_of;
  for (const Bytes& input : inputs) {
    Execute(input);
    auto& edges = edges_of.emplace_back();
    for (uint32_t edge = 0; edge < kEdges; ++edge) {
      if (hits[edge] != 0) edges.push_back(edge);
    }
  }
  std::vector<bool> covered(kEdges, false);
  std::filesystem::create_directories(folder);
  for (size_t written = 0; written < kept; ++written) {
    size_t best = 0;
    std::ptrdiff_t most = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto gain = std::count_if(edges_of[i].begin(), edges_of[i].end(),
                                      [&](uint32_t edge) { return !covered[edge]; });
      if (gain > most) best = i, most = gain;
    }
    if (most == 0) return written;
    for (const uint32_t edge : edges_of[best]) covered[edge] = true;
    char name[32];
    std::snprintf(name, sizeof name, "%02zu", written);
    std::ofstream(folder + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(inputs[best].data()),
               static_cast<int64_t>(inputs[best].size()));
  }
  return kept;
}

}  // namespace

// Called at every edge of the code under test; this file is compiled without it.
extern "C" void __sanitizer_cov_trace_pc() {
  // Relative to a place in this program, so that the load address does not matter.
  const uintptr_t place = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                          reinterpret_cast<uintptr_t>(&LLVMFuzzerTestOneInput);
  const uintptr_t mixed = (place * 0x9E3779B97F4A7C15u) >> 40;
  uint8_t& count = hits[(mixed ^ last_place) % kEdges];
  if (count != 255) ++count;
  last_place = mixed >> 1;
}

int main(int argc, char** argv) {
  double limit_s = 0;
  bool replay = false;
  std::string merge_to;
  std::vector<Bytes> inputs;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const auto value = [&](std::string_view name) {
      return argument.starts_with(name) ? argv[i] + name.size() : nullptr;
    };
    if (const char* text = value("-seed=")) {
      seed = std::strtoull(text, nullptr, 10);
    } else if (const char* text = value("-max_total_time=")) {
      limit_s = std::strtod(text, nullptr);
    } else if (const char* text = value("-merge_to=")) {
      merge_to = text;
    } else if (argument == "-runs=0") {
      replay = true;
    } else if (argument.starts_with("-")) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    } else {
      Load(argv[i], inputs);
    }
  }
  signal(SIGABRT, OnSignal);
  signal(SIGALRM, OnSignal);

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  Coverage coverage;
  std::vector<Bytes> corpus;
  const size_t given = inputs.size();
  inputs.push_back({});
  for (const Bytes& input : inputs) {
    Execute(input);
    if (coverage.Add() || corpus.empty()) corpus.push_back(input);
  }
  jax_ep::Random random(seed);
  double shown = 0;
  while (!replay && seconds() < limit_s) {
    const Bytes input = Mutated(corpus, random);
    Execute(input);
    if (coverage.Add()) corpus.push_back(input);
    if (seconds() - shown > 60) {
      shown = seconds();
      std::fprintf(stderr, "%.0f s: %" PRIu64 " executions, %zu edges, %zu inputs\n", shown,
                   executions, coverage.edges(), corpus.size());
    }
  }
  const uint64_t made = executions;
  const double took = seconds();
  const double busy = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;  // of the processor
  const size_t kept = merge_to.empty() ? 0 : Merge(corpus, merge_to, kMerged);
  alarm(0);
  std::printf("{\"seed\": %" PRIu64
              ", \"seconds\": %.1f, \"cpu_seconds\": %.1f, \"executions\": %" PRIu64
              ", \"edges\": %zu, \"inputs_given\": %zu, \"inputs_found\": %zu, \"merged\": %zu}\n",
              seed, took, busy, made, coverage.edges(), given, corpus.size(), kept);
  return 0;
}
