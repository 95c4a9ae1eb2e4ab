// Tests of protocol/pending.h: its decisions, and programs with calls that are never ended. Ranks
// are threads. Runs under TSan and ASan + UBSan as well.
#include "protocol/pending.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "check.h"
#include "signals_exchange.h"
#include "signals_world.h"

namespace jax_ep {
namespace {

void TestLeases() {
  CallState state = StartState(4);
  const RegionLease held = LeaseRegion(state, 2, 2);
  CHECK(held.epoch == 4 && held.region == 0 && held.previous == 3);
  CommitSend(state, held);
  // Fused calls skip the held region, one after the other.
  for (uint64_t epoch = 5; epoch < 8; ++epoch) {
    const RegionLease lease = LeaseRegion(state, 2, 2);
    CHECK(lease.epoch == epoch && lease.region == 1);
    CHECK(lease.previous == (epoch == 5 ? StartMark(4) : epoch - 1));
    CommitSend(state, lease);
    CHECK(LeaseRegion(state, 2, 2).region == kNoRegion);
    CommitRecv(state, lease);
  }
  CommitRecv(state, held);
  const RegionLease back = LeaseRegion(state, 2, 2);
  CHECK(back.epoch == 8 && back.region == 0 && back.previous == 4);
}

// Calls take the first regions in turn; the others are for calls beside pending ones.
void TestTurns() {
  for (const uint64_t first : kFirstEpochs) {
    CallState state = StartState(first);
    for (uint64_t epoch = first; epoch != first + 4; ++epoch) {
      const RegionLease lease = LeaseRegion(state, 1, 3);
      CHECK(lease.epoch == epoch && lease.region == 0 && lease.previous == epoch - 1);
      CommitSend(state, lease);
      CommitRecv(state, lease);
    }
    for (uint32_t region = 0; region < 2; ++region) {
      CHECK(SurplusRegion(state, 3) == kNoRegion);
      const RegionLease lease = LeaseRegion(state, 1, 3);
      CHECK(lease.region == region);
      CommitSend(state, lease);
    }
    CHECK(LeaseRegion(state, 1, 3).region == 2 && LeaseRegion(state, 2, 3).region == 2);
    CHECK(SurplusRegion(state, 3) == kNoRegion && SurplusRegion(state, 2) == 0);
  }
}

// If pending calls fill all regions, the oldest is given up, also if epochs wrap between them.
void TestPending() {
  for (const uint64_t first : kFirstEpochs) {
    CallState state = StartState(first);
    PendingCall calls[6];
    for (uint32_t i = 0; i < 6; ++i) {
      const RegionLease lease = LeaseRegion(state, 2, 3);
      CommitSend(state, lease);
      calls[i] = {lease.epoch, lease.region, 5};
      const uint32_t surplus = SurplusRegion(state, 3);
      CHECK((surplus == kNoRegion) == (i < 2));
      if (i < 2) continue;
      CHECK(surplus == calls[i - 2].region && state.last_epoch[surplus] == calls[i - 2].epoch);
      CommitRecv(state, {0, 0, surplus});
    }
    for (uint32_t i = 0; i < 6; ++i) {
      const RegionLease lease = ResumeRegion(state, calls[i], 3);
      CHECK(lease.epoch == calls[i].epoch);
      CHECK(lease.region == (i < 4 ? kNoRegion : calls[i].region));
    }
    for (const PendingCall& wrong :
         {PendingCall{calls[5].epoch, 3, 5}, PendingCall{calls[5].epoch, kNoRegion, 5},
          PendingCall{calls[5].epoch + 1, calls[5].region, 5}}) {
      CHECK(ResumeRegion(state, wrong, 3).region == kNoRegion);
    }
    // A call ends only once.
    CommitRecv(state, ResumeRegion(state, calls[4], 3));
    CHECK(ResumeRegion(state, calls[4], 3).region == kNoRegion);
    CHECK(ResumeRegion(state, calls[5], 3).region == calls[5].region);
  }
}

// As in the kernels: one region for whole calls, two more for pending ones, and the oldest of three
// is given up.
void TestDroppedCalls() {
  for (const char* program :
       {"D>a D>b D<a D<b D>c D<c D", "D>a D D>b D C>c D<a C D D<b C<c C", "D>a D>b D>c D D<b D<c D",
        "D>a D>b D>c D>d D<d D D<c D>e D>f D>g D"}) {
    for (const uint64_t first : kFirstEpochs) {
      for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks) {
        CurrentCase() = std::string(program) + ", " + std::to_string(ranks) +
                        " ranks, from epoch " + std::to_string(first);
        Exchange exchange({.ranks = ranks,
                           .turns = 1,
                           .depth = 3,
                           .gives_up = true,
                           .blocks = 2,
                           .first_epoch = first});
        exchange.Run(program);
        for (uint32_t r = 0; r < ranks; ++r) {
          CHECK(exchange.ok(r) && exchange.calls_done(r) == Parse(program).size());
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestLeases();
  jax_ep::TestTurns();
  jax_ep::TestPending();
  jax_ep::TestDroppedCalls();
  std::printf("pending_test: ok\n");
  return 0;
}
