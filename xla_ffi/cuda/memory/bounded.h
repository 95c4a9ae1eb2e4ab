// Gives a time limit to waits that have none of their own. Used when windows are closed.
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

// Returns whether `act` ended within the limit and without an exception. CUDA's waits cannot be
// cancelled, so one that takes longer continues on a thread that nobody joins; `act` must own all
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
    return false;  // no thread could be started
  }
  std::unique_lock<std::mutex> lock(outcome->mutex);
  outcome->changed.wait_for(lock, limit, [&] { return outcome->ended_well.has_value(); });
  return outcome->ended_well.value_or(false);
}

}  // namespace jax_ep::cuda
