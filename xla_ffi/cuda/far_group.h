// What the kernels of shmem/far.cu are given. They are in the native module of NVSHMEM, which loads
// them, and are launched by that of the calls: both use this.
#pragma once

#include <cstdint>

#include "protocol/far.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// A group at a rank of which some ranks are on other nodes. Where `group.far` has its bit,
// `group.windows` has the staging area in place of a rank's window.
struct FarGroup {
  WindowGroup group;
  FarLayout layout;
  int32_t pes[kMaxWindowRanks];  // NVSHMEM's numbers of the ranks
};

// One of its calls.
struct FarCall {
  CallKind kind;
  FarShape shape;
  const PendingCall* pending;  // nullptr: only credits are returned
};

// Threads of a block. Blocks are (share, far rank) where a region is sent off, else (1, far rank).
inline constexpr uint32_t kFarThreads = 512;

// Kernels, as the driver names them once they are loaded.
struct FarKernels {
  uint64_t send;    // forwards a call's regions, if one is given, and returns credits that are due
  uint64_t arrive;  // waits for a call's regions and delivers their cells
};
inline constexpr const char* kFarSendName = "JaxEpFarSend";
inline constexpr const char* kFarArriveName = "JaxEpFarArrive";

}  // namespace jax_ep::cuda
