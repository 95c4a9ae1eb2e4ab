// Runs CUDA kernels on the host, with a fiber per thread. The headers in include/ are built on it.
// CMakeLists.txt in this folder lists what is checked and what cannot be.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <typeindex>
#include <vector>

#include "races.h"

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

struct EmulatedStream;

namespace jax_ep::emulator {

inline constexpr uint32_t kWarpLanes = 32;
inline constexpr uint32_t kBarriers = 16;
inline constexpr size_t kMostSharedBytes = 227 << 10;
// The alignment of shared memory, and of bulk copies.
inline constexpr size_t kSharedAlign = 128, kCopyAlign = 16;
// Fill memory that was never written, and the destination of a load under way.
inline constexpr uint8_t kUnwritten = 0xCD, kUnderWay = 0xDB;

// ---- Settings, from the environment -------------------------------------------------------------

// A rank and the number, from 0, of the launch on its stream at which the fault begins.
struct Fault {
  int device = -1;
  int launch = 0;
};

struct Settings {
  int gpus;             // EMULATED_GPUS (2)
  int multiprocessors;  // EMULATED_SMS (6)
  unsigned resident;    // EMULATED_RESIDENT (all): blocks that run at once on a GPU
  uint64_t seed;        // EMULATED_SEED (random; it is in the name of the device)
  uint64_t ns_a_round;  // EMULATED_NS (2000): how far a GPU's clock goes in a round of all threads
  Fault missing;        // EMULATED_MISSING=RANK:LAUNCH: that launch and those after it never run
  Fault late;           // EMULATED_LATE=RANK:LAUNCH: that launch is 6 s late
};

const Settings& GetSettings();

// ---- What runs ----------------------------------------------------------------------------------

struct Warp {
  // By parity of the generation: a lane may be one collective ahead of lanes that still read.
  uint64_t values[2][kWarpLanes];
  std::array<uint32_t, 6> words[2][kWarpLanes];
  uint32_t generation = 0, arrived = 0;
  const char* kind = nullptr;
};

struct Barrier {
  uint32_t expected = 0, arrived = 0, generation = 0;
  bool all = true, result[2] = {};
  std::vector<uint32_t> by_warp;
};

// The copies between two commits of a thread.
struct BulkGroup {
  int unread = 0, unwritten = 0;
  char read = 0, written = 0;  // released when they are done
};

// A put that the threads of a block make together.
struct PutCall {
  void* to;
  const void* from;
  size_t bytes;
  int pe;
  bool operator==(const PutCall&) const = default;
};

// A copy that is carried out at the latest when its thread waits for it.
struct OwnCopied {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};

struct Launch {
  int device = 0;
  bool on_stream = false;  // rather than the null stream
  int number = 0;          // on its stream
  // What the previous launch on the stream has released, and what this one releases.
  const char* follows = nullptr;
  const char* ends = nullptr;
  dim3 grid;
  uint32_t threads = 0;
  size_t shared_bytes = 0;
  std::function<void()> body;
  uint32_t cluster = 1;   // blocks that begin together: 1 or 2
  bool early = false;     // whether it may begin before the previous launch has ended
  uint32_t overlaps = 0;  // 1 until the previous launch has ended, if this one is early
  unsigned started = 0, ended = 0;
  unsigned let_go = 0;  // blocks that let the next launch begin

  unsigned blocks() const { return grid.x * grid.y; }
};

// Memory that ends at a page without access, and begins shortly after one.
struct Guarded {
  uint8_t* at = nullptr;
  size_t bytes = 0;
  uint8_t* mapping = nullptr;
  size_t mapped = 0;
};

struct Fiber;

struct Block;
struct Warpgroup;

// Two blocks that begin together; null for one that has ended.
struct Cluster {
  Block* blocks[2] = {};
  uint32_t arrived = 0, generation = 0;
  char orders[2] = {};  // by parity of the generation
  // Where dynamic shared memory, whose size a launch sets, begins in a block's shared memory.
  uint32_t start;
};

// A thread that acquires it is ordered after all puts that a signal covers.
using PutsBefore = std::shared_ptr<const char>;

struct Block {
  Launch* launch = nullptr;
  dim3 index;
  std::vector<PutCall> puts;
  std::vector<PutsBefore> signals;  // for races: those that its threads have acquired
  Guarded shared;
  std::map<std::type_index, Guarded> objects;  // static shared memory
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  std::vector<std::unique_ptr<Fiber>> fibers;
  uint32_t live = 0;
  bool let_go = false;  // whether a thread let the next launch begin
  // For blocks in clusters. `fenced` is what bulk copies and products see of ordinary stores to
  // shared memory: those before a fence, which the next check takes over.
  std::shared_ptr<Cluster> cluster;
  std::vector<uint8_t> fenced;
  bool takes_over = false;
  bool new_mbarriers = false;  // there are some that no fence has published
  std::vector<std::shared_ptr<Warpgroup>> warpgroups;
  char end = 0;  // released by its threads when they end

