// The native module jax_ep._native_shmem: NVSHMEM for transport shmem. It is loaded only for that
// transport and can be imported without NVSHMEM, GPU or driver.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <vector>

#include "shmem/heap.h"
#include "shmem/kernels.h"

namespace nb = nanobind;

namespace jax_ep::shmem {
namespace {

NB_MODULE(_native_shmem, m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.doc() = "NVSHMEM's symmetric heap. Addresses are ints, 0 for none.";
  m.def("load", &Load, nb::arg("path"), Released(),
        "Opens libnvshmem_host; returns its version. RuntimeError says why not.");
  m.def("started", &Started, "Whether this process has started NVSHMEM, through whatever library.");
  m.def(
      "unique_id",
      [] {
        const std::string id = UniqueId();
        return nb::bytes(id.data(), id.size());
      },
      "Names a start; made in one process, given to `start` in all.");
  m.def(
      "start",
      [](nb::bytes unique_id, int pe, int pes, int32_t ordinal) {
        const std::string id(unique_id.c_str(), unique_id.size());
        nb::gil_scoped_release release;
        Start(id, pe, pes, ordinal);
      },
      nb::arg("unique_id"), nb::arg("pe"), nb::arg("pes"), nb::arg("ordinal"),
      "Collective, once a process, which is `pe` of `pes`.");
  m.attr("HAS_KERNELS") = kHasKernels;
  m.def(
      "kernels",
      [] {
        nb::gil_scoped_release release;
        const cuda::InternodeKernels kernels = LoadKernels();
        return std::vector<uint64_t>(std::begin(kernels.functions), std::end(kernels.functions));
      },
      "After the start: those that reach ranks on other nodes.");
  m.def("allocate", &Allocate, nb::arg("bytes"), Released(),
        "Collective: a block of the heap; 0 where it has no room.");
  m.def("free", &Free, nb::arg("block"), Released(), "Collective.");
  m.def("reached", &Reached, nb::arg("block"), nb::arg("pe"), Released(),
        "Where this process reaches the block of `pe`; 0: not by loads and stores.");
}

}  // namespace
}  // namespace jax_ep::shmem
