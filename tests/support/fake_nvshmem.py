"""NVSHMEM without a GPU: threads act as processes, and every step waits for all."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from jax_ep._native import ffi
from jax_ep._peers import nvshmem, windows
from jax_ep._peers.rendezvous import Rendezvous
from support import fake_windows, helpers
from support.fake_windows import act_all, make_groups

KERNELS = [11, 12]
here = threading.local()  # the process that a thread acts as
ONE_EACH = make_groups([[(0, 0), (1, 0), (2, 0)]])
# Groups whose ranks differ from their processes in order and have other ordinals.
CROSSED = make_groups([[(3, 1), (0, 2)], [(2, 0), (1, 3)]])


class Nvshmem:
    """What all processes share; blocks lie at the same offset in every heap."""

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
    """One process's _native_shmem. Its block at offset n has address n + 1000 * pe."""

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


class Native(fake_windows.Native):
    """The CUDA module; records the windows that it is given."""

    def __init__(self, process: int) -> None:
        super().__init__(process, given={}, internode={}, in_use=set())

    def open_windows(self, key, groups, config, *, given, internode, **options):
        self.groups, self.given[key], self.internode[key] = groups, given, internode
        for group, blocks in zip(groups, given, strict=True):
            (rank,) = (r for r, o in enumerate(group) if o != self.ELSEWHERE)
            self.in_use.add(blocks[rank])
        return fake_windows.BYTES

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

    def size(self, *internode: Any, **changes: Any) -> int:
        """Bytes of a window; `internode` is passed to window_bytes."""
        config = helpers.make_config(**changes)
        sizes = windows.window_config(config, self.groups.shape[1])
        return ffi.native.window_bytes(sizes, *internode)

    def opens(self, key: int, *internode: Any, **changes: Any) -> None:
        size = self.size(*internode, **changes)
        for actor in self.run(key, **changes).values():
            assert actor.error is None
            assert actor.result == size

    def refused(self, *words: str, **changes: Any) -> None:
        """Asserts that all processes get the same refusal, with these `words`."""
        (found,) = {actor.result for actor in self.run(1, **changes).values()}
        assert all(word in " ".join(found) for word in words), found
