// The parameters of the kernels in shmem/internode.cu. The NVSHMEM module loads those kernels, and
// the module of the calls launches them; both use this header.
#pragma once

#include <cstdint>

#include "protocol/bundle.h"
#include "protocol/internode.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// A group at a rank that has ranks on other nodes. For a rank with its bit in `group.internode`,
// `group.windows` has the staging area instead of its window.
struct InternodeGroup {
  WindowGroup group;
  InternodeLayout layout;
  BundleLayout bundles;
  NodeMap map;                   // without nodes if nothing is bundled
  int32_t pes[kMaxWindowRanks];  // NVSHMEM's number of each rank
};

// A call of such a group.
struct InternodeCall {
  CallKind kind;
  InternodeShape shape;
  const PendingCall* pending;  // nullptr: only return credits
  TokenSlots slots;            // for dispatches that send
};

// Whether a token crosses to a node only once.
JAX_EP_HOST_DEVICE bool Bundled(const InternodeGroup& internode, CallKind kind) {
  return kind == CallKind::kDispatch && internode.map.nodes > 0;
}

// Threads per block. A grid has a row of blocks for each internode rank.
inline constexpr uint32_t kInternodeThreads = 512;
// Tokens that a block bundles, one per lane.
inline constexpr int64_t kBundleTokens = 32;
// Blocks per row that store a bundle's messages into the node's windows.
inline constexpr uint32_t kRelayBlocks = 48;

// The kernels that a call across nodes launches, in this order.
enum class InternodeKernel : uint32_t {
  // With bundles only: gathers a node's messages.
  kBundle,
  // Forwards a call's regions, if there is a call, one share per block; returns credits that are
  // due.
  kSend,
  // Waits for a call's regions and, without bundles, delivers their cells.
  kArrive,
  // With bundles only: stores messages into the windows of the node.
  kRelay,
  // With bundles only: delivers their cells after that.
  kDeliver,
};
inline constexpr uint32_t kNumInternodeKernels = 5;
inline constexpr const char* kInternodeKernelNames[kNumInternodeKernels] = {
    "JaxEpInternodeBundle", "JaxEpInternodeSend", "JaxEpInternodeArrive", "JaxEpInternodeRelay",
    "JaxEpInternodeDeliver"};

// The handles that the driver gives to loaded kernels.
struct InternodeKernels {
  uint64_t functions[kNumInternodeKernels];
};

}  // namespace jax_ep::cuda
