"""Transport "shmem": windows from the symmetric heap of NVSHMEM. Used by init.

The kernels are those of p2p. What differs is where windows come from: each process of
the mesh has one GPU and is one PE of NVSHMEM, which maps the memory of the others on
its node. Ranks on other nodes are reached by NVSHMEM's puts.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from jax_ep._core.config import EPConfig
from jax_ep._native import loader
from jax_ep._peers import topology, windows
from jax_ep._peers.rendezvous import Meeting
from jax_ep._peers.windows import NotMapped, Obstacle

T = TypeVar("T")

LIBRARY = "libnvshmem_host.so.3"
PACKAGE = "nvidia-nvshmem-cu13"


def candidates() -> Iterator[str]:
    """Where the library may be: NVSHMEM_HOME, PyPI's wheel, the loader's own places."""
    home = os.environ.get("NVSHMEM_HOME")
    if home:
        yield str(pathlib.Path(home) / "lib" / LIBRARY)
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield str(pathlib.Path(folder) / "lib" / LIBRARY)
    yield LIBRARY


class Heap:
    """What this process has of NVSHMEM, which starts once and never ends.

    NVSHMEM's own end waits for all processes, dead ones too.

    Attributes:
        processes: PEs, in their order; empty before the start.
        ordinal: of this process's GPU.
        blocks: windows by the key of their group, in the order of allocation, which is
            the same everywhere.
        hosts: of the processes of the mesh that was looked at last.
        broken: why nothing more can be done, if so.
    """

    def __init__(self, find: Callable[[], ModuleType | None] = loader.shmem) -> None:
        """Starts nothing; `find` finds the native module."""
        self._find = find
        self.processes: tuple[int, ...] = ()
        self.ordinal = -1
        self.blocks: dict[int, int] = {}
        self.hosts: topology.Hosts = {}
        self.broken: str | None = None

    def load(self) -> tuple[str | None, Obstacle | None]:
        """The library's version, or what is missing for it."""
        native = self._find()
        if native is None:
            return None, (
                f"jax_ep built with NVSHMEM's headers (pip install {PACKAGE} before "
                "pip install jax_ep, from source)",
                "a build without",
            )
        why = ""
        for path in candidates():
            try:
                return native.load(path), None
            except RuntimeError as error:
                why = why or f"{path}: {error}"
        return None, (f"NVSHMEM 3 (pip install {PACKAGE})", why)

    def own_obstacle(self, groups: np.ndarray, own: int) -> Obstacle | None:
        """(what shmem must have, what was found) as far as this process sees."""
        _, lacking = self.load()
        if lacking is not None:
            return lacking
        here = [device for device in groups.flat if device.process_index == own]
        if len(here) != 1:
            return "one GPU of the mesh in each process", f"{len(here)} in one"
        if self.broken:
            return "NVSHMEM to work", self.broken
        processes = tuple(sorted({device.process_index for device in groups.flat}))
        if not self.processes:
            if self._module().started():
                return "NVSHMEM to itself", "one that another library has started"
        elif self.processes != processes:
            return (
                "the processes that NVSHMEM was started with, "
                f"{list(self.processes)}, in every mesh",
                f"{list(processes)}",
            )
        elif self.ordinal != windows.ordinal(here[0]):
            return (
                f"the GPU that NVSHMEM was started with, local device {self.ordinal}",
                f"local device {windows.ordinal(here[0])}",
            )
        return None

    def find_obstacle(
        self, native: ModuleType, groups: np.ndarray, config: EPConfig, meeting: Meeting
    ) -> Obstacle | None:
        """As own_obstacle, with what p2p must have; the same in all processes."""
        if not meeting.possible:
            return "jax.distributed.initialize() in a mesh of several processes", "none"
        meeting.begin()  # before a look at what other threads change
        card = {
            "obstacle": self.own_obstacle(groups, meeting.own),
            "started": bool(self.processes),
            "kernels": bool(getattr(self._find(), "HAS_KERNELS", False)),
        }
        cards = meeting.gather("shmem", card)
        found = windows.first({p: card["obstacle"] for p, card in cards.items()})
        if found is not None:
            return found
        started = [process for process, card in cards.items() if card["started"]]
        if len(started) not in (0, len(cards)):
            return "NVSHMEM started in all processes of a mesh or in none", f"{started}"
        self.hosts, found = topology.find_hosts(native, groups, meeting)
        nodes = topology.of_groups(groups, config, self.hosts)
        if found is not None or not topology.several(nodes):
            return found
        without = [process for process, card in cards.items() if not card["kernels"]]
        if without:
            return (
                "jax_ep built with libnvshmem_device.a beside NVSHMEM's headers, for "
                "ranks on other nodes",
                f"none in processes {without}",
            )
        return None

    def open_windows(
        self,
        native: ModuleType,
        key: int,
        groups: np.ndarray,
        config: EPConfig,
        first_epoch: int | None,
        meeting: Meeting,
    ) -> int:
        """Opens the group `key` over blocks of the heap; returns a window's bytes.

        Raises:
            NotMapped: NVSHMEM does not start, or GPUs do not reach each other by it.
            RuntimeError: no room, here or in another process, or one that did not come.
        """
        own = windows.local_groups(groups, meeting.own)
        nodes = topology.of_groups(groups, config, self.hosts)
        far, bundled = topology.several(nodes), topology.bundled(nodes, config)
        size = topology.window_bytes(config, nodes)
        # NVSHMEM waits for all processes. All are here when it begins to, since each
        # step follows one of the meeting; one that dies just then ends at the limit.
        self._start(groups, meeting, config.timeout_s)
        self._free_closed(native, meeting, config.timeout_s)
        block = self._bounded(self._module().allocate, config.timeout_s, size)
        if block:
            self.blocks[key] = block
        lacks = meeting.gather("heap", None if block else (f"{size} bytes", "no room"))
        short = windows.first(lacks)
        if short is not None:
            if None in lacks.values():
                self.broken = "heaps that differ: some process had no room"
            raise RuntimeError(
                "jax_ep.init: each GPU must have room for its window in NVSHMEM's "
                f"heap, {short[0]}, got {short[1]}; lower max_tokens_per_rank or "
                "pending_calls, leave JAX less of the device "
                "(XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE="
                "false), or raise NVSHMEM_MAX_MEMORY_PER_GPU"
            )
        pes = [
            [meeting.processes.index(device.process_index) for device in group]
            for group in own
        ]
        given, obstacle = self._reached(own, pes, block, config, meeting.own)
        kernels: list[int] = []
        if far:
            try:
                kernels = self._bounded(self._module().kernels, config.timeout_s / 2)
            except RuntimeError:
                obstacle = ("NVSHMEM to take jax_ep's device code", str(self.broken))
        found = windows.first(meeting.gather("reached", obstacle))
        if found is not None:
            raise NotMapped(found)
        native.open_windows(
            key,
            [windows.ordinals(group, meeting.own, native.ELSEWHERE) for group in own],
            windows.window_config(config, groups.shape[1]),
            timeout_s=config.timeout_s,
            num_sms=config.num_sms or 0,
            first_epoch=native.FIRST_EPOCH if first_epoch is None else first_epoch,
            given=given,
            far=self._far(own, pes, config, bundled, kernels) if far else None,
        )
        try:
            # Others may store into this process's window only after its first contents.
            meeting.gather("windows", None)
        except BaseException:
            native.close_group(key)
            raise
        return size

    def _far(
        self,
        groups: list[np.ndarray],
        pes: list[list[int]],
        config: EPConfig,
        bundled: tuple[int, int],
        kernels: list[int],
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """What the native module takes to reach other nodes."""
        names = topology.of_groups(groups, config, self.hosts)
        numbers = [[each.index(name) for name in each] for each in names]
        return pes, numbers if bundled != (0, 0) else [], kernels

    def _reached(
        self,
        groups: list[np.ndarray],
        pes: list[list[int]],
        block: int,
        config: EPConfig,
        own: int,
    ) -> tuple[list[list[int]], Obstacle | None]:
        """Where the ranks' blocks are, 0 on other nodes; what is out of reach."""
        given: list[list[int]] = []
        obstacle = None
        for group, numbers in zip(groups, pes, strict=True):
            nodes = topology.of_ranks(group, config, self.hosts)
            here = {
                n for n, d in zip(nodes, group, strict=True) if d.process_index == own
            }
            given.append([])
            for rank, (node, pe) in enumerate(zip(nodes, numbers, strict=True)):
                given[-1].append(
                    self._module().reached(block, pe) if node in here else 0
                )
                if node in here and not given[-1][-1]:
                    obstacle = (
                        "GPUs of a node that NVSHMEM maps for each other",
                        f"none for rank {rank}",
                    )
        return given, obstacle

    def _start(self, groups: np.ndarray, meeting: Meeting, timeout_s: float) -> None:
        if self.processes:
            return
        # Multicast is for collectives, which nothing here calls; on hosts that are
        # shared it can take GPUs out of service.
        os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
        first = meeting.processes[0]
        name, failure = None, None
        if meeting.own == first:
            try:
                name = self._bounded(self._module().unique_id, timeout_s / 2).hex()
            except RuntimeError as error:
                failure = ("NVSHMEM to start in all processes", str(self.broken))
                if error.__cause__ is not None:  # no network yet; nothing has begun
                    self.broken = None
        ids = meeting.gather("id", {"name": name, "failure": failure})
        found = windows.first({p: card["failure"] for p, card in ids.items()})
        if found is not None:
            raise NotMapped(found)
        name = bytes.fromhex(ids[first]["name"])
        (device,) = (d for d in groups.flat if d.process_index == meeting.own)
        pe, pes = meeting.processes.index(meeting.own), len(meeting.processes)
        ordinal = windows.ordinal(device)
        try:
            # Half of the time: a process that fails at once waits for the others.
            self._bounded(self._module().start, timeout_s / 2, name, pe, pes, ordinal)
        except RuntimeError:
            failure = ("NVSHMEM to start in all processes", str(self.broken))
        found = windows.first(meeting.gather("started", failure))
        if found is not None:
            self.broken = self.broken or "a start that another process failed in"
            raise NotMapped(found)
        self.processes, self.ordinal = tuple(meeting.processes), ordinal

    def _free_closed(
        self, native: ModuleType, meeting: Meeting, timeout_s: float
    ) -> None:
        """Frees the blocks of groups that are closed in all processes."""
        in_use = set(native.given_windows_in_use())
        closed = [key for key, block in self.blocks.items() if block not in in_use]
        # Keys as strings: they have 63 bits.
        answers = meeting.gather("closed", [str(key) for key in closed])
        for key in closed:
            if all(str(key) in keys for keys in answers.values()):
                self._bounded(self._module().free, timeout_s, self.blocks[key])
                del self.blocks[key]

    def _bounded(self, call: Callable[..., T], timeout_s: float, *args: Any) -> T:
        """Ends within the time limit, where NVSHMEM would wait for a dead process."""
        result: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(call(*args))
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="jax_ep NVSHMEM", daemon=True)
        try:
            thread.start()
            thread.join(timeout_s)
        except BaseException:
            # It goes on by itself, and NVSHMEM takes one call at a time.
            self.broken = self.broken or "a wait of NVSHMEM that was interrupted"
            raise
        if thread.is_alive():
            self.broken = f"a wait of NVSHMEM that has not ended in {timeout_s:g} s"
        elif failure:
            self.broken = str(failure[0])
        if self.broken:
            raise RuntimeError(
                "jax_ep.init: NVSHMEM must answer in every process of the mesh, got "
                f"{self.broken}; restart the processes, or use another transport"
            ) from (failure[0] if failure else None)
        return result[0]

    def _module(self) -> ModuleType:
        native = self._find()
        assert native is not None
        return native


heap = Heap()  # of this process
