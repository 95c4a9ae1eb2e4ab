"""What the processes of a mesh tell each other while they run init. Used by init.

Values pass through the key-value store of jax.distributed: only the mesh's processes
take part, and every wait has an end. A collective such as process_allgather would need
all processes of the job, and wait for a dead one for ever.

Each step ends with a *verdict*, one key that is written once, by whoever is first: the
mesh's first process, with the values of all, or one that fails or whose time is up,
with the reason. Every process takes the verdict of a step as its own result, so that a
step succeeds in all of them or in none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import jax
from jax.sharding import Mesh

from jax_ep._core import threads

# Otherwise when it is used: most jobs pass no descriptors, and importing takes time.
if TYPE_CHECKING:
    from jax_ep._peers.descriptors import Giver, Taker

Result = TypeVar("Result")

# A wait is cut into slices, to look for processes that have given up.
_SLICE_S = 0.5
# What leaving a meeting may take.
_FAREWELL_S = 3.0


class _Memory:
    """What this process remembers of its meetings with the same processes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # one meeting at a time
        self.attempts = 0  # meetings that were begun, in step with the others'
        self.left: set[str] = set()  # keys in the store, for the next meeting to delete
        self.told: set[str] = set()  # failures that this process has raised already


# By who meets and which of them this process is.
_memories: defaultdict[tuple[str, int], _Memory] = defaultdict(_Memory)


def _store() -> Any:
    """The client of jax.distributed, or None where it was not initialized."""
    from jax._src import distributed  # no public way to its store

    return distributed.global_state.client


class StoreStalled(RuntimeError):
    """The store did not answer within the time limit."""


