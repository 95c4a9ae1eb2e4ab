// What internode_world.h exchanges: rules, groups, and what every rank knows about a call.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/internode.h"
#include "signals_world.h"

namespace jax_ep {

inline constexpr int64_t kMost = 70, kHidden = 16, kMessageBytes = 32, kExperts = 4;

struct Rules {
  bool fences = true;
  bool settles = true;
  bool waits_for_credits = true;
  bool inbox = true;     // else flags are put directly where they are read
  bool observes = true;  // else credits are returned for what has not arrived
  bool orders = true;    // else credits for what a relay observes may overtake each other

  bool all() const { return fences && settles && waits_for_credits && inbox && observes && orders; }
};

struct Setup {
  uint32_t ranks, node, depth;
  bool bundles;  // dispatches are bundled if nodes have equal sizes
  uint64_t first_epoch, seed;
};

// ---- What every rank knows of a call ----

inline uint64_t Bits(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t to, uint64_t salt) {
  return Mix(Mix(epoch * 2 + kind) + source * 8 + to + salt * 64);
}
inline int64_t MessagesOf(uint64_t epoch, uint32_t kind) {
  return static_cast<int64_t>(Bits(epoch, kind, 0, 0, 99) % (kMost + 1));
}
// The token of each slot, or the slot's number in combines, whose slots have no token.
inline std::vector<int64_t> TokensOf(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t to) {
  std::vector<int64_t> tokens;
  const uint64_t bits = Bits(epoch, kind, source, to, 98);
  const int64_t messages = bits % 4 == 0 ? 0 : MessagesOf(epoch, kind);
  const auto most = static_cast<uint64_t>(messages + 1);
  const int64_t end = kind == 0 ? messages : static_cast<int64_t>(bits / 4 % most);
  for (int64_t token = 0; token < end; ++token) {
    const bool goes = kind == 1 || Mix(bits + static_cast<uint64_t>(token)) % 3 != 0;
    if (goes) tokens.push_back(token);
  }
  return tokens;
}
inline int64_t SlotsOf(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t to) {
  return static_cast<int64_t>(TokensOf(epoch, kind, source, to).size());
}
// The same for all destinations of a dispatched token.
inline uint64_t WordOf(uint64_t epoch, uint32_t kind, uint32_t source, uint32_t to, int64_t token,
                       uint64_t word) {
  return Bits(epoch, kind, source, kind == 0 ? 0 : to, static_cast<uint64_t>(token) * 8 + word);
}
// 0 for calls without counts, which are cached dispatches and combines.
inline int64_t CountsOf(uint64_t epoch, uint32_t kind) {
  return kind == 0 && Bits(epoch, kind, 0, 0, 97) % 3 != 0 ? CountCells(kExperts) : 0;
}
inline InternodeShape ShapeOf(uint64_t epoch, uint32_t kind) {
  const int64_t messages = MessagesOf(epoch, kind);
  return kind == 0 ? InternodeShape::OfDispatch(messages, kMessageBytes, CountsOf(epoch, kind))
                   : InternodeShape::OfCombine(messages, kMessageBytes, kHidden);
}
inline uint16_t TagOf(uint64_t epoch) { return static_cast<uint16_t>(epoch * 7); }

}  // namespace jax_ep
