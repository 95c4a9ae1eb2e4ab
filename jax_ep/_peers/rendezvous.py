"""Exchanges values between the processes of a mesh while they run init.

Values pass through the key-value store of jax.distributed. Only the processes of the
mesh take part, and every wait is bounded. A collective such as process_allgather would
need all processes of the job, and would wait for a dead one for ever.

Each step ends with a *verdict*, a key that only the first writer sets: the mesh's first
process, with the values of all, or a process that fails or times out, with the reason.
Every process takes the verdict as the result of the step, so that a step succeeds in
all processes or in none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import reprlib
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import jax
from jax.sharding import Mesh

from jax_ep._core import threads
from jax_ep._peers import answers

# At run time this is imported where it is used, because most jobs pass no descriptors.
if TYPE_CHECKING:
    from jax_ep._peers.descriptors import DescriptorClient, DescriptorServer

Result = TypeVar("Result")

# Waits run in slices, between which a process looks for others that have given up.
_SLICE_S = 0.5
_LEAST_S = 0.01
# Limit on the time that leaving a rendezvous after a failure takes.
_FAREWELL_S = 3.0
# How much longer than the time limit a store may be silent where to give up would
# leave processes with different outcomes. After about this time JAX ends the processes
# of a job whose coordinator is silent.
SILENT_S = 100.0


class _Memory:
    """State that outlives one rendezvous of the same processes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # allows one rendezvous at a time
        self.attempts = 0  # rendezvous begun so far, kept in step with other processes
        self.left: set[str] = set()  # keys that the next rendezvous deletes
        self.told: set[str] = set()  # failures that this process has already raised


# Keys: digest of the processes that take part, and the number of this process.
_memories: defaultdict[tuple[str, int], _Memory] = defaultdict(_Memory)


def job_store() -> Any:
    """Returns the client of jax.distributed, or None if it is not initialized."""
    from jax._src import distributed  # JAX has no public API for the store

    return distributed.global_state.client


