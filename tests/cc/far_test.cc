// protocol/far.h between ranks that are threads, each on a node of its own, over adverse_puts.h.
// Without any one of its rules what arrives must be wrong.
#include "protocol/far.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "adverse_puts.h"
#include "check.h"
#include "protocol/host_signal_memory.h"

namespace jax_ep {
namespace {

constexpr uint32_t kRanks = 3, kDepth = 2, kChunks = 4, kSlots = 4;
constexpr uint16_t kTag = 77;

// All that one source sends to one destination in a call.
struct Share {
  uint64_t messages[kChunks][kSlots];
  FlagCell flags[kChunks];
  CountCell count;
};

struct Cells {
  FlagCell flags[kChunks];
  CountCell count;
};

struct Window {
  Share shares[kDepth][kRanks];  // by source
  Cells inbox[kDepth][kRanks];
  uint64_t arrived[kDepth][kRanks];
  uint64_t credits[kDepth][kRanks];  // by destination
};

struct Rules {
  bool fences = true;
  bool waits_for_credits = true;
  bool inbox = true;            // else flags are put where they are read
  bool observes_always = true;  // else not where nothing is needed
};

class World {
 public:
  World(const Rules& rules, uint64_t first_epoch, uint64_t seed)
      : rules_(rules), first_epoch_(first_epoch), seed_(seed) {
    std::vector<uint8_t*> windows;
    for (uint32_t r = 0; r < kRanks; ++r) {
      windows_.push_back(std::make_unique<Window>());
      staged_.push_back(std::make_unique<Window>());
      Start(*windows_[r]);
      windows.push_back(reinterpret_cast<uint8_t*>(windows_[r].get()));
    }
    puts_ = std::make_unique<AdversePuts>(std::move(windows), seed);
  }

  // How many ranks have met something wrong.
  int Run(uint64_t calls) {
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        AdversePuts::Lane lane(*puts_, rules_.fences);
        Random random(seed_ * kRanks + rank);
        // In halves, each placed after the next one was sent: what arrives of others then says
        // little of what they have read, which is what credits are for.
        for (uint64_t call = 0; call < calls && wrong == 0; ++call) {
          const uint64_t epoch = first_epoch_ + call;
          if (!SendAll(lane, rank, epoch, random) ||
              (call > 0 && !PlaceAll(lane, rank, epoch - 1))) {
            ++wrong;
          }
        }
        // Lanes are named by the pieces that are under way.
        done_.fetch_add(1);
        while (done_.load() < kRanks) std::this_thread::yield();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return wrong;
  }

 private:
  void Start(Window& window) const {
    const uint64_t mark = StartMark(first_epoch_);
    for (uint32_t region = 0; region < kDepth; ++region) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        for (FlagCell& flag : window.shares[region][rank].flags) flag = {mark, 0, 0, 0};
        window.arrived[region][rank] = window.credits[region][rank] = mark;
      }
    }
  }

  static int64_t Offset(const Window& window, const void* place) {
    return static_cast<const uint8_t*>(place) - reinterpret_cast<const uint8_t*>(&window);
  }

  static uint64_t Value(uint64_t epoch, uint32_t source, uint32_t rank, uint32_t slot) {
    return Random(epoch * 64 + source * 32 + rank * 16 + slot).Bits();
  }

  // Not every call is needed by its destination.
  static bool Needed(uint64_t epoch, uint32_t rank) { return Random(epoch * 4 + rank).Bits() % 4; }

  template <typename Observe>
  bool Await(Observe observe) const {
    const WaitReport alive{};
    const bool mutant =
        !rules_.fences || !rules_.waits_for_credits || !rules_.inbox || !rules_.observes_always;
    const uint64_t seconds = mutant ? 1 : 60;
    return WaitUntil(memory_, {seconds * 1000000000u, &alive}, observe) == WaitStatus::kArrived;
  }

  bool SendAll(const AdversePuts::Lane& lane, uint32_t rank, uint64_t epoch, Random& random) {
    for (uint32_t step = 1; step < kRanks; ++step) {
      if (!Send(lane, rank, (rank + step) % kRanks, epoch)) return false;
      if (random.OneIn(8)) std::this_thread::yield();
    }
    return true;
  }

  bool PlaceAll(const AdversePuts::Lane& lane, uint32_t rank, uint64_t epoch) {
    for (uint32_t step = 1; step < kRanks; ++step) {
      const uint32_t source = (rank + step) % kRanks;
      if (!Place(rank, source, epoch)) return false;
      const uint32_t region = RegionOf(epoch, kDepth);
      ReturnFarCredit(lane, memory_, source,
                      Offset(*windows_[source], &windows_[source]->credits[region][rank]), epoch);
    }
    return true;
  }

