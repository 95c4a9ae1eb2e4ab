// Which devices can have windows. For init, which chooses the transport by it.
#pragma once

#include <cstddef>
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

// For a group that these devices of this process belong to, whatever its config; `shared`: with
// devices of other processes.
std::optional<Obstacle> FindObstacle(const std::vector<int32_t>& ordinals, bool shared);

// For the same devices and the group's others, as far as this process sees those: CUDA knows of no
// device that CUDA_VISIBLE_DEVICES leaves out, and then only mapping a window can tell.
std::optional<Obstacle> FindPeerObstacle(const std::vector<int32_t>& ordinals,
                                         const std::vector<std::string>& peer_uuids);

// The same in every process; "" where the driver tells none.
std::string DeviceUuid(int32_t ordinal);

// Of bytes.
std::string Hex(const void* bytes, size_t count);

// The multiprocessors that every one of these devices has.
int64_t Multiprocessors(const std::vector<int32_t>& ordinals);

}  // namespace jax_ep::cuda
