"""Meshes of several processes: when they can have windows, and opening them.

Needs no GPU: threads act as processes, files as windows. test_multiprocess_windows.py
has processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from typing import Any

import pytest

from jax_ep._peers import descriptors, windows
from jax_ep._peers.descriptors import DescriptorClient
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._transport import select
from support.fake_windows import (
    ONE_EACH,
    PAIRS,
    Device,
    Job,
    act_all,
    check_marks,
    here,
    make_groups,
)
from support.fake_windows import all_closed as all_closed

SOON_S = 10.0  # well below the 20 s that others would wait


# Every group in one process.
APART = make_groups([[(0, 0), (0, 1)], [(1, 0), (1, 1)]])


@pytest.mark.parametrize(
    "groups", [ONE_EACH, PAIRS, APART], ids=["one", "two", "apart"]
)
def test_every_rank_maps_every_other(groups, all_closed) -> None:
    job = Job(groups)
    check_marks(job, job.results())
    for process, native in job.natives.items():
        # Only the groups that have ranks here.
        here = [group for group in groups if process in _by_process(group)]
        expected = [windows.ordinals(group, process, -1) for group in here]
        assert native.groups == expected
        assert {kind for _, kind in native.taken_by} <= {int}
        assert not native.by_fabric
        # Fabrics are not asked for if no group crosses processes.
        assert bool(native.fabric_asked) == (groups is not APART)
        # Without a fabric no memory is allocated to try its handles.
        assert not native.handles_asked
    job.close()


def _by_process(group: Any) -> dict[int, list[Device]]:
    found: dict[int, list[Device]] = {}
    for device in group:
        found.setdefault(device.process_index, []).append(device)
    return found


def test_groups_apart_need_no_sockets(all_closed, monkeypatch) -> None:
    monkeypatch.setattr(Rendezvous, "listen", None)
    job = Job(APART)
    job.results()
    assert not any(native.peers for native in job.natives.values())
    job.close()


def test_peers_are_asked_for_by_uuid(all_closed) -> None:
    job = Job(PAIRS)
    job.results()
    assert job.natives[0].peers == [([1, -1, 0, -1], ["gpu-1-0", "gpu-1-1"])]
    assert job.natives[3].peers == [([-1, -1, 1, 0], ["gpu-2-0", "gpu-2-1"])]
    job.close()


OBSTACLE = ("GPUs of compute capability 9.0 or newer", "8.0 on device 0")
MISPLACED = [
    (ONE_EACH, {"obstacle": {2: OBSTACLE}}, "9.0", r"8\.0 on device 0 \(process 2\)"),
    (APART, {"obstacle": {1: OBSTACLE}}, "9.0", r"8\.0 on device 0 \(process 1\)"),
    (
        ONE_EACH,
        {"uuids": dict.fromkeys(range(3), lambda process, ordinal: "gpu-x")},
        "a GPU of its own",
        "gpu-x more than once",
    ),
    (
        ONE_EACH,
        {"peer": {1: ("peer access", "none from device 0 to device gpu-2-0")}},
        "peer access",
        r"gpu-2-0 \(process 1\)",
    ),
]


@pytest.mark.parametrize(("groups", "fields", "must", "got"), MISPLACED)
def test_obstacle_in_one_process(groups, fields, must, got, all_closed) -> None:
    """All processes report the same, and nothing is opened."""
    job = Job(groups, **fields)
    results = job.results()
    assert len(set(results)) == 1
    assert must in results[0][0]
    assert re.search(got, results[0][1])
    assert not any(native.own for native in job.natives.values())


def test_unknown_uuids_are_no_obstacle(all_closed) -> None:
    job = Job(ONE_EACH, uuids=dict.fromkeys(range(3), lambda process, ordinal: ""))
    job.results()
    job.close()


def test_other_hosts(all_closed, monkeypatch) -> None:
    """Different groups may be on several hosts, one group may not."""
    hosts = iter([f"boot{i}", f"node{i}"] for i in range(100))
    monkeypatch.setattr(windows, "host", lambda: next(hosts))
    (found,) = set(Job(ONE_EACH).results())
    assert "on one host" in found[0]
    assert re.search(r"'node0', 'node1', 'node2'.*processes \[0, 1, 2\]", found[1])
    job = Job(APART)
    job.results()
    job.close()


def test_containers_with_networks_of_their_own(all_closed, monkeypatch) -> None:
    """Sockets on one host do not reach each other: no p2p in any process."""
    monkeypatch.setattr(Rendezvous, "listen", lambda self: "00" * 24)
    (found,) = set(Job(ONE_EACH).results())
    assert "network namespace" in found[0]
    assert "refused from process 0 to 1" in found[1]


def test_containers_with_users_of_their_own(all_closed, monkeypatch) -> None:
    """Processes give nothing to another user: no p2p, but no error with "auto"."""
    user = os.geteuid()
    monkeypatch.setattr(descriptors.os, "geteuid", lambda: user + 1)
    (found,) = set(Job(ONE_EACH).results())
    assert "user namespace" in found[0]
    assert "from process 0 to 1" in found[1]


@pytest.mark.parametrize(
    ("error", "must"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "one more open file"),
        (TimeoutError("no answer within 3 s"), "answer each other within timeout_s"),
        (PermissionError(errno.EPERM, "of another user"), "user namespace"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "network namespace"),
    ],
)
def test_why_sockets_do_not_reach(error, must, all_closed, monkeypatch) -> None:
    """The error has the actual reason, not the usual one."""

    def fail(self: Rendezvous, process: int, address: str) -> None:
        raise error

    monkeypatch.setattr(Rendezvous, "connect", fail)
    (found,) = set(Job(ONE_EACH).results())
    assert must in found[0]
    assert (error.strerror or str(error)) in found[1]


REFUSED = PermissionError(errno.EPERM, "Operation not permitted")
FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("place", "name", "error", "must"),
    [
        (socket.socket, "bind", REFUSED, "abstract Unix sockets"),
        (socket.socket, "listen", REFUSED, "abstract Unix sockets"),
        (socket, "socketpair", FULL, "one more open file"),
        (windows.socket, "gethostname", FULL, "one more open file"),
        (DescriptorClient, "greet", REFUSED, "abstract Unix sockets"),
    ],
)
def test_process_that_cannot_listen(
    place, name, error, must, all_closed, monkeypatch, caplog
) -> None:
    """All processes know which one it is; with "auto" they go on without p2p."""
    true = getattr(place, name)

    def refuse(*args: Any, **named: Any) -> Any:
        if getattr(here, "process", None) == 1:
            raise error
        return true(*args, **named)

    monkeypatch.setattr(place, name, refuse)
    (found,) = set(Job(ONE_EACH).results())
    assert must in found[0]
    assert found[1] == f"{error.strerror} (process 1)"
    with Rendezvous([0, 1], 0, 1.0) as meeting:
        assert select.instead("auto", found, meeting) == "collective"
        assert found[1] in caplog.text
        with pytest.raises(ValueError, match=must):
            select.instead("p2p", found, meeting)


@pytest.mark.parametrize("error", [FULL, TimeoutError("no answer within 3 s")])
def test_window_that_is_not_handed_over(error, all_closed, monkeypatch) -> None:
    true_take = Rendezvous.take

    def take(self: Rendezvous, process: int, number: int) -> int:
        if self.own == 1:
            raise error
        return true_take(self, process, number)

    monkeypatch.setattr(Rendezvous, "take", take)
    actors = Job(ONE_EACH).run()
    for actor in actors.values():
        assert isinstance(actor.error, windows.NotMapped)
        assert (error.strerror or str(error)) in actor.error.obstacle[1]
        assert "(process 1)" in actor.error.obstacle[1]


def silent_address(stack: contextlib.ExitStack) -> str:
    """The address of a server that accepts nobody."""
    name = os.urandom(8)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listener.bind(descriptors._PREFIX + name.hex().encode())
    listener.listen()
    return (name + bytes(16)).hex()


@pytest.mark.parametrize("comes", [True, False])
def test_process_that_stands_still(comes: bool, all_closed, monkeypatch) -> None:
    """The others wait once, not twice, and name it and nobody else."""
    timeout_s = 3.0
    true_listen, true_gather = Rendezvous.listen, Rendezvous.gather
    with contextlib.ExitStack() as stack:

        def listen(self: Rendezvous) -> str:
            return silent_address(stack) if self.own == 1 else true_listen(self)

        def gather(self: Rendezvous, name: str, value: Any) -> Any:
            if self.own == 1 and name == "reach":
                time.sleep(0.7 * timeout_s if comes else 1.5 * timeout_s)
            if self.own == 0 and name == "reach":
                value = None, False  # it connected before the other stood still
            return true_gather(self, name, value)

        monkeypatch.setattr(Rendezvous, "listen", listen)
        monkeypatch.setattr(Rendezvous, "gather", gather)
        actors = Job(ONE_EACH).run(timeout_s=timeout_s)
    for process, actor in actors.items():
        if comes:
            assert "answer each other" in actor.result[0]
            assert "from process 2 to 1 (process 2)" in actor.result[1]
        elif process != 1:
            assert "nothing from processes [1] of" in str(actor.error)
            assert actor.seconds < 1.4 * timeout_s


def test_who_does_not_answer_is_blamed_last() -> None:
    late = ("processes that answer", "none from process 0 to 2"), True
    room = ("room for one more open file", "none"), False
    found = windows.first_cause({0: late, 1: (None, False), 2: room})
    assert found == (room[0][0], "none (process 2)")
    assert windows.first_cause({0: late, 1: (None, False)}) is not None
    assert windows.first_cause({0: (None, False)}) is None


def test_a_failure_is_not_taken_for_a_network(all_closed, monkeypatch) -> None:
    """A failed process's socket is gone, too, but its error has precedence."""
    true_connect, failed = Rendezvous.connect, threading.Event()

    def connect(self: Rendezvous, process: int, address: str) -> None:
        if self.own == 1:
            raise RuntimeError("out of memory")
        failed.wait(20)
        if process == 1:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        true_connect(self, process, address)

    true_close = Rendezvous.close

    def close(self: Rendezvous, *args: Any) -> None:
        true_close(self, *args)
        if self.own == 1:
            failed.set()

    monkeypatch.setattr(Rendezvous, "connect", connect)
    monkeypatch.setattr(Rendezvous, "close", close)
    actors = Job(ONE_EACH).run()
    for process in (0, 2):
        assert isinstance(actors[process].error, RuntimeError)
        words = "init failed on process 1: RuntimeError: out of memory"
        assert words in str(actors[process].error)


