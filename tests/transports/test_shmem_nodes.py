"""Transport shmem without a GPU: which ranks share a node, and how to reach others."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import jax
import pytest

from jax_ep._cli.doctor import findings
from jax_ep._native import ffi, loader
from jax_ep._peers import nvshmem, windows
from jax_ep._transport import select
from support import fake_windows, helpers
from support.fake_nvshmem import CROSSED, KERNELS, ONE_EACH, Job, here
from support.fake_windows import act_all, make_groups


@pytest.fixture(autouse=True)
def no_start_changes_the_environment(monkeypatch):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")


def test_ranks_of_forced_nodes_are_left_to_puts() -> None:
    job = Job(ONE_EACH)
    # Out of reach, as ranks of another node may be.
    job.shared.unreached = {(0, 2), (1, 2), (2, 0), (2, 1)}
    job.opens(7, True, ranks_per_node=2)
    for process, native in job.natives.items():
        near = [0, 0, 2002] if process == 2 else [2, 1002, 0]
        assert native.given[7] == [near]
        # The last node has one rank less.
        assert native.internode[7] == ([[0, 1, 2]], [], KERNELS)
    # Nodes as large as the groups need no puts.
    job.shared.unreached = set()
    job.opens(8, ranks_per_node=3)
    assert {native.internode[8] for native in job.natives.values()} == {None}


def test_hosts_are_nodes(monkeypatch) -> None:
    job = Job(CROSSED)
    hosts = {0: "a", 1: "b", 2: "b", 3: "a"}
    monkeypatch.setattr(windows, "host", lambda: [hosts[here.process]] * 2)
    job.opens(7)
    hosts[0] = "b"
    job.opens(8, True)
    internode = {p: native.internode[8] for p, native in job.natives.items()}
    # PEs by rank in each group.
    for process, pes in {0: [3, 0], 1: [2, 1], 2: [2, 1], 3: [3, 0]}.items():
        assert internode[process] == ([pes], [], KERNELS)
    given = {p: native.given[8][0] for p, native in job.natives.items()}
    assert given == {0: [0, 3], 1: [2003, 1003], 2: [2003, 1003], 3: [3003, 0]}
    job.modules[2].HAS_KERNELS = False
    job.refused("libnvshmem_device.a", "[2]")
    job.opens(9, ranks_per_node=2)


def test_bundles_want_nodes_of_several_ranks() -> None:
    groups = make_groups([[(0, 0), (1, 0), (2, 0), (3, 0)]])
    for changes, shape in (
        ({"ranks_per_node": 2}, (2, 2)),
        ({"ranks_per_node": 2, "top_k": 1}, (0, 0)),
        ({"ranks_per_node": 1}, (0, 0)),
        ({"ranks_per_node": 3}, (0, 0)),
    ):
        job = Job(groups)
        job.opens(7, True, shape, **changes)
        for native in job.natives.values():
            numbers = [[0, 0, 2, 2]] if shape[0] else []
            assert native.internode[7] == ([[0, 1, 2, 3]], numbers, KERNELS)


@pytest.mark.parametrize("node", [1, 2, 4])
def test_the_doctor_tells_what_is_allocated(node) -> None:
    job = Job(make_groups([[(0, 0), (1, 0), (2, 0), (3, 0)]]))
    assert not any(actor.error for actor in job.run(7, ranks_per_node=node).values())
    told = findings.window_bytes(helpers.make_config(), 4, node)
    assert {module.allocated for module in job.modules.values()} == {told}


def test_forced_node_across_hosts() -> None:
    job = Job(ONE_EACH)
    job.shared.unreached = {(0, 1), (1, 0)}
    for actor in job.run(1, ranks_per_node=2).values():
        assert isinstance(actor.error, windows.NotMapped)
        assert "none for rank 1 (process 0)" in str(actor.error)


class HeapHere:
    """The heap of the process that a thread acts as."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job.heaps[here.process], name)