class Meeting:
    """One init's exchange between the processes of a mesh; a context manager.

    Processes meet in the same order everywhere, as their inits come. One that leaves
    with an exception ends the meeting for all.

    Attributes:
        processes: those of the mesh, ascending.
        own: this one.
        subject: what the meeting is about, to be set before the first `gather`; must be
            the same everywhere.
    """

    def __init__(
        self,
        processes: list[int],
        own: int,
        timeout_s: float,
        subject: str = "",
        store: Any = None,
    ) -> None:
        """Opens nothing and waits for nobody.

        Args:
            processes: who takes part.
            own: this process.
            timeout_s: bound of each step.
            subject: what it is about.
            store: the key-value store, None for that of jax.distributed.

        Raises:
            ValueError: this process does not take part.
        """
        if own not in processes:
            raise ValueError(
                "jax_ep.init: mesh must hold devices of this process, got devices of "
                f"{processes} in process {own}; call it in the mesh's processes alone"
            )
        self.processes, self.own, self.subject = processes, own, subject
        self._timeout_s = timeout_s
        self._giver: Giver | None = None
        self._takers: dict[int, Taker] = {}
        self._store: Any = None
        self._locked = False
        who = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self._memory = _memories[who, own]
        self._stale: set[str] = set()  # keys of meetings before
        if self.alone:
            return
        self._store = _store() if store is None else store
        self._root = f"jax_ep/{who}"
        self._token, self._attempt = secrets.token_hex(8), 0
        # Of this meeting alone, once all have arrived: made of the first one's token.
        self._folder = ""
        self._step = 0  # the last that this process has taken part in
        self._inside = False  # whether it is there still
        self._over = False  # whether a verdict has ended the meeting
        self._end = 0.0  # of the wait that it is in

    @staticmethod
    def of(mesh: Mesh, timeout_s: float) -> Meeting:
        """Of the processes whose devices the mesh holds."""
        processes = sorted({device.process_index for device in mesh.devices.flat})
        own = jax.process_index(mesh.devices.flat[0].client)
        return Meeting(processes, own, timeout_s)

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
            self._arrive()
        self._step += 1
        return self._exchange(step, value)

    def conclude(self) -> None:
        """The last steps: after them init has succeeded in all processes, or in none.

        Two, since a process that stood still for long may find what others have left of
        one that they have given up. The second follows at once.
        """
        if self.possible:
            self.gather("done", None)
            self.gather("agreed", None)

    def unreadable(self, error: Exception) -> Exception:
        """What `error` is, where it comes of another process's answers; else itself."""
        return error if self.alone or not self.possible else _unreadable(error)

    def begin(self) -> None:
        """Has other meetings of these processes, in this one, wait for the end."""
        if self._locked or not self.possible:
            return
        if not self._memory.lock.acquire(timeout=self._timeout_s):
            raise RuntimeError(
                "jax_ep.init: one init of the same processes must run at a time, got "
                f"another one's that did not end within timeout_s = {self._timeout_s:g}"
                " s; make inits of a mesh from one thread"
            )
        self._locked = True
        self._memory.attempts += 1
        self._attempt = self._memory.attempts
        self._stale, self._memory.left = self._memory.left, set()

    # ---- Arrival ----

    @property
    def _first(self) -> int:
        return self.processes[0]

    def _arrive(self) -> None:
        """Finds a folder that no other meeting has had, the same in all processes.

        The mesh's first process invites to one, which its token of this meeting names.
        So what attempts that failed have left behind, here or in others, is never taken
        for an answer, and processes that failed at different times meet again.
        """
        self._end = time.monotonic() + self._timeout_s
        card = {
            "subject": hashlib.sha256(_bytes(self.subject)).hexdigest(),
            "attempt": self._attempt,
        }
        if self.own == self._first:
            self._folder = f"{self._root}/{self._token}"
            self._invite()
            found = self._exchange("arrival", card)
        else:
            self._delete(self._failed_key())
            found = self._accept(card)
        try:
            subjects = {process: card["subject"] for process, card in found.items()}
            self._memory.attempts = max(int(card["attempt"]) for card in found.values())
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(error) from error
        # Whoever has arrived has left the meeting before.
        for key in self._stale - self._memory.left:
            self._delete(key)
        for process, subject in subjects.items():
            if subject != subjects[self._first]:
                raise ValueError(
                    "jax_ep.init: mesh, axis_name, config and transport must be the "
                    f"same in every process of the mesh, got others in {process} than "
                    f"in {self._first}; make inits in the same order everywhere"
                )

    def _invite(self, failed: str | None = None) -> None:
        self._put(
            f"{self._root}/invitation",
            {"token": self._token, "attempt": self._attempt, "failed": failed},
        )

    def _accept(self, card: dict[str, Any]) -> dict[int, Any]:
        """Follows the first process's invitations until one is to a whole meeting."""
        seen = ""
        while True:
            invitation = self._get(f"{self._root}/invitation") or {}
            token = str(invitation.get("token"))
            if invitation and token != seen:
                seen = token
                self._consider(invitation, f"{self._root}/{token}", card)
            verdict = self._wait(self._verdict_key()) if self._folder else None
            if verdict is not None:
                return self._judged(verdict)
            if self._left_s() <= 0:
                return self._give_up_waiting("arrival")
            if not self._folder:
                time.sleep(min(self._left_s(), _SLICE_S / 4))

    def _consider(
        self, invitation: dict[str, Any], folder: str, card: dict[str, Any]
    ) -> None:
        """Joins the meeting if it has not ended, in success or failure, without us."""
        verdict = self._get(f"{folder}/0/verdict")
        why = invitation.get("failed") or _failure_of(verdict)
        if why and self._concerns(invitation):
            self._over = True
            _raise_failed(self._first, str(why))
        if not why and verdict is None:
            self._folder, self._inside = folder, True
            self._put(self._own_key(), {"value": card})

    def _concerns(self, told: dict[str, Any]) -> bool:
        """Whether a failure before arrival is of this attempt, and is news."""
        token, attempt = told.get("token"), told.get("attempt")
        if not isinstance(token, str) or not isinstance(attempt, int):
            return False
        news = attempt >= self._attempt and token not in self._memory.told
        if news:
            self._memory.told.add(token)
        return news

    # ---- A step ----

    def _exchange(self, step: str, value: Any) -> dict[int, Any]:
        if self._step:
            self._end = time.monotonic() + self._timeout_s
        self._inside = True
        if self.own == self._first:
            verdict = self._collect(value)
        else:
            self._put(self._own_key(), {"value": value})
            verdict = None
            while verdict is None and self._left_s() > 0:
                verdict = self._wait(self._verdict_key())
        if verdict is None:
            return self._give_up_waiting(step)
        return self._judged(verdict)

    def _collect(self, value: Any) -> Any:
        """As the first process: reads all values and publishes them; None in time."""
        values = {self.own: value}
        for process in self.processes[1:]:
            while process not in values:
                found = self._wait(f"{self._folder}/{self._step}/{process}")
                if found is not None:
                    values[process] = _value_of(found)
                    continue
                verdict = self._get(self._verdict_key())
                if verdict is not None:
                    return verdict
                if not self._step:
                    self._raise_if_one_failed_before()
                    # One that was left behind in a store that stood still may have come
                    # after it.
                    told = self._get(f"{self._root}/invitation") or {}
                    if told.get("token") != self._token:
                        self._invite()
                if self._left_s() <= 0:
                    return None
        return self._claim({"values": {str(p): v for p, v in values.items()}})

    def _raise_if_one_failed_before(self) -> None:
        """Of those who will not arrive."""
        for process, told in self._read(f"{self._root}/failed").items():
            if isinstance(told, dict) and self._concerns(told):
                _raise_failed(process, str(told.get("failed")))

    def _give_up_waiting(self, step: str) -> dict[int, Any]:
        """Ends the step for all, unless it has just come to its end after all."""
        # A little more, to tell the others.
        self._end = time.monotonic() + _SLICE_S
        missing = [self._first]
        if self._folder:
            found = self._read(f"{self._folder}/{self._step}")
            late = [p for p in self.processes[1:] if p not in found and p != self.own]
            # The first one's value comes with its verdict.
            missing = late or missing
        why = (
            "every process of the mesh must come within timeout_s = "
            f"{self._timeout_s:g} s to the step {step!r}, got nothing from "
            f"{missing} of {self.processes}; see what became of them, or raise "
            "timeout_s where they only start late (docs/cluster.md)"
        )
        if not self._folder:  # nobody has invited
            self._over = True
            raise RuntimeError(f"jax_ep.init: {why}")
        return self._judged(self._claim({"failed": why, "process": self.own}))

    def _judged(self, verdict: Any) -> dict[int, Any]:
        """The values of a verdict; raises what it says otherwise."""
        self._inside = False
        if self.own == self._first:
            # Who has come to this step has read the verdict of the one before; that of
            # the arrival tells who comes now that it is too late to join.
            if self._step > 1:
                self._delete(self._verdict_key(self._step - 1))
        else:
            self._delete(self._own_key())
        why = _failure_of(verdict)
        if why is not None:
            self._over = True
            if verdict.get("process") == self.own:
                raise RuntimeError(f"jax_ep.init: {why}")
            _raise_failed(verdict.get("process"), why)
        try:
            return {p: verdict["values"][str(p)] for p in self.processes}
        except (KeyError, TypeError) as error:
            raise _unreadable(error) from error

    # ---- The store ----

    def _verdict_key(self, step: int | None = None) -> str:
        return f"{self._folder}/{self._step if step is None else step}/verdict"

    def _own_key(self) -> str:
        return f"{self._folder}/{self._step}/{self.own}"

    def _failed_key(self) -> str:
        return f"{self._root}/failed/{self.own}"

    def _left_s(self) -> float:
        return self._end - time.monotonic()

    def _call(self, ask: Callable[[Any], Result], more_s: float = 0.0) -> Result:
        """`ask(store)`, which ends with the wait that this process is in.

        The store's calls have no deadline of their own: a process 0 that stands still
        would hold them up for ever.
        """
        store = self._store
        limit = max(self._left_s(), _SLICE_S) + more_s
        try:
            return threads.bounded(lambda: ask(store), limit)
        except TimeoutError:
            raise StoreStalled(
                "jax_ep.init: the key-value store of jax.distributed must answer "
                f"within timeout_s = {self._timeout_s:g} s, got nothing; see what "
                "became of the process that runs the coordinator (process 0)"
            ) from None

    def _put(self, key: str, value: Any) -> None:
        raw = _dump(value)
        self._memory.left.add(key)
        self._call(lambda s: s.key_value_set_bytes(key, raw, allow_overwrite=True))

    def _claim(self, verdict: dict[str, Any], step: int | None = None) -> Any:
        """Writes the verdict of a step, or reads the one that was there before."""
        key, raw = self._verdict_key(step), _dump(verdict)
        self._memory.left.add(key)
        claimed = self._ask(
            lambda s: [s.key_value_set_bytes(key, raw, allow_overwrite=False)],
            "ALREADY_EXISTS",
        )
        return _load(raw) if claimed is not None else self._get(key)

    def _get(self, key: str) -> Any:
        """What is there now, or None."""
        return _load(self._ask(lambda s: s.key_value_try_get_bytes(key), "NOT_FOUND"))

    def _wait(self, key: str) -> Any:
        """What is there within a slice, or None."""
        milliseconds = max(1, int(1000 * min(self._left_s(), _SLICE_S)))
        found = self._ask(
            lambda s: s.blocking_key_value_get_bytes(key, milliseconds),
            "DEADLINE_EXCEEDED",
            more_s=_SLICE_S,
        )
        return _load(found)

    def _read(self, folder: str) -> dict[int, Any]:
        """What processes have put there, by process."""
        entries = self._call(lambda s: s.key_value_dir_get_bytes(f"{folder}/"))
        named = {key.rpartition("/")[2]: raw for key, raw in entries}
        return {
            int(name): _load(raw) for name, raw in named.items() if name.isdecimal()
        }

    def _delete(self, key: str) -> None:
        if key not in self._memory.left | self._stale:
            return
        self._memory.left.discard(key)
        self._stale.discard(key)
        # Nothing depends on it, and after another jax.distributed.initialize() there is
        # no such key.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._call(lambda s: s.key_value_delete(key))

    def _ask(
        self, ask: Callable[[Any], Result], code: str, more_s: float = 0.0
    ) -> Result | None:
        """As `_call`; None where the store answers with that status."""

        def asked(store: Any) -> Result | None:
            try:
                return ask(store)
            except jax.errors.JaxRuntimeError as error:
                if code not in str(error):
                    raise
                return None

        return self._call(asked, more_s)

    # ---- Descriptors ----

    def listen(self) -> str:
        """Opens a place to `give` descriptors at; returns its address."""
        from jax_ep._peers.descriptors import Giver

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
        from jax_ep._peers.descriptors import Taker

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
            self.raise_if_failed()
            raise RuntimeError(
                "jax_ep.init: every process of an EP group must hand its windows over, "
                f"got from process {process}: {error}; see what became of it"
            ) from error

    def raise_if_failed(self) -> None:
        """Raises what another process has failed with, if it has left word.

        For what may come of that, before it is taken for something else.
        """
        if self.alone or not self._folder:
            return
        self._end = time.monotonic() + _SLICE_S
        verdict = self._get(self._verdict_key(self._step + 1))
        why = _failure_of(verdict)
        if why is not None:
            self._over = True
            _raise_failed(verdict.get("process"), why)

    def __enter__(self) -> Self:
        """Begins: a failure from here on is told to the others."""
        if not self.alone:
            self.begin()
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Closes all; tells the others of an exception, so that they do not wait."""
        self.close(None if kind is None else f"{kind.__name__}: {value}", value)

    def close(self, why: str | None = None, error: BaseException | None = None) -> None:
        """What leaving does, once; `why` it is left before its end."""
        # The rest comes to pass also where a part of it is interrupted.
        with contextlib.ExitStack() as rest:
            if self._locked:
                rest.callback(self._unlock)
            for taker in self._takers.values():
                rest.callback(taker.close)
            if self._giver is not None:
                rest.callback(self._giver.close)
            # First, so that whoever finds this process's socket closed finds out why.
            if why is not None and self._locked and not self.alone:
                # A store that stands still gets it when it goes on; nobody waits.
                stalled = isinstance(error, StoreStalled)
                with contextlib.suppress(jax.errors.JaxRuntimeError, StoreStalled):
                    self._give_up(why, 0.0 if stalled else _FAREWELL_S)

    def _unlock(self) -> None:
        if self._locked:
            self._locked = False
            # What a meeting that failed has not deleted the next one will.
            self._memory.left |= self._stale
            self._memory.lock.release()

    def _give_up(self, why: str, seconds: float) -> None:
        """Leaves word of a failure where the others look next."""
        if self._over:
            return
        self._end = time.monotonic() + min(seconds, self._timeout_s)
        verdict = {"failed": why, "process": self.own}
        if self._folder:
            inside = self._inside and _failure_of(self._claim(verdict)) is not None
            # It has taken part in the last step, and the others may have gone on.
            if not inside:
                self._claim(verdict, self._step + 1)
        elif self.own == self._first:
            self._invite(failed=why)
        else:
            told = {"token": self._token, "attempt": self._attempt, "failed": why}
            self._put(self._failed_key(), told)


def _raise_failed(process: Any, why: str) -> NoReturn:
    raise RuntimeError(
        f"jax_ep.init: init failed on process {process}: {why}; it ends on all "
        "processes of the mesh"
    )


def _unreadable(error: Exception) -> RuntimeError:
    return RuntimeError(
        "jax_ep.init: every process of the mesh must run the same jax_ep, got an "
        f"answer that cannot be read ({type(error).__name__}: {error}); install one "
        "version everywhere"
    )


def _failure_of(verdict: Any) -> str | None:
    if isinstance(verdict, dict) and "failed" in verdict:
        return str(verdict["failed"])
    return None


def _bytes(text: str) -> bytes:
    # File names and messages of errors may hold what UTF-8 cannot say.
    return text.encode(errors="backslashreplace")


def _dump(value: Any) -> bytes:
    return _bytes(json.dumps(value))


def _load(raw: bytes | None) -> Any:
    if raw is None:
        return None
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise _unreadable(error) from error
    if not isinstance(found, dict):
        raise _unreadable(TypeError(repr(raw[:80])))
    return found


def _value_of(found: dict[str, Any]) -> Any:
    try:
        return found["value"]
    except KeyError as error:
        raise _unreadable(error) from error