def processes_of(mesh: Mesh) -> list[int]:
    """Returns the processes whose devices the mesh holds, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


class StoreStalled(RuntimeError):
    """The store did not answer within the time limit."""


# The attribute of an exception about another process: that process, and its failure.
_ORIGIN = "_jax_ep_origin"


class Rendezvous:
    """One exchange between the processes of a mesh, for one init; a context manager.

    All processes must run the inits of a series in the same order. A process that
    leaves with an exception ends the rendezvous for all.

    Attributes:
        processes: the processes of the mesh, ascending.
        own: this process.
        subject: describes the init; must be equal in all processes, and set before the
            first `gather`.
    """

    def __init__(
        self,
        processes: list[int],
        own: int,
        timeout_s: float,
        subject: str = "",
        store: Any = None,
        series: str = "",
        place: str = "",
    ) -> None:
        """Sets up the state; opens no connection and does not wait.

        Args:
            processes: the processes that take part.
            own: this process.
            timeout_s: limit on each step, in seconds.
            subject: describes the init.
            store: the key-value store; None means that of jax.distributed.
            series: name of a series of rendezvous. Those of one series follow each
                other in the same order in all processes; series do not wait for each
                other.
            place: position in the series, if a process may have missed some; only
                processes at the same place meet.

        Raises:
            ValueError: this process does not take part.
        """
        if own not in processes:
            raise ValueError(
                f"jax_ep.init: mesh must hold devices of this process, {own}, got "
                f"devices of processes {processes}; call init only in processes of the "
                "mesh"
            )
        self.processes, self.own, self.subject = processes, own, subject
        self._timeout_s = timeout_s
        self._server: DescriptorServer | None = None
        self._clients: dict[int, DescriptorClient] = {}
        self._store: Any = None
        self._locked = False
        self._turns: list[threading.Lock] = []
        who = hashlib.sha256(f"{processes}{series}".encode()).hexdigest()[:16]
        self._memory = _memories[who, own]
        # When waits for other processes outside of the store began, since the last
        # step.
        self._apart_since: float | None = None
        self._stale: set[str] = set()  # keys of earlier rendezvous
        if self.alone:
            return
        self._store = job_store() if store is None else store
        self._root = f"jax_ep/{who}/{place}" if place else f"jax_ep/{who}"
        self._placed = bool(place)
        self._token, self._attempt = secrets.token_hex(8), 0
        # Prefix of this rendezvous's keys, set on arrival from the first process's
        # token.
        self._folder = ""
        self._step = 0  # the last step that this process has taken part in
        self._inside = False  # whether that step is still going on
        self._over = False  # whether a verdict has ended the rendezvous
        self._end = 0.0  # deadline of the current wait, by time.monotonic
        # Until when the last step waits for a silent store.
        self._patient_until = 0.0

    @staticmethod
    def of(mesh: Mesh, timeout_s: float, series: str = "") -> Rendezvous:
        """Makes a rendezvous of the processes whose devices the mesh holds."""
        own = jax.process_index(mesh.devices.flat[0].client)
        return Rendezvous(processes_of(mesh), own, timeout_s, series=series)

    @property
    def alone(self) -> bool:
        """Whether this is the only process that takes part."""
        return len(self.processes) == 1

    @property
    def possible(self) -> bool:
        """Whether values can be exchanged; the same in all processes."""
        return self.alone or self._store is not None

    def gather(self, step: str, value: Any) -> dict[int, Any]:
        """Returns the value of each process, by process, after a round trip by JSON.

        All processes must call this with the same steps in the same order.

        Raises:
            RuntimeError: a process did not call within the time limit, or failed.
            ValueError: a process has another subject.
        """
        if self.alone:
            self._apart_since = None
            return {self.own: json.loads(json.dumps(value))}
        self.begin()
        if not self._folder:
            self._arrive()
        self._step += 1
        return self._exchange(step, value)

    def ask(self, step: str, value: Any, check: answers.Check) -> dict[int, Any]:
        """Like `gather`, and raises RuntimeError unless all values pass `check`."""
        found = self.gather(step, value)
        for process, answer in found.items():
            if not check(answer):
                raise _unreadable(
                    f"process {process} sent {reprlib.repr(answer)} in step {step!r}"
                )
        return found

    def conclude(self) -> None:
        """Runs the last steps, after which init succeeded in all processes or in none.

        There are two, because a process that was stopped for a long time may find the
        leftovers of a rendezvous that the others have given up.

        Whoever has come to the second one leaves it with its verdict only, however
        long the store is silent (up to a limit): the others may have it already.
        """
        if not self.possible:
            return
        self.gather("done", None)
        self._patient_until = time.monotonic() + self._timeout_s + SILENT_S
        try:
            self.gather("agreed", None)
        finally:
            self._patient_until = 0.0

    def apart_s(self) -> float:
        """Returns the time left for waits outside of the store before the next step.

        All of them together get half of the time limit. So a process that waits for
        one that stands still comes to the next step before the others' time is up, and
        is not taken for the one that stands still.
        """
        now = time.monotonic()
        if self._apart_since is None:
            self._apart_since = now
        return max(_LEAST_S, self._apart_since + self._timeout_s / 2 - now)

    def unreadable(self, error: Exception) -> Exception:
        """Returns the error to raise for `error`, which reading an answer caused."""
        return error if self.alone or not self.possible else _unreadable(_words(error))

    def begin(self) -> None:
        """Makes other threads' rendezvous of the same processes wait for this one."""
        if self._locked or not self.possible:
            return
        if not self._memory.lock.acquire(timeout=self._timeout_s):
            raise RuntimeError(
                "jax_ep.init: another thread's init with the same processes did not "
                f"end within timeout_s = {self._timeout_s:g} s; call init for a mesh "
                "from one thread"
            )
        self._locked = True
        self._memory.attempts += 1
        self._attempt = self._memory.attempts
        self._stale, self._memory.left = self._memory.left, set()

    def take_turn(self, lock: threading.Lock) -> None:
        """Keeps rendezvous of other series out of what `lock` guards, in all processes.

        The mesh's first process holds its lock until it leaves the rendezvous, so all
        processes go on in the order in which that one took it.
        """
        if not self.possible:
            return
        self.begin()
        if self.own == self._first:
            if not lock.acquire(timeout=self._timeout_s):
                raise RuntimeError(
                    "jax_ep.init: another thread's init did not end within timeout_s = "
                    f"{self._timeout_s:g} s; raise timeout_s"
                )
            self._turns.append(lock)
        self.gather("turn", None)

    # ---- Arrival ----

    @property
    def _first(self) -> int:
        return self.processes[0]

    def _arrive(self) -> None:
        """Agrees with all processes on a key prefix that no other rendezvous has used.

        The mesh's first process invites the others to a prefix with its token. So keys
        that failed attempts left behind, in any process, are never taken for answers,
        and processes that failed at different times find each other again.
        """
        self._end, self._apart_since = time.monotonic() + self._timeout_s, None
        info = {
            "subject": hashlib.sha256(_bytes(self.subject)).hexdigest(),
            "attempt": self._attempt,
        }
        if self.own == self._first:
            self._folder = f"{self._root}/{self._token}"
            self._invite()
            found = self._exchange("arrival", info)
        else:
            self._delete(self._failed_key())
            found = self._accept(info)
        if not all(map(_INFO, found.values())):
            raise _unreadable(f"ValueError: {reprlib.repr(found)} in step 'arrival'")
        subjects = {process: info["subject"] for process, info in found.items()}
        self._memory.attempts = max(info["attempt"] for info in found.values())
        # All have arrived, so nobody needs keys of the previous rendezvous.
        for key in self._stale - self._memory.left:
            self._delete(key)
        for process, subject in subjects.items():
            if subject != subjects[self._first]:
                raise ValueError(
                    "jax_ep.init: mesh, axis_name, config and transport must be the "
                    "same in every process of the mesh, got different ones in process "
                    f"{process} than in process {self._first}; call init with the same "
                    "arguments in the same order in all processes"
                )

    def _invite(self, failed: str | None = None, process: int | None = None) -> None:
        told = {"token": self._token, "attempt": self._attempt}
        told |= {"failed": failed, "process": process}
        self._put(f"{self._root}/invitation", told)

    def _accept(self, info: dict[str, Any]) -> dict[int, Any]:
        """Follows the first process's invitations until a rendezvous is complete."""
        seen = ""
        while True:
            invitation = self._get(f"{self._root}/invitation") or {}
            if invitation and not _INVITATION(invitation):
                raise _unreadable(f"ValueError: {reprlib.repr(invitation)}")
            token = str(invitation.get("token"))
            if invitation and token != seen:
                seen = token
                self._consider(invitation, f"{self._root}/{token}", info)
            verdict = self._wait(self._verdict_key()) if self._folder else None
            if verdict is not None:
                return self._judged(verdict)
            if self._left_s() <= 0:
                return self._give_up_waiting("arrival")
            if not self._folder:
                time.sleep(min(self._left_s(), _SLICE_S / 4))

    def _consider(
        self, invitation: dict[str, Any], folder: str, info: dict[str, Any]
    ) -> None:
        """Joins the rendezvous unless it has already ended, in success or failure."""
        verdict = self._get(f"{folder}/0/verdict")
        why = invitation.get("failed") or _failure_of(verdict)
        if why and self._concerns(invitation):
            self._over = True
            told = invitation if invitation["failed"] else verdict
            _raise_failed(told["process"], str(why))
        if not why and verdict is None:
            self._folder, self._inside = folder, True
            self._put(self._own_key(), {"value": info})

    def _concerns(self, told: dict[str, Any]) -> bool:
        """Whether a failure before arrival belongs to this attempt, and is new."""
        if not _INVITATION(told):
            return False
        token, attempt = told["token"], told["attempt"]
        of_this = self._placed or attempt >= self._attempt
        news = of_this and token not in self._memory.told
        if news:
            self._memory.told.add(token)
        return news

    # ---- A step ----

    def _exchange(self, step: str, value: Any) -> dict[int, Any]:
        if self._step:
            begun = self._apart_since or time.monotonic()
            self._end = begun + self._timeout_s
        self._apart_since = None
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
        """Reads and publishes all values, as the first process; None if time is up."""
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
                    # After a stall of the store, an old invitation may have been
                    # written after this one.
                    told = self._get(f"{self._root}/invitation") or {}
                    if told.get("token") != self._token:
                        self._invite()
                if self._left_s() <= 0:
                    return None
        return self._claim({"values": {str(p): v for p, v in values.items()}})

    def _raise_if_one_failed_before(self) -> None:
        """Raises the failure of a process that failed before it arrived."""
        for told in self._read(f"{self._root}/failed").values():
            if self._concerns(told):
                _raise_failed(told["process"], str(told["failed"]))

    def _give_up_waiting(self, step: str) -> dict[int, Any]:
        """Fails the step in all processes, unless it has just succeeded."""
        # Extra time to tell the others.
        self._end = time.monotonic() + _SLICE_S
        missing = [self._first]
        if self._folder:
            found = self._read(f"{self._folder}/{self._step}")
            late = [p for p in self.processes[1:] if p not in found and p != self.own]
            # If all others have come, only the first process can be late: its value is
            # part of the verdict.
            missing = late or missing
        why = (
            f"every process of the mesh must reach the step {step!r} of init within "
            f"timeout_s = {self._timeout_s:g} s, got nothing from processes {missing} "
            f"of {self.processes}; check whether they failed, or raise timeout_s if "
            "they start late (docs/cluster.md)"
        )
        if not self._folder:  # there was no invitation
            # If there is a place, the first process may still arrive, and is told then.
            self._over = not self._placed
            raise RuntimeError(f"jax_ep.init: {why}")
        verdict = {"failed": why, "process": self.own, "late": True}
        return self._judged(self._claim(verdict))

    def _judged(self, verdict: Any) -> dict[int, Any]:
        """Returns the values of a verdict, or raises the failure that it reports."""
        self._inside = False
        # What follows is best effort, and must not outlast a store that is silent.
        self._end, self._patient_until = time.monotonic(), 0.0
        if self.own == self._first:
            # Processes at this step have read the verdict of the step before. That of
            # the arrival stays, to tell late processes that they cannot join.
            if self._step > 1:
                self._delete(self._verdict_key(self._step - 1))
        else:
            self._delete(self._own_key())
        why = _failure_of(verdict)
        if why is not None:
            self._over = True
            # Whoever found out that others are late has not failed itself.
            if verdict.get("late") or verdict.get("process") == self.own:
                raise RuntimeError(f"jax_ep.init: {why}")
            _raise_failed(verdict.get("process"), why)
        try:
            return {p: verdict["values"][str(p)] for p in self.processes}
        except (KeyError, TypeError) as error:
            raise _unreadable(_words(error)) from error

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
        """Returns `ask(store)`, with the deadline of the current wait.

        Calls of the store themselves have no deadline: if process 0 is stopped, they
        would block for ever.
        """
        store = self._store
        patience = self._patient_until - time.monotonic()
        limit = max(self._left_s(), _SLICE_S, patience) + more_s
        try:
            return threads.bounded(lambda: ask(store), limit)
        except TimeoutError:
            if self._patient_until:
                raise split(self._timeout_s) from None
            raise StoreStalled(
                "jax_ep.init: the key-value store of jax.distributed did not answer "
                f"within timeout_s = {self._timeout_s:g} s; check the process that "
                "runs the coordinator (process 0)"
            ) from None

    def _put(self, key: str, value: Any) -> None:
        raw = _dump(value)
        self._memory.left.add(key)
        self._call(lambda s: s.key_value_set_bytes(key, raw, allow_overwrite=True))

    def _claim(self, verdict: dict[str, Any], step: int | None = None) -> Any:
        """Writes the verdict of a step, or returns the one that is already there."""
        key, raw = self._verdict_key(step), _dump(verdict)
        self._memory.left.add(key)
        claimed = self._ask(
            lambda s: [s.key_value_set_bytes(key, raw, allow_overwrite=False)],
            "ALREADY_EXISTS",
        )
        return _load(raw) if claimed is not None else self._get(key)

    def _get(self, key: str) -> Any:
        """Returns the current value of `key`, or None."""
        return _load(self._ask(lambda s: s.key_value_try_get_bytes(key), "NOT_FOUND"))

    def _wait(self, key: str) -> Any:
        """Waits up to one slice for a value of `key`; None if there is none."""
        milliseconds = max(1, int(1000 * min(self._left_s(), _SLICE_S)))
        found = self._ask(
            lambda s: s.blocking_key_value_get_bytes(key, milliseconds),
            "DEADLINE_EXCEEDED",
            more_s=_SLICE_S,
        )
        return _load(found)

    def _read(self, folder: str) -> dict[int, Any]:
        """Returns the values that processes have put under `folder`, by process."""
        entries = self._call(lambda s: s.key_value_dir_get_bytes(f"{folder}/"))
        named = {key.rpartition("/")[2]: raw for key, raw in entries}
        processes = {str(process): process for process in self.processes}
        return {
            processes[name]: _load(raw)
            for name, raw in named.items()
            if name in processes
        }

    def _delete(self, key: str) -> None:
        if key not in self._memory.left | self._stale:
            return
        self._memory.left.discard(key)
        self._stale.discard(key)
        # Best effort: a new jax.distributed.initialize() starts without the key.
        with contextlib.suppress(jax.errors.JaxRuntimeError, StoreStalled):
            self._call(lambda s: s.key_value_delete(key))

    def _ask(
        self, ask: Callable[[Any], Result], code: str, more_s: float = 0.0
    ) -> Result | None:
        """Like `_call`, but returns None if the store answers with status `code`."""

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
        """Starts a server to `give` descriptors by; returns its address.

        Raises:
            OSError: this process cannot open more files, or the system refuses what a
                server or a client of it needs.
        """
        from jax_ep._peers.descriptors import (
            DescriptorClient,
            DescriptorServer,
            OtherUser,
        )

        if self._server is None:
            self._server = DescriptorServer()
            # Only a client finds out whether the system allows all of it here. Which
            # users meet, the clients in other processes find out.
            with contextlib.suppress(OtherUser), contextlib.ExitStack() as stack:
                client = DescriptorClient(self._server.address, self.apart_s())
                stack.callback(client.close)
                client.greet()
        return self._server.address

    def give(self, number: int, descriptor: int) -> None:
        """Offers a descriptor, closed with the rendezvous; needs `listen` before."""
        assert self._server is not None
        self._server.give(number, descriptor)

    def connect(self, process: int, address: str) -> None:
        """Connects to the server of another process.

        Raises:
            OSError: it cannot be reached, or it refuses the user of this process.
        """
        from jax_ep._peers.descriptors import DescriptorClient

        client = DescriptorClient(address, self.apart_s())
        self._clients[process] = client
        client.limit(self.apart_s())
        client.greet()

    def connected(self, process: int) -> bool:
        """Whether `connect` has connected to that process."""
        return process in self._clients

    def take(self, process: int, number: int) -> int:
        """Takes a descriptor that a process offers; needs `connect` before.

        The caller must close it.

        Raises:
            OSError: the process did not hand it over.
        """
        client = self._clients[process]
        client.limit(self.apart_s())
        return client.take(number)

    def raise_if_failed(self) -> None:
        """Raises the failure of another process, if it has reported one.

        Call it before reporting an error that may only be a consequence.
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
        """Begins the rendezvous; failures from here on are reported to the others."""
        if not self.alone:
            self.begin()
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Closes everything; reports an exception to the others, which then stop."""
        self.close(None if kind is None else f"{kind.__name__}: {value}", value)

    def close(self, why: str | None = None, error: BaseException | None = None) -> None:
        """Leaves the rendezvous; repeated calls do nothing.

        Args:
            why: the reason for leaving it before its end.
            error: the exception that ended it.
        """
        # An ExitStack, so that an interrupt of one callback does not skip the others.
        with contextlib.ExitStack() as rest:
            if self._locked:
                rest.callback(self._unlock)
            while self._turns:
                rest.callback(self._turns.pop().release)
            for client in self._clients.values():
                rest.callback(client.close)
            if self._server is not None:
                rest.callback(self._server.close)
            # Before the sockets close, so that a process that finds one closed finds
            # the reason as well.
            if why is not None and self._locked and not self.alone:
                # Do not wait for a stalled store; it gets the message when it resumes.
                seconds = 0.0 if isinstance(error, StoreStalled) else _FAREWELL_S
                # Whoever passes a failure on is not the one that failed.
                process, reason = getattr(error, _ORIGIN, (self.own, why))
                with contextlib.suppress(jax.errors.JaxRuntimeError, StoreStalled):
                    self._give_up(process, str(reason), seconds)

    def _unlock(self) -> None:
        if self._locked:
            self._locked = False
            # The next rendezvous deletes what a failed one has left.
            self._memory.left |= self._stale
            self._memory.lock.release()

    def _give_up(self, process: Any, why: str, seconds: float) -> None:
        """Reports a failure where the others look next."""
        if self._over:
            return
        self._end = time.monotonic() + min(seconds, self._timeout_s)
        self._patient_until = 0.0
        verdict = {"failed": why, "process": process}
        if self._folder:
            inside = self._inside and _failure_of(self._claim(verdict)) is not None
            # The last step is complete, and the others may be at the next one.
            if not inside:
                self._claim(verdict, self._step + 1)
        elif self.own == self._first:
            self._invite(why, process)
        else:
            told = {"token": self._token, "attempt": self._attempt} | verdict
            self._put(self._failed_key(), told)


