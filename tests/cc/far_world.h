// The world of far_test.cc: ranks that are threads, on nodes of one or more, each with a block of
// its own. Ranks of a node store into each other's windows; over adverse_puts.h ranks of others are
// reached by the steps of protocol/far.h, in the order in which the kernels of a call take them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "adverse_puts.h"
#include "check.h"
#include "protocol/far.h"
#include "protocol/host_signal_memory.h"
#include "signals_world.h"

namespace jax_ep {

inline constexpr int64_t kMost = 70, kHidden = 16, kMessageBytes = 32, kExperts = 4;

struct Rules {
  bool fences = true;
  bool settles = true;
  bool waits_for_credits = true;
  bool inbox = true;     // else flags are put where they are read
  bool observes = true;  // else credits go back for what has not arrived

  bool all() const { return fences && settles && waits_for_credits && inbox && observes; }
};

struct Setup {
  uint32_t ranks, node, depth;
  uint64_t first_epoch, seed;
};

class World {
 public:
  World(const Setup& setup, const Rules& rules)
      : setup_(setup),
        rules_(rules),
        sizes_{.ranks = setup.ranks,
               .local_experts = kExperts,
               .dispatch_tokens = kMost,
               .combine_tokens = kMost,
               .top_k = 1,
               .hidden = kHidden,
               .dispatch_message_bytes = kMessageBytes,
               .combine_message_bytes = kMessageBytes,
               .turns = 1,
               .depth = setup.depth},
        window_(WindowLayout::Of(sizes_)),
        far_(FarLayout::Of(window_, sizes_)) {
    std::vector<uint8_t*> blocks;
    for (uint32_t r = 0; r < setup.ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>());
      Rank& rank = *ranks_.back();
      // Aligned for cells.
      rank.memory.resize(static_cast<size_t>(far_.bytes / 16));
      rank.block = reinterpret_cast<uint8_t*>(rank.memory.data());
      Start(rank);
      blocks.push_back(rank.block);
    }
    puts_ = std::make_unique<AdversePuts>(blocks, setup.seed);
    for (uint32_t r = 0; r < setup.ranks; ++r) {
      for (uint32_t i = 0; i <= kFarShares; ++i) {
        ranks_[r]->lanes.push_back(
            std::make_unique<AdversePuts::Lane>(*puts_, r, rules.fences, rules.settles));
      }
      for (uint32_t to = 0; to < setup.ranks; ++to) {
        ranks_[r]->windows.push_back(Far(r, to) ? blocks[r] + far_.staged : blocks[to]);
      }
    }
  }