@pytest.mark.parametrize("field", ["no_map", "no_export"])
def test_windows_that_cannot_be_shared(field: str, all_closed) -> None:
    """All processes get the error and close all, so that init can go on without p2p."""
    job = Job(PAIRS, **{field: {2: "CUDA_ERROR_INVALID_DEVICE"}})
    actors = job.run()
    errors = [actor.error for actor in actors.values()]
    assert {type(error) for error in errors} == {windows.NotMapped}
    assert len({error.obstacle for error in errors}) == 1
    assert "INVALID_DEVICE" in errors[0].obstacle[1]
    assert "(process 2)" in errors[0].obstacle[1]
    assert all(native.closed == [1] for native in job.natives.values())


def test_no_room_in_one_process(all_closed) -> None:
    """The process itself reports it; the others do not wait for it, and close."""
    job = Job(ONE_EACH, no_room={1: "jax_ep.init: 5 bytes on device 0"})
    actors = job.run()
    for process, actor in actors.items():
        assert isinstance(actor.error, RuntimeError)
        assert "5 bytes on device 0" in str(actor.error)
        assert actor.seconds < SOON_S
        if process != 1:
            assert "process 1" in str(actor.error)
            assert job.natives[process].closed == [1]
    assert not job.natives[1].own


class Killed(BaseException):
    """Ends a thread as a kill ends a process: without telling others."""


