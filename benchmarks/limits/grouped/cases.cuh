// Sizes of grouped matmuls, and of their groups.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace jax_ep::cuda {

// Sizes on one rank, the same as CASES of benchmarks/layers/grouped.py.
struct Case {
  const char* name;
  int hidden;
  int inner;
  int groups;
  int rows;
};

constexpr Case kCases[] = {
    {"mid", 2048, 1024, 16, 32768},       {"large-64", 7168, 2048, 16, 32768},
    {"large-256", 7168, 2048, 64, 32768}, {"many", 7168, 2048, 128, 32768},
    {"decode", 7168, 2048, 64, 1024},
};

// Draws the sizes of groups: every row gets a random expert.
inline std::vector<int32_t> DrawnSizes(const Case& each, std::mt19937_64& random) {
  std::vector<int32_t> sizes(static_cast<size_t>(each.groups));
  std::uniform_int_distribution<size_t> group(0, sizes.size() - 1);
  for (int row = 0; row < each.rows; ++row) ++sizes[group(random)];
  return sizes;
}

inline std::vector<int32_t> EndsOf(const std::vector<int32_t>& sizes) {
  std::vector<int32_t> ends(sizes.size());
  std::partial_sum(sizes.begin(), sizes.end(), ends.begin());
  return ends;
}

// Splits a text at its commas.
inline std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char each : text) {
    if (each == ',') {
      words.emplace_back();
    } else {
      words.back() += each;
    }
  }
  return words;
}

}  // namespace jax_ep::cuda
