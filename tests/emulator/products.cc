// Matmuls of warpgroups (wgmma). They run in order, but at any time: operands are read at any time
// before a thread has waited for them, and sums hold NaN until then.
#include <algorithm>
#include <bit>
#include <deque>
#include <map>

#include "emulator.h"
#include "formats/e4m3.h"
#include "formats/numbers.h"

namespace jax_ep::emulator {
namespace {

constexpr uint32_t kRows = 64, kMostColumns = 256, kMostK = 32;
constexpr uint32_t kLineBytes = 128, kAtomBytes = 1024, kUnitBytes = 16;
constexpr uint32_t kUnderWaySum = 0x7FABADBAu;  // a NaN

// Sums of a warpgroup while products add to them.
struct Sums {
  uint32_t columns;
  float* of_thread[kWarpgroupThreads] = {};
  float at[kRows * kMostColumns];

  uint32_t per_thread() const { return kRows * columns / kWarpgroupThreads; }
  // Element i of a thread.
  float& Of(uint32_t thread, uint32_t i) {
    const uint32_t lane = thread % kWarpLanes;
    const uint32_t row = thread / kWarpLanes * 16 + lane / 4 + i / 2 % 2 * 8;
    return at[row * columns + i / 4 * 8 + lane % 4 * 2 + i % 2];
  }
};

struct Range {
  uint32_t at;  // in shared memory
  uint32_t bytes;
};

// An action that all threads of a warpgroup perform, one after the other.
enum class Kind { kFence, kProduct, kCommit, kWait };
constexpr const char* kNames[] = {"a fence of products", "a product", "a commit of products",
                                  "a wait for products"};
struct Action {
  Kind kind;
  Product product{};
  uint32_t pending = 0;
  uint32_t arrived = 0;
  // Of a product.
  std::shared_ptr<Sums> sums{};
  bool first = false;  // of its sums
  const uint32_t* words[kWarpgroupThreads] = {};
  std::vector<Range> reads{};
  bool done = false, retired = false;
  uint64_t delay = 0;
  char begin = 0, end = 0;
  // A wait waits for products before this number, after which these sums are whole.
  uint64_t waits_for = 0;
  std::vector<std::shared_ptr<Sums>> whole{};
};

// The delay of some products, unless a thread waits for them.
constexpr uint64_t kUntilWaited = 1 << 30;
uint64_t DrawDelay() {
  const uint64_t draw = Random() % 16;
  return draw == 0 ? kUntilWaited : draw < 5 ? draw : 0;
}

}  // namespace

struct Warpgroup {
  std::deque<Action> actions;
  uint64_t first = 0;  // number of the first action that is kept
  // The next action of each thread, and the one up to which it has waited.
  uint64_t of_thread[kWarpgroupThreads] = {}, through[kWarpgroupThreads] = {};
  // The state after the last action.
  bool fenced = false;
  std::vector<std::pair<std::shared_ptr<Sums>, uint64_t>>
      under_way;                 // with the last product's number
  std::vector<uint64_t> groups;  // committed ones: numbers of the actions that follow them
  // Actions before `next` have been carried out; threads wait for those before `wanted`. `done`
  // counts products.
  uint64_t next = 0, wanted = 0;
  uint32_t done = 0;
  Actor actor;
  bool has_actor = false;
  // Set by SetRegisters.
  uint32_t registers = 0, warps_set = 0;

