"""A lock for pytest-xdist's workers, which run tests on the same GPUs.

A GPU runs one process at a time, for milliseconds, and a kernel that waits for another
GPU may use up its time slices. So a worker holds the lock while it runs a test, but not
while JAX traces and compiles, which takes most of a test's time.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# JAX reports the start and end of tracing, lowering and compiling under this prefix.
COMPILING = "/jax/core/compile/"
# Workers in a group, of which one at a time may use the GPUs. With small groups GPUs
# switch between kernels that wait for each other. With one large group they idle, since
# each worker waits behind all others after every compilation.
SHARE = 5


class GpuLock:
    """One process's lock on a file, for all its threads."""

    def __init__(self, file: pathlib.Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._mutex = threading.Lock()
        self._wanted = False
        self._held = False
        self._compiling = 0
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Holds the lock, but not while this process compiles."""
        self._set(wanted=True)
        try:
            yield
        finally:
            self._set(wanted=False)

    def release(self) -> None:
        """Ends `hold` early: the rest of the test runs without it."""
        self._set(wanted=False)

    def close(self) -> None:
        jax.monitoring.unregister_scalar_listener(self._begin)
        jax.monitoring.unregister_event_duration_listener(self._end)
        os.close(self._file)

    def _begin(self, event: str, *_: object, **__: object) -> None:
        if event.startswith(COMPILING):
            self._set(compiling=1)

    def _end(self, event: str, *_: object, **__: object) -> None:
        if event.startswith(COMPILING):
            self._set(compiling=-1)

    def _set(self, wanted: bool | None = None, compiling: int = 0) -> None:
        with self._mutex:
            self._wanted = self._wanted if wanted is None else wanted
            self._compiling += compiling
            hold = self._wanted and self._compiling == 0
            if hold != self._held:
                fcntl.flock(self._file, fcntl.LOCK_EX if hold else fcntl.LOCK_UN)
                self._held = hold


def warm_up() -> jax.Array:
    """Starts the GPUs and NCCL, which a process does once, without the lock.

    Returns a sum over all GPUs.
    """
    devices = jax.devices()
    rows = NamedSharding(jax.make_mesh((len(devices),), ("gpu",)), PartitionSpec("gpu"))
    total = jax.jit(jnp.sum, in_shardings=rows)(np.ones(len(devices)))
    return total.block_until_ready()


def of_worker(worker: str) -> GpuLock:
    """The lock of the worker "gw<i>".

    Processes that a test starts take no lock: they may wait for each other, and what
    some of them measure must not include a wait for a lock. The test either keeps its
    own lock for them, with `for_processes`, or gives it up when it starts them.
    """
    group = int(worker.removeprefix("gw")) // SHARE
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    name = f"jax_ep-tests-{os.getuid()}-gpus-{gpus}-{group}"
    lock = GpuLock(pathlib.Path(tempfile.gettempdir(), name))

    def release(event: str, _: object) -> None:
        if event == "subprocess.Popen" and not _KEPT.get():
            lock.release()

    sys.addaudithook(release)
    return lock


_KEPT = contextvars.ContextVar("kept", default=False)


@contextlib.contextmanager
def for_processes() -> Generator[None]:
    """Keeps the test's lock, if it has one, while processes that it starts run.

    No other process that takes the lock uses the GPUs until they have ended.
    """
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)
