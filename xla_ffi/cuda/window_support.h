// Which devices can have windows. For init, which chooses the transport by it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace jax_ep::cuda {

// What keeps a group from having windows: "must have <lacks>, got <found>".
struct Obstacle {
  std::string lacks;
  std::string found;
};

// For a group whose ranks are devices `ordinals` of this process, whatever its config.
std::optional<Obstacle> FindObstacle(const std::vector<int32_t>& ordinals);

// The multiprocessors that every one of these devices has.
int64_t Multiprocessors(const std::vector<int32_t>& ordinals);

}  // namespace jax_ep::cuda
