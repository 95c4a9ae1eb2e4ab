// The report of programs that measure GPUs: they print one JSON object, even if they fail.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace jax_ep::cuda {

class JsonObject {
 public:
  JsonObject& Add(std::string_view key, double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.12g", value);
    return AddJson(key, text);
  }
  JsonObject& Add(std::string_view key, std::string_view value) {
    return AddJson(key, '"' + std::string(value) + '"');
  }
  JsonObject& Add(std::string_view key, const JsonObject& value) {
    return AddJson(key, value.Text());
  }
  JsonObject& Add(std::string_view key, const std::vector<JsonObject>& values) {
    std::string text;
    for (const JsonObject& value : values) text += (text.empty() ? "" : ",\n  ") + value.Text();
    return AddJson(key, '[' + text + ']');
  }
  std::string Text() const { return '{' + fields_ + '}'; }

 private:
  JsonObject& AddJson(std::string_view key, const std::string& value) {
    fields_ += (fields_.empty() ? "\"" : ",\n \"") + std::string(key) + "\": " + value;
    return *this;
  }
  std::string fields_;
};

inline JsonObject& Report() {
  static JsonObject report;
  return report;
}

// Prints what has been measured so far and ends the program at once: GPUs may still be waiting.
[[noreturn]] inline void Fail(const std::string& message) {
  Report().Add("error", message);
  std::puts(Report().Text().c_str());
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", message.c_str());
  std::_Exit(1);
}

inline void MustSucceed(cudaError_t error, const char* call) {
  if (error != cudaSuccess) Fail(std::string(call) + ": " + cudaGetErrorString(error));
}
#define CHECK_CUDA(call) MustSucceed(call, #call)

inline double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace jax_ep::cuda
