// Tests of protocol/internode.h between ranks on several nodes, over adverse puts: whole calls,
// pending ones and dropped ones. Without any one of its rules, wrong data must arrive.
#include "protocol/internode.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "check.h"
#include "internode_world.h"

namespace jax_ep {
namespace {

constexpr const char* kPrograms[] = {"D C D~ C~ D", "D>a D>b D<a C D<b C>c D C<c",
                                     "D>a D C>c D<a D>b D>d D>e D>f C<c C D<f D"};

void Right() {
  for (const uint64_t first_epoch : {kFirstEpoch, UINT64_MAX - 20}) {
    for (const Setup& setup :
         {Setup{3, 1, 3, false, first_epoch, 1}, Setup{4, 2, 3, false, first_epoch, 2},
          Setup{4, 3, 3, true, first_epoch, 3}, Setup{4, 2, 3, true, first_epoch, 4},
          Setup{6, 3, 3, true, first_epoch, 5}}) {
      for (const char* program : kPrograms) {
        CurrentCase() = std::string(program) + ", ranks " + std::to_string(setup.ranks) +
                        ", a node " + std::to_string(setup.node);
        CHECK(World(setup, {}).Run(program, 4));
      }
      CurrentCase() = "one region";
      CHECK(World({setup.ranks, setup.node, 1, setup.bundles, first_epoch, 6}, {})
                .Run("D C D C~", 4));
    }
  }
}

// A thread that sees that there is a report sees all of it.
void Poison() {
  CurrentCase() = "poison";
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    alignas(16) uint64_t cell[2] = {};
    AdversePuts puts({reinterpret_cast<uint8_t*>(cell)}, seed);
    const AdversePuts::Lane lane(puts, 0, true, true);
    const WaitReport report{seed, 1, 2, 3, Phase::kReceive, WaitStatus::kTimedOut};
    SpreadInternodePoison(lane, 0, 0, report);
    const HostSignalMemory memory;
    while (memory.Acquire(&cell[1]) == 0) memory.Pause();
    CHECK(memory.Peek(&cell[0]) == seed);
  }
}

// These provoke data races, so they do not run under ThreadSanitizer.
void Wrong(const char* name, const Rules& rules, int times = 30) {
#if !defined(__SANITIZE_THREAD__)
  CurrentCase() = name;
  bool found = false;
  // The order of threads matters, too, so the last of these takes up to a few tens of seeds.
  for (uint64_t seed = 0; seed < 100 && !found; ++seed) {
    for (const char* program : kPrograms) {
      const bool bundles = seed % 2 != 0 || !rules.orders;
      const Setup setup{bundles ? 4u : 3u, bundles ? 2u : 1u, 3, bundles, kFirstEpoch, seed};
      found = found || !World(setup, rules).Run(program, times);
    }
  }
  CHECK(found);
#else
  static_cast<void>(name), static_cast<void>(rules), static_cast<void>(times);
#endif
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::Right();
  jax_ep::Poison();
  jax_ep::Wrong("no fence", {.fences = false});
  jax_ep::Wrong("nothing settles", {.settles = false});
  jax_ep::Wrong("no credits", {.waits_for_credits = false});
  jax_ep::Wrong("flags put in place", {.inbox = false});
  jax_ep::Wrong("credits for what has not arrived", {.observes = false});
  jax_ep::Wrong("credits that overtake", {.orders = false}, 300);
  std::printf("internode_test: ok\n");
  return 0;
}