  bool Send(const AdversePuts::Lane& lane, uint32_t rank, uint32_t to, uint64_t epoch) {
    const uint32_t region = RegionOf(epoch, kDepth);
    Window& own = *windows_[rank];
    const bool first = epoch - first_epoch_ < kDepth;
    const RegionLease lease{epoch, first ? StartMark(first_epoch_) : epoch - kDepth, region};
    if (rules_.waits_for_credits &&
        !Await([&] { return ObserveCredit(memory_, &own.credits[region][to], lease); })) {
      return false;
    }
    // By destination in the source's own memory.
    Share& staged = staged_[rank]->shares[region][to];
    for (uint32_t slot = 0; slot < kChunks * kSlots; ++slot) {
      staged.messages[slot / kSlots][slot % kSlots] = Value(epoch, rank, to, slot);
    }
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      staged.flags[chunk] = {epoch, chunk * kSlots, kSlots, kTag};
    }
    staged.count = {{kChunks * kSlots, kTag, 0}, CellStamp(epoch)};
    const Window& there = *windows_[to];
    const Share& share = there.shares[region][rank];
    const Cells& inbox = there.inbox[region][rank];
    const FarPart parts[] = {
        {Offset(there, share.messages), staged.messages, sizeof(staged.messages)},
        {Offset(there, rules_.inbox ? inbox.flags : share.flags), staged.flags,
         sizeof(staged.flags)},
        {Offset(there, &inbox.count), &staged.count, sizeof(staged.count)},
    };
    ForwardRegion(lane, to, parts, 3, Offset(there, &there.arrived[region][rank]), epoch);
    return true;
  }

  bool Place(uint32_t rank, uint32_t source, uint64_t epoch) {
    const uint32_t region = RegionOf(epoch, kDepth);
    Window& own = *windows_[rank];
    Share& share = own.shares[region][source];
    const Cells& inbox = own.inbox[region][source];
    const bool needed = Needed(epoch, rank);
    if (!needed && !rules_.observes_always) return true;
    if (rules_.inbox || !needed) {
      const uint64_t* arrived = &own.arrived[region][source];
      if (!Await([&] { return ObserveRegion(memory_, arrived, epoch); })) return false;
    }
    if (!needed) return true;
    if (rules_.inbox) {
      DeliverCells(memory_, share.flags, inbox.flags, kChunks);
      DeliverCells(memory_, &share.count, &inbox.count, 1);
      CountCell count{};
      if (ObserveCounts(memory_, &share.count, epoch, count) != Observation::kArrived ||
          count.counts[0] != kChunks * kSlots) {
        return false;
      }
    }
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      FlagCell flag{};
      const FlagCell* cell = &share.flags[chunk];
      if (!Await([&] { return ObserveFlag(memory_, cell, epoch, kTag, flag); })) return false;
      for (uint32_t slot = flag.first_slot; slot < flag.first_slot + flag.count; ++slot) {
        if (slot >= kChunks * kSlots) return false;
        if (share.messages[slot / kSlots][slot % kSlots] != Value(epoch, source, rank, slot)) {
          return false;
        }
      }
    }
    return true;
  }

  const HostSignalMemory memory_{};
  const Rules rules_;
  const uint64_t first_epoch_, seed_;
  std::vector<std::unique_ptr<Window>> windows_, staged_;
  std::atomic<uint32_t> done_ = 0;
  std::unique_ptr<AdversePuts> puts_;  // ends first
};

void Right() {
  for (const uint64_t first_epoch : {kFirstEpoch, UINT64_MAX - 20}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CurrentCase() = "seed " + std::to_string(seed);
      CHECK(World({}, first_epoch, seed).Run(200) == 0);
    }
  }
}

// Data races are what these are about, so ThreadSanitizer has no part in them.
void Wrong(const char* name, const Rules& rules) {
#if !defined(__SANITIZE_THREAD__)
  CurrentCase() = name;
  bool found = false;
  for (uint64_t seed = 0; seed < 20 && !found; ++seed) {
    found = World(rules, kFirstEpoch, seed).Run(400) > 0;
  }
  CHECK(found);
#else
  static_cast<void>(name), static_cast<void>(rules);
#endif
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::Right();
  jax_ep::Wrong("no fence", {.fences = false});
  jax_ep::Wrong("no credits", {.waits_for_credits = false});
  jax_ep::Wrong("flags put in place", {.inbox = false});
  jax_ep::Wrong("credits for what has not arrived", {.observes_always = false});
  return 0;
}
