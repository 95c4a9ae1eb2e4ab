"""Windows of transport "shmem", from the symmetric heap of NVSHMEM.

The kernels are those of p2p; only the windows differ. Each process of the mesh has one
GPU and is one PE of NVSHMEM, which maps the memory of the other PEs on its node. Ranks
on other nodes are reached by NVSHMEM's puts.
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
from jax_ep._peers import answers, topology, windows
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._peers.windows import NotMapped, Obstacle

T = TypeVar("T")

# What processes tell each other, step by step.
_INFO = answers.record(
    obstacle=answers.obstacle, started=answers.flag, kernels=answers.flag
)
_ID = answers.record(
    name=answers.optional(answers.hexadecimal), failure=answers.obstacle
)

LIBRARY = "libnvshmem_host.so.3"
_FOR_CUDA_12 = loader.plugin is not None and loader.plugin.extra == "cuda12"
PACKAGE = "nvidia-nvshmem-cu12" if _FOR_CUDA_12 else "nvidia-nvshmem-cu13"


def candidates() -> Iterator[str]:
    """Yields paths to try: NVSHMEM_HOME, PyPI's wheel, the loader's search path."""
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
    """The NVSHMEM state of this process.

    NVSHMEM starts once and is never finalised, because its finalisation waits for all
    processes, including dead ones.

    Attributes:
        processes: processes of the job by PE; empty before the start.
        ordinal: device ordinal of this process's GPU.
        blocks: address of the window by group key, in order of allocation, which is the
            same in all processes.
        hosts: host of each process of the mesh that was checked last.
        broken: the reason why NVSHMEM cannot be used any more, or None.
    """

    def __init__(self, find: Callable[[], ModuleType | None] = loader.shmem) -> None:
        """Does not start NVSHMEM; `find` returns the native module, if it was built."""
        self._find = find
        self.processes: tuple[int, ...] = ()
        self.ordinal = -1
        self.blocks: dict[int, int] = {}
        self.hosts: topology.Hosts = {}
        self.broken: str | None = None
        self._turn = threading.Lock()

    def load(self) -> tuple[str | None, Obstacle | None]:
        """Loads the library; returns its version, or an obstacle."""
        native = self._find()
        if native is None:
            return None, (
                "jax_ep's plugin for CUDA, or a build from source with NVSHMEM's "
                f"headers (pip install {PACKAGE} before it)",
                loader.shmem_problem() or "neither",
            )
        why = ""
        for path in candidates():
            try:
                return native.load(path), None
            except RuntimeError as error:
                why = why or f"{path}: {error}"
        return None, (f"NVSHMEM 3 (pip install {PACKAGE})", why)

    def own_obstacle(self, groups: np.ndarray, own: int) -> Obstacle | None:
        """Returns an obstacle to shmem in this process, or None."""
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
                return "NVSHMEM to itself", "NVSHMEM started by another library"
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
        self,
        native: ModuleType,
        groups: np.ndarray,
        config: EPConfig,
        rendezvous: Rendezvous,
    ) -> Obstacle | None:
        """Returns an obstacle to shmem in any process, or None; the same in all."""
        if not rendezvous.possible:
            return "jax.distributed.initialize() in a mesh of several processes", "none"
        # NVSHMEM's calls wait for all processes, so all must make them in one order.
        rendezvous.take_turn(self._turn)
        info = {"obstacle": None, "started": bool(self.processes), "kernels": False}
        try:
            info["obstacle"] = self.own_obstacle(groups, rendezvous.own)
            info["kernels"] = bool(getattr(self._find(), "HAS_KERNELS", False))
        except (OSError, ImportError) as error:  # such as for lack of descriptors
            info["obstacle"] = "NVSHMEM's library and jax_ep's module", str(error)
        infos = rendezvous.ask("shmem", info, _INFO)
        found = windows.first({p: info["obstacle"] for p, info in infos.items()})
        if found is not None:
            return found
        started = [process for process, info in infos.items() if info["started"]]
        if len(started) not in (0, len(infos)):
            return "NVSHMEM started in all processes of a mesh or in none", f"{started}"
        self.hosts, found = topology.find_hosts(native, groups, rendezvous)
        nodes = topology.of_groups(groups, config, self.hosts)
        if found is not None or not topology.several(nodes):
            return found
        without = [process for process, info in infos.items() if not info["kernels"]]
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
        rendezvous: Rendezvous,
    ) -> int:
        """Opens the group `key` over blocks of the heap; returns bytes per window.

        Raises:
            NotMapped: NVSHMEM does not start, or does not connect the GPUs.
            RuntimeError: a heap of this or another process is full, or a process failed
                or did not arrive.
        """
        own = windows.local_groups(groups, rendezvous.own)
        nodes = topology.of_groups(groups, config, self.hosts)
        internode, bundled = topology.several(nodes), topology.bundled(nodes, config)
        size = topology.window_bytes(config, nodes)
        # NVSHMEM waits for all processes without a limit. Each call therefore follows a
        # step of the rendezvous, so that all are here; if one dies just then, the time
        # limit ends the wait.
        self._start(groups, rendezvous, config.timeout_s)
        self._free_closed(native, rendezvous, config.timeout_s)
        block = self._bounded(self._module().allocate, config.timeout_s, size)
        if block:
            self.blocks[key] = block
        lack = None if block else (f"{size} bytes", "no room")
        lacks = rendezvous.ask("heap", lack, answers.obstacle)
        short = windows.first(lacks)
        if short is not None:
            if None in lacks.values():
                self.broken = "heaps that differ, as a process had no room"
            raise RuntimeError(
                "jax_ep.init: each GPU must have room for its window in NVSHMEM's "
                f"heap, {short[0]}, got {short[1]}; lower max_tokens_per_rank or "
                "pending_calls, leave JAX less of the device "
                "(XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE="
                "false), or raise NVSHMEM_MAX_MEMORY_PER_GPU"
            )
        pes = [
            [rendezvous.processes.index(device.process_index) for device in group]
            for group in own
        ]
        given, obstacle = self._reached(own, pes, block, config, rendezvous.own)
        kernels: list[int] = []
        if internode:
            try:
                limit_s = min(config.timeout_s / 2, rendezvous.apart_s())
                kernels = self._bounded(self._module().kernels, limit_s)
            except RuntimeError:
                obstacle = ("NVSHMEM to take jax_ep's device code", str(self.broken))
        found = windows.first(rendezvous.ask("reached", obstacle, answers.obstacle))
        if found is not None:
            raise NotMapped(found)
        native.open_windows(
            key,
            [
                windows.ordinals(group, rendezvous.own, native.ELSEWHERE)
                for group in own
            ],
            windows.window_config(config, groups.shape[1]),
            timeout_s=config.timeout_s,
            num_sms=config.num_sms or 0,
            first_epoch=native.FIRST_EPOCH if first_epoch is None else first_epoch,
            given=given,
            internode=self._internode(own, pes, config, bundled, kernels)
            if internode
            else None,
        )
        try:
            # Others must not store into this window before it is initialised.
            rendezvous.gather("windows", None)
        except BaseException:
            native.close_group(key)
            raise
        return size

    def _internode(
        self,
        groups: list[np.ndarray],
        pes: list[list[int]],
        config: EPConfig,
        bundled: tuple[int, int],
        kernels: list[int],
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Returns the native module's argument for ranks on other nodes."""
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
        """Returns addresses of the ranks' blocks, 0 on other nodes, and an obstacle."""
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

    def _start(
        self, groups: np.ndarray, rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        if self.processes:
            return
        # Multicast serves NVSHMEM's collectives, which jax_ep does not call. On shared
        # hosts it can put GPUs out of service.
        os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
        first = rendezvous.processes[0]
        name, failure = None, None
        if rendezvous.own == first:
            try:
                limit_s = min(timeout_s / 2, rendezvous.apart_s())
                name = self._bounded(self._module().unique_id, limit_s).hex()
            except RuntimeError as error:
                failure = ("NVSHMEM to start in all processes", str(self.broken))
                if (
                    error.__cause__ is not None
                ):  # no network yet, so init can be retried
                    self.broken = None
        told = {"name": name, "failure": failure}
        ids = rendezvous.ask("id", told, _ID)
        found = windows.first({p: info["failure"] for p, info in ids.items()})
        if found is not None:
            raise NotMapped(found)
        name = bytes.fromhex(ids[first]["name"])
        (device,) = (d for d in groups.flat if d.process_index == rendezvous.own)
        pe, pes = rendezvous.processes.index(rendezvous.own), len(rendezvous.processes)
        ordinal = windows.ordinal(device)
        try:
            # A part of the time, because a process that fails at once waits for others.
            limit_s = min(timeout_s / 2, rendezvous.apart_s())
            self._bounded(self._module().start, limit_s, name, pe, pes, ordinal)
        except RuntimeError:
            failure = ("NVSHMEM to start in all processes", str(self.broken))
        found = windows.first(rendezvous.ask("started", failure, answers.obstacle))
        if found is not None:
            self.broken = self.broken or "a start that failed in another process"
            raise NotMapped(found)
        self.processes, self.ordinal = tuple(rendezvous.processes), ordinal

    def _free_closed(
        self, native: ModuleType, rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        """Frees the blocks of groups that are closed in all processes."""
        in_use = set(native.given_windows_in_use())
        closed = [key for key, block in self.blocks.items() if block not in in_use]
        # As strings, because keys have 63 bits.
        told = [str(key) for key in closed]
        everywhere = rendezvous.ask("closed", told, answers.several(answers.text))
        for key in closed:
            if all(str(key) in keys for keys in everywhere.values()):
                self._bounded(self._module().free, timeout_s, self.blocks[key])
                del self.blocks[key]

    def _bounded(self, call: Callable[..., T], timeout_s: float, *args: Any) -> T:
        """Returns `call(*args)`, or raises RuntimeError after `timeout_s`.

        NVSHMEM itself waits for dead processes without a limit.
        """
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
            # The call continues in its thread, and NVSHMEM allows one call at a time.
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