  uint32_t rank() const { return cluster == nullptr ? 0 : cluster->blocks[1] == this; }
};

struct Fiber {
  void* stack_pointer = nullptr;
  uint8_t* stack = nullptr;
  Actor actor;
  Block* block = nullptr;
  dim3 thread;
  // Sleeps while *wait_on is wait_value.
  const uint32_t* wait_on = nullptr;
  uint32_t wait_value = 0;
  bool done = false;
  const char* where = "not begun";
  std::vector<std::shared_ptr<BulkGroup>> groups;
  // The thread's own copies: open ones, and those of groups.
  std::vector<OwnCopied> own_open;
  std::deque<std::vector<OwnCopied>> own_groups;
  std::shared_ptr<BulkGroup> open;
  size_t puts = 0;  // how many it has taken part in
  // For races: whether a fence precedes its next stores, and relaxed loads since the last fence.
  bool fenced = false;
  std::vector<const void*> loaded;
};

// The thread that runs; null on the host.
extern Fiber* current;

// ---- Scheduling (scheduler.cc) ------------------------------------------------------------------

// Prints what is wrong, which thread did it and the seed, and ends the process with status 9.
[[noreturn]] __attribute__((format(printf, 1, 2))) void Die(const char* format, ...);
// Lets other threads run.
void Yield(const char* where);
void SleepWhile(const uint32_t* word, uint32_t value, const char* where);
void RunAll();
uint64_t ClockNs();
uint64_t Random();
const std::vector<Block*>& RunningBlocks();

// ---- Collectives (collectives.cc) ---------------------------------------------------------------

// The value that each lane of the warp passed. With `orders`, accesses before it are ordered before
// those after it.
const uint64_t* Exchange(uint32_t mask, uint64_t value, const char* kind, bool orders = false);
// The same with several words per lane.
const std::array<uint32_t, 6>* ExchangeWords(const std::array<uint32_t, 6>& words,
                                             const char* kind);
// Whether all passed true. Without `wait` the thread only arrives.
bool Sync(uint32_t barrier, uint32_t threads, bool value, bool wait);
void ExpectNoArrivals(const Block& block);

// ---- Memory order, for races (collectives.cc) ---------------------------------------------------

// A fence that releases before the stores directly after it, and acquires after all relaxed loads.
void Fence();
void LoadsRelaxed(const void* at);
void LoadsAcquire(const void* at);
void StoresRelaxed(const void* at);

// ---- Bulk copies and mbarriers (bulk.cc) --------------------------------------------------------

void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);
void BulkStore(void* global, const void* shared, uint32_t bytes);
void BulkCommit();
void BulkWait(int pending, bool read);
void MbarrierInit(uint64_t* barrier, uint32_t arrivals);
void MbarrierExpect(uint64_t* barrier, uint32_t bytes);
bool MbarrierTryWait(uint64_t* barrier, uint32_t parity);
// Lets some of the copies under way progress.
void AdvanceCopies();
bool CopiesUnderWay();
void ExpectNoCopies(const Block& block);

// Without `global` it writes zeros.
void OwnCopy(void* shared, const void* global, uint32_t bytes);
// Makes a group of the thread's copies since the last one, and waits for all groups but some.
void EndOwnCopies();
void AwaitOwnCopies(size_t pending);
void AsyncArrive(uint64_t* barrier);
// Arrives at this block's mbarrier, or at the same place in another block of its cluster.
void MbarrierArrive(uint64_t* barrier, uint32_t rank);
// Dies if a load under way writes these bytes.
void ExpectLoaded(const Block& block, const uint8_t* shared, size_t bytes);

// ---- Clusters, fences of proxies (clusters.cc) --------------------------------------------------

