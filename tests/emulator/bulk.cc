// Bulk copies and the mbarriers that they complete on. A copy reads at a random time and writes
// even later, so that a stage that is read or overwritten without a wait holds the wrong bytes.
#include <algorithm>
#include <bit>
#include <utility>

#include "emulator.h"

namespace jax_ep::emulator {
namespace {

// The 128-byte lines of a tensor's box.
constexpr int kLineBytes = 128, kUnitBytes = 16;
struct BoxLines {
  TensorMap map;
  int32_t at[4];
  uint32_t first;
  uint32_t address;  // of the first one in its block's shared memory
};

struct Copy {
  Block* block;  // may have ended once a store has read
  int device;
  const char* ends;  // the launch's, which waits for the copy
  uint8_t* to;
  const uint8_t* from;  // null in a tensor copy
  uint32_t bytes;
  Actor actor;
  uint64_t delay;                      // rounds until its next step
  uint64_t* barrier = nullptr;         // of a load
  std::shared_ptr<BulkGroup> group{};  // of a store
  bool read = false;
  std::vector<uint8_t> data{};
  std::unique_ptr<BoxLines> lines{};

  const uint8_t* shared() const { return barrier != nullptr ? to : from; }
};
std::vector<Copy> copies;
std::map<int, std::vector<Actor>> free_actors;  // by GPU

// The contents of an emulated mbarrier.
struct Mbarrier {
  uint32_t phase : 8;
  uint32_t arrivals : 12;  // of each phase
  uint32_t missing : 12;
  int32_t bytes;  // still to come; negative if copies complete before the arrival that expects them
};
constexpr uint32_t kMostArrivals = (1 << 12) - 1;

// Some copies are much slower than others.
uint64_t DrawDelay() { return Random() % 8 == 0 ? Random() % 100 : Random() % 6; }

bool TakesPart(const Mbarrier& state) { return state.phase <= 1 && state.arrivals != 0; }

Mbarrier Load(const uint64_t* barrier) {
  const auto state = std::bit_cast<Mbarrier>(*barrier);
  if (!TakesPart(state)) Die("an mbarrier that nobody has initialised");
  return state;
}

// The address that the participants of a phase release.
const void* OrderOf(const uint64_t* barrier, uint32_t phase) {
  return reinterpret_cast<const char*>(barrier) + phase;
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

void CheckMbarrier(const uint64_t* barrier, const char* what) {
  const auto* byte = reinterpret_cast<const uint8_t*>(barrier);
  const Block& block = *current->block;
  if (byte < block.shared.at || byte >= block.shared.at + block.shared.bytes) {
    for (const auto& [type, memory] : block.objects) {
      if (byte >= memory.at && byte + sizeof *barrier <= memory.at + memory.bytes) return;
    }
  }
  CheckShared(barrier, sizeof *barrier, alignof(uint64_t), what);
}

void CheckCopy(const void* shared, const void* global, uint32_t bytes, const char* what) {
  if (bytes == 0 || bytes % kCopyAlign != 0) Die("%s of %u bytes", what, bytes);
  CheckShared(shared, bytes, kCopyAlign, what);
  CheckGlobal(global, bytes, kCopyAlign, what);
}

// Dies if a copy or product under way uses the destination of a load.
void ExpectUnused(const Block& block, const uint8_t* shared, uint32_t bytes) {
  for (const Copy& copy : copies) {
    if (copy.block != &block || (copy.read && copy.barrier == nullptr)) continue;
    if (copy.shared() < shared + bytes && shared < copy.shared() + copy.bytes) {
      Die("a bulk load into shared memory that another bulk copy uses");
    }
  }
  if (ProductsRead(block, shared, bytes)) {
    Die("a bulk load into shared memory that a product reads, for which nobody has waited");
  }
}

// A copy's stores count as fenced.
void StoreShared(Block& block, uint8_t* to, const uint8_t* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  if (block.cluster == nullptr) return;
  std::memcpy(block.fenced.data() + (to - block.shared.at), from, bytes);
}

void MarkUnderWay(Block& block, uint8_t* to, uint32_t bytes) {
  std::memset(to, kUnderWay, bytes);
  if (block.cluster == nullptr) return;
  std::memset(block.fenced.data() + (to - block.shared.at), kUnderWay, bytes);
}

// The copy's actor, ordered after what the thread that begins the copy has done.
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

// Calls visit(line, at, first, bytes): in this line of the copy, `bytes` bytes from `first` on are
// in memory, at `at`. The others are outside of the tensor.
template <typename Visit>
void ForEachLine(const BoxLines& lines, uint32_t count, Visit visit) {
  const TensorMap& map = lines.map;
  const int64_t begin = std::max<int64_t>(lines.at[0], 0);
  const int64_t end = std::min<int64_t>(int64_t{lines.at[0]} + map.box[0], map.sizes[0]);
  for (uint32_t line = 0; line < count; ++line) {
    uint32_t index = lines.first + line;
    const uint8_t* at = map.base + begin * map.element_bytes;
    bool inside = begin < end;
    for (int i = 1; i < 4; ++i) {
      const int64_t place = int64_t{lines.at[i]} + index % map.box[i];
      index /= map.box[i];
      inside &= place >= 0 && place < map.sizes[i];
      if (inside) at += place * map.strides[i - 1];
    }
    if (!inside) continue;
    visit(line, at, static_cast<size_t>(begin - lines.at[0]) * map.element_bytes,
          static_cast<size_t>(end - begin) * map.element_bytes);
  }
}

void ReadFrom(Copy& copy) {
  if (copy.lines == nullptr) {
    if (copy.barrier == nullptr) {
      ExpectFenced(*copy.block, copy.from, copy.bytes, "a bulk store");
    }
    copy.data.assign(copy.from, copy.from + copy.bytes);
    copy.actor.Run();
    Reads(copy.from, copy.bytes);
    return;
  }
  copy.data.assign(copy.bytes, 0);
  const uint32_t lines = copy.bytes / kLineBytes;
  ForEachLine(*copy.lines, lines,
              [&](uint32_t line, const uint8_t* at, size_t first, size_t bytes) {
                std::memcpy(copy.data.data() + line * kLineBytes + first, at, bytes);
              });
  copy.actor.Run();
  ForEachLine(*copy.lines, lines,
              [](uint32_t, const uint8_t* at, size_t, size_t bytes) { Reads(at, bytes); });
}

// Writes what the copy has read; tensors are swizzled by bits of the address.
void WriteTo(const Copy& copy) {
  if (copy.lines == nullptr) {
    StoreShared(*copy.block, copy.to, copy.data.data(), copy.bytes);
    return;
  }
  for (uint32_t at = 0; at < copy.bytes; at += kUnitBytes) {
    const uint32_t swizzle = (copy.lines->address + at) / kLineBytes % 8 * kUnitBytes;
    StoreShared(*copy.block, copy.to + (at ^ swizzle), copy.data.data() + at, kUnitBytes);
  }
}

void Complete(const Copy& copy, Actor host) {
  if (copy.barrier == nullptr) {
    std::memcpy(copy.to, copy.data.data(), copy.bytes);
  } else {
    WriteTo(copy);
  }
  copy.actor.Run();
  Writes(copy.to, copy.bytes);
  if (copy.barrier == nullptr) {
    Release(&copy.group->written);
  } else {
    Release(OrderOf(copy.barrier, Load(copy.barrier).phase));
  }
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

// One arrival that makes the phase wait for `bytes` more bytes.
void Arrive(uint64_t* barrier, uint32_t bytes) {
  Mbarrier state = Load(barrier);
  if (state.missing == 0) Die("more arrivals at an mbarrier than it is for");
  Release(OrderOf(barrier, state.phase));
  --state.missing;
  state.bytes += static_cast<int32_t>(bytes);
  Store(barrier, state);
}

void LoadLines(Block& block, uint8_t* to, const TensorMap& map, const int32_t (&at)[4],
               uint64_t* barrier) {
  Load(barrier);
  const uint32_t lines = map.box[1] * map.box[2] * map.box[3], bytes = lines * kLineBytes;
  ExpectUnused(block, to, bytes);
  MarkUnderWay(block, to, bytes);
  const auto offset = static_cast<uint32_t>(to - block.shared.at);
  // In pieces that arrive independently.
  for (uint32_t first = 0; first < lines;) {
    const uint32_t count =
        Random() % 2 == 0 ? lines - first : 1 + static_cast<uint32_t>(Random()) % (lines - first);
    Copy copy = CopyOf(to + first * kLineBytes, nullptr, count * kLineBytes);
    copy.block = &block;
    copy.barrier = barrier;
    copy.lines =
        std::make_unique<BoxLines>(BoxLines{map,
                                            {at[0], at[1], at[2], at[3]},
                                            first,
                                            block.cluster->start + offset + first * kLineBytes});
    ForEachLine(*copy.lines, count, [&](uint32_t, const uint8_t* from, size_t, size_t in_line) {
      CheckGlobal(from, in_line, 1, "tensor copy");
    });
    copies.push_back(std::move(copy));
    first += count;
  }
}

}  // namespace

void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  const Unseen unseen;
  CheckCopy(shared, global, bytes, "bulk load");
  CheckMbarrier(barrier, "mbarrier of a bulk load");
  Load(barrier);
  auto* to = static_cast<uint8_t*>(shared);
  ExpectUnused(*current->block, to, bytes);
  MarkUnderWay(*current->block, to, bytes);
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

namespace {
void CarryOut(const std::vector<OwnCopied>& copies) {
  for (const OwnCopied& copy : copies) {
    static constexpr uint8_t kZeros[16] = {};
    const uint8_t* from = copy.from == nullptr ? kZeros : copy.from;
    if (copy.from != nullptr) Reads(from, copy.bytes);
    StoreShared(*current->block, copy.to, from, copy.bytes);
    Writes(copy.to, copy.bytes);
  }
}
}  // namespace

void OwnCopy(void* shared, const void* global, uint32_t bytes) {
  const Unseen unseen;
  CheckShared(shared, bytes, bytes, "asynchronous copy");
  if (global != nullptr) CheckGlobal(global, bytes, bytes, "asynchronous copy");
  // What was there is gone from now on.
  std::memset(shared, kUnderWay, bytes);
  current->own_open.push_back(
      {static_cast<uint8_t*>(shared), static_cast<const uint8_t*>(global), bytes});
}

void EndOwnCopies() {
  const Unseen unseen;
  current->own_groups.push_back(std::exchange(current->own_open, {}));
}

void AwaitOwnCopies(size_t pending) {
  const Unseen unseen;
  auto& groups = current->own_groups;
  while (groups.size() > pending || (!groups.empty() && Random() % 4 == 0)) {
    CarryOut(groups.front());
    groups.pop_front();
  }
}

void AsyncArrive(uint64_t* barrier) {
  const Unseen unseen;
  CheckMbarrier(barrier, "mbarrier");
  CarryOut(std::exchange(current->own_open, {}));
  Arrive(barrier, 0);
}

void BulkCommit() {
  const Unseen unseen;
  auto& groups = current->groups;
  // In a build for races a wait still has to acquire them.
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
  if (current->block->cluster != nullptr) Writes(barrier, sizeof *barrier);
  const Unseen unseen;
  CheckMbarrier(barrier, "mbarrier");
  if (arrivals == 0 || arrivals > kMostArrivals) Die("an mbarrier of %u arrivals", arrivals);
  *barrier = std::bit_cast<uint64_t>(Mbarrier{0, arrivals, arrivals, 0});
  current->block->new_mbarriers = true;
}

void MbarrierExpect(uint64_t* barrier, uint32_t bytes) {
  if (current->block->cluster != nullptr) Reads(barrier, sizeof *barrier);
  const Unseen unseen;
  CheckMbarrier(barrier, "mbarrier");
  Arrive(barrier, bytes);
}

void MbarrierArrive(uint64_t* barrier, uint32_t rank) {
  CheckMbarrier(barrier, "mbarrier");
  const auto& cluster = current->block->cluster;
  uint64_t* at = barrier;
  if (cluster != nullptr) {
    const Block* block = rank < 2 ? cluster->blocks[rank] : nullptr;
    if (block == nullptr) Die("an arrival at block %u of a cluster, which has ended", rank);
    at = reinterpret_cast<uint64_t*>(SharedOf(*block, barrier));
    Reads(at, sizeof *at);
  }
  const Unseen unseen;
  Arrive(at, 0);
}

bool MbarrierTryWait(uint64_t* barrier, uint32_t parity) {
  if (current->block->cluster != nullptr) Reads(barrier, sizeof *barrier);
  const Unseen unseen;
  CheckMbarrier(barrier, "mbarrier");
  if (Load(barrier).phase != parity) {
    Acquire(OrderOf(barrier, parity));
    return true;
  }
  if (current->block->cluster == nullptr) {
    Yield("mbarrier");
  } else {
    // Until a thread arrives or the phase ends.
    static_assert(std::endian::native == std::endian::little);
    const auto* word = reinterpret_cast<const uint32_t*>(barrier);
    SleepWhile(word, *word, "mbarrier");
  }
  return false;
}

void TensorLoad(void* shared, const TensorMap& map, const int32_t (&at)[4], uint64_t* barrier,
                bool both) {
  const Unseen unseen;
  Block& own = *current->block;
  auto* to = static_cast<uint8_t*>(shared);
  CheckShared(to, map.box[1] * map.box[2] * map.box[3] * kLineBytes, kCopyAlign, "tensor copy");
  if (SharedAddress(to) % (8 * kLineBytes) != 0) {
    Die("a tensor copy to shared memory at %u", SharedAddress(to));
  }
  CheckMbarrier(barrier, "mbarrier of a tensor copy");
  for (uint32_t rank = 0; rank < 2; ++rank) {
    if (!both && rank != own.rank()) continue;
    Block* block = own.cluster->blocks[rank];
    if (block == nullptr) Die("a copy to block %u of a cluster, which has ended", rank);
    LoadLines(*block, SharedOf(*block, to), map, at,
              reinterpret_cast<uint64_t*>(SharedOf(*block, barrier)));
  }
}

void TensorStore(const TensorMap& map, const int32_t (&at)[4], const void* shared) {
  const Unseen unseen;
  const auto* from = static_cast<const uint8_t*>(shared);
  if (SharedAddress(from) % (8 * kLineBytes) != 0) {
    Die("a tensor copy from shared memory at %u", SharedAddress(from));
  }
  const uint32_t lines = map.box[1] * map.box[2] * map.box[3], start = SharedAddress(from);
  CheckShared(from, lines * kLineBytes, kCopyAlign, "tensor copy");
  // In units, which are swizzled.
  ForEachLine({map, {at[0], at[1], at[2], at[3]}, 0, start}, lines,
              [&](uint32_t line, const uint8_t* to, size_t first, size_t bytes) {
                for (size_t byte = 0; byte < bytes; byte += kUnitBytes) {
                  const uint32_t offset = line * kLineBytes + static_cast<uint32_t>(first + byte);
                  const uint32_t swizzle = (start + offset) / kLineBytes % 8 * kUnitBytes;
                  BulkStore(const_cast<uint8_t*>(to) + byte, from + (offset ^ swizzle), kUnitBytes);
                }
              });
}

bool IsTensorMap(const TensorMap& map) {
  constexpr int64_t kMostSize = int64_t{1} << 32, kMostStride = int64_t{1} << 40;
  bool right = reinterpret_cast<uintptr_t>(map.base) % kCopyAlign == 0 &&
               map.box[0] * map.element_bytes == kLineBytes;
  for (int i = 0; i < 4; ++i) {
    right &= map.sizes[i] > 0 && map.sizes[i] <= kMostSize && map.box[i] > 0 && map.box[i] <= 256;
  }
  for (const int64_t stride : map.strides) {
    right &= stride > 0 && stride < kMostStride && stride % kCopyAlign == 0;
  }
  return right;
}

void ExpectLoaded(const Block& block, const uint8_t* shared, size_t bytes) {
  for (const Copy& copy : copies) {
    if (copy.block != &block || copy.barrier == nullptr) continue;
    if (copy.to < shared + bytes && shared < copy.to + copy.bytes) {
      Die("a product reads shared memory to which a copy is under way");
    }
  }
}

void AdvanceCopies() {
  const Actor host = Actor::Running();
  for (size_t i = 0; i < copies.size();) {
    Copy& copy = copies[i];
    if (copy.delay-- != 0) {
      ++i;
    } else if (!copy.read) {
      ReadFrom(copy);
      copy.read = true;
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
