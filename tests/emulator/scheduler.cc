// Fibers and their turns: blocks, warps and lanes run in random order, some held back for a while.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "../cc/check.h"
#include "emulator.h"

// Saves the callee-saved registers, stores the stack pointer in *save, and continues from `load`.
// The floating-point settings are the same in all fibers.
extern "C" void EmulatorSwitch(void** save, void* load);
asm(R"(
.text
.globl EmulatorSwitch
EmulatorSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.section .note.GNU-stack,"",@progbits
.text
)");

namespace jax_ep::emulator {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr uint64_t kStackEnd = 0x5AFE5AFE5AFE5AFEu;
constexpr uint64_t kLateNs = 6'000'000'000;

int64_t FromEnvironment(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::atoll(text);
}

Fault FaultFromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  Fault fault;
  if (text == nullptr) return fault;
  if (std::sscanf(text, "%d:%d", &fault.device, &fault.launch) != 2) {
    Die("%s=%s is not RANK:LAUNCH", name, text);
  }
  return fault;
}

void* scheduler_stack = nullptr;
Actor host;
std::vector<Block*> blocks;
// Stacks of fibers that have ended, by GPU. All that runs on a stack belongs to one actor, since
// nothing orders the accesses of two.
struct Place {
  uint8_t* stack;
  Actor actor;
};
std::map<int, std::vector<Place>> free_places;
uint64_t rounds = 0, turns = 0;
std::mt19937_64 random_draws;

// ---- Blocks -------------------------------------------------------------------------------------

void GoToHost() {
  host.Run();
  EmulatorSwitch(&current->stack_pointer, scheduler_stack);
}

void RunThread() {
  Acquire(&host);
  const Launch& launch = *current->block->launch;
  // An early launch follows the one before the previous one, which released the same place.
  Acquire(launch.overlaps == 0 ? launch.follows : launch.ends);
  launch.body();
  Release(current->block->launch->ends);
  if (current->block->cluster != nullptr) {
    // Whatever writes to a block's shared memory must be done before the block ends.
    Block& block = *current->block;
    Release(&block.end);
    if (kRaces && block.live == 1) {
      Acquire(&block.end);
      Writes(block.shared.at, block.launch->shared_bytes);
    }
  }
  if (current->open != nullptr) Die("a thread ends with bulk copies that it has not committed");
  current->done = true;
  GoToHost();
  std::abort();
}

Place TakePlace(int device) {
  std::vector<Place>& free = free_places[device];
  if (free.empty()) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) Die("no memory for stacks");
    free.push_back({static_cast<uint8_t*>(stack), Actor::Make()});
  }
  const Place place = free.back();
  free.pop_back();
  std::memcpy(place.stack, &kStackEnd, sizeof kStackEnd);
  return place;
}

std::unique_ptr<Fiber> MakeFiber(Block* block, uint32_t thread) {
  constexpr int kSavedRegisters = 6;
  auto fiber = std::make_unique<Fiber>();
  fiber->block = block;
  fiber->thread = dim3(thread, 0, 0);
  const Place place = TakePlace(block->launch->device);
  fiber->stack = place.stack;
  fiber->actor = place.actor;
  auto** top = reinterpret_cast<void**>(fiber->stack + kStackBytes - 64);
  *--top = nullptr;  // a return address: functions begin 8 bytes off a multiple of 16
  *--top = reinterpret_cast<void*>(&RunThread);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
  return fiber;
}

void Begin(Launch* launch, const std::shared_ptr<Cluster>& cluster) {
  auto* block = new Block;
  block->launch = launch;
  block->index = dim3(launch->started % launch->grid.x, launch->started / launch->grid.x, 0);
  ++launch->started;
  block->warps.resize(launch->threads / kWarpLanes);
  for (Barrier& barrier : block->barriers) barrier.by_warp.resize(block->warps.size());
  block->shared = AllocateGuarded(launch->shared_bytes, kSharedAlign);
  block->cluster = cluster;
  if (cluster) {
    cluster->blocks[block->index.x % 2] = block;
    block->fenced.assign(launch->shared_bytes, kUnwritten);
  }
  for (uint32_t i = 0; i < launch->threads; ++i) block->fibers.push_back(MakeFiber(block, i));
  block->live = launch->threads;
  blocks.push_back(block);
}

// Begins one block, or those of a cluster.
void Begin(Launch* launch) {
  if (launch->cluster == 1) return Begin(launch, nullptr);
  const auto cluster = std::make_shared<Cluster>();
  // After what the system and other shared memory take.
  cluster->start = static_cast<uint32_t>(1024 * (1 + Random() % 4));
  Begin(launch, cluster);
  Begin(launch, cluster);
}

