// The native module jax_ep._native_cuda: CUDA targets and the windows of transports p2p and shmem.
// It imports where there is no GPU or driver.
#include <cuda_runtime_api.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/memory/fabric.h"
#include "cuda/memory/window_support.h"
#include "ffi/cuda_handlers.h"
#include "ffi/module_common.h"
#include "ffi/window_arguments.h"
#include "ffi/window_group.h"

namespace nb = nanobind;

namespace jax_ep::ffi_layer {
namespace {

// The device ordinals, by rank, of each EP group that has ranks in this process; kElsewhere for the
// devices of other processes.
using EpGroups = std::vector<std::vector<int32_t>>;

using MustAndGot = std::optional<std::pair<std::string, std::string>>;

MustAndGot ToPython(const std::optional<cuda::Obstacle>& obstacle) {
  if (!obstacle) return std::nullopt;
  return std::pair(obstacle->lacks, obstacle->found);
}

MustAndGot P2pObstacle(const EpGroups& ep_groups) {
  nb::gil_scoped_release release;
  for (const std::vector<int32_t>& ordinals : ep_groups) {
    const std::vector<int32_t> local = LocalOrdinals(ordinals);
    const auto obstacle = cuda::FindObstacle(local, local.size() != ordinals.size());
    if (obstacle) return ToPython(obstacle);
  }
  return std::nullopt;
}

MustAndGot PeerObstacle(const std::vector<int32_t>& ordinals,
                        const std::vector<std::string>& uuids) {
  nb::gil_scoped_release release;
  return ToPython(cuda::FindPeerObstacle(LocalOrdinals(ordinals), uuids));
}

std::shared_ptr<WindowedGroup> FindWindowed(int64_t key) {
  auto group = std::dynamic_pointer_cast<WindowedGroup>(GroupRegistry::Get().Find(key));
  if (!group) throw std::invalid_argument("jax_ep: the key must be of an open group with windows");
  return group;
}

std::tuple<int, int64_t, std::optional<nb::bytes>> ExportWindow(int64_t key, int32_t ordinal) {
  const SharedWindow shared = [&] {
    nb::gil_scoped_release release;
    return FindWindowed(key)->Export(ordinal);
  }();
  const auto& [descriptor, fabric] = shared.exported;
  std::optional<nb::bytes> handle;
  if (fabric) handle.emplace(fabric->data(), fabric->size());
  return {descriptor, shared.bytes, handle};
}

void ImportWindow(int64_t key, size_t ep_group, int32_t rank, int descriptor, int64_t bytes) {
  nb::gil_scoped_release release;
  FindWindowed(key)->Import(ep_group, rank, descriptor, bytes);
}

void ImportFromFabric(int64_t key, size_t ep_group, int32_t rank, const nb::bytes& handle,
                      int64_t bytes) {
  cuda::FabricHandle fabric{};
  if (handle.size() != fabric.size()) {
    throw std::invalid_argument(
        "jax_ep: a fabric handle must have " + std::to_string(fabric.size()) + " bytes, got " +
        std::to_string(handle.size()) + "; the processes must be of one build");
  }
  std::memcpy(fabric.data(), handle.data(), fabric.size());
  nb::gil_scoped_release release;
  FindWindowed(key)->Import(ep_group, rank, fabric, bytes);
}

// The fields of InternodeAccess: pes, nodes, kernels.
using Internode = std::tuple<EpGroups, EpGroups, std::vector<uint64_t>>;

std::optional<InternodeAccess> AccessOf(const std::optional<Internode>& internode) {
  if (!internode) return std::nullopt;
  const auto& [pes, nodes, functions] = *internode;
  InternodeAccess access{pes, nodes, {}};
  if (functions.size() != cuda::kNumInternodeKernels) {
    throw std::invalid_argument("jax_ep: the native modules must be of one build");
  }
  std::copy(functions.begin(), functions.end(), access.kernels.functions);
  return access;
}

int64_t OpenWindows(int64_t key, const EpGroups& ep_groups, const nb::dict& config,
                    double timeout_s, int64_t num_sms, uint64_t first_epoch,
                    const std::optional<GivenWindows>& given,
                    const std::optional<Internode>& internode, bool by_fabric) {
  const WindowSizes sizes = WindowSizesFrom(config);
  nb::gil_scoped_release release;
  for (const std::vector<int32_t>& ordinals : ep_groups) {
    const int64_t processors = cuda::Multiprocessors(LocalOrdinals(ordinals));
    if (num_sms <= processors) continue;
    throw std::invalid_argument("jax_ep.init: num_sms must be at most the " +
                                std::to_string(processors) + " SMs of a device, got " +
                                std::to_string(num_sms) +
                                "; leave it None to choose from the shape");
  }
  const WindowOptions options{timeout_s, num_sms, first_epoch, by_fabric};
  const std::optional<InternodeAccess> access = AccessOf(internode);
  auto group = given ? std::make_shared<WindowedGroup>(ep_groups, sizes, options, *given,
                                                       access ? &*access : nullptr)
                     : std::make_shared<WindowedGroup>(ep_groups, sizes, options);
  const int64_t bytes = group->window_bytes();
  GroupRegistry::Get().Open(key, std::move(group));
  return bytes;
}

NB_MODULE(_native_cuda, m) {
  m.doc() = "CUDA handlers of jax_ep, and the windows of its GPU transports.";
  DefineCommon(m, CudaTargets());
  m.attr("CUDA_VERSION") = CUDART_VERSION;
  m.attr("MAX_WINDOW_RANKS") = kMaxWindowRanks;
  m.attr("FIRST_EPOCH") = kFirstEpoch;
  m.attr("ELSEWHERE") = kElsewhere;
  m.def("launch_counts", &LaunchCounts,
        "Returns how many calls this process has made so far, (captured, not captured); replays "
        "of graphs do not count.");
  m.def("p2p_obstacle", &P2pObstacle, nb::arg("ep_groups"),
        "Returns (what the groups must have, what was found) if transport p2p cannot serve them.");
  m.def("open_windows", &OpenWindows, nb::arg("key"), nb::arg("ep_groups"), nb::arg("config"),
        nb::kw_only(), nb::arg("timeout_s"), nb::arg("num_sms"), nb::arg("first_epoch"),
        nb::arg("given") = nb::none(), nb::arg("internode") = nb::none(),
        nb::arg("by_fabric") = false,
        "Opens a group as open_group does, with a window for each local rank, and returns the "
        "bytes of a window. Windows of ranks in other processes must be added by import_window. "
        "`given` has the addresses of all windows, by EP group and rank, and 0 for ranks on other "
        "nodes; then no window is allocated, and local ones only get their first contents. "
        "`internode` "
        "says how ranks on other nodes are reached: (pes, node numbers or nothing if dispatches "
        "are not bundled, each by EP group and rank; kernels). With `by_fabric`, windows that "
        "other processes share have fabric handles too.");
  m.def("given_windows_in_use", &GivenWindowsInUse,
        "Returns the given windows of local ranks that must not be freed, because their group is "
        "open or failed to close.");
  m.def("peer_obstacle", &PeerObstacle, nb::arg("ordinals"), nb::arg("uuids"),
        "Like p2p_obstacle, for an EP group's devices in this process and those of other "
        "processes, as far as this process sees them.");
  m.def(
      "device_uuid", [](int32_t ordinal) { return cuda::DeviceUuid(ordinal); }, nb::arg("ordinal"),
      "Returns the device's UUID, which is the same in every process; empty if the driver reports "
      "none.");
  m.def(
      "device_fabric", [](int32_t ordinal) { return cuda::FabricOf(ordinal); }, nb::arg("ordinal"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Returns the cluster and clique of the NVLink fabric that the device has joined; empty if "
      "it is in none.");
  m.def(
      "shares_by_fabric", [](int32_t ordinal) { return cuda::SharesByFabric(ordinal); },
      nb::arg("ordinal"), nb::call_guard<nb::gil_scoped_release>(),
      "Returns whether fabric handles of the device's memory work in this process.");
  m.def("export_window", &ExportWindow, nb::arg("key"), nb::arg("ordinal"),
        "Returns what import_window needs: (a new file descriptor of a local window's memory, its "
        "bytes, its fabric handle or None if it was opened without one).");
  m.def("import_window", &ImportWindow, nb::arg("key"), nb::arg("ep_group"), nb::arg("rank"),
        nb::arg("handle"), nb::arg("bytes"),
        "Maps the window of a rank of another process, in the EP group with that index, from a "
        "file descriptor or a fabric handle.");
  m.def("import_window", &ImportFromFabric, nb::arg("key"), nb::arg("ep_group"), nb::arg("rank"),
        nb::arg("handle"), nb::arg("bytes"));
  m.def(
      "wait_failures",
      [](int64_t key) {
        const auto group = std::dynamic_pointer_cast<WindowedGroup>(GroupRegistry::Get().Find(key));
        return group ? group->Failures() : std::vector<std::pair<int32_t, std::string>>{};
      },
      nb::arg("key"),
      "Returns (rank, text) for each local device whose calls have failed, by rank.");
}

}  // namespace
}  // namespace jax_ep::ffi_layer
