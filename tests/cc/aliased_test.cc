// Results that share an operand's memory, as jax.ffi.ffi_call(input_output_aliases=...) makes them:
// whatever the contents, no call touches anything outside of its buffers (AddressSanitizer), and
// routes are the same as without sharing.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/steps.h"
#include "formats/bf16.h"
#include "fuzz/calls_fuzz.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::ffi_layer {
namespace {

// Calls of random shapes and contents. Each operand and result of the same type share in turn.
void TestAnyCall() {
  Random random(41);
  int64_t aliased[8] = {};
  for (int round = 0; round < 12'000; ++round) {
    std::vector<uint8_t> bytes(static_cast<size_t>(random.In(24, 90)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Bits());
    const int64_t number = round % 8;
    CurrentCase() = "call " + std::to_string(number) + ", round " + std::to_string(round);
    const int64_t choice = random.In(1, 3);
    FuzzInput input(bytes.data(), bytes.size());
    aliased[number] += RunNumbered(input, number, {choice, random.OneIn(8)}) == choice;
  }
  // ep_dispatch_pack's ids share with slot_of or position, ep_combine_unpack's residual or shared
  // rows with the output. In other calls an operand has a result's type only if its shape was
  // changed.
  CHECK(aliased[0] > 400 && aliased[5] > 100);
}

// Valid ids, -1 and some ids out of range share the memory of a table.
void TestRouteOverItsIds() {
  Random random(42);
  for (int round = 0; round < 300; ++round) {
    CurrentCase() = "round " + std::to_string(round);
    const EpShape shape{.ranks = random.In(1, 4),
                        .local_experts = random.In(1, 4),
                        .tokens = random.In(1, 9),
                        .top_k = random.In(1, 5),
                        .hidden = 8,
                        .element_bytes = 4};
    const int64_t entries = shape.tokens * shape.top_k;
    const auto message = DispatchMessage::Of(shape.row_bytes(), 0, shape.top_k);
    const int64_t region =
        RegionHeader::Of(shape.local_experts).bytes + shape.tokens * message.bytes;
    const Buffer tokens(shape.tokens * shape.row_bytes()), weights(entries * 4);
    const Buffer send(shape.ranks * region), position(entries * 4), num_invalid(4);
    const Buffer ids(entries * 4), table(entries * 4), expected(entries * 4), other(entries * 4);
    std::vector<int32_t> slots(static_cast<size_t>(shape.ranks)),
        rows(static_cast<size_t>(shape.experts()));
    for (int64_t i = 0; i < entries; ++i) {
      constexpr int32_t kBad[] = {INT32_MIN, INT32_MAX, -2, 1 << 20};
      ids.as<int32_t>()[i] = random.OneIn(4)
                                 ? kBad[random.In(0, 3)]
                                 : static_cast<int32_t>(random.In(-1, shape.experts() - 1));
    }
    KeptInvalidIds invalid;
    const bool over_slots = random.OneIn(2);
    int32_t* const slot_of = (over_slots ? expected : other).as<int32_t>();
    int32_t* const positions = (over_slots ? other : expected).as<int32_t>();
    RouteTokens(shape, ids.as<int32_t>(), 0, shape.tokens, {slots.data(), rows.data()},
                {slot_of, positions}, invalid);
    InvalidIdReport report{};
    DispatchPackStep step{{},
                          shape,
                          ElementType::kFloat32,
                          tokens.data(),
                          ids.as<int32_t>(),
                          weights.as<float>(),
                          nullptr,
                          send.data(),
                          (over_slots ? ids : table).as<int32_t>(),
                          (over_slots ? table : ids).as<int32_t>(),
                          num_invalid.as<int32_t>(),
                          &report};
    const cpu::RowTask task = cpu::DispatchPack<Bf16Format>(step);
    task.run(0, task.items);
    CHECK(std::memcmp(ids.data(), expected.data(), static_cast<size_t>(entries * 4)) == 0);
    CHECK(std::memcmp(table.data(), other.data(), static_cast<size_t>(entries * 4)) == 0);
    CHECK(*num_invalid.as<int32_t>() == invalid.count);
    CHECK(invalid.count == 0 || report.value == invalid.first_id);
  }
}

}  // namespace
}  // namespace jax_ep::ffi_layer

int main() {
  jax_ep::ffi_layer::TestAnyCall();
  jax_ep::ffi_layer::TestRouteOverItsIds();
  std::puts("aliased_test: ok");
}
