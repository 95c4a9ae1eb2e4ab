// NVLink between hosts: which GPUs are linked by it, and whether this process may share memory over
// it. For init, which chooses the transport by it, and for windows.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace jax_ep::cuda {

// What a process of any host in the same fabric maps memory by: a CUmemFabricHandle.
using FabricHandle = std::array<uint8_t, 64>;

// Cluster and clique of a device as the management library (NVML) tells them: devices whose texts
// are equal reach each other's memory over NVLink, on whatever hosts. "" for a device in none, or
// not yet, and where there is no such library.
std::string FabricOf(int32_t ordinal);

// Whether fabric handles of this device's memory can be made and opened here. The driver's
// attribute alone says it of drivers; the process also needs an IMEX channel. Tried once for each
// device.
bool SharesByFabric(int32_t ordinal);

}  // namespace jax_ep::cuda
