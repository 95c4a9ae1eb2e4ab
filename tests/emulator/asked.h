// The command line of a test.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "emulator.h"

namespace jax_ep {

// What a test is asked to do: an optional word, the seed of its draws, and their number.
struct Asked {
  std::string only;
  uint64_t seed;
  int64_t draws;

  Asked(int argc, char** argv, int64_t own_draws) {
    if (argc > 1 && std::isalpha(*argv[1]) != 0) only = argv[1], --argc, ++argv;
    seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
    draws = argc > 2 ? std::atoll(argv[2]) : own_draws;
    std::printf("seed %llu, EMULATED_SEED=%llu\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(emulator::GetSettings().seed));
  }
};

}  // namespace jax_ep
