// Blocks that run in pairs, and the proxies through which their shared memory is seen.
#include <cstring>

#include "emulator.h"

namespace jax_ep::emulator {
namespace {

// Where a block's shared memory begins. As on GPUs, the bits from 24 on give the block in the
// cluster: without them an address belongs to block 0. Blocks by themselves begin at 1024.
uint32_t BlockAddress(const Block& block) {
  return block.cluster == nullptr ? 1024 : block.cluster->start | block.rank() << 24;
}

}  // namespace

void ClusterSync() {
  const Unseen unseen;
  Block& block = *current->block;
  if (block.cluster == nullptr) Die("ClusterSync outside of a cluster");
  if (block.new_mbarriers) Die("ClusterSync with mbarriers that no fence has made known");
  Cluster& cluster = *block.cluster;
  uint32_t threads = 0;
  for (const Block* each : cluster.blocks) threads += each != nullptr ? each->live : 0;
  if (threads != 2 * block.launch->threads) Die("ClusterSync when threads have ended");
  const uint32_t generation = cluster.generation;
  Release(&cluster.orders[generation % 2]);
  if (++cluster.arrived == threads) {
    cluster.arrived = 0;
    ++cluster.generation;
  } else {
    SleepWhile(&cluster.generation, generation, "ClusterSync");
  }
  Acquire(&cluster.orders[generation % 2]);
}

uint32_t SharedAddress(const void* shared) {
  const Block& block = *current->block;
  const auto offset = static_cast<const uint8_t*>(shared) - block.shared.at;
  if (offset < 0 || offset > static_cast<ptrdiff_t>(block.shared.bytes)) {
    Die("the address of %p, which is not in the shared memory of its block", shared);
  }
  return BlockAddress(block) + static_cast<uint32_t>(offset);
}

uint8_t* SharedPointer(uint32_t address) {
  const Block& block = *current->block;
  const uint32_t offset = address - BlockAddress(block);
  if (offset > block.shared.bytes) {
    Die("shared address %#x, where this block's begin at %#x", address, BlockAddress(block));
  }
  return block.shared.at + offset;
}

uint8_t* SharedOf(const Block& block, const void* shared) {
  const Block& own = *current->block;
  const auto* byte = static_cast<const uint8_t*>(shared);
  for (const auto& [type, memory] : own.objects) {
    if (byte < memory.at || byte >= memory.at + memory.bytes) continue;
    const auto found = block.objects.find(type);
    if (found == block.objects.end()) Die("another block's shared memory before it has begun");
    return found->second.at + (byte - memory.at);
  }
  return block.shared.at + (byte - own.shared.at);
}

// Takes effect at the end of the warp's turn, or at the next check in this turn: the fences of all
// lanes are one.
void FenceAsyncShared() {
  current->block->takes_over = true;
  current->block->new_mbarriers = false;
}

void FenceMbarriers() { current->block->new_mbarriers = false; }

void TakeOver(Block& block) {
  block.takes_over = false;
  if (block.cluster == nullptr) return;
  std::memcpy(block.fenced.data(), block.shared.at, block.fenced.size());
}

void ExpectFenced(Block& block, const uint8_t* shared, size_t bytes, const char* who) {
  if (block.cluster == nullptr) return;
  if (block.takes_over) TakeOver(block);
  if (std::memcmp(block.fenced.data() + (shared - block.shared.at), shared, bytes) != 0) {
    Die("%s reads shared memory that was stored to without a fence", who);
  }
}

}  // namespace jax_ep::emulator
