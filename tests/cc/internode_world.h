// The world of internode_test.cc: ranks are threads, on nodes of one or more, and each has its own
// block. Ranks of a node store into each other's windows. Ranks of other nodes are reached over
// adverse_puts.h by the steps of protocol/internode.h, and of protocol/bundle.h for dispatches, in
// the order in which the kernels of a call take them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "adverse_puts.h"
#include "check.h"
#include "internode_draw.h"
#include "internode_ranks.h"
#include "protocol/bundle.h"
#include "protocol/host_signal_memory.h"
#include "protocol/internode.h"
#include "signals_world.h"

namespace jax_ep {

class World : private InternodeRanks {
 public:
  using InternodeRanks::InternodeRanks;

  // Whether no rank has seen anything wrong.
  bool Run(const std::string& program, int times) {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < setup_.ranks; ++r) {
      threads.emplace_back([&, r] {
        std::map<std::string, PendingCall> pending;
        for (int i = 0; i < times; ++i) {
          for (const Call& call : Parse(program)) {
            if (!right_ || !RunCall(r, call, pending[call.name])) {
              right_ = false;
              return;
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return right_;
  }

 private:
  // Waits; ends at once if any rank has seen something wrong.
  template <typename Observe>
  bool Await(Observe observe) const {
    const WaitReport alive{};
    const uint64_t seconds = rules_.all() ? 60 : 1;
    return WaitUntil(memory_, {seconds * 1000000000u, &alive},
                     [&] { return right_ ? observe() : Observation::kArrived; }) ==
               WaitStatus::kArrived &&
           right_;
  }

  bool RunCall(uint32_t rank, const Call& call, PendingCall& pending) {
    if (call.sends) {
      if (!Send(rank, call, pending)) return false;
      Bundled(call.kind) ? ForwardBundles(rank, pending) : Forward(rank, call.kind, pending);
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
    const InternodeOffsets offsets = Offsets(call.kind);
    const RegionLease lease = LeaseRegion(state, 1, setup_.depth);
    if (lease.region == kNoRegion) return false;
    for (uint32_t to = 0; to < setup_.ranks; ++to) {
      const auto* credit = At<uint64_t>(rank.block, offsets.Credit(lease.region, to));
      if ((rules_.waits_for_credits || !IsInternode(r, to)) &&
          !Await([&] { return ObserveCredit(memory_, credit, lease); })) {
        return false;
      }
    }
    for (uint32_t to = 0; to < setup_.ranks; ++to) SendTo(r, to, call.kind, lease);
    CommitSend(state, lease);
    pending = {lease.epoch, lease.region, TagOf(lease.epoch)};
    const uint32_t surplus = call.places ? kNoRegion : SurplusRegion(state, setup_.depth);
    if (surplus == kNoRegion) return true;
    ReturnAll(r, call.kind, surplus, state.last_epoch[surplus]);
    CommitRecv(state, {0, 0, surplus});
    return true;
  }

  void SendTo(uint32_t r, uint32_t to, uint32_t kind, const RegionLease& lease) {
    uint8_t* base = ranks_[r]->windows[to];
    const InternodeOffsets offsets = Offsets(kind);
    const uint32_t part = PartAt(r, to);
    const uint64_t epoch = lease.epoch;
    const std::vector<int64_t> tokens = TokensOf(epoch, kind, r, to);
    const auto slots = static_cast<int64_t>(tokens.size()), messages = MessagesOf(epoch, kind);
    const ChunkRule& rule = kind == 0 ? kDispatchChunks : kCombineChunks;
    for (int64_t cell = 0; cell < CountsOf(epoch, kind); ++cell) {
      memory_.Post(At<CountCell>(base, offsets.Counts(lease.region, part)) + cell,
                   {{static_cast<int32_t>(slots), TagOf(epoch), 0}, CellStamp(epoch)});
    }
    for (int64_t chunk = 0; chunk < rule.Count(messages); ++chunk) {
      const int64_t first = std::min(chunk * rule.Tokens(messages), slots);
      const int64_t count = std::min(rule.Tokens(messages), slots - first);
      for (int64_t slot = first; slot < first + count; ++slot) {
        auto* words =
            At<uint64_t>(base, offsets.Messages(lease.region, part) + slot * kMessageBytes);
        for (uint64_t i = 0; i < kMessageBytes / 8; ++i) {
          words[i] = WordOf(epoch, kind, r, to, tokens[static_cast<size_t>(slot)], i);
        }
      }
      // Combines do not announce chunks without slots, and need not announce where one starts.
      if (kind == 1 && count == 0) continue;
      const auto start = static_cast<uint32_t>(kind == 1 ? 0xABCD : first);
      PublishFlag(memory_, At<FlagCell>(base, offsets.Flags(lease.region, part)) + chunk,
                  {epoch, start, static_cast<uint16_t>(count), TagOf(epoch)});
    }
  }

  void Forward(uint32_t r, uint32_t kind, const PendingCall& call) {
    Rank& rank = *ranks_[r];
    const InternodeOffsets offsets = Offsets(kind);
    const InternodeShape shape = ShapeOf(call.epoch, kind);
    uint8_t* staged = rank.block + internode_.staged;
    for (uint32_t to = 0; to < setup_.ranks; ++to) {
      if (!IsInternode(r, to)) continue;
      const auto* flags = At<FlagCell>(staged, offsets.Flags(call.region, to));
      int64_t slots = 0;
      for (uint32_t i = 0; i < 3; ++i) {
        slots = std::max(slots, SlotsEnd(memory_, flags, shape, call.epoch, i, 3));
      }
      CHECK(slots == SlotsOf(call.epoch, kind, r, to));
      for (uint32_t share = 0; share < kInternodeShares; ++share) {
        ForwardShare(*rank.lanes[share], offsets, staged, r, to, shape, call, slots, share);
      }
    }
  }

  void ForwardBundles(uint32_t r, const PendingCall& call) {
    Rank& rank = *ranks_[r];
    const InternodeOffsets offsets = Offsets(0);
    const BundleOffsets bundles = Bundles();
    const InternodeShape shape = ShapeOf(call.epoch, 0);
    uint8_t* staged = rank.block + internode_.staged;
    const int64_t n = MessagesOf(call.epoch, 0);
    // One entry per rank, in order.
    std::vector<int32_t> slot_of(static_cast<size_t>(n * setup_.ranks), -1);
    for (uint32_t to = 0; to < setup_.ranks; ++to) {
      const std::vector<int64_t> tokens = TokensOf(call.epoch, 0, r, to);
      for (size_t slot = 0; slot < tokens.size(); ++slot) {
        slot_of[static_cast<size_t>(tokens[slot]) * setup_.ranks + to] =
            static_cast<int32_t>(to * n) + static_cast<int32_t>(slot);
      }
    }
    const TokenSlots slots{slot_of.data(), n, setup_.ranks};
    for (uint32_t to = 0; to < setup_.ranks; ++to) {
      if (!map_.Relays(r, to)) continue;
      const uint32_t node = map_.node_of[to];
      const BundleSide& side = bundle_.staged;
      int64_t count = 0;
      for (int64_t token = 0; token < n; ++token) {
        if (!GoesTo(map_, setup_.ranks, slots, token, node)) continue;
        auto* row = At<int32_t>(rank.block, bundles.Row(side, call.region, node, count));
        const int64_t from = WriteRow(map_, offsets, shape, slots, token, node, call.region, row);
        std::memcpy(rank.block + bundles.Messages(side, call.region, node) + count * kMessageBytes,
                    staged + from, kMessageBytes);
        ++count;
      }
      *At<int64_t>(rank.block, bundles.Table(side, call.region, node)) = count;
      for (uint32_t share = 0; share < kInternodeShares; ++share) {
        ForwardBundle(*rank.lanes[share], offsets, bundles, rank.block, staged, r, to, shape, call,
                      count, share);
      }
    }
  }

  void Relay(uint32_t r, uint32_t source, const PendingCall& call) {
    Rank& rank = *ranks_[r];
    const InternodeOffsets offsets = Offsets(0);
    const BundleOffsets bundles = Bundles();
    const InternodeShape shape = ShapeOf(call.epoch, 0);
    const uint32_t from = map_.node_of[source], here = map_.node_of[r];
    const BundleSide& side = bundle_.inbox;
    const int64_t count = *At<int64_t>(rank.block, bundles.Table(side, call.region, from));
    for (uint32_t local_rank = 0; local_rank < map_.size; ++local_rank) {
      uint8_t* window = rank.windows[map_.RankAt(here, local_rank)];
      for (int64_t i = 0; i < count; ++i) {
        const int32_t slot =
            At<int32_t>(rank.block, bundles.Row(side, call.region, from, i))[local_rank];
        if (slot < 0) continue;
        const auto* message =
            At<uint64_t>(rank.block, bundles.Messages(side, call.region, from) + i * kMessageBytes);
        // Word by word, as ThreadSanitizer does not see a memcpy of constant size.
        std::copy_n(
            message, kMessageBytes / 8,
            At<uint64_t>(window, offsets.Messages(call.region, source) + slot * kMessageBytes));
      }
      DeliverCells(memory_, At<FlagCell>(window, offsets.Flags(call.region, source)),
                   At<FlagCell>(rank.block, bundles.Flags(call.region, from, local_rank)),
                   shape.flags, 0, 1);
      DeliverCells(memory_, At<CountCell>(window, offsets.Counts(call.region, source)),
                   At<CountCell>(rank.block, bundles.Counts(call.region, from, local_rank)),
                   shape.counts, 0, 1);
    }
  }

  bool AwaitRegion(uint32_t r, uint32_t kind, uint32_t source, uint32_t region, uint64_t epoch) {
    const InternodeOffsets offsets = Offsets(kind);
    for (uint32_t share = 0; share < kInternodeShares; ++share) {
      const auto* arrived = At<uint64_t>(ranks_[r]->block, offsets.Arrived(region, source, share));
      if (!Await([&] { return ObserveShare(memory_, arrived, epoch); })) return false;
    }
    ranks_[r]->lanes[kInternodeShares]->Settle();
    return true;
  }

  bool Arrive(uint32_t r, uint32_t kind, const PendingCall& call) {
    const InternodeOffsets offsets = Offsets(kind);
    const InternodeShape shape = ShapeOf(call.epoch, kind);
    uint8_t* own = ranks_[r]->block;
    for (uint32_t source = 0; source < setup_.ranks; ++source) {
      if (!Hears(r, source, kind) || !rules_.inbox) continue;
      if (!AwaitRegion(r, kind, source, call.region, call.epoch)) return false;
      if (Bundled(kind)) {
        Relay(r, source, call);
        continue;
      }
      for (uint32_t i = 0; i < 2; ++i) {
        DeliverCells(memory_, At<FlagCell>(own, offsets.Flags(call.region, source)),
                     At<FlagCell>(own, offsets.InboxFlags(call.region, source)), shape.flags, i, 2);
        DeliverCells(memory_, At<CountCell>(own, offsets.Counts(call.region, source)),
                     At<CountCell>(own, offsets.InboxCounts(call.region, source)), shape.counts, i,
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
    CommitRecv(ranks_[r]->states[call.kind], {0, 0, pending.region});
    return true;
  }

  bool PlaceFrom(uint32_t r, uint32_t source, uint32_t kind, const PendingCall& call) {
    uint8_t* own = ranks_[r]->block;
    const InternodeOffsets offsets = Offsets(kind);
    const uint64_t epoch = call.epoch;
    const std::vector<int64_t> tokens = TokensOf(epoch, kind, source, r);
    const auto slots = static_cast<int64_t>(tokens.size()), messages = MessagesOf(epoch, kind);
    const ChunkRule& rule = kind == 0 ? kDispatchChunks : kCombineChunks;
    for (int64_t cell = 0; cell < CountsOf(epoch, kind); ++cell) {
      CountCell seen{};
      const auto* from = At<CountCell>(own, offsets.Counts(call.region, source)) + cell;
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
      const auto* cell = At<FlagCell>(own, offsets.Flags(call.region, source)) + chunk;
      if (!Await([&] { return ObserveFlag(memory_, cell, epoch, TagOf(epoch), flag); }) ||
          flag.count != count) {
        return false;
      }
      for (int64_t slot = first; slot < first + count; ++slot) {
        const auto* words =
            At<uint64_t>(own, offsets.Messages(call.region, source) + slot * kMessageBytes);
        for (uint64_t i = 0; i < kMessageBytes / 8; ++i) {
          const int64_t token = tokens[static_cast<size_t>(slot)];
          if (words[i] != WordOf(epoch, kind, source, r, token, i)) return false;
        }
      }
    }
    return true;
  }

  void ReturnAll(uint32_t r, uint32_t kind, uint32_t region, uint64_t epoch) {
    const InternodeOffsets offsets = Offsets(kind);
    for (uint32_t source = 0; source < setup_.ranks; ++source) {
      uint8_t* base = ranks_[r]->windows[source];
      ReturnCredit(memory_, At<uint64_t>(base, offsets.Credit(region, PartAt(r, source))), epoch);
    }
  }

  bool ReturnDue(uint32_t r, uint32_t kind) {
    Rank& rank = *ranks_[r];
    const InternodeOffsets offsets = Offsets(kind);
    for (uint32_t source = 0; source < setup_.ranks; ++source) {
      for (uint32_t region = 0; region < setup_.depth && IsInternode(r, source); ++region) {
        const uint64_t due = memory_.Peek(
            At<uint64_t>(rank.block + internode_.staged, offsets.Credit(region, source)));
        auto* returned = At<uint64_t>(rank.block, offsets.Returned(region, source));
        if (memory_.Peek(returned) == due) continue;
        if (!Hears(r, source, kind)) {
          if (rules_.orders) rank.lanes[kInternodeShares]->Fence();
        } else if (rules_.observes && !AwaitRegion(r, kind, source, region, due)) {
          return false;
        }
        memory_.Post(returned, due);
        ReturnInternodeCredit(*rank.lanes[kInternodeShares], memory_, source,
                              offsets.Credit(region, r), due);
      }
    }
    return true;
  }

  const HostSignalMemory memory_{};
  std::atomic<bool> right_ = true;  // whether all ranks have seen only right data so far
};

}  // namespace jax_ep
