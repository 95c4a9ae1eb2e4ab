"""Transport shmem without a GPU: who may have it, and windows from an imagined heap.

Threads stand for processes and meet in the imagined NVSHMEM as they would in the real
one: each of its steps waits for all.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import helpers
import imagined
import numpy as np
import pytest
from test_meeting import act_all
from test_windows import make_groups

from jax_ep._native import ffi, loader
from jax_ep._peers import nvshmem, windows
from jax_ep._peers.rendezvous import Rendezvous

KERNELS = [11, 12]
here = threading.local()  # the process that a thread stands for
ONE_EACH = make_groups([[(0, 0), (1, 0), (2, 0)]])
# Groups of ranks in another order than their processes, and of other ordinals.
CROSSED = make_groups([[(3, 1), (0, 2)], [(2, 0), (1, 3)]])


class Nvshmem:
    """What all processes share: blocks at the same offset of every heap."""

    def __init__(self, pes: int) -> None:
        self.barrier = threading.Barrier(pes)
        self.calls: list[list[Any]] = [[] for _ in range(pes)]
        self.unreached: set[tuple[int, int]] = set()
        self.short: set[int] = set()
        self.stuck = False

    def meet(self, pe: int, *call: Any) -> None:
        self.calls[pe].append(call)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(60)


class Module:
    """_native_shmem of one process. The block at offset n of `pe` is n + 1000 * pe."""

    def __init__(self, shared: Nvshmem) -> None:
        self.shared, self.pe, self.offset = shared, -1, 1
        self.HAS_KERNELS: bool = True
        self.allocated = 0
        self.missing: str | None = None

    def load(self, path: str) -> str:
        if self.missing:
            raise RuntimeError(self.missing)
        return "3.4.5"

    def started(self) -> bool:
        return self.pe >= 0

    def unique_id(self) -> bytes:
        return b"unique"

    def start(self, unique_id: bytes, pe: int, pes: int, ordinal: int) -> None:
        assert unique_id == b"unique"
        assert pes == self.shared.barrier.parties
        self.pe = pe
        self.shared.meet(pe, "start", ordinal)

    def kernels(self) -> list[int]:
        assert self.pe >= 0
        return KERNELS

    def allocate(self, size: int) -> int:
        self.allocated = size
        self.shared.meet(self.pe, "allocate")
        if self.pe in self.shared.short:
            return 0
        self.offset += 1
        return self.offset + 1000 * self.pe

    def free(self, block: int) -> None:
        self.shared.meet(self.pe, "free", block % 1000)

    def reached(self, block: int, pe: int) -> int:
        if (self.pe, pe) in self.shared.unreached:
            return 0
        return block % 1000 + 1000 * pe


class Native(imagined.Native):
    """The CUDA module; notes what it is given."""

    def __init__(self, process: int) -> None:
        super().__init__(process, given={}, far={}, in_use=set())

    def open_windows(self, key, groups, config, *, given, far, **options):
        self.groups, self.given[key], self.far[key] = groups, given, far
        for group, blocks in zip(groups, given, strict=True):
            (rank,) = (r for r, o in enumerate(group) if o != self.ELSEWHERE)
            self.in_use.add(blocks[rank])
        return imagined.BYTES

    def given_windows_in_use(self):
        return sorted(self.in_use)

    def close_group(self, key):
        self.in_use -= {block for blocks in self.given.get(key, []) for block in blocks}


class Job:
    """The processes of some groups, each with its heap."""

    def __init__(self, groups: np.ndarray) -> None:
        self.groups = groups
        self.processes = sorted({device.process_index for device in groups.flat})
        self.shared = Nvshmem(len(self.processes))
        self.modules = {p: Module(self.shared) for p in self.processes}
        self.natives = {p: Native(p) for p in self.processes}
        self.heaps = {
            p: nvshmem.Heap(lambda module=module: module)
            for p, module in self.modules.items()
        }

    def run(self, key: int, timeout_s: float = 20.0, **changes: Any) -> dict[int, Any]:
        config = helpers.make_config(timeout_s=timeout_s, **changes)

        def act(meeting: Rendezvous) -> Any:
            here.process = meeting.own
            native, heap = self.natives[meeting.own], self.heaps[meeting.own]
            found = heap.find_obstacle(native, self.groups, config, meeting)
            if found is not None:
                return found
            return heap.open_windows(native, key, self.groups, config, 1, meeting)

        return act_all(dict.fromkeys(self.processes, act))

    def size(self, *far: Any, **changes: Any) -> int:
        """Bytes of a window; `far` as window_bytes takes it."""
        config = helpers.make_config(**changes)
        sizes = windows.window_config(config, self.groups.shape[1])
        return ffi.native.window_bytes(sizes, *far)

    def opens(self, key: int, *far: Any, **changes: Any) -> None:
        size = self.size(*far, **changes)
        for actor in self.run(key, **changes).values():
            assert actor.error is None
            assert actor.result == size

    def refused(self, *words: str, **changes: Any) -> None:
        """In the same words everywhere."""
        (found,) = {actor.result for actor in self.run(1, **changes).values()}
        assert all(word in " ".join(found) for word in words), found


@pytest.fixture(autouse=True)
def no_start_changes_the_environment(monkeypatch):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")


@pytest.mark.parametrize("groups", [ONE_EACH, CROSSED], ids=["one", "two"])
def test_every_rank_is_given_every_window(groups) -> None:
    job = Job(groups)
    job.opens(7)
    for group in groups:
        blocks = [2 + 1000 * device.process_index for device in group]
        for device in group:
            process = device.process_index
            assert job.natives[process].given[7] == [blocks]
            assert job.shared.calls[process] == [
                ("start", device.local_hardware_id),
                ("allocate",),
            ]


def test_blocks_are_freed_where_all_have_closed() -> None:
    job = Job(ONE_EACH)
    job.opens(1)
    job.opens(2)
    for native in job.natives.values():
        native.close_group(1)
    job.natives[0].close_group(2)
    job.opens(3)
    # The second one is still open in some.
    frees = [("free", 2)]
    for calls in job.shared.calls:
        assert [call for call in calls if call[0] == "free"] == frees
        assert [call[0] for call in calls].count("start") == 1
    for process in (1, 2):
        job.natives[process].close_group(2)
    job.opens(4)
    for calls in job.shared.calls:
        assert [call for call in calls if call[0] == "free"] == [*frees, ("free", 3)]


def test_no_start_with_multicast(monkeypatch) -> None:
    import os

    Job(ONE_EACH).opens(1)
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"


def test_what_one_process_lacks_is_said_in_all() -> None:
    job = Job(ONE_EACH)
    job.modules[1].missing = "cannot open shared object file"
    job.refused("pip install nvidia-nvshmem-cu13", "cannot open", "(process 1)")
    job = Job(ONE_EACH)
    job.heaps[2] = nvshmem.Heap(lambda: None)
    job.refused("built with NVSHMEM's headers", "(process 2)")
    job = Job(ONE_EACH)
    job.natives[0].obstacle = ("compute capability 9.0", "8.0")
    job.refused("compute capability 9.0", "8.0 (process 0)")


def test_what_this_version_does_not_serve() -> None:
    Job(make_groups([[(0, 0), (1, 0), (0, 1), (1, 1)]])).refused("one GPU", "2 in one")
    job = Job(ONE_EACH)
    for native in job.natives.values():
        native.uuids = lambda process, ordinal: "gpu"
    job.refused("a GPU of its own", "gpu more than once")
    job = Job(ONE_EACH)
    job.modules[0].pe = 0
    job.refused("started by another library")


def test_other_processes_or_devices_than_at_the_start() -> None:
    job = Job(ONE_EACH)
    job.opens(1)
    job.groups = ONE_EACH[:, :2]
    job.processes = [0, 1]
    job.refused("[0, 1, 2]", "[0, 1]")
    job = Job(ONE_EACH)
    job.opens(1)
    job.groups = make_groups([[(0, 0), (1, 0), (2, 1)]])
    job.refused("local device 0", "local device 1", "(process 2)")


def test_process_that_was_started_again() -> None:
    job = Job(ONE_EACH)
    job.opens(1)
    job.heaps[2] = nvshmem.Heap(lambda: Module(job.shared))
    job.refused("in all processes of a mesh or in none", "[0, 1]")


def test_gpus_out_of_reach() -> None:
    job = Job(ONE_EACH)
    job.shared.unreached = {(0, 2)}
    for actor in job.run(1).values():
        assert isinstance(actor.error, windows.NotMapped)
        assert "none for rank 2 (process 0)" in str(actor.error)
    # No group holds the blocks.
    job.shared.unreached = set()
    job.opens(2)
    assert ("free", 2) in job.shared.calls[1]


@pytest.mark.parametrize("short", [{1}, {0, 1, 2}])
def test_heap_without_room(short) -> None:
    job = Job(ONE_EACH)
    job.shared.short = short
    for actor in job.run(1).values():
        assert "must have room" in str(actor.error)
        assert f"{job.size()} bytes" in str(actor.error)
    job.shared.short = set()
    if len(short) == len(job.processes):
        job.opens(2)
    else:
        job.refused("heaps that differ")


def test_nvshmem_that_waits_for_ever() -> None:
    job = Job(ONE_EACH)
    release = threading.Event()
    job.modules[1].start = lambda *args: release.wait(60)
    job.shared.barrier = threading.Barrier(3)
    try:
        actors = job.run(1, timeout_s=2.0).values()
    finally:
        release.set()
        job.shared.barrier.abort()
    for actor in actors:
        # With "auto" another transport takes over.
        assert isinstance(actor.error, windows.NotMapped)
        assert "has not ended in 1 s (process 0)" in str(actor.error)
    job.refused("a wait of NVSHMEM that has not ended")


def test_library_is_looked_for_at_home_first(monkeypatch) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", "/somewhere")
    first, *_, last = nvshmem.candidates()
    assert (first, last) == (
        f"/somewhere/lib/{nvshmem.LIBRARY}",
        nvshmem.LIBRARY,
    )


def test_library_of_the_package(monkeypatch, tmp_path) -> None:
    import importlib
    import sys

    (tmp_path / "nvidia" / "nvshmem").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = {name for name in sys.modules if name.partition(".")[0] == "nvidia"}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    importlib.invalidate_caches()
    # Behind it what else is installed.
    wheel, *_, last = nvshmem.candidates()
    assert wheel == str(tmp_path / "nvidia" / "nvshmem" / "lib" / nvshmem.LIBRARY)
    assert last == nvshmem.LIBRARY
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)


def test_module_says_why_it_cannot_load() -> None:
    native = loader.shmem()
    if native is None:
        pytest.skip("built without NVSHMEM's headers")
    with pytest.raises(RuntimeError, match="nowhere"):
        native.load("/nowhere/libnvshmem_host.so.3")
    with pytest.raises(RuntimeError, match="must be started first"):
        native.allocate(8)
