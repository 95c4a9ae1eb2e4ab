"""Transport shmem without a GPU: when it can be used, and windows from a fake heap.

Threads act as processes and meet in the fake NVSHMEM as they would in the real one:
each of its steps waits for all.
"""

from __future__ import annotations

import threading

import pytest

from jax_ep._native import loader
from jax_ep._peers import nvshmem, windows
from support.fake_nvshmem import CROSSED, ONE_EACH, Job, Module
from support.fake_windows import make_groups


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
    # Some processes still have the second one open.
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
    job.refused("jax_ep's plugin for CUDA", "(process 2)")
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
    # Other installed libraries come after it.
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
