// What both native modules give Python: their targets and their groups.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "ffi/group.h"
#include "ffi/table_export.h"

namespace jax_ep::ffi_layer {

inline void DefineCommon(nanobind::module_& m, std::vector<Target> targets) {
  m.def(
      "operand_tables", &OperandTables,
      "Operands, results and attributes of every target of jax_ep, also of those that this module "
      "does not serve.");
  m.def(
      "targets",
      [targets] {
        const auto capsule = [](XLA_FFI_Handler* handler) {
          return nb::capsule(reinterpret_cast<void*>(handler));
        };
        nb::dict result;
        for (const Target& target : targets) {
          if (target.initialize == nullptr) {
            result[target.name] = capsule(target.handler);
            continue;
          }
          nb::dict stages;
          stages["execute"] = capsule(target.handler);
          stages["initialize"] = capsule(target.initialize);
          result[target.name] = stages;
        }
        return result;
      },
      "Custom-call target name -> handler capsule, or a dict of capsules by stage, for "
      "jax.ffi.register_ffi_target.");
  m.def(
      "open_group",
      [](int64_t key, const std::vector<int32_t>& ordinals, const std::vector<int32_t>& ranks) {
        nb::gil_scoped_release release;
        GroupRegistry::Get().Open(key, std::make_shared<Group>(ordinals, ranks));
      },
      nb::arg("key"), nb::arg("ordinals"), nb::arg("ranks"),
      "Registers a group: local device ordinals[i] is rank ranks[i].");
  m.def(
      "close_group",
      [](int64_t key) {
        nb::gil_scoped_release release;
        GroupRegistry::Get().Close(key);
      },
      nb::arg("key"), "Closes and forgets a group; a key that is not open is ignored.");
  m.def(
      "take_invalid_ids",
      [](int64_t key) {
        std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>> found;
        if (const auto group = GroupRegistry::Get().Find(key)) {
          for (const auto& id : group->TakeInvalidIds()) {
            found.emplace_back(id.rank, id.ordinal, id.report.token, id.report.k, id.report.value);
          }
        }
        return found;
      },
      nb::arg("key"),
      "Returns (rank, device ordinal, token, k, value) for the first bad id of each local device.");
  m.def(
      "take_mixed_calls",
      [](int64_t key) {
        std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, bool>> found;
        if (const auto group = GroupRegistry::Get().Find(key)) {
          for (const auto& [rank, ordinal, report] : group->TakeMixedCalls()) {
            const int32_t there = report.there & static_cast<int32_t>(kCallOpMask);
            found.emplace_back(rank, ordinal, report.source, report.here, there,
                               (report.there & MixedCallReport::kSameHandle) != 0);
          }
        }
        return found;
      },
      nb::arg("key"),
      "Returns (rank, device ordinal, source rank, CallOp here, CallOp there, whether both are of "
      "one handle) for the first collective call of each local device that met another call.");
  m.def(
      "pool_threads",
      [](int64_t key) -> int64_t {
        const auto group = GroupRegistry::Get().Find(key);
        return group ? group->pool_threads() : 0;
      },
      nb::arg("key"),
      "Returns how many threads XLA's CPU pool had when ep_init ran; 0 if there is no pool.");
}

}  // namespace jax_ep::ffi_layer