  Action& At(uint64_t number) { return actions[number - first]; }
  uint64_t end() const { return first + actions.size(); }
};

namespace {

std::map<int, std::vector<Actor>> free_actors;  // by GPU

uint32_t Thread() { return current->thread.x % kWarpgroupThreads; }

Warpgroup& Own() {
  Block& block = *current->block;
  if (block.cluster == nullptr || block.launch->threads % kWarpgroupThreads != 0) {
    Die("products outside of a cluster of warpgroups");
  }
  auto& warpgroups = block.warpgroups;
  if (warpgroups.empty()) warpgroups.resize(block.launch->threads / kWarpgroupThreads);
  auto& own = warpgroups[current->thread.x / kWarpgroupThreads];
  if (own == nullptr) own = std::make_shared<Warpgroup>();
  return *own;
}

// ---- Operands -----------------------------------------------------------------------------------

struct Operand {
  uint32_t start, next_chunk, next_atom;
  bool mn_major;
};

Operand OperandOf(uint64_t bits, bool mn_major) {
  const auto bytes = [&](int from) { return static_cast<uint32_t>(bits >> from & 0x3FFF) << 4; };
  if ((bits & 0xBFFF'C000'C000'C000) != 0 || bits >> 62 != 1) {
    Die("an operand %016llx that is not emulated", static_cast<unsigned long long>(bits));
  }
  const Operand operand{bytes(0), bytes(16), bytes(32), mn_major};
  const uint32_t off = operand.start % kAtomBytes;
  if (operand.next_atom % kAtomBytes != 0 || (mn_major && operand.next_chunk % kAtomBytes != 0) ||
      (mn_major ? off != 0 : off % 32 != 0 || off >= kLineBytes)) {
    Die("an operand at %u, atoms %u and chunks %u apart", operand.start, operand.next_atom,
        operand.next_chunk);
  }
  return operand;
}

// The address of a byte of an operand. A line is a row (or column), or an element of K if
// `mn_major`.
uint32_t AddressOf(const Operand& operand, uint32_t line, uint32_t byte) {
  uint32_t at = operand.start + line / 8 * operand.next_atom + line % 8 * kLineBytes;
  at += operand.mn_major ? byte / kLineBytes * operand.next_chunk + byte % kLineBytes : byte;
  return at ^ (at / kLineBytes % 8 * kUnitBytes);
}

// The atoms that hold rows (or columns) [0, rows) of `steps` of the contracted dimension.
void AddReads(const Operand& operand, uint32_t rows, uint32_t steps, std::vector<Range>& ranges) {
  const uint32_t chunks = operand.mn_major ? rows * 2 / kLineBytes : 1;
  const uint32_t atoms = (operand.mn_major ? steps : rows) / 8;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    for (uint32_t atom = 0; atom < atoms; ++atom) {
      const uint32_t at = operand.start / kAtomBytes * kAtomBytes + chunk * operand.next_chunk +
                          atom * operand.next_atom;
      if (!ranges.empty() && ranges.back().at + ranges.back().bytes == at) {
        ranges.back().bytes += kAtomBytes;
      } else {
        ranges.push_back({at, kAtomBytes});
      }
    }
  }
}

uint8_t* Shared(const Block& block, Range range) {
  const uint32_t start = block.cluster->start;
  if (range.at < start || range.at + range.bytes > start + block.shared.bytes) {
    Die("an operand of %u bytes at %u of shared memory from %u to %zu", range.bytes, range.at,
        start, start + block.shared.bytes);
  }
  return block.shared.at + (range.at - start);
}

float ToFloat(Operands operands, const uint8_t* at) {
  if (operands == Operands::kE4M3) return E4M3::Decode(*at);
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return operands == Operands::kFloat16 ? jax_ep::ToFloat(Float16{bits})
                                        : jax_ep::ToFloat(BFloat16{bits});
}

// to[k * rows + row].
void Read(const Block& block, const Product& product, bool of_b, float* to) {
  const bool mn_major = of_b ? product.b_mn_major : product.a_mn_major;
  const Operand operand = OperandOf(of_b ? product.b : product.a, mn_major);
  const uint32_t rows = of_b ? product.columns : kRows;
  const uint32_t size = product.operands == Operands::kE4M3 ? 1 : 2, steps = 32 / size;
  const uint8_t* shared = block.shared.at - block.cluster->start;
  const uint32_t lines = mn_major ? steps : rows, line_bytes = mn_major ? rows * size : 32;
  for (uint32_t line = 0; line < lines; ++line) {
    for (uint32_t byte = 0; byte < line_bytes; byte += kUnitBytes) {
      const uint8_t* unit = shared + AddressOf(operand, line, byte);
      for (uint32_t i = 0; i < kUnitBytes; i += size) {
        const uint32_t in_line = (byte + i) / size;
        const uint32_t k = mn_major ? line : in_line, row = mn_major ? in_line : line;
        to[k * rows + row] = ToFloat(product.operands, unit + i);
      }
    }
  }
}

// The same of A in registers.
void ReadRegisters(const Action& action, float* to) {
  for (uint32_t thread = 0; thread < kWarpgroupThreads; ++thread) {
    const uint32_t lane = thread % kWarpLanes, first = thread / kWarpLanes * 16 + lane / 4;
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t word = action.words[thread][i / 2], row = first + i / 2 % 2 * 8;
      const uint32_t k = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const uint16_t bits = static_cast<uint16_t>(word >> i % 2 * 16);
      to[k * kRows + row] =
          ToFloat(action.product.operands, reinterpret_cast<const uint8_t*>(&bits));
    }
  }
}

// ---- Carrying out -------------------------------------------------------------------------------

template <uint32_t kColumns>
void Multiply(const float* a, const float* b, uint32_t steps, bool add, float* sums) {
  for (uint32_t row = 0; row < kRows; ++row) {
    float* to = sums + row * kColumns;
    if (!add) std::fill_n(to, kColumns, 0.0f);
    for (uint32_t k = 0; k < steps; ++k) {
      const float by = a[k * kRows + row];
      const float* from = b + k * kColumns;
      for (uint32_t column = 0; column < kColumns; ++column) to[column] += by * from[column];
    }
  }
}

void CarryOut(Block& block, Warpgroup& warpgroup, Action& action) {
  static float a[kRows * kMostK], b[kMostColumns * kMostK];
  const Actor host = Actor::Running();
  if (!warpgroup.has_actor) {
    std::vector<Actor>& free = free_actors[block.launch->device];
    if (free.empty()) free.push_back(Actor::Make());
    warpgroup.actor = free.back();
    warpgroup.has_actor = true;
    free.pop_back();
  }
  const Product& product = action.product;
  for (const Range range : action.reads) {
    ExpectFenced(block, Shared(block, range), range.bytes, "a product");
  }
  warpgroup.actor.Run();
  Acquire(&action.begin);
  for (const Range range : action.reads) Reads(Shared(block, range), range.bytes);
  Release(&action.end);
  host.Run();
  if (product.a_in_registers) {
    ReadRegisters(action, a);
  } else {
    Read(block, product, false, a);
  }
  Read(block, product, true, b);
  const uint32_t steps = product.operands == Operands::kE4M3 ? 32 : 16;
  const auto multiplied = [&]<uint32_t... kColumns>() {
    return ((product.columns == kColumns &&
             (Multiply<kColumns>(a, b, steps, product.add, action.sums->at), true)) ||
            ...);
  };
  if (!multiplied.operator()<8, 16, 32, 64, 128, 256>()) {
    Die("a product of %u columns", product.columns);
  }
  action.done = true;
  ++warpgroup.done;
}

// Forgets actions that all threads have completed.
void Forget(Warpgroup& warpgroup) {
  while (!warpgroup.actions.empty()) {
    const Action& action = warpgroup.actions.front();
    const bool over = action.kind == Kind::kProduct ? action.retired : true;
    const uint64_t number = warpgroup.first;
    if (!over || number >= warpgroup.next ||
        std::any_of(std::begin(warpgroup.through), std::end(warpgroup.through),
                    [&](uint64_t waited) { return waited <= number; })) {
      return;
    }
    warpgroup.actions.pop_front();
    ++warpgroup.first;
  }
}

// ---- Issuing ------------------------------------------------------------------------------------

bool Untouched(const float* sum) {
  uint32_t bits;
  std::memcpy(&bits, sum, sizeof bits);
  return bits == kUnderWaySum;
}

// The first thread that issues a product determines it.
void Begin(Warpgroup& warpgroup, Action& action, const float* sums) {
  const Product& product = action.product;
  Block& block = *current->block;
  const uint32_t steps = product.operands == Operands::kE4M3 ? 32 : 16;
  if (!product.a_in_registers) {
    AddReads(OperandOf(product.a, product.a_mn_major), kRows, steps, action.reads);
  }
  AddReads(OperandOf(product.b, product.b_mn_major), product.columns, steps, action.reads);
  for (const Range range : action.reads) ExpectLoaded(block, Shared(block, range), range.bytes);
  for (auto& [own, last] : warpgroup.under_way) {
    if (own->of_thread[Thread()] != sums) continue;
    action.sums = own;
    last = warpgroup.end();
  }
  if (action.sums == nullptr) {
    if (!warpgroup.fenced) Die("a product with sums that threads have held, without a fence");
    action.sums = std::make_shared<Sums>();
    action.first = true;
    warpgroup.under_way.emplace_back(action.sums, warpgroup.end());
  } else if (action.sums->columns != product.columns) {
    Die("products of unlike shapes with the same sums");
  }
  action.sums->columns = product.columns;
  action.delay = DrawDelay();
}

// This thread's next action, which must be the same for all.
Action& Next(Warpgroup& warpgroup, Kind kind, const Product& product, uint32_t pending,
             float* sums) {
  const uint64_t number = warpgroup.of_thread[Thread()]++;
  if (number == warpgroup.end()) {
    Action action{.kind = kind, .product = product, .pending = pending};
    switch (kind) {
      case Kind::kFence:
        warpgroup.fenced = true;
        break;
      case Kind::kProduct:
        Begin(warpgroup, action, sums);
        break;
      case Kind::kCommit:
        warpgroup.groups.push_back(number);
        break;
      case Kind::kWait: {
        auto& groups = warpgroup.groups;
        const size_t over = groups.size() - std::min<size_t>(groups.size(), pending);
        if (over == 0) break;
        action.waits_for = groups[over - 1];
        auto& under_way = warpgroup.under_way;
        for (size_t i = 0; i < under_way.size();) {
          if (under_way[i].second > action.waits_for) {
            ++i;
            continue;
          }
          action.whole.push_back(under_way[i].first);
          under_way.erase(under_way.begin() + static_cast<ptrdiff_t>(i));
          warpgroup.fenced = false;
        }
        break;
      }
    }
    warpgroup.actions.push_back(std::move(action));
  }
  Action& action = warpgroup.At(number);
  if (action.kind != kind) {
    Die("threads of a warpgroup are at %s and at %s", kNames[static_cast<int>(action.kind)],
        kNames[static_cast<int>(kind)]);
  }
  if (action.product != product || action.pending != pending) {
    Die("threads of a warpgroup do not agree about %s", kNames[static_cast<int>(kind)]);
  }
  ++action.arrived;
  return action;
}

}  // namespace

