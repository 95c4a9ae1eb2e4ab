"""What the processes of a mesh tell each other while they run init. Used by init.

Values pass through the key-value store of jax.distributed: only the mesh's processes
take part, and every wait has an end. A collective such as process_allgather would need
all processes of the job, and wait for a dead one for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import Mesh

# Otherwise when it is used: most jobs pass no descriptors, and importing takes time.
if TYPE_CHECKING:
    from jax_ep._descriptors import Giver, Taker

# A wait is cut into slices, to look for processes that have given up, and for Ctrl-C.
_SLICE_S = 0.25

# By who meets and which of them this process is: keys that its last meeting has left,
# and a lock, since it can be at one meeting of the same processes at a time.
_left: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
_locks: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)


def _store() -> Any:
    """The client of jax.distributed, or None where it was not initialized."""
    from jax._src import distributed  # no public way to its store

    return distributed.global_state.client


class Meeting:
    """One init's exchange between the processes of a mesh; a context manager.

    Processes meet in the same order everywhere, as their inits come. One that leaves
    with an exception ends the meeting for all.

    Attributes:
        processes: those of the mesh, ascending.
        own: this one.
    """

    def __init__(
        self,
        processes: list[int],
        own: int,
        timeout_s: float,
        subject: str,
        store: Any = None,
    ) -> None:
        """Opens nothing and waits for nobody.

        Args:
            processes: who takes part.
            own: this process.
            timeout_s: bound of each wait.
            subject: what it is about; must be the same everywhere.
            store: the key-value store, None for that of jax.distributed.

        Raises:
            ValueError: this process does not take part.
        """
        if own not in processes:
            raise ValueError(
                "jax_ep.init: mesh must hold devices of this process, got devices of "
                f"{processes} in process {own}; call it in the mesh's processes alone"
            )
        self.processes, self.own = processes, own
        self._timeout_s = timeout_s
        self._subject = hashlib.sha256(subject.encode()).hexdigest()
        self._giver: Giver | None = None
        self._takers: dict[int, Taker] = {}
        self._store: Any = None
        self._locked = False
        who = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self._series = who, own
        if self.alone:
            return
        self._store = _store() if store is None else store
        self._cards = f"jax_ep/{who}/card"
        # Of this meeting alone, once it has begun.
        self._folder = ""

    @staticmethod
    def of(mesh: Mesh, timeout_s: float, subject: str) -> Meeting:
        """Of the processes whose devices the mesh holds."""
        processes = sorted({device.process_index for device in mesh.devices.flat})
        own = jax.process_index(mesh.devices.flat[0].client)
        return Meeting(processes, own, timeout_s, subject)

    @property
    def alone(self) -> bool:
        """Whether nobody else takes part."""
        return len(self.processes) == 1

    @property
    def possible(self) -> bool:
        """Whether values can be exchanged; the same everywhere."""
        return self.alone or self._store is not None

    def gather(self, step: str, value: Any) -> dict[int, Any]:
        """The value of each process, by process, as JSON has it.

        Each of them calls this, with steps in the same order.

        Raises:
            RuntimeError: some did not within the time limit, or have given up.
            ValueError: some came with another subject.
        """
        if self.alone:
            return {self.own: json.loads(json.dumps(value))}
        self.begin()
        if not self._folder:
            self._find_folder()
        key = f"{self._folder}/{step}/{self.own}"
        self._put(key, json.dumps(value))
        found = self._await(step)
        # Whoever has come here has read what came before.
        self._forget(keep=key)
        return {process: json.loads(raw) for process, raw in found.items()}

    def begin(self) -> None:
        """Has other meetings of these processes, in this one, wait for the end."""
        if self._locked:
            return
        if not _locks[self._series].acquire(timeout=self._timeout_s):
            raise RuntimeError(
                "jax_ep.init: one init of the same processes must run at a time, got "
                f"another one's that did not end within timeout_s = {self._timeout_s:g}"
                " s; make inits of a mesh from one thread"
            )
        self._locked = True

    def _find_folder(self) -> None:
        """Finds one that no other meeting has had, the same in all processes.

        Its name is made of a number that each process draws. So what attempts that
        failed have left behind, here or in others, is never taken for an answer, and
        processes that failed at different times meet again.
        """
        cards = self._cards
        self._put(
            f"{cards}/{self.own}", json.dumps([secrets.token_hex(8), self._subject])
        )
        said, subjects, seen = "", {}, set()
        end = time.monotonic() + self._timeout_s
        while True:
            # First, since those who have seen all of "here" take their cards away.
            if self._folder and not self._missing(self._read(f"{self._folder}/here")):
                break
            found = self._read(cards)
            seen |= set(found)
            awaited = self._missing(found)
            # One that has given up in time takes its card away, for want of another.
            awaited = [process for process in awaited if process not in seen] or awaited
            key = cards
            if not awaited:
                everybody = repr(sorted(found.items())).encode()
                folder = f"jax_ep/{hashlib.sha256(everybody).hexdigest()[:32]}"
                if folder != self._folder:
                    self._folder, said = folder, f"{folder}/here/{self.own}"
                    subjects = {p: json.loads(raw)[1] for p, raw in found.items()}
                    self._put(said, "")
                key = f"{self._folder}/here"
                awaited = self._missing(self._read(key))
            if awaited:
                self._doze("arrival", key, awaited, end)
        self._forget(keep=said)
        for process, subject in subjects.items():
            if subject != subjects[self.processes[0]]:
                raise ValueError(
                    "jax_ep.init: mesh, axis_name, config and transport must be the "
                    f"same in every process of the mesh, got others in {process} than "
                    f"in {self.processes[0]}; make inits in the same order everywhere"
                )

    def _await(self, step: str) -> dict[int, bytes]:
        folder, end = f"{self._folder}/{step}", time.monotonic() + self._timeout_s
        while True:
            # In this order: one that gives up after a step has been to it.
            gone = self._gone()
            found = self._read(folder)
            missing = self._missing(found)
            if not missing:
                return found
            if gone:
                raise gone
            self._doze(step, folder, missing, end)

    def _gone(self) -> RuntimeError | None:
        """What there is to say of those who have given up."""
        for process, why in self._read(f"{self._folder}/gone").items():
            return RuntimeError(
                "jax_ep.init: every process of the mesh must come to its end, got a "
                f"failure of process {process}: {why.decode()}"
            )
        return None

    def _missing(self, found: dict[int, bytes]) -> list[int]:
        return [process for process in self.processes if process not in found]

    def _doze(self, step: str, folder: str, missing: list[int], end: float) -> None:
        """Until the first of those has put something there, a slice at most."""
        left = end - time.monotonic()
        if left <= 0:
            raise RuntimeError(
                "jax_ep.init: every process of the mesh must come within timeout_s = "
                f"{self._timeout_s:g} s to the step {step!r}, got nothing from "
                f"{missing} of {self.processes}; see what became of them, or raise "
                "timeout_s where they only start late (docs/cluster.md)"
            )
        milliseconds = max(1, int(1000 * min(left, _SLICE_S)))
        try:
            key = f"{folder}/{missing[0]}"
            self._store.blocking_key_value_get_bytes(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise

    def _put(self, key: str, value: str) -> None:
        _left[self._series].append(key)
        self._store.key_value_set_bytes(key, value.encode(), allow_overwrite=True)

    def _forget(self, keep: str) -> None:
        """Takes away what this process has put, here and in meetings before."""
        for key in _left[self._series]:
            if key != keep:
                self._delete(key)
        _left[self._series] = [keep]

    def _delete(self, key: str) -> None:
        # Nothing depends on it, and after another jax.distributed.initialize() there is
        # no such key.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.key_value_delete(key)

    def _read(self, folder: str) -> dict[int, bytes]:
        entries = self._store.key_value_dir_get_bytes(f"{folder}/")
        return {int(key.rpartition("/")[2]): raw for key, raw in sorted(entries)}

    # ---- Descriptors ----

    def listen(self) -> str:
        """Opens a place to `give` descriptors at; returns its address."""
        from jax_ep._descriptors import Giver

        self._giver = self._giver or Giver()
        return self._giver.address

    def give(self, number: int, descriptor: int) -> None:
        """Lets the others take it; it is closed with the meeting. After `listen`."""
        assert self._giver is not None
        self._giver.give(number, descriptor)

    def connect(self, process: int, address: str) -> None:
        """Reaches the place of another process.

        Raises:
            OSError: it cannot be reached, or gives nothing to this process's user.
        """
        from jax_ep._descriptors import Taker

        self._takers[process] = Taker(address, self._timeout_s)
        self._takers[process].greet()

    def connected(self, process: int) -> bool:
        """Whether `take` can get what that process gives."""
        return process in self._takers

    def take(self, process: int, number: int) -> int:
        """A descriptor that a process gives, the caller's to close. After `connect`.

        Raises:
            RuntimeError: it did not come.
        """
        try:
            return self._takers[process].take(number)
        except OSError as error:
            # It may have left for the sake of another one, whom its word names.
            raise self._gone() or RuntimeError(
                "jax_ep.init: every process of an EP group must hand its windows over, "
                f"got from process {process}: {error}; see what became of it"
            ) from error

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Closes all; tells the others of an exception, so that they do not wait."""
        # The rest comes to pass also where a part of it is interrupted.
        with contextlib.ExitStack() as rest:
            if self._locked:
                rest.callback(_locks[self._series].release)
            for taker in self._takers.values():
                rest.callback(taker.close)
            if self._giver is not None:
                rest.callback(self._giver.close)
            # First, so that whoever finds this process's socket closed finds out why.
            if kind is not None and self._locked and not self.alone:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._give_up(f"{kind.__name__}: {value}")

    def _give_up(self, why: str) -> None:
        card = f"{self._cards}/{self.own}"
        if card in _left[self._series]:
            _left[self._series].remove(card)
            self._delete(card)
        if self._folder:
            self._put(f"{self._folder}/gone/{self.own}", why)
