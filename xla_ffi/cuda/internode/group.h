// What the kernels of shmem/internode.cu are given. They are in the native module of NVSHMEM, which
// loads them, and are launched by that of the calls: both use this.
#pragma once

#include <cstdint>

#include "protocol/bundle.h"
#include "protocol/internode.h"
#include "protocol/window.h"

namespace jax_ep::cuda {

// A group at a rank of which some ranks are on other nodes. Where `group.far` has its bit,
// `group.windows` has the staging area in place of a rank's window.
struct InternodeGroup {
  WindowGroup group;
  InternodeLayout layout;
  BundleLayout bundles;
  NodeMap map;                   // of no nodes: nothing is bundled
  int32_t pes[kMaxWindowRanks];  // NVSHMEM's numbers of the ranks
};

// One of its calls.
struct InternodeCall {
  CallKind kind;
  InternodeShape shape;
  const PendingCall* pending;  // nullptr: only credits are returned
  TokenSlots slots;            // of dispatches that send
};

// Whether a token crosses to a node once.
JAX_EP_HOST_DEVICE bool Bundled(const InternodeGroup& internode, CallKind kind) {
  return kind == CallKind::kDispatch && internode.map.nodes > 0;
}

// Threads of a block. A grid has a row of blocks for each far rank.
inline constexpr uint32_t kInternodeThreads = 512;
// Tokens that one of its blocks bundles, a lane each.
inline constexpr int64_t kBundleTokens = 32;
// In a row, of those that store a bundle's messages on.
inline constexpr uint32_t kRelayBlocks = 48;

// By number: what a call of several nodes launches, in this order.
enum class InternodeKernel : uint32_t {
  kBundle,   // of bundles: gathers a node's messages
  kSend,     // a share a block: forwards a call's regions, if it is given; returns credits that are
             // due
  kArrive,   // waits for a call's regions and, where nothing is bundled, delivers their cells
  kRelay,    // of bundles: stores messages on into the windows of the node
  kDeliver,  // of bundles: then delivers their cells
};
inline constexpr uint32_t kNumInternodeKernels = 5;
inline constexpr const char* kInternodeKernelNames[kNumInternodeKernels] = {
    "JaxEpInternodeBundle", "JaxEpInternodeSend", "JaxEpInternodeArrive", "JaxEpInternodeRelay",
    "JaxEpInternodeDeliver"};

// As the driver names them once they are loaded.
struct InternodeKernels {
  uint64_t functions[kNumInternodeKernels];
};

}  // namespace jax_ep::cuda
