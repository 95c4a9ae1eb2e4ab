"""Handles that layers and traced functions with equal arguments share.

Processes of a job trace different programs, at different times and in different orders,
but opening a handle takes all processes of its mesh. So a request for a shared handle
goes into a log of the job, and a thread in each process opens the groups in the order
of that log, including those that its own process has not requested yet.

The thread runs no program: a device may be waiting for another process that is tracing
and waits for this one. ep_init runs when the process itself requests the handle.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ep._core import calls, errors, threads
from jax_ep._core.config import MAX_TIMEOUT_S, EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Transport
from jax_ep._peers import answers
from jax_ep._peers.rendezvous import (
    SILENT_S,
    Rendezvous,
    job_store,
    processes_of,
    split,
)
from jax_ep._peers.request_log import RequestLog
from jax_ep._setup import init, runtime

_logger = logging.getLogger("jax_ep")

# How often the thread looks for requests: soon after one, and later on.
_SOON_S, _LATER_S = 0.02, 1.0

# Identifies a handle: its content, how often `close_shared_handles` was called before,
# and how many of this content were closed one by one since. All processes count alike.
_Which = tuple[str, int, int]
_Future = concurrent.futures.Future[init.Group]

_lock = threading.Lock()  # guards what follows
_handles: dict[Any, EPHandle] = {}
_groups: dict[_Which, _Future] = {}  # open, or about to be
# How many attempts to open a group have failed; all processes count alike. A request
# has the number that its process knew, so that one failure is the answer to all that
# were made before it, in every process.
_failures: Counter[_Which] = Counter()
_finished: set[_Which] = set()  # have been opened
_closings = 0
_closed: Counter[str] = Counter()
_opener: _Opener | None = None

_making = threading.Lock()  # ep_init runs once for each handle


@calls.explained("shared_handle")
def shared_handle(
    mesh: Mesh | None,
    axis_name: str | Sequence[str],
    config: EPConfig,
    transport: Transport = "auto",
) -> EPHandle:
    """Returns one open handle per set of arguments; the first call opens it.

    Layers of `jax_ep.flax` and `jax_ep.apply_experts` get their handles here. It can be
    called while JAX traces: a function that is traced again gets the same handle. A
    handle stays open until its `close` (the next call makes a new one) or
    `jax_ep.close_shared_handles` closes it. A process that loads a compiled executable
    must first call this, with the arguments of the process that compiled it.

    The processes of a job may call it in different orders and at different times, since
    each has a thread that opens what the others request. The thread starts with the
    first call in a process; until then the other processes wait for it, up to the
    config's `timeout_s`.

    Args:
        mesh: a `jax.sharding.Mesh`, or None for the mesh of `jax.set_mesh`.
        axis_name: the EP axis, or a tuple of axes whose product is the group.
        config: sizes and options.
        transport: "auto", "p2p", "shmem" or "collective".

    Returns:
        An `EPHandle`.

    Raises:
        ValueError, TypeError, RuntimeError: for the reasons of `jax_ep.init`.
    """
    runtime.require_unforked()
    mesh = init.resolved_mesh(mesh)
    init.check_arguments(config, transport)
    key = (mesh, init.axis_names(mesh, axis_name), config, transport)
    with _lock:
        found = _handles.get(key)
    if found is not None and not found.closed:
        return found
    names = init.checked(mesh, axis_name, config, transport)
    request = _request(mesh, names, config, transport)
    content = _content(request)
    with _lock:
        if key in _handles and _handles[key].closed:
            del _handles[key]
            _groups.pop((content, _closings, _closed[content]), None)
            _closed[content] += 1
        which = content, _closings, _closed[content]
    if len(request["processes"]) > 1:
        group = _opened_by_all(which, request, config.timeout_s)
        # If this fails, the group stays open, as others may use it already.
        return _made(key, lambda: init.handle_of(group))
    return _made(key, lambda: _opened_alone(key, which))


def close_shared_handles() -> None:
    """Closes every handle of `jax_ep.shared_handle`, including those of layers.

    Compiled functions that use one can no longer be called; after
    `jax.clear_caches()` JAX traces them again. Layers made later get new handles. In a
    job of several processes each of them must call it.
    """
    global _closings
    with _lock:
        handles = list(_handles.values())
        _handles.clear()
        _closed.clear()
        # Includes groups that another process has requested but this one has not.
        opened = [which for which, future in _groups.items() if future.done()]
        groups = [_groups.pop(which) for which in opened if which[1] <= _closings]
        _closings += 1
    keys = {ep.key for ep in handles}
    for ep in handles:
        ep.close()
    for group in (future.result() for future in groups):
        if group.key not in keys:
            group.close()


def open_handles() -> list[EPHandle]:
    """Returns the shared handles that are open in this process, oldest first."""
    with _lock:
        return [ep for ep in _handles.values() if not ep.closed]


def _made(key: Any, make: Any) -> EPHandle:
    """Returns the handle of `key`; the first thread that needs it makes it."""
    with _making:
        with _lock:
            found = _handles.get(key)
        if found is None or found.closed:
            found = threads.untraced(make) if init.traced(key[0]) else make()
            with _lock:
                _handles[key] = found
                count = len(_handles)
            _logger.info(
                "jax_ep: opened shared handle %d, %s over %s: %s; %.1f MB per device",
                count,
                found.transport,
                found.axis_names,
                found.config,
                found.buffer_bytes / 1e6,
            )
    return found


# ---- Requests ----


def _request(
    mesh: Mesh, names: tuple[str, ...], config: EPConfig, transport: str
) -> dict[str, Any]:
    """Returns the arguments as JSON, from which any process can make them again."""
    return {
        "processes": processes_of(mesh),
        "platform": mesh.devices.flat[0].platform,
        "devices": [device.id for device in mesh.devices.flat],
        "shape": list(mesh.devices.shape),
        "axes": list(mesh.axis_names),
        "types": [kind.name for kind in mesh.axis_types],
        "names": list(names),
        "config": dataclasses.asdict(config),
        "transport": transport,
    }


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_TIMEOUT_S


# An entry of the log.
_ENTRY = answers.record(
    request=answers.record(
        processes=answers.several(answers.count),
        platform=answers.text,
        devices=answers.several(answers.count),
        shape=answers.several(answers.count),
        axes=answers.several(answers.text),
        types=answers.several(answers.text),
        names=answers.several(answers.text),
        config=answers.record(timeout_s=_seconds),
        transport=answers.text,
    ),
    which=answers.tuple_of(answers.count, answers.count),
    attempt=answers.count,
)


def _content(request: dict[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)


def _arguments(request: dict[str, Any]) -> tuple[Mesh, tuple[str, ...], EPConfig, Any]:
    """Returns the arguments that `_request` was given."""
    devices = {device.id: device for device in jax.devices(request["platform"])}
    flat = np.array([devices[number] for number in request["devices"]])
    mesh = Mesh(
        flat.reshape(request["shape"]),
        tuple(request["axes"]),
        axis_types=tuple(AxisType[name] for name in request["types"]),
    )
    config = EPConfig(**request["config"])
    return mesh, tuple(request["names"]), config, request["transport"]


def _series(which: _Which) -> str:
    """Returns the name under which groups of equal content are numbered."""
    return f" shared {which[1]} {which[2]}"


# ---- One process ----


def _opened_alone(key: Any, which: _Which) -> EPHandle:
    mesh, names, config, transport = key
    with Rendezvous.of(mesh, config.timeout_s) as rendezvous:
        group = init.open_group(
            mesh, names, config, transport, rendezvous, _series(which)
        )
    with group.closed_on_failure():
        return init.handle_of(group)


# ---- Several processes ----


def _opened_by_all(
    which: _Which, request: dict[str, Any], timeout_s: float
) -> init.Group:
    """Returns the open group of a request, after asking the other processes for it."""
    opener = _running_opener()
    with _lock:
        future = _groups.get(which)
        ask = future is None
        if future is None:
            future = _groups[which] = _Future()
        attempt = _failures[which]
    if ask:
        entry = {"request": request, "which": which[1:], "attempt": attempt}
        try:
            opener.ask(entry, timeout_s)
        except BaseException as error:
            _failed(which, future, error)
            raise
    # Waits in slices, so that Ctrl-C ends it. The thread itself bounds its waits, but
    # not those for the next entry of the log.
    while not future.done():
        concurrent.futures.wait([future], _LATER_S / 4)
        if not opener.is_alive():
            _failed(which, future, RuntimeError(_STORE_ENDED))
        elif opener.reads_for_s() > timeout_s + SILENT_S:
            _failed(which, future, split(timeout_s))
    return future.result()


_STORE_ENDED = (
    "jax_ep.init: the key-value store of jax.distributed must be there as long as "
    "handles are opened, got its end; call it before jax.distributed.shutdown"
)


def _failed(which: _Which, future: _Future, error: BaseException) -> None:
    """Tells all threads that wait for a group, and lets the next call ask again."""
    with _lock:
        if future.done():
            return
        _groups.pop(which, None)
        future.set_exception(error)


def _running_opener() -> _Opener:
    global _opener
    with _lock:
        store = job_store()
        if _opener is None or not _opener.is_alive() or _opener.store is not store:
            if _opener is not None:
                _opener.stop()
            _opener = _Opener(store)
            _opener.start()
        return _opener


class _Opener(threading.Thread):
    """Opens the groups of the job's log, one after the other."""

    def __init__(self, store: Any) -> None:
        super().__init__(name="jax_ep shared handles", daemon=True)
        self.store, self._log = store, RequestLog(store)
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._reads_since: float | None = None

    def ask(self, entry: dict[str, Any], timeout_s: float) -> None:
        """Appends an entry to the log.

        Waits for a silent store longer than the time limit, because a request that the
        store gets later is served all the same.
        """
        try:
            threads.bounded(lambda: self._log.append(entry), timeout_s + SILENT_S)
        except TimeoutError:
            raise split(timeout_s) from None
        self._wake.set()

    def reads_for_s(self) -> float:
        """Returns how long the store has not answered the thread's present question."""
        since = self._reads_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """Ends the thread, unless it is opening a group."""
        self._stopped.set()
        self._wake.set()

    def run(self) -> None:
        """Reads the log until `stop`, or until the store is gone."""
        pause_s = _SOON_S
        while not self._stopped.is_set():
            try:
                self._reads_since = time.monotonic()
                found = self._log.read()
                self._reads_since = None
                if found is not None:
                    self._serve(*found)
            except jax.errors.JaxRuntimeError:
                return
            if found is not None:
                pause_s = _SOON_S
            elif self._wake.wait(pause_s):
                self._wake.clear()
                pause_s = _SOON_S
            else:
                pause_s = min(2 * pause_s, _LATER_S)

    def _serve(self, number: int, entry: dict[str, Any]) -> None:
        if not _ENTRY(entry):
            _logger.warning(
                "jax_ep: request %d for a shared handle cannot be read; install the "
                "same version of jax_ep everywhere",
                number,
            )
            return
        request, attempt = entry["request"], entry["attempt"]
        if jax.process_index() not in request["processes"]:
            return
        closings, closed = entry["which"]
        which: _Which = _content(request), closings, closed
        with _lock:
            failures, here = _failures[which], which in _finished
            # Another request has been served since it was made: it succeeded, or it
            # failed, and then also in the process that has made this one.
            if attempt < failures or (here and attempt == failures):
                return
            future = _Future() if here else _groups.setdefault(which, _Future())
        try:
            group = self._open(number, request, _series(which), here)
        except BaseException as error:
            if not here:
                with _lock:
                    _failures[which] = attempt + 1
                _failed(which, future, error)
            return
        with _lock:
            _finished.add(which)
            late = which[1] < _closings
            if late:
                _groups.pop(which, None)
            future.set_result(group)
        if late:  # this process has called close_shared_handles meanwhile
            group.close()

    def _open(
        self, number: int, request: dict[str, Any], series: str, here: bool
    ) -> init.Group:
        """Opens a group with the other processes; refuses if it is `here` already."""
        processes, own = request["processes"], jax.process_index()
        timeout_s = float(request["config"]["timeout_s"])
        rendezvous = Rendezvous(
            processes, own, timeout_s, series="shared", place=str(number)
        )
        try:
            # Any failure from here on is told to the others.
            with rendezvous:
                if here:
                    raise errors.unusable(
                        "shared_handle",
                        f"process {own} has this handle, but another one has failed to "
                        "get it",
                        "call jax_ep.close_shared_handles() in every process",
                    )
                try:
                    arguments = _arguments(request)
                except Exception as error:  # there are no such arguments here
                    raise rendezvous.unreadable(error) from error
                group = init.open_group(*arguments, rendezvous, series)
                with group.closed_on_failure():
                    rendezvous.conclude()
                return group
        finally:
            rendezvous.close()


@atexit.register
def _stop_opener() -> None:
    """Ends the thread before the store does: it may not run while Python ends."""
    if _opener is not None:
        _opener.stop()
        _opener.join(2 * _LATER_S)
