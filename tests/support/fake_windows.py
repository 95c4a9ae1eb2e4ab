"""Windows without a GPU: threads meet over a store, and a native module uses files.

Each window is a memfd. A process that maps another's window leaves its mark there, at
its own rank, so that tests see who has mapped what. A fabric handle names the window's
descriptor and its fabric.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import struct
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_ep._native import ffi
from jax_ep._peers import windows
from jax_ep._peers.rendezvous import Rendezvous
from support import helpers

BYTES = 4096
HANDLE = struct.Struct("<qq48s")  # process id, descriptor, fabric

here = threading.local()  # `process`: the one that a thread acts as


class Store:
    """The key-value store of jax.distributed, for threads that act as processes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: set before")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get_bytes(self, key):
        with self._changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
            return self.values[key]

    def key_value_dir_get_bytes(self, folder):
        with self._changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(folder)]

    def key_value_delete(self, key):
        with self._changed:
            self.values.pop(key, None)

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self._changed:
            if self._changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                return self.values[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")


@contextlib.contextmanager
def as_of_cuda():
    """Errors of the system as those of the CUDA module."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(str(error)) from error


class Native(types.SimpleNamespace):
    """The CUDA module of one process. Fields say what fails."""

    MAX_WINDOW_RANKS = 32
    FIRST_EPOCH = 1
    ELSEWHERE = -1

    def __init__(self, process: int, **fields: Any) -> None:
        super().__init__(
            process=process,
            obstacle=None,
            peer=None,
            no_room=None,
            no_export=None,
            no_map=None,
            uuids=lambda process, ordinal: f"gpu-{process}-{ordinal}",
            fabric="",
            makes_handles=True,
            fabric_asked=[],
            handles_asked=[],
            taken_by=[],
            asked=[],
            peers=[],
            groups=None,
            own={},
            mapped={},
            closed=[],
        )
        self.__dict__.update(fields)

    def p2p_obstacle(self, groups):
        self.asked.append(groups)
        return self.obstacle

    def peer_obstacle(self, ordinals, uuids):
        self.peers.append((ordinals, uuids))
        return self.peer

    def device_uuid(self, ordinal):
        return self.uuids(self.process, ordinal)

    def device_fabric(self, ordinal):
        self.fabric_asked.append(ordinal)
        return self.fabric

    def shares_by_fabric(self, ordinal):
        self.handles_asked.append(ordinal)
        return self.makes_handles

    def open_windows(self, key, groups, config, **options):
        if self.no_room:
            raise RuntimeError(self.no_room)
        self.groups = groups
        self.by_fabric = options["by_fabric"]
        for group in groups:
            for rank, ordinal in enumerate(group):
                if ordinal != self.ELSEWHERE:
                    with as_of_cuda():
                        descriptor = os.memfd_create("window")
                    os.ftruncate(descriptor, BYTES)
                    self.own[ordinal] = descriptor, mmap.mmap(descriptor, BYTES)
                    self.mark(self.own[ordinal][1], rank)
        local = [(o, r) for g in groups for r, o in enumerate(g) if o != self.ELSEWHERE]
        ffi.native.open_group(key, [o for o, _ in local], [r for _, r in local])
        return BYTES

    def mark(self, memory, rank):
        """Marks a window for a local rank, at the rank's place."""
        memory[rank] = self.process + 1

    def export_window(self, key, ordinal):
        if self.no_export:
            raise RuntimeError(self.no_export)
        descriptor, handle = self.own[ordinal][0], None
        if self.by_fabric:
            assert self.makes_handles
            handle = HANDLE.pack(os.getpid(), descriptor, self.fabric.encode())
        with as_of_cuda():
            return os.dup(descriptor), BYTES, handle

    def import_window(self, key, ep_group, rank, handle, size):
        if self.no_map:
            raise RuntimeError(self.no_map)
        group = self.groups[ep_group]
        assert group[rank] == self.ELSEWHERE
        self.taken_by.append((rank, type(handle)))
        if isinstance(handle, bytes):
            owner, descriptor, fabric = HANDLE.unpack(handle)
            assert fabric.rstrip(b"\0").decode() == self.fabric
            with open(f"/proc/{owner}/fd/{descriptor}", "r+b") as window:
                memory = mmap.mmap(window.fileno(), size)
        else:
            memory = mmap.mmap(handle, size)
        self.mapped[ep_group, rank] = memory
        for own, ordinal in enumerate(group):
            if ordinal != self.ELSEWHERE:
                self.mark(memory, own)

    def close_group(self, key):
        self.closed.append(key)
        for descriptor, memory in self.own.values():
            memory.close()
            os.close(descriptor)
        for memory in self.mapped.values():
            memory.close()
        self.own, self.mapped = {}, {}
        ffi.native.close_group(key)

    def marks(self, ordinal):
        """Who has mapped a window of this process, by rank: process + 1, or 0."""
        return list(self.own[ordinal][1][: self.MAX_WINDOW_RANKS])


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def threads_of_meetings() -> int:
    """How many threads still hand out descriptors."""
    end = time.monotonic() + 20
    while True:
        count = sum("_serve" in thread.name for thread in threading.enumerate())
        if count == 0 or time.monotonic() > end:
            return count
        time.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a device that choosing a transport reads."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    client: Any = None

    @property
    def local_hardware_id(self) -> int:
        return self.id % 8


class Actor(threading.Thread):
    """Runs `act(meeting)` as one process; keeps what it returned or raised."""

    def __init__(
        self, act: Callable[[Rendezvous], Any], *args: Any, **named: Any
    ) -> None:
        super().__init__()
        self.meeting = Rendezvous(*args, **named)
        self.act, self.result, self.error = act, None, None
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        try:
            with self.meeting as meeting:
                self.result = self.act(meeting)
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - start


def act_all(
    acts: dict[int, Callable[[Rendezvous], Any]],
    timeout_s: float = 20.0,
    processes: list[int] | None = None,
    subject: Callable[[int], str] = str,
    store: Any = None,
) -> dict[int, Actor]:
    """Runs each process's act in a thread; `processes` may also name absent ones."""
    store = store or Store()
    processes = processes or sorted(acts)
    actors = {
        process: Actor(
            act, processes, process, timeout_s, subject=subject(0), store=store
        )
        for process, act in acts.items()
    }
    for actor in actors.values():
        actor.join(200)
    return actors


CONFIG = helpers.make_config(timeout_s=20.0)


def make_groups(layout: list[list[tuple[int, int]]]) -> np.ndarray:
    """EP groups as arrays of devices, from (process, ordinal) pairs."""
    groups = np.empty((len(layout), len(layout[0])), object)
    for i, group in enumerate(layout):
        for rank, (process, ordinal) in enumerate(group):
            groups[i, rank] = Device(8 * process + ordinal, process)
    return groups


ONE_EACH = make_groups([[(0, 0), (1, 0), (2, 0)]])
# Two groups, each over two processes with two devices each; ranks of a process are not
# always adjacent.
PAIRS = make_groups(
    [
        [(0, 1), (1, 0), (0, 0), (1, 1)],
        [(2, 0), (2, 1), (3, 1), (3, 0)],
    ]
)


class Job:
    """What init does to open windows, in all processes of some groups."""

    def __init__(self, groups: np.ndarray, **fields: dict[int, Any]) -> None:
        """`fields` gives values of fields of `Native`, by process."""
        self.groups = groups
        self.processes = sorted({device.process_index for device in groups.flat})
        self.natives = {p: Native(p) for p in self.processes}
        for name, values in fields.items():
            for process, value in values.items():
                setattr(self.natives[process], name, value)

    def act(self, meeting: Rendezvous) -> Any:
        """Acts as init does: returns an obstacle, or the marks in opened windows."""
        native = self.natives[meeting.own]
        here.process = meeting.own
        found = windows.find_obstacle(native, self.groups, meeting)
        if found is not None:
            return found
        size = windows.open_windows(native, 1, self.groups, CONFIG, 1, meeting)
        assert size == BYTES
        # Waits for all, as a call would.
        meeting.gather("used", None)
        return {ordinal: native.marks(ordinal) for ordinal in native.own}

    def run(self, **options: Any) -> dict[int, Any]:
        actors = act_all(dict.fromkeys(self.processes, self.act), **options)
        assert threads_of_meetings() == 0
        return actors

    def results(self) -> list[Any]:
        actors = self.run()
        assert [actor.error for actor in actors.values()] == [None] * len(actors)
        return [actor.result for actor in actors.values()]

    def close(self) -> None:
        for native in self.natives.values():
            native.close_group(1)


@pytest.fixture
def all_closed():
    """Checks that a test leaves no descriptor open."""
    before = descriptors()
    yield
    assert descriptors() == before


def check_marks(job: Job, marked: list[Any]) -> None:
    """Every window is marked by its own rank and by ranks of other processes."""
    results = dict(zip(job.processes, marked, strict=True))
    for group in job.groups:
        for device in group:
            marks = results[device.process_index][device.id % 8]
            for rank, other in enumerate(group):
                local = other.process_index == device.process_index
                expected = (
                    0 if local and other is not device else other.process_index + 1
                )
                assert marks[rank] == expected, (device, rank)