void ClusterSync();
uint32_t SharedAddress(const void* shared);
uint8_t* SharedPointer(uint32_t address);
// The place in another block's shared memory that corresponds to `shared` in this block's.
uint8_t* SharedOf(const Block& block, const void* shared);
void FenceAsyncShared();
void FenceMbarriers();
// Makes stores that a fence covers visible to copies and products.
void TakeOver(Block& block);
// Dies if ordinary stores that no fence covers have changed these bytes.
void ExpectFenced(Block& block, const uint8_t* shared, size_t bytes, const char* who);

// ---- Tensor copies (bulk.cc) --------------------------------------------------------------------

struct TensorMap {
  const uint8_t* base;
  uint32_t element_bytes;
  uint32_t box[4];
  int64_t sizes[4];
  int64_t strides[3];  // of dimensions 1 to 3, bytes
};
// Whether the hardware allows such a map.
bool IsTensorMap(const TensorMap& map);
void TensorStore(const TensorMap& map, const int32_t (&at)[4], const void* shared);
void TensorLoad(void* shared, const TensorMap& map, const int32_t (&at)[4], uint64_t* barrier,
                bool both);

// ---- Matmuls of warpgroups (products.cc) --------------------------------------------------------

inline constexpr uint32_t kWarpgroupThreads = 128;
enum class Operands { kBFloat16, kFloat16, kE4M3 };
// sums [64, columns] (+)= a * b of 32 bytes of the contracted dimension.
struct Product {
  Operands operands;
  uint32_t columns;
  bool a_mn_major, b_mn_major, add;
  uint64_t a, b;
  bool a_in_registers = false;
  bool operator==(const Product&) const = default;
};
// `words`: four registers of this thread with its part of A, if that is in registers. They are read
// when the product is carried out.
void IssueProduct(const Product& product, float* sums, const uint32_t* words = nullptr);
void FenceProducts();
void CommitProducts();
void WaitForProducts(uint32_t pending);
void SetRegisters(uint32_t registers, bool grow);
// Carries out some of the products under way.
void AdvanceProducts();
bool ProductsUnderWay();
// Whether products for which no thread has waited read these bytes.
bool ProductsRead(const Block& block, const uint8_t* shared, size_t bytes);
void ExpectNoProducts(const Block& block);

// ---- Puts to other nodes (puts.cc) --------------------------------------------------------------

// A PE's block of the symmetric heap, and the GPU that it is on.
struct HeapBlock {
  uint8_t* at;
  size_t bytes;
  int device;
};
// Forgets what is under way.
void SetHeap(std::vector<HeapBlock> by_pe);
// Called by all threads of a block together.
void PutByBlock(void* to, const void* from, size_t bytes, int pe);
// Called by one thread.
void FencePuts();
void SignalPe(uint64_t* at, uint64_t value, int pe);
// A thread that has acquired a signal's value on this GPU may then read what had arrived before it.
// For races any thread of the block is enough; a barrier between the two is not checked.
void SettlePuts();
// For races: the word at `at` was acquired, which a signal may have stored.
void AcquiresSignal(const void* at);
// Lets some of the puts under way progress.
void AdvancePuts();
bool PutsUnderWay();
void ExpectWholePuts(const Block& block);

// ---- Memory and streams (runtime.cc) ------------------------------------------------------------

Guarded AllocateGuarded(size_t bytes, size_t align);
void FreeGuarded(const Guarded& memory);
// Frees all allocations and streams; nothing may be under way.
void Reset();
// Static shared memory: one object per type.
void* SharedObject(std::type_index type, size_t bytes);
// Dies unless the bytes are aligned and in one allocation.
void CheckGlobal(const void* at, size_t bytes, size_t align, const char* what);
void Enqueue(Launch launch, EmulatedStream* stream);
// The first launch of each stream that has any, and the next one if it may begin already.
std::vector<Launch*> FirstLaunches();
void PopEnded();
// Lets the next launch on the stream begin, if it is early, once all blocks have called this or
// have ended. The other function waits, in an early launch, for the end of the previous one.
void LetNextLaunchBegin();
void AwaitPreviousLaunch();

inline uint8_t* SharedBytes() { return current->block->shared.at; }

template <typename T>
T& SharedObject() {
  return *static_cast<T*>(SharedObject(typeid(T), sizeof(T)));
}

template <typename To, typename From>
To Bits(From value) {
  static_assert(sizeof(To) == sizeof(From) || sizeof(To) == 8 || sizeof(From) == 8);
  To to{};
  std::memcpy(&to, &value, sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
  return to;
}

}  // namespace jax_ep::emulator
