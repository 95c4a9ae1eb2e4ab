// Waits that have no limit of their own, given one. Used where windows are closed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace jax_ep::cuda {

// Whether `act` has ended, without an exception, within the limit. One that has not goes on by
// itself on a thread that nobody joins, since no wait of CUDA's can be given up: it must own all
// that it uses.
inline bool EndsWithin(std::chrono::nanoseconds limit, std::function<void()> act) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<bool> ended_well;
  };
  const auto outcome = std::make_shared<Outcome>();
  try {
    std::thread([outcome, act = std::move(act)] {
      bool well = true;
      try {
        act();
      } catch (const std::exception&) {
        well = false;
      }
      const std::lock_guard<std::mutex> lock(outcome->mutex);
      outcome->ended_well = well;
      outcome->changed.notify_all();
    }).detach();
  } catch (const std::exception&) {
    return false;  // the process has no thread to give
  }
  std::unique_lock<std::mutex> lock(outcome->mutex);
  outcome->changed.wait_for(lock, limit, [&] { return outcome->ended_well.has_value(); });
  return outcome->ended_well.value_or(false);
}

}  // namespace jax_ep::cuda
