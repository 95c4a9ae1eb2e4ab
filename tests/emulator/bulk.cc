// Bulk copies and the mbarriers that they complete on. A copy reads when it likes and writes later
// still, so a stage that is read or overwritten without the wait for it holds the wrong bytes.
#include <algorithm>
#include <bit>
#include <utility>

#include "emulator.h"

namespace jax_ep::emulator {
namespace {

struct Copy {
  Block* block;  // may be gone when a store has read
  int device;
  const char* ends;  // of its launch, which waits for it
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
  Actor actor;
  uint64_t delay;                      // rounds until it gets further
  uint64_t* barrier = nullptr;         // of a load
  std::shared_ptr<BulkGroup> group{};  // of a store
  bool read = false;
  std::vector<uint8_t> data{};

  const uint8_t* shared() const { return barrier != nullptr ? to : from; }
};
std::vector<Copy> copies;
std::map<int, std::vector<Actor>> free_actors;  // by GPU

// What an mbarrier holds here.
struct Mbarrier {
  uint8_t phase;
  uint8_t arrivals;  // of each phase
  uint16_t missing;
  int32_t bytes;  // that have yet to come; fewer than none where copies come before their arrival
};

// Some are much slower than others.
uint64_t DrawDelay() { return Random() % 8 == 0 ? Random() % 100 : Random() % 6; }

bool TakesPart(const Mbarrier& state) { return state.phase <= 1 && state.arrivals != 0; }

Mbarrier Load(const uint64_t* barrier) {
  const auto state = std::bit_cast<Mbarrier>(*barrier);
  if (!TakesPart(state)) Die("an mbarrier that nobody has initialised");
  return state;
}

void Store(uint64_t* barrier, Mbarrier state) {
  if (state.missing == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.missing = state.arrivals;
  }
  *barrier = std::bit_cast<uint64_t>(state);
}

void CheckShared(const void* at, size_t bytes, size_t align, const char* what) {
  const auto* byte = static_cast<const uint8_t*>(at);
  const Block& block = *current->block;
  const size_t size = block.launch->shared_bytes;
  if (byte < block.shared.at || byte + bytes > block.shared.at + size) {
    Die("%s: %zu bytes at %td of %zu of shared memory", what, bytes, byte - block.shared.at, size);
  }
  if ((byte - block.shared.at) % static_cast<ptrdiff_t>(align) != 0) {
    Die("%s: shared memory at %td", what, byte - block.shared.at);
  }
}

void CheckCopy(const void* shared, const void* global, uint32_t bytes, const char* what) {
  if (bytes == 0 || bytes % kCopyAlign != 0) Die("%s of %u bytes", what, bytes);
  CheckShared(shared, bytes, kCopyAlign, what);
  CheckGlobal(global, bytes, kCopyAlign, what);
}

// Where a load goes nobody else may read or write meanwhile.
void ExpectUnused(const uint8_t* shared, uint32_t bytes) {
  for (const Copy& copy : copies) {
    if (copy.block != current->block || (copy.read && copy.barrier == nullptr)) continue;
    if (copy.shared() < shared + bytes && shared < copy.shared() + copy.bytes) {
      Die("a bulk load into shared memory that another bulk copy uses");
    }
  }
}

// What the thread that begins a copy did comes before it.
Actor BeginActor() {
  std::vector<Actor>& free = free_actors[current->block->launch->device];
  if (free.empty()) free.push_back(Actor::Make());
  const Actor actor = free.back();
  free.pop_back();
  Release(current);
  actor.Run();
  Acquire(current);
  current->actor.Run();
  return actor;
}

Copy CopyOf(void* to, const void* from, uint32_t bytes) {
  const Launch& launch = *current->block->launch;
  return {.block = current->block,
          .device = launch.device,
          .ends = launch.ends,
          .to = static_cast<uint8_t*>(to),
          .from = static_cast<const uint8_t*>(from),
          .bytes = bytes,
          .actor = BeginActor(),
          .delay = DrawDelay()};
}

void Complete(const Copy& copy, Actor host) {
  std::memcpy(copy.to, copy.data.data(), copy.bytes);
  copy.actor.Run();
  Writes(copy.to, copy.bytes);
  Release(copy.barrier != nullptr ? static_cast<void*>(copy.barrier) : &copy.group->written);
  Release(copy.ends);
  host.Run();
  if (copy.barrier == nullptr) {
    --copy.group->unwritten;
    return;
  }
  Mbarrier state = Load(copy.barrier);
  state.bytes -= static_cast<int32_t>(copy.bytes);
  Store(copy.barrier, state);
}

}  // namespace

void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  const Unseen unseen;
  CheckCopy(shared, global, bytes, "bulk load");
  CheckShared(barrier, sizeof *barrier, alignof(uint64_t), "mbarrier of a bulk load");
  Load(barrier);
  auto* to = static_cast<uint8_t*>(shared);
  ExpectUnused(to, bytes);
  std::memset(to, kUnderWay, bytes);
  copies.push_back(CopyOf(to, global, bytes));
  copies.back().barrier = barrier;
}

