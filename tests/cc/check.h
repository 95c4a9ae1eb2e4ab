// CHECK, random draws and exact-size buffers for the C++ tests. A failed CHECK prints its location
// and the current case, and ends the process with status 1.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace jax_ep {

// What the test is doing; printed when a CHECK fails. Only the main thread may set it.
inline std::string& CurrentCase() {
  static std::string text;
  return text;
}

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      std::fprintf(stderr, "%s:%d: not so: %s\n  case: %s\n", __FILE__, __LINE__, #condition, \
                   ::jax_ep::CurrentCase().c_str());                                          \
      std::_Exit(1);                                                                          \
    }                                                                                         \
  } while (false)

// The same draws on every machine (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Bits() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t value = state_;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
  }
  // In [low, high].
  int64_t In(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t n) { return In(1, n) == 1; }

 private:
  uint64_t state_;
};

// Bytes with no slack after them, so that AddressSanitizer sees the first byte past the end. They
// start as poison, so that an output that was never written shows.
inline constexpr uint8_t kPoison = 0xAB;

class Buffer {
 public:
  Buffer() : Buffer(0) {}
  // `offset` shifts the data off its 16-byte boundary.
  explicit Buffer(int64_t bytes, int64_t offset = 0)
      : bytes_(bytes), offset_(offset), memory_(new uint8_t[static_cast<size_t>(bytes + offset)]) {
    std::memset(memory_.get(), kPoison, static_cast<size_t>(bytes + offset));
  }

  uint8_t* data() const { return memory_.get() + offset_; }
  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  void Randomize(Random& random) {
    for (int64_t i = 0; i < bytes_; ++i) data()[i] = static_cast<uint8_t>(random.Bits());
  }

 private:
  int64_t bytes_;
  int64_t offset_;
  std::unique_ptr<uint8_t[]> memory_;
};

}  // namespace jax_ep