void IssueProduct(const Product& product, float* sums, const uint32_t* words) {
  const Unseen unseen;
  Warpgroup& warpgroup = Own();
  Action& action = Next(warpgroup, Kind::kProduct, product, 0, sums);
  Sums& all = *action.sums;
  const uint32_t thread = Thread();
  action.words[thread] = words;
  Release(&action.begin);
  if (!action.first) {
    if (all.of_thread[thread] != sums) Die("threads of a warpgroup do not agree about sums");
    return;
  }
  all.of_thread[thread] = sums;
  for (uint32_t i = 0; i < all.per_thread(); ++i) {
    if (product.add) all.Of(thread, i) = sums[i];
    std::memcpy(&sums[i], &kUnderWaySum, sizeof kUnderWaySum);
  }
}

void FenceProducts() {
  const Unseen unseen;
  Next(Own(), Kind::kFence, {}, 0, nullptr);
}

void CommitProducts() {
  const Unseen unseen;
  Next(Own(), Kind::kCommit, {}, 0, nullptr);
}

void WaitForProducts(uint32_t pending) {
  const Unseen unseen;
  Warpgroup& warpgroup = Own();
  const uint64_t number = warpgroup.of_thread[Thread()];
  const uint64_t ends = Next(warpgroup, Kind::kWait, {}, pending, nullptr).waits_for;
  warpgroup.wanted = std::max(warpgroup.wanted, ends);
  while (warpgroup.next < ends) SleepWhile(&warpgroup.done, warpgroup.done, "wait for products");
  for (uint64_t i = warpgroup.first; i < ends; ++i) {
    Action& action = warpgroup.At(i);
    if (action.kind != Kind::kProduct) continue;
    Acquire(&action.end);
    action.retired = true;
  }
  for (const auto& sums : warpgroup.At(number).whole) {
    const uint32_t thread = Thread();
    float* to = sums->of_thread[thread];
    for (uint32_t i = 0; i < sums->per_thread(); ++i) {
      if (!Untouched(to + i)) Die("sums were stored while products added to them");
      to[i] = sums->Of(thread, i);
    }
  }
  warpgroup.through[Thread()] = std::max(warpgroup.through[Thread()], ends);
  Forget(warpgroup);
}