def test_auto_takes_puts_between_hosts_alone(monkeypatch) -> None:
    hosts = {0: "a", 1: "b", 2: "b"}
    monkeypatch.setattr(windows, "host", lambda: [hosts[here.process]] * 2)
    mesh: Any = types.SimpleNamespace(
        devices=ONE_EACH, axis_names=("dp", "ep"), shape={"dp": 1, "ep": 3}
    )

    def chosen(job: Job) -> str:
        monkeypatch.setattr(ffi, "native_for", lambda _: job.natives[here.process])
        monkeypatch.setattr(nvshmem, "heap", HeapHere(job))

        def act(meeting):
            here.process = meeting.own
            config = helpers.make_config()
            return select.choose(mesh, ("ep",), "auto", meeting, config)

        actors = act_all(dict.fromkeys(job.processes, act)).values()
        assert all(actor.error is None for actor in actors)
        (found,) = {str(actor.result) for actor in actors}
        return found

    assert chosen(Job(ONE_EACH)) == "shmem"
    job = Job(ONE_EACH)
    job.modules[1].missing = "cannot open shared object file"
    assert chosen(job) == "collective"
    hosts.update({1: "a", 2: "a"})
    assert chosen(Job(ONE_EACH)) == "p2p"
    # On one host, it is not the network that prevents p2p.
    job = Job(ONE_EACH)
    job.natives[0].peer = ("peer access between all GPUs", "none")
    assert chosen(job) == "collective"


@pytest.mark.parametrize(
    ("process", "step", "ending"),
    [
        (0, "unique_id", "raises"),
        (0, "unique_id", "hangs"),
        (2, "start", "raises"),
        (1, "kernels", "raises"),
        (1, "kernels", "hangs"),
    ],
)
def test_start_that_one_process_fails_in(process: int, step: str, ending: str) -> None:
    """The others, which wait in the start, get the error; `auto` can go on without.

    If it raises before any process has begun, another init may try again.
    """
    job, over = Job(ONE_EACH), threading.Event()

    def fails(*args: Any) -> None:
        if ending == "raises":
            raise RuntimeError("no network")
        over.wait(60)

    setattr(job.modules[process], step, fails)
    words = {"raises": "no network", "hangs": "not ended in 0.5 s"}[ending]
    try:
        actors = job.run(1, timeout_s=1.0, ranks_per_node=2).values()
    finally:
        job.shared.barrier.abort()
        over.set()
    for actor in actors:
        assert isinstance(actor.error, windows.NotMapped)
        # In the start itself others fail, too, and the lowest of them is named.
        if step != "start":
            assert words in str(actor.error)
            assert f"(process {process})" in str(actor.error)
    if (step, ending) != ("unique_id", "raises"):
        job.refused("NVSHMEM to work")
        return
    delattr(job.modules[process], step)
    job.shared.barrier.reset()
    job.opens(1, True, ranks_per_node=2)


def test_doctor_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(windows, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(ffi, "native_for", lambda platform: fake_windows.Native(0))
    monkeypatch.setattr(findings, "self_test", lambda mesh, transport: "passed")
    module = types.SimpleNamespace(HAS_KERNELS=False)

    def found(native: Any) -> tuple[dict[str, bool], str]:
        monkeypatch.setattr(loader, "shmem", lambda: native)
        monkeypatch.setattr(nvshmem, "heap", nvshmem.Heap(lambda: native))
        transports = findings.transports(jax.devices()[:1], helpers.make_config())
        assert transports["p2p"]["works"]
        assert transports["shmem"]["works"] == (native is module)
        return findings._build(), transports["shmem"]["why"]

    build, why = found(None)
    assert not build["shmem"]
    assert f"pip install {nvshmem.PACKAGE}" in why
    assert "found neither" in why

    def fails(path: str) -> str:
        raise RuntimeError("version 2.11.0, built for 3.4 or newer of 3")

    build, why = found(types.SimpleNamespace(HAS_KERNELS=True, load=fails))
    assert build["shmem"]
    assert build["shmem over nodes"]
    assert f"NVSHMEM 3 (pip install {nvshmem.PACKAGE})" in why
    assert "version 2.11.0" in why
    # What a build lacks that has no device library.
    module.load, module.started = lambda path: "3.4.5", lambda: False
    build, _ = found(module)
    assert build["shmem"]
    assert not build["shmem over nodes"]


@pytest.mark.parametrize("processes", [1, 2])
def test_inits_of_several_threads(processes, monkeypatch) -> None:
    """A thread uses NVSHMEM only after or before another starts it, not during that."""
    job = Job(make_groups([[(process, 0) for process in range(processes)]]))
    starting, true_meet = threading.Event(), job.shared.meet

    def meet(pe: int, *what: Any) -> Any:
        if what[0] == "start":
            starting.set()
            time.sleep(0.3)
        return true_meet(pe, *what)

    monkeypatch.setattr(job.shared, "meet", meet)
    first = threading.Thread(target=job.opens, args=(1,))
    first.start()
    assert starting.wait(20)
    job.opens(2)
    first.join(20)
    assert all(list(heap.blocks) == [1, 2] for heap in job.heaps.values())
