// What the fuzz targets share: reading an input's bytes as numbers and buffers, and a check that
// ends the process with a signal, so that libFuzzer and driver.cc keep the input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"

namespace jax_ep {

#define FUZZ_CHECK(condition)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  // Zero past the end.
  template <typename T>
  T Take() {
    T value{};
    const size_t bytes = std::min(left_, sizeof value);
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
    return value;
  }
  uint8_t Byte() { return Take<uint8_t>(); }
  // In [low, high], which has at most 256 values.
  int64_t In(int64_t low, int64_t high) { return low + Byte() % (high - low + 1); }
  bool Flag() { return (Byte() & 1) != 0; }
  // Mostly small numbers, else an edge case or any number.
  int64_t AnyInt() {
    static constexpr int64_t kEdges[] = {-1,      0,         1,         2,
                                         16,      32,        33,        2048,
                                         2049,    INT32_MAX, INT32_MIN, int64_t{1} << 31,
                                         1 << 20, INT64_MAX, INT64_MIN, 1 << 30};
    const uint8_t kind = Byte();
    if (kind < 128) return kind;
    if (kind < 144) return kEdges[kind - 128];
    return kind < 200 ? int64_t{Take<int32_t>()} : Take<int64_t>();
  }

  // Fills a buffer with any bytes. Random bytes come from a seed, so that inputs stay short; small
  // int32s are close to the indices that tables hold.
  void Fill(const Buffer& buffer, int64_t bound) {
    const uint8_t kind = Byte() % 5;
    uint8_t* to = buffer.data();
    Random random(kind == 0 ? 0 : Byte());
    if (kind == 0) {
      for (int64_t i = 0; i < buffer.bytes(); ++i) to[i] = Byte();
    } else if (kind == 1) {
      for (int64_t i = 0; i < buffer.bytes(); ++i) to[i] = static_cast<uint8_t>(random.Bits());
    } else if (kind == 2) {
      std::memset(to, 0xFF, static_cast<size_t>(buffer.bytes()));
    } else {
      for (int64_t i = 0; i + 4 <= buffer.bytes(); i += 4) {
        const auto value = static_cast<int32_t>(random.In(kind == 3 ? 0 : -2, bound));
        std::memcpy(to + i, &value, sizeof value);
      }
    }
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace jax_ep