void End(Block* block) {
  if (block->cluster != nullptr) {
    ExpectNoProducts(*block);
    if (block->cluster->arrived != 0) Die("a block ends with threads at ClusterSync");
    block->cluster->blocks[block->rank()] = nullptr;
  }
  blocks.erase(std::find(blocks.begin(), blocks.end(), block));
  ExpectNoCopies(*block);
  ExpectNoArrivals(*block);
  ExpectWholePuts(*block);
  for (const auto& fiber : block->fibers) {
    if (std::memcmp(fiber->stack, &kStackEnd, sizeof kStackEnd) != 0) Die("a stack is too small");
    free_places[block->launch->device].push_back({fiber->stack, fiber->actor});
  }
  FreeGuarded(block->shared);
  for (const auto& [type, memory] : block->objects) FreeGuarded(memory);
  ++block->launch->ended;
  if (!block->let_go) ++block->launch->let_go;
  delete block;
}

// ---- Turns --------------------------------------------------------------------------------------

bool OneIn(uint64_t n) { return Random() % n == 0; }

// Whether a launch that has not begun may begin.
bool Arrived(const Launch& launch) {
  static const Launch* waits = nullptr;
  static uint64_t since = 0;
  const Fault& late = GetSettings().late;
  if (!launch.on_stream || launch.device != late.device || launch.number != late.launch) {
    return true;
  }
  if (waits != &launch) waits = &launch, since = ClockNs();
  return ClockNs() - since >= kLateNs;
}

// Begins some of the blocks that fit. Returns whether others could still begin, or are late.
bool BeginBlocks() {
  std::map<int, unsigned> resident;
  for (const Block* block : blocks) ++resident[block->launch->device];
  bool later = false;
  for (Launch* launch : FirstLaunches()) {
    unsigned& running = resident[launch->device];
    if (launch->started == 0 && !Arrived(*launch)) {
      later = true;
      continue;
    }
    const unsigned most = std::max(GetSettings().resident, launch->cluster);
    const auto fits = [&] {
      return launch->started < launch->blocks() && most - running >= launch->cluster;
    };
    while (fits()) {
      if (launch->started != 0 && OneIn(2)) break;
      Begin(launch);
      running += launch->cluster;
    }
    later |= fits();
  }
  return later;
}

// Among blocks in clusters, at most one becomes much slower than the others, and so do some lanes
// of one warp.
const Block* slow_block = nullptr;
struct {
  const Block* block = nullptr;
  uint64_t warp, first, end;
} slow_lanes;
void DrawSlow() {
  if (blocks.empty() || blocks.front()->cluster == nullptr) return;
  constexpr uint64_t kRounds = 100;
  if (OneIn(kRounds)) slow_block = OneIn(2) ? nullptr : blocks[Random() % blocks.size()];
  if (!OneIn(kRounds / 4)) return;
  slow_lanes.block = blocks[Random() % blocks.size()];
  slow_lanes.warp = Random() % slow_lanes.block->warps.size();
  slow_lanes.first = Random() % kWarpLanes;
  slow_lanes.end = slow_lanes.first + 1 + Random() % kWarpLanes;
}

// Returns whether a thread ran or was held back.
bool RunWarp(Block* block, uint32_t warp) {
  const uint32_t first = static_cast<uint32_t>(Random() % kWarpLanes);
  // Lanes diverge unless something holds them together.
  const uint32_t lanes = OneIn(4) ? static_cast<uint32_t>(Random() % kWarpLanes) : kWarpLanes;
  bool ran = lanes < kWarpLanes;
  const bool slow = block == slow_lanes.block && warp == slow_lanes.warp && !OneIn(32);
  for (uint32_t i = 0; i < lanes; ++i) {
    const uint32_t lane = (first + i) % kWarpLanes;
    Fiber* fiber = block->fibers[warp * kWarpLanes + lane].get();
    if (fiber->done) continue;
    if (slow && lane >= slow_lanes.first && lane < slow_lanes.end) {
      ran = true;
      continue;
    }
    if (fiber->wait_on != nullptr && *fiber->wait_on == fiber->wait_value) continue;
    fiber->wait_on = nullptr;
    ran = true;
    current = fiber;
    fiber->actor.Run();
    ++turns;
    EmulatorSwitch(&scheduler_stack, fiber->stack_pointer);
    current = nullptr;
    if (fiber->done) --block->live;
  }
  if (block->takes_over) TakeOver(*block);
  return ran;
}

// At random times a rank, or none, becomes much slower than the others.
int slow_rank = -1;
void DrawSlowRank() {
  constexpr uint64_t kRounds = 500;
  if (!OneIn(kRounds)) return;
  const int gpus = GetSettings().gpus;
  slow_rank = static_cast<int>(Random() % static_cast<uint64_t>(2 * gpus)) - gpus;
}

// Returns whether a thread ran or was held back.
bool RunBlock(Block* block) {
  if (block == slow_block && !OneIn(32)) return true;
  if (OneIn(3) || (block->launch->device == slow_rank && !OneIn(8))) return true;
  bool ran = false;
  const size_t warps = block->warps.size(), first = Random() % warps;
  for (size_t i = 0; i < warps; ++i) {
    ran |= OneIn(4) || RunWarp(block, static_cast<uint32_t>((first + i) % warps));
  }
  if (block->live == 0) End(block);
  return ran;
}

