// Finds out which devices can have windows. init uses it to choose the transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace jax_ep::cuda {

// What prevents a group from having windows: "must have <lacks>, got <found>".
struct Obstacle {
  std::string lacks;
  std::string found;
};

// Checks devices of this process that belong to one group, for any config. `shared`: the group has
// devices of other processes too.
std::optional<Obstacle> FindObstacle(const std::vector<int32_t>& ordinals, bool shared);

// Checks the same devices against the group's other devices, as far as this process sees those.
// CUDA cannot see devices that CUDA_VISIBLE_DEVICES hides; for them only mapping a window can tell.
std::optional<Obstacle> FindPeerObstacle(const std::vector<int32_t>& ordinals,
                                         const std::vector<std::string>& peer_uuids);

// Equal in all processes; "" if the driver does not report it.
std::string DeviceUuid(int32_t ordinal);

// The bytes in hexadecimal.
std::string Hex(const void* bytes, size_t count);

// The largest number of multiprocessors that all of these devices have.
int64_t Multiprocessors(const std::vector<int32_t>& ordinals);

}  // namespace jax_ep::cuda