def _raise_failed(process: Any, why: str) -> NoReturn:
    error = RuntimeError(
        f"jax_ep.init: init failed on process {process}: {why}; aborting on all "
        "processes of the mesh"
    )
    vars(error)[_ORIGIN] = process, why
    raise error


def split(timeout_s: float) -> StoreStalled:
    """Returns the error for a silent store that may go on to other processes."""
    return StoreStalled(
        "jax_ep.init: the key-value store of jax.distributed did not answer within "
        f"timeout_s = {timeout_s:g} s and {SILENT_S:g} s more, so other processes may "
        "get a handle all the same; end the job, and check the process that runs the "
        "coordinator (process 0)"
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unreadable(why: str) -> RuntimeError:
    return RuntimeError(
        f"jax_ep.init: an answer of another process cannot be read ({why}); install "
        "the same version of jax_ep everywhere"
    )


def _token(value: Any) -> bool:
    return answers.hexadecimal(value) and value != ""


# What a process tells on arrival, and what it tells before: an invitation by the first,
# or a failure by another.
_INFO = answers.record(subject=answers.text, attempt=answers.count)
_INVITATION = answers.record(
    token=_token,
    attempt=answers.count,
    failed=answers.optional(answers.text),
    process=answers.optional(answers.count),
)


def _failure_of(verdict: Any) -> str | None:
    if isinstance(verdict, dict) and "failed" in verdict:
        return str(verdict["failed"])
    return None


def _bytes(text: str) -> bytes:
    # File names and error messages may contain surrogates, which UTF-8 cannot encode.
    return text.encode(errors="backslashreplace")


def _dump(value: Any) -> bytes:
    return _bytes(json.dumps(value))


def _load(raw: bytes | None) -> Any:
    if raw is None:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _unreadable(_words(error)) from error
    if not isinstance(found, dict):
        raise _unreadable(f"TypeError: {raw[:80]!r}")
    return found


def _value_of(found: dict[str, Any]) -> Any:
    try:
        return found["value"]
    except KeyError as error:
        raise _unreadable(_words(error)) from error