// Prints how many threads wait where.
void Describe() {
  std::map<std::string, int> waiting;
  for (const Block* block : blocks) {
    const std::string name = "rank " + std::to_string(block->launch->device) + ", block " +
                             std::to_string(block->index.x);
    for (const auto& fiber : block->fibers) {
      if (fiber->done) continue;
      const std::string warp = std::to_string(fiber->thread.x / kWarpLanes);
      ++waiting[name + ", warp " + warp + ": " + fiber->where];
    }
    for (uint32_t id = 0; id < kBarriers; ++id) {
      const Barrier& barrier = block->barriers[id];
      if (barrier.arrived == 0) continue;
      const std::string of = std::to_string(barrier.expected) + " are at barrier ";
      waiting[name + ", of " + of + std::to_string(id)] = static_cast<int>(barrier.arrived);
    }
  }
  for (const auto& [what, threads] : waiting) {
    std::fprintf(stderr, "  %s: %d threads\n", what.c_str(), threads);
  }
}

}  // namespace

Fiber* current = nullptr;

const std::vector<Block*>& RunningBlocks() { return blocks; }

const Settings& GetSettings() {
  static const Settings settings{
      .gpus = static_cast<int>(FromEnvironment("EMULATED_GPUS", 2)),
      .multiprocessors = static_cast<int>(FromEnvironment("EMULATED_SMS", 6)),
      .resident = static_cast<unsigned>(FromEnvironment("EMULATED_RESIDENT", INT32_MAX)),
      .seed = static_cast<uint64_t>(FromEnvironment("EMULATED_SEED", std::random_device{}())),
      .ns_a_round = static_cast<uint64_t>(FromEnvironment("EMULATED_NS", 2000)),
      .missing = FaultFromEnvironment("EMULATED_MISSING"),
      .late = FaultFromEnvironment("EMULATED_LATE"),
  };
  return settings;
}

void Die(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fflush(stdout);
  std::fprintf(stderr, "emulator: ");
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (current != nullptr) {
    std::fprintf(stderr, "; rank %d, block %u, thread %u", current->block->launch->device,
                 current->block->index.x, current->thread.x);
  }
  std::fprintf(stderr, "; EMULATED_SEED=%llu\n",
               static_cast<unsigned long long>(GetSettings().seed));
  if (!CurrentCase().empty()) std::fprintf(stderr, "  case: %s\n", CurrentCase().c_str());
  std::_Exit(9);
}

uint64_t Random() {
  const Unseen unseen;
  return random_draws() >> 11;
}

uint64_t ClockNs() { return rounds * GetSettings().ns_a_round; }

void Yield(const char* where) {
  current->where = where;
  GoToHost();
}

void SleepWhile(const uint32_t* word, uint32_t value, const char* where) {
  current->wait_on = word;
  current->wait_value = value;
  Yield(where);
}

void LetNextLaunchBegin() {
  Block& block = *current->block;
  if (!block.let_go) ++block.launch->let_go;
  block.let_go = true;
}

void AwaitPreviousLaunch() {
  const Launch& launch = *current->block->launch;
  while (launch.overlaps != 0) SleepWhile(&launch.overlaps, 1, "AwaitPreviousLaunch");
  Acquire(launch.follows);
}

void RunAll() {
  const Unseen unseen;
  host = Actor::Running();
  Release(&host);
  const std::vector<Launch*> launches = FirstLaunches();
  // Host threads prepare ranks in any order, on null streams, which must not change the draws.
  static uint64_t runs = 0;
  runs += std::any_of(launches.begin(), launches.end(), [](Launch* l) { return l->on_stream; });
  random_draws.seed(GetSettings().seed + (runs << 32));
  slow_block = slow_lanes.block = nullptr;
  // Threads that are held back get a turn within this many rounds.
  constexpr uint64_t kRoundsForAll = 5000;
  uint64_t idle_rounds = 0;
  for (;;) {
    PopEnded();
    if (FirstLaunches().empty()) return;
    ++rounds;
    DrawSlowRank();
    DrawSlow();
    bool goes_on = BeginBlocks();
    goes_on |= CopiesUnderWay() || PutsUnderWay() || ProductsUnderWay();
    idle_rounds = goes_on ? 0 : idle_rounds + 1;
    const uint64_t turns_before = turns;
    AdvanceCopies();
    AdvancePuts();
    AdvanceProducts();
    std::vector<Block*> order = blocks;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[Random() % i]);
    for (Block* block : order) goes_on |= RunBlock(block);
    if (turns != turns_before) idle_rounds = 0;
    if ((goes_on && idle_rounds < kRoundsForAll) || blocks.empty()) continue;
    Describe();
    Die("deadlock");
  }
}

}  // namespace jax_ep::emulator
