"""A lock on each GPU, for processes that run tests on the same GPUs.

A GPU runs one process at a time, for milliseconds, and a kernel that waits for another
GPU may use up its time slices. So a process holds a lock on each of its GPUs while it
runs a test, but not while JAX traces and compiles, which takes most of a test's time.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
import pathlib
import sys
import threading
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# JAX reports the start and end of tracing, lowering and compiling under this prefix.
COMPILING = "/jax/core/compile/"


class GpuLock:
    """One process's lock, for all its threads; `files` has one file per GPU."""

    def __init__(self, files: list[pathlib.Path]) -> None:
        # Sorted, so that no two processes wait for each other.
        flags = os.O_RDWR | os.O_CREAT
        self._files = [os.open(file, flags, 0o600) for file in sorted(files)]
        self._mutex = threading.Lock()
        self._wanted = False
        self._held = False
        self._compiling = 0
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Holds the locks, but not while this process compiles."""
        self._set(wanted=True)
        try:
            yield
        finally:
            self._set(wanted=False)

    def release(self) -> None:
        """Ends `hold` early: the rest of the test runs without the locks."""
        self._set(wanted=False)

    def close(self) -> None:
        jax.monitoring.unregister_scalar_listener(self._begin)
        jax.monitoring.unregister_event_duration_listener(self._end)
        for file in self._files:
            os.close(file)

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
                for file in self._files:
                    fcntl.flock(file, fcntl.LOCK_EX if hold else fcntl.LOCK_UN)
                self._held = hold


def warm_up() -> jax.Array:
    """Starts the GPUs and NCCL, which a process does once, without the lock.

    Returns a sum over all GPUs.
    """
    devices = jax.devices()
    rows = NamedSharding(jax.make_mesh((len(devices),), ("gpu",)), PartitionSpec("gpu"))
    total = jax.jit(jnp.sum, in_shardings=rows)(np.ones(len(devices)))
    return total.block_until_ready()


def of_environment() -> GpuLock | None:
    """The lock whose files are in the folder JAX_EP_TEST_GPU_LOCKS; None if not set.

    Processes that a test starts take no lock: they may wait for each other, and what
    some of them measure must not include a wait for a lock. The test either keeps its
    own lock for them, with `for_processes`, or gives it up when it starts them.
    """
    folder = os.environ.pop("JAX_EP_TEST_GPU_LOCKS", None)
    if folder is None:
        return None
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    lock = GpuLock([pathlib.Path(folder, f"gpu{gpu}") for gpu in gpus])

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