@pytest.mark.few(2)
@pytest.mark.parametrize("step", ["devices", "reach", "windows", "take", "mapped"])
def test_process_that_dies(step: str, all_closed, monkeypatch) -> None:
    """At any step: the others' init ends in time, names it, and closes all."""
    job = Job(ONE_EACH)
    true_gather, true_take = Rendezvous.gather, Rendezvous.take

    def die(meeting: Rendezvous) -> None:
        monkeypatch.setattr(meeting, "_give_up", lambda *_: None)
        raise Killed

    def gather(self: Rendezvous, name: str, value: Any) -> Any:
        if self.own == 1 and name == step:
            die(self)
        return true_gather(self, name, value)

    def take(self: Rendezvous, process: int, number: int) -> int:
        if self.own == 1 and step == "take":
            die(self)
        return true_take(self, process, number)

    def act(meeting: Rendezvous) -> Any:
        try:
            return job.act(meeting)
        except Killed:
            return None

    monkeypatch.setattr(Rendezvous, "gather", gather)
    monkeypatch.setattr(Rendezvous, "take", take)
    acts = dict.fromkeys(job.processes, act)
    timeout_s = 1.5
    actors = act_all(acts, timeout_s=timeout_s)
    for process in (0, 2):
        text = str(actors[process].error)
        assert isinstance(actors[process].error, RuntimeError)
        assert re.search(r"process 1\b|nothing from processes \[1\]", text), text
        # Counted from the last sign of life.
        assert actors[process].seconds < timeout_s + SOON_S
        if step in ("windows", "take", "mapped"):
            assert job.natives[process].closed == [1]
    job.natives[1].close_group(1)