void BulkStore(void* global, const void* shared, uint32_t bytes) {
  const Unseen unseen;
  CheckCopy(shared, global, bytes, "bulk store");
  if (current->open == nullptr) current->open = std::make_shared<BulkGroup>();
  ++current->open->unread;
  ++current->open->unwritten;
  copies.push_back(CopyOf(global, shared, bytes));
  copies.back().group = current->open;
}

void BulkCommit() {
  const Unseen unseen;
  auto& groups = current->groups;
  // Not those that a wait has yet to acquire.
  while (!kRaces && !groups.empty() && groups.front()->unwritten == 0) groups.erase(groups.begin());
  groups.push_back(current->open != nullptr ? std::move(current->open)
                                            : std::make_shared<BulkGroup>());
  current->open = nullptr;
}

void BulkWait(int pending, bool read) {
  const Unseen unseen;
  auto& groups = current->groups;
  const size_t ended = groups.size() - std::min(groups.size(), static_cast<size_t>(pending));
  const auto ready = [&] {
    return std::all_of(groups.begin(), groups.begin() + static_cast<ptrdiff_t>(ended),
                       [&](auto& group) { return (read ? group->unread : group->unwritten) == 0; });
  };
  while (!ready()) Yield("wait for bulk stores");
  if (!kRaces) return;
  for (size_t i = 0; i < ended; ++i) Acquire(read ? &groups[i]->read : &groups[i]->written);
  if (!read) groups.erase(groups.begin(), groups.begin() + static_cast<ptrdiff_t>(ended));
}

void MbarrierInit(uint64_t* barrier, uint32_t arrivals) {
  const Unseen unseen;
  CheckShared(barrier, sizeof *barrier, alignof(uint64_t), "mbarrier");
  if (arrivals == 0 || arrivals > UINT8_MAX) Die("an mbarrier of %u arrivals", arrivals);
  *barrier = std::bit_cast<uint64_t>(
      Mbarrier{0, static_cast<uint8_t>(arrivals), static_cast<uint16_t>(arrivals), 0});
}

void MbarrierExpect(uint64_t* barrier, uint32_t bytes) {
  const Unseen unseen;
  Release(barrier);
  CheckShared(barrier, sizeof *barrier, alignof(uint64_t), "mbarrier");
  Mbarrier state = Load(barrier);
  if (state.missing == 0) Die("more arrivals at an mbarrier than it is for");
  --state.missing;
  state.bytes += static_cast<int32_t>(bytes);
  Store(barrier, state);
}

bool MbarrierTryWait(uint64_t* barrier, uint32_t parity) {
  const Unseen unseen;
  CheckShared(barrier, sizeof *barrier, alignof(uint64_t), "mbarrier");
  if (Load(barrier).phase != parity) {
    Acquire(barrier);
    return true;
  }
  Yield("mbarrier");
  return false;
}

void AdvanceCopies() {
  const Actor host = Actor::Running();
  for (size_t i = 0; i < copies.size();) {
    Copy& copy = copies[i];
    if (copy.delay-- != 0) {
      ++i;
    } else if (!copy.read) {
      copy.data.assign(copy.from, copy.from + copy.bytes);
      copy.read = true;
      copy.actor.Run();
      Reads(copy.from, copy.bytes);
      if (copy.barrier == nullptr) Release(&copy.group->read);
      host.Run();
      if (copy.barrier == nullptr) --copy.group->unread;
      copy.delay = DrawDelay();
    } else {
      Complete(copy, host);
      free_actors[copy.device].push_back(copy.actor);
      std::swap(copy, copies.back());
      copies.pop_back();
    }
  }
}

bool CopiesUnderWay() { return !copies.empty(); }

void ExpectNoCopies(const Block& block) {
  for (const Copy& copy : copies) {
    if (copy.block != &block) continue;
    if (copy.barrier != nullptr) Die("a block ends with a bulk load under way");
    if (!copy.read) Die("a block ends before its bulk stores have read its shared memory");
  }
}

}  // namespace jax_ep::emulator
