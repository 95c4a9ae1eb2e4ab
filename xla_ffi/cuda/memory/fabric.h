// NVLink between hosts: which GPUs it connects, and whether this process may share memory over it.
// init uses it to choose the transport.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace jax_ep::cuda {

// The handle by which a process on any host of the same fabric maps memory: a CUmemFabricHandle.
using FabricHandle = std::array<uint8_t, 64>;

// Returns the cluster and clique of a device as NVML reports them. Devices with equal text reach
// each other's memory over NVLink, even across hosts. Returns "" if the device is in no fabric, has
// not joined one yet, or NVML is missing.
std::string FabricOf(int32_t ordinal);

// Returns whether fabric handles of this device's memory can be made and opened here. The driver's
// attribute is not enough, because the process also needs an IMEX channel, so this tries it, once
// per device.
bool SharesByFabric(int32_t ordinal);

}  // namespace jax_ep::cuda