void AdvanceProducts() {
  for (Block* block : RunningBlocks()) {
    for (const auto& warpgroup : block->warpgroups) {
      if (warpgroup == nullptr) continue;
      uint64_t& next = warpgroup->next;
      for (; next < warpgroup->end(); ++next) {
        Action& action = warpgroup->At(next);
        if (action.kind != Kind::kProduct) continue;
        if (action.arrived < kWarpgroupThreads) break;
        const bool put_off = action.delay == kUntilWaited;
        if (put_off && next < warpgroup->wanted) action.delay = Random() % 3;
        if (action.delay != 0) {
          if (!put_off) --action.delay;
          break;
        }
        CarryOut(*block, *warpgroup, action);
      }
    }
  }
}

bool ProductsUnderWay() {
  for (const Block* block : RunningBlocks()) {
    for (const auto& warpgroup : block->warpgroups) {
      if (warpgroup == nullptr || warpgroup->next >= warpgroup->end()) continue;
      const Action& action = warpgroup->At(warpgroup->next);
      if (action.kind == Kind::kProduct && action.arrived == kWarpgroupThreads &&
          (action.delay != kUntilWaited || warpgroup->next < warpgroup->wanted)) {
        return true;
      }
    }
  }
  return false;
}

bool ProductsRead(const Block& block, const uint8_t* shared, size_t bytes) {
  for (const auto& warpgroup : block.warpgroups) {
    if (warpgroup == nullptr) continue;
    for (const Action& action : warpgroup->actions) {
      if (action.kind != Kind::kProduct || action.retired) continue;
      for (const Range range : action.reads) {
        const uint8_t* at = Shared(block, range);
        if (at < shared + bytes && shared < at + range.bytes) return true;
      }
    }
  }
  return false;
}