  // Whether nobody has met anything wrong.
  bool Run(const std::string& program, int times) {
    std::atomic<bool> right = true;
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < setup_.ranks; ++r) {
      threads.emplace_back([&, r] {
        std::map<std::string, PendingCall> pending;
        for (int i = 0; i < times; ++i) {
          for (const Call& call : Parse(program)) {
            if (!right || !RunCall(r, call, pending[call.name])) {
              right = false;
              return;
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return right;
  }

 private:
  struct alignas(16) Line {
    uint64_t words[2];
  };
  struct Rank {
    std::vector<Line> memory;
    uint8_t* block;
    std::vector<uint8_t*> windows;                          // as a kernel has them
    std::vector<std::unique_ptr<AdversePuts::Lane>> lanes;  // of shares, and of credits
    CallState states[kBufferGroups];
  };
  static_assert(sizeof(Line) == 16);

  void Start(Rank& rank) {
    const uint64_t mark = StartMark(setup_.first_epoch);
    for (int k = 0; k < kBufferGroups; ++k) {
      rank.states[k] = StartState(setup_.first_epoch);
      const FarPlaces places = Places(k);
      for (uint32_t region = 0; region < setup_.depth; ++region) {
        for (uint32_t peer = 0; peer < setup_.ranks; ++peer) {
          for (uint8_t* base : {rank.block, rank.block + far_.staged}) {
            for (int64_t i = 0; i < places.window.flags_per_source; ++i) {
              At<FlagCell>(base, places.Flags(region, peer))[i] = {mark, 0, 0, 0};
            }
            *At<uint64_t>(base, places.Credit(region, peer)) = mark;
          }
          for (uint32_t share = 0; share < kFarShares; ++share) {
            *At<uint64_t>(rank.block, places.Arrived(region, peer, share)) = mark;
          }
          *At<uint64_t>(rank.block, places.Returned(region, peer)) = mark;
        }
      }
    }
  }

  template <typename T>
  static T* At(uint8_t* base, int64_t at) {
    return reinterpret_cast<T*>(base + at);
  }
  FarPlaces Places(uint32_t kind) const {
    return {window_.groups[kind], rules_.inbox ? far_.groups[kind] : in_place_[kind], setup_.ranks};
  }
  bool Far(uint32_t a, uint32_t b) const { return a / setup_.node != b / setup_.node; }
  uint32_t PartAt(uint32_t rank, uint32_t to) const { return Far(rank, to) ? to : rank; }

  // ---- What every rank knows of a call ----

  static uint64_t Bits(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t to, uint64_t salt) {
    return Mix(Mix(epoch * 2 + kind) + source * 8 + to + salt * 64);
  }
  static int64_t Messages(uint64_t epoch, uint32_t kind) {
    return static_cast<int64_t>(Bits(epoch, kind, 0, 0, 99) % (kMost + 1));
  }
  static int64_t Slots(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t to) {
    const auto most = static_cast<uint64_t>(Messages(epoch, kind));
    const uint64_t bits = Bits(epoch, kind, source, to, 98);
    return bits % 4 == 0 ? 0 : static_cast<int64_t>(bits / 4 % (most + 1));
  }
  // Not dispatches along a route, nor combines.
  static int64_t CountsOf(uint64_t epoch, uint32_t kind) {
    return kind == 0 && Bits(epoch, kind, 0, 0, 97) % 3 != 0 ? CountCells(kExperts) : 0;
  }
  static FarShape ShapeOf(uint64_t epoch, uint32_t kind) {
    const int64_t messages = Messages(epoch, kind);
    return kind == 0 ? FarShape::OfDispatch(messages, kMessageBytes, CountsOf(epoch, kind))
                     : FarShape::OfCombine(messages, kMessageBytes, kHidden);
  }
  static uint16_t Tag(uint64_t epoch) { return static_cast<uint16_t>(epoch * 7); }

  template <typename Observe>
  bool Await(Observe observe) const {
    const WaitReport alive{};
    const uint64_t seconds = rules_.all() ? 60 : 1;
    return WaitUntil(memory_, {seconds * 1000000000u, &alive}, observe) == WaitStatus::kArrived;
  }

  bool RunCall(uint32_t rank, const Call& call, PendingCall& pending) {
    if (call.sends) {
      if (!Send(rank, call, pending)) return false;
      Forward(rank, call.kind, pending);
      if (!ReturnDue(rank, call.kind)) return false;
    }
    if (!call.places) return true;
    if (ResumeRegion(ranks_[rank]->states[call.kind], pending, setup_.depth).region == kNoRegion) {
      return false;
    }
    return Arrive(rank, call.kind, pending) && Place(rank, call, pending) &&
           ReturnDue(rank, call.kind);
  }

  // ---- As the kernels do ----

  bool Send(uint32_t r, const Call& call, PendingCall& pending) {
    Rank& rank = *ranks_[r];
    CallState& state = rank.states[call.kind];
    const FarPlaces places = Places(call.kind);
    const RegionLease lease = LeaseRegion(state, 1, setup_.depth);
    if (lease.region == kNoRegion) return false;
    for (uint32_t to = 0; to < setup_.ranks; ++to) {
      const auto* credit = At<uint64_t>(rank.block, places.Credit(lease.region, to));
      if ((rules_.waits_for_credits || !Far(r, to)) &&
          !Await([&] { return ObserveCredit(memory_, credit, lease); })) {
        return false;
      }
    }
    for (uint32_t to = 0; to < setup_.ranks; ++to) SendTo(r, to, call.kind, lease);
    CommitSend(state, lease);
    pending = {lease.epoch, lease.region, Tag(lease.epoch)};
    const uint32_t surplus = call.places ? kNoRegion : SurplusRegion(state, setup_.depth);
    if (surplus == kNoRegion) return true;
    ReturnAll(r, call.kind, surplus, state.last_epoch[surplus]);
    CommitPlace(state, {0, 0, surplus});
    return true;
  }

  void SendTo(uint32_t r, uint32_t to, uint32_t kind, const RegionLease& lease) {
    uint8_t* base = ranks_[r]->windows[to];
    const FarPlaces places = Places(kind);
    const uint32_t part = PartAt(r, to);
    const uint64_t epoch = lease.epoch;
    const int64_t messages = Messages(epoch, kind), slots = Slots(epoch, kind, r, to);
    const ChunkRule& rule = kind == 0 ? kDispatchChunks : kCombineChunks;
    for (int64_t cell = 0; cell < CountsOf(epoch, kind); ++cell) {
      memory_.Post(At<CountCell>(base, places.Counts(lease.region, part)) + cell,
                   {{static_cast<int32_t>(slots), Tag(epoch), 0}, CellStamp(epoch)});
    }
    for (int64_t chunk = 0; chunk < rule.Count(messages); ++chunk) {
      const int64_t first = std::min(chunk * rule.Tokens(messages), slots);
      const int64_t count = std::min(rule.Tokens(messages), slots - first);
      for (int64_t slot = first; slot < first + count; ++slot) {
        auto* words =
            At<uint64_t>(base, places.Messages(lease.region, part) + slot * kMessageBytes);
        for (uint64_t i = 0; i < kMessageBytes / 8; ++i)
          words[i] = Bits(epoch, kind, r, to, slot * 8 + i);
      }
      // Combines announce no chunk without slots, and may say other things of it than its start.
      if (kind == 1 && count == 0) continue;
      const auto start = static_cast<uint32_t>(kind == 1 ? 0xABCD : first);
      PublishFlag(memory_, At<FlagCell>(base, places.Flags(lease.region, part)) + chunk,
                  {epoch, start, static_cast<uint16_t>(count), Tag(epoch)});
    }
  }

  void Forward(uint32_t r, uint32_t kind, const PendingCall& call) {
    Rank& rank = *ranks_[r];
    const FarPlaces places = Places(kind);
    const FarShape shape = ShapeOf(call.epoch, kind);
    uint8_t* staged = rank.block + far_.staged;
    for (uint32_t to = 0; to < setup_.ranks; ++to) {
      if (!Far(r, to)) continue;
      const auto* flags = At<FlagCell>(staged, places.Flags(call.region, to));
      int64_t slots = 0;
      for (uint32_t i = 0; i < 3; ++i) {
        slots = std::max(slots, SlotsEnd(memory_, flags, shape, call.epoch, i, 3));
      }
      CHECK(slots == Slots(call.epoch, kind, r, to));
      for (uint32_t share = 0; share < kFarShares; ++share) {
        ForwardShare(*rank.lanes[share], places, staged, r, to, shape, call, slots, share);
      }
    }
  }

  bool AwaitRegion(uint32_t r, uint32_t kind, uint32_t source, uint32_t region, uint64_t epoch) {
    const FarPlaces places = Places(kind);
    for (uint32_t share = 0; share < kFarShares; ++share) {
      const auto* arrived = At<uint64_t>(ranks_[r]->block, places.Arrived(region, source, share));
      if (!Await([&] { return ObserveShare(memory_, arrived, epoch); })) return false;
    }
    ranks_[r]->lanes[kFarShares]->Settle();
    return true;
  }

  bool Arrive(uint32_t r, uint32_t kind, const PendingCall& call) {
    const FarPlaces places = Places(kind);
    const FarShape shape = ShapeOf(call.epoch, kind);
    uint8_t* own = ranks_[r]->block;
    for (uint32_t source = 0; source < setup_.ranks; ++source) {
      if (!Far(r, source) || !rules_.inbox) continue;
      if (!AwaitRegion(r, kind, source, call.region, call.epoch)) return false;
      for (uint32_t i = 0; i < 2; ++i) {
        DeliverCells(memory_, At<FlagCell>(own, places.Flags(call.region, source)),
                     At<FlagCell>(own, places.InboxFlags(call.region, source)), shape.flags, i, 2);
        DeliverCells(memory_, At<CountCell>(own, places.Counts(call.region, source)),
                     At<CountCell>(own, places.InboxCounts(call.region, source)), shape.counts, i,
                     2);
      }
    }
    return true;
  }

  bool Place(uint32_t r, const Call& call, const PendingCall& pending) {
    for (uint32_t source = 0; source < setup_.ranks && call.needs; ++source) {
      if (!PlaceFrom(r, source, call.kind, pending)) return false;
    }
    ReturnAll(r, call.kind, pending.region, pending.epoch);
    CommitPlace(ranks_[r]->states[call.kind], {0, 0, pending.region});
    return true;
  }

  bool PlaceFrom(uint32_t r, uint32_t source, uint32_t kind, const PendingCall& call) {
    uint8_t* own = ranks_[r]->block;
    const FarPlaces places = Places(kind);
    const uint64_t epoch = call.epoch;
    const int64_t messages = Messages(epoch, kind), slots = Slots(epoch, kind, source, r);
    const ChunkRule& rule = kind == 0 ? kDispatchChunks : kCombineChunks;
    for (int64_t cell = 0; cell < CountsOf(epoch, kind); ++cell) {
      CountCell seen{};
      const auto* from = At<CountCell>(own, places.Counts(call.region, source)) + cell;
      if (!Await([&] { return ObserveCounts(memory_, from, epoch, seen); }) ||
          seen.counts[0] != slots) {
        return false;
      }
    }
    for (int64_t chunk = 0; chunk < rule.Count(messages); ++chunk) {
      const int64_t first = std::min(chunk * rule.Tokens(messages), slots);
      const int64_t count = std::min(rule.Tokens(messages), slots - first);
      if (kind == 1 && count == 0) continue;
      FlagCell flag{};
      const auto* cell = At<FlagCell>(own, places.Flags(call.region, source)) + chunk;
      if (!Await([&] { return ObserveFlag(memory_, cell, epoch, Tag(epoch), flag); }) ||
          flag.count != count) {
        return false;
      }
      for (int64_t slot = first; slot < first + count; ++slot) {
        const auto* words =
            At<uint64_t>(own, places.Messages(call.region, source) + slot * kMessageBytes);
        for (uint64_t i = 0; i < kMessageBytes / 8; ++i) {
          if (words[i] != Bits(epoch, kind, source, r, slot * 8 + i)) return false;
        }
      }
    }
    return true;
  }

  void ReturnAll(uint32_t r, uint32_t kind, uint32_t region, uint64_t epoch) {
    const FarPlaces places = Places(kind);
    for (uint32_t source = 0; source < setup_.ranks; ++source) {
      uint8_t* base = ranks_[r]->windows[source];
      ReturnCredit(memory_, At<uint64_t>(base, places.Credit(region, PartAt(r, source))), epoch);
    }
  }

  bool ReturnDue(uint32_t r, uint32_t kind) {
    Rank& rank = *ranks_[r];
    const FarPlaces places = Places(kind);
    for (uint32_t source = 0; source < setup_.ranks; ++source) {
      for (uint32_t region = 0; region < setup_.depth && Far(r, source); ++region) {
        const uint64_t due =
            memory_.Peek(At<uint64_t>(rank.block + far_.staged, places.Credit(region, source)));
        auto* returned = At<uint64_t>(rank.block, places.Returned(region, source));
        if (memory_.Peek(returned) == due) continue;
        if (rules_.observes && !AwaitRegion(r, kind, source, region, due)) return false;
        memory_.Post(returned, due);
        ReturnFarCredit(*rank.lanes[kFarShares], memory_, source, places.Credit(region, r), due);
      }
    }
    return true;
  }

  const HostSignalMemory memory_{};
  const Setup setup_;
  const Rules rules_;
  const WindowSizes sizes_;
  const WindowLayout window_;
  const FarLayout far_;
  // Of the rule that flags take no inbox.
  const FarGroupLayout in_place_[kBufferGroups] = {InPlace(0), InPlace(1)};
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<AdversePuts> puts_;  // ends first

  FarGroupLayout InPlace(int kind) const {
    FarGroupLayout group = far_.groups[kind];
    group.flags = window_.groups[kind].flags;
    group.counts = window_.groups[kind].counts;
    return group;
  }
};

}  // namespace jax_ep
