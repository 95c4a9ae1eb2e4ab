// The ranks of internode_world.h, on nodes of one or more, and the layout of their blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "adverse_puts.h"
#include "internode_draw.h"
#include "protocol/bundle.h"
#include "protocol/internode.h"

namespace jax_ep {

class InternodeRanks {
 public:
  InternodeRanks(const Setup& setup, const Rules& rules)
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
               .low_latency_dispatch_tokens = 0,  // internode calls have no messages in cells
               .low_latency_message_bytes = kMessageBytes,
               .turns = 1,
               .depth = setup.depth},
        window_(WindowLayout::Of(sizes_)),
        internode_(InternodeLayout::Of(window_, sizes_)),
        map_(MapOf(setup)),
        bundle_(BundleLayout::Of(internode_, window_, sizes_, map_.nodes, map_.size)) {
    std::vector<uint8_t*> blocks;
    for (uint32_t r = 0; r < setup.ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>());
      Rank& rank = *ranks_.back();
      // Aligned for cells.
      rank.memory.resize(static_cast<size_t>(bundle_.bytes / 16));
      rank.block = reinterpret_cast<uint8_t*>(rank.memory.data());
      Start(rank);
      blocks.push_back(rank.block);
    }
    puts_ = std::make_unique<AdversePuts>(blocks, setup.seed);
    for (uint32_t r = 0; r < setup.ranks; ++r) {
      for (uint32_t i = 0; i <= kInternodeShares; ++i) {
        ranks_[r]->lanes.push_back(
            std::make_unique<AdversePuts::Lane>(*puts_, r, rules.fences, rules.settles));
      }
      for (uint32_t to = 0; to < setup.ranks; ++to) {
        ranks_[r]->windows.push_back(IsInternode(r, to) ? blocks[r] + internode_.staged
                                                        : blocks[to]);
      }
    }
  }

 protected:
  struct alignas(16) Line {
    uint64_t words[2];
  };
  struct Rank {
    std::vector<Line> memory;
    uint8_t* block;
    std::vector<uint8_t*> windows;                          // as in a kernel
    std::vector<std::unique_ptr<AdversePuts::Lane>> lanes;  // of shares, and of credits
    CallState states[kBufferGroups];
  };
  static_assert(sizeof(Line) == 16);

  void Start(Rank& rank) {
    const uint64_t mark = StartMark(setup_.first_epoch);
    for (int k = 0; k < kBufferGroups; ++k) {
      rank.states[k] = StartState(setup_.first_epoch);
      const InternodeOffsets offsets = Offsets(k);
      for (uint32_t region = 0; region < setup_.depth; ++region) {
        for (uint32_t peer = 0; peer < setup_.ranks; ++peer) {
          for (uint8_t* base : {rank.block, rank.block + internode_.staged}) {
            for (int64_t i = 0; i < offsets.window.flags_per_source; ++i) {
              At<FlagCell>(base, offsets.Flags(region, peer))[i] = {mark, 0, 0, 0};
            }
            *At<uint64_t>(base, offsets.Credit(region, peer)) = mark;
          }
          for (uint32_t share = 0; share < kInternodeShares; ++share) {
            *At<uint64_t>(rank.block, offsets.Arrived(region, peer, share)) = mark;
          }
          *At<uint64_t>(rank.block, offsets.Returned(region, peer)) = mark;
        }
      }
    }
  }

  template <typename T>
  static T* At(uint8_t* base, int64_t at) {
    return reinterpret_cast<T*>(base + at);
  }
  static NodeMap MapOf(const Setup& setup) {
    int32_t numbers[kMaxWindowRanks];
    for (uint32_t r = 0; r < setup.ranks; ++r)
      numbers[r] = 7 - static_cast<int32_t>(r / setup.node);
    return setup.bundles ? NodeMap::Of(numbers, setup.ranks) : NodeMap{};
  }
  bool Bundled(uint32_t kind) const { return kind == 0 && map_.nodes > 0; }
  // Whether this rank waits for puts of an internode source.
  bool Hears(uint32_t r, uint32_t source, uint32_t kind) const {
    return IsInternode(r, source) && (!Bundled(kind) || map_.Relays(source, r));
  }
  BundleOffsets Bundles() const { return {window_.groups[0], bundle_, map_}; }
  InternodeOffsets Offsets(uint32_t kind) const {
    return {window_.groups[kind], rules_.inbox ? internode_.groups[kind] : in_place_[kind],
            setup_.ranks};
  }
  bool IsInternode(uint32_t a, uint32_t b) const { return a / setup_.node != b / setup_.node; }
  uint32_t PartAt(uint32_t rank, uint32_t to) const { return IsInternode(rank, to) ? to : rank; }

  const Setup setup_;
  const Rules rules_;
  const WindowSizes sizes_;
  const WindowLayout window_;
  const InternodeLayout internode_;
  const NodeMap map_;
  const BundleLayout bundle_;
  // For runs without the inbox rule.
  const InternodeGroupLayout in_place_[kBufferGroups] = {InPlace(0), InPlace(1)};
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<AdversePuts> puts_;  // last, so that it is destroyed first

 private:
  InternodeGroupLayout InPlace(int kind) const {
    InternodeGroupLayout group = internode_.groups[kind];
    group.flags = window_.groups[kind].flags;
    group.counts = window_.groups[kind].counts;
    return group;
  }
};

}  // namespace jax_ep