// ---- Registers ----------------------------------------------------------------------------------

void SetRegisters(uint32_t registers, bool grow) {
  const Unseen unseen;
  Warpgroup& warpgroup = Own();
  if (registers % 8 != 0 || registers < 24 || registers > 256) Die("%u registers", registers);
  const uint32_t given = (64 << 10) / current->block->launch->threads / 8 * 8;
  if (grow ? registers < given : registers > given) {
    Die("from %u registers to %u", given, registers);
  }
  if (warpgroup.registers == 0) warpgroup.registers = registers;
  if (warpgroup.registers != registers) Die("warps of a warpgroup do not agree about registers");
  ++warpgroup.warps_set;
}

void ExpectNoProducts(const Block& block) {
  const uint32_t given = (64 << 10) / block.launch->threads / 8 * 8;
  uint32_t all = 0;
  for (const auto& warpgroup : block.warpgroups) {
    all += warpgroup != nullptr && warpgroup->registers != 0 ? warpgroup->registers : given;
    if (warpgroup == nullptr) continue;
    if (!warpgroup->under_way.empty()) Die("a block ends with products that nobody has waited for");
    if (warpgroup->warps_set % kWarpgroupThreads != 0) {
      Die("a block ends with registers that only some warps of a warpgroup have set");
    }
    if (warpgroup->has_actor) free_actors[block.launch->device].push_back(warpgroup->actor);
  }
  if (all > given * block.warpgroups.size()) Die("a block wants more registers than it has");
}

}  // namespace jax_ep::emulator
