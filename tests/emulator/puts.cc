// Puts that do the worst that protocol/internode.h allows: pieces of puts and signals arrive late
// and in random order, also after the end of their kernel. They are read from their source only
// when they arrive, and are not visible until a thread settles. For races each put and each signal
// is an actor of its own, which is ordered only after what the issuing thread has done. Puts before
// a signal's fence are ordered before a thread that has acquired the signal and settles.
#include <algorithm>
#include <utility>

#include "emulator.h"

namespace jax_ep::emulator {
namespace {

constexpr uint64_t kMostPieceBytes = 600;

// A block, and the blocks with its index in earlier launches: a fence belongs to the PE.
struct Lane {
  int device;
  unsigned x, y;
  auto operator<=>(const Lane&) const = default;
};
// Shared by all pieces of a put, or of a signal.
using SharedActor = std::shared_ptr<const Actor>;

struct Piece {
  SharedActor actor;
  Lane lane;
  uint64_t fenced;  // how many fences its lane made before it
  int pe;
  uint8_t* to;
  const uint8_t* from;  // nullptr: a signal
  size_t bytes;
  uint64_t value;
  uint64_t delay;  // rounds
};
// A piece that has reached its destination but is not visible yet.
struct Landed {
  uint8_t* to;
  std::vector<uint8_t> bytes;
};

std::vector<HeapBlock> heap;  // by PE
std::map<Lane, uint64_t> fences;
std::vector<Piece> pieces;
std::map<int, std::vector<Landed>> landed;  // by device

// For races. By lane and PE: what puts release when they have arrived, by the number of the lane's
// fences before them. At 0 are also all puts that a signal has covered.
std::map<std::pair<Lane, int>, std::map<uint64_t, PutsBefore>> over;
std::map<const void*, PutsBefore> signalled;  // by word, for its last signal

// Sometimes a later call's puts overtake a piece.
uint64_t DrawDelay() { return Random() % 32 == 0 ? Random() % 3000 : Random() % 20; }

Lane OwnLane() {
  const Block& block = *current->block;
  return {block.launch->device, block.index.x, block.index.y};
}

const HeapBlock& OwnBlock() {
  const int device = current->block->launch->device;
  for (const HeapBlock& block : heap) {
    if (block.device == device) return block;
  }
  Die("a put without a heap");
}

// The address at a PE that corresponds to `at` in the caller's block.
uint8_t* Symmetric(const void* at, size_t bytes, int pe, const char* what) {
  const HeapBlock& own = OwnBlock();
  const auto offset = static_cast<const uint8_t*>(at) - own.at;
  if (pe < 0 || static_cast<size_t>(pe) >= heap.size()) Die("%s to PE %d", what, pe);
  const HeapBlock& there = heap[static_cast<size_t>(pe)];
  if (offset < 0 || offset + bytes > std::min(own.bytes, there.bytes)) {
    Die("%s of %zu bytes at %td of a block of %zu", what, bytes, offset, there.bytes);
  }
  return there.at + offset;
}

// A signal waits for everything that its lane issued before the lane's last fence.
bool MayArrive(const Piece& piece) {
  if (piece.from != nullptr) return true;
  return std::none_of(pieces.begin(), pieces.end(), [&](const Piece& other) {
    return other.lane == piece.lane && other.pe == piece.pe && other.fenced < piece.fenced;
  });
}

SharedActor BeginActor() {
  return {new Actor(Actor::Make()), [](const Actor* actor) {
            actor->End();
            delete actor;
          }};
}

PutsBefore MakePutsBefore() { return std::make_shared<const char>(); }

// Run by the signal's actor. A thread that acquires its word is ordered after what the lane had
// done, but after puts only with SettlePuts.
void DeliverSignal(const Piece& piece) {
  auto* word = reinterpret_cast<uint64_t*>(piece.to);
  StoreAndRelease(word, piece.value);
  const Unseen unseen;
  auto& puts = over[{piece.lane, piece.pe}];
  const auto fenced = puts.lower_bound(piece.fenced);
  for (auto one = puts.begin(); one != fenced; ++one) Acquire(one->second.get());
  puts.erase(puts.begin(), fenced);
  const PutsBefore& all = signalled[word] = MakePutsBefore();
  Release(all.get());
  if (piece.fenced != 0) puts[0] = all;
}

// Run by the put's actor.
void ReadAndWrite(const Piece& piece) {
  Reads(piece.from, piece.bytes);
  Writes(piece.to, piece.bytes);
  const Unseen unseen;
  PutsBefore& puts = over[{piece.lane, piece.pe}][piece.fenced];
  if (puts == nullptr) puts = MakePutsBefore();
  Release(puts.get());
}

void Deliver(const Piece& piece) {
  const Actor host = Actor::Running();
  piece.actor->Run();
  piece.from == nullptr ? DeliverSignal(piece) : ReadAndWrite(piece);
  host.Run();
  if (piece.from == nullptr) return;
  if (Random() % 2 == 0) {
    const int device = heap[static_cast<size_t>(piece.pe)].device;
    landed[device].push_back({piece.to, {piece.from, piece.from + piece.bytes}});
  } else {
    std::memcpy(piece.to, piece.from, piece.bytes);
  }
}

}  // namespace

void SetHeap(std::vector<HeapBlock> by_pe) {
  heap = std::move(by_pe);
  pieces.clear();
  landed.clear();
  over.clear();
  signalled.clear();
}

void PutByBlock(void* to, const void* from, size_t bytes, int pe) {
  const Unseen unseen;
  std::vector<PutCall>& calls = current->block->puts;
  const size_t call = current->puts++;
  const PutCall own{to, from, bytes, pe};
  // The put starts with the first thread, as no barrier is guaranteed.
  if (call < calls.size()) {
    if (calls[call] != own) Die("threads of a block put different things");
    return;
  }
  calls.push_back(own);
  if (bytes == 0) Die("a put of no bytes");
  CheckGlobal(from, bytes, 1, "the source of a put");
  Piece piece{BeginActor(),
              OwnLane(),
              fences[OwnLane()],
              pe,
              Symmetric(to, bytes, pe, "a put"),
              static_cast<const uint8_t*>(from),
              bytes,
              0,
              0};
  while (bytes > 0) {
    piece.bytes = Random() % 2 == 0 ? bytes : std::min(bytes, 1 + Random() % kMostPieceBytes);
    piece.delay = DrawDelay();
    pieces.push_back(piece);
    piece.to += piece.bytes;
    piece.from += piece.bytes;
    bytes -= piece.bytes;
  }
}

void FencePuts() {
  const Unseen unseen;
  ++fences[OwnLane()];
}

void SignalPe(uint64_t* at, uint64_t value, int pe) {
  const Unseen unseen;
  uint8_t* to = Symmetric(at, sizeof value, pe, "a signal");
  if (reinterpret_cast<uintptr_t>(to) % sizeof value != 0) Die("a signal that is not aligned");
  pieces.push_back(
      {BeginActor(), OwnLane(), fences[OwnLane()], pe, to, nullptr, 0, value, DrawDelay()});
}

void SettlePuts() {
  const Unseen unseen;
  std::vector<Landed>& here = landed[current->block->launch->device];
  for (const Landed& one : here) std::memcpy(one.to, one.bytes.data(), one.bytes.size());
  here.clear();
  for (const PutsBefore& puts : current->block->signals) Acquire(puts.get());
}

void AcquiresSignal(const void* at) {
  const Unseen unseen;
  const auto found = signalled.find(at);
  if (found == signalled.end()) return;
  auto& signals = current->block->signals;
  if (std::find(signals.begin(), signals.end(), found->second) == signals.end()) {
    signals.push_back(found->second);
  }
}

void AdvancePuts() {
  for (size_t i = 0; i < pieces.size();) {
    uint64_t& delay = pieces[i].delay;
    if (delay != 0) --delay;
    if (delay != 0 || !MayArrive(pieces[i])) {
      ++i;
      continue;
    }
    std::swap(pieces[i], pieces.back());
    const Piece piece = pieces.back();
    pieces.pop_back();
    Deliver(piece);
  }
}

bool PutsUnderWay() { return !pieces.empty(); }

void ExpectWholePuts(const Block& block) {
  for (const auto& fiber : block.fibers) {
    if (fiber->puts == block.puts.size()) continue;
    Die("a block ends with a thread that took part in %zu of its %zu puts", fiber->puts,
        block.puts.size());
  }
}

}  // namespace jax_ep::emulator
