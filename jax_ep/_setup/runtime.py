"""Prepares the process: sizes XLA's CPU thread pool, and detects forks.

XLA's CPU pool has max(NPROC or cores, devices) threads. Collectives block one thread
per device, so several programs in flight on more devices than cores can take all
threads and deadlock (docs/sharp_bits.md). XLA reads NPROC when the CPU backend starts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_ep._core import errors

THREADS_PER_DEVICE = 4
MIN_THREADS = 32
_warned = False
_forked_from: int | None = None  # parent, if it had started JAX before the fork


def _cpu_devices() -> int:
    """Returns how many CPU devices this process will have; at least 2 in a job."""
    if jax.distributed.is_initialized():
        return max(2, _own_cpu_devices())
    return _own_cpu_devices()


def _own_cpu_devices() -> int:
    own = getattr(jax.config, "jax_num_cpu_devices", -1)
    if own >= 0:
        return own
    flags = os.environ.get("XLA_FLAGS", "")
    match = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(match.group(1)) if match else 1


def _backend_started() -> bool:
    try:
        from jax._src import xla_bridge  # public functions would start the backend

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


@contextlib.contextmanager
def _raised_nproc() -> Iterator[None]:
    """Raises NPROC, never lowers it, while the CPU backend starts."""
    devices, before = _cpu_devices(), os.environ.get("NPROC")
    if devices > 1:
        current = before or ""
        wanted = max(
            # Only ASCII digits, as XLA parses it; str.isdigit accepts more.
            int(current) if re.fullmatch("[0-9]{1,9}", current) else 0,
            os.cpu_count() or 1,
            MIN_THREADS,
            THREADS_PER_DEVICE * devices,
        )
        os.environ["NPROC"] = str(wanted)
    try:
        yield
    finally:
        if before is not None:
            os.environ["NPROC"] = before
        elif devices > 1:
            del os.environ["NPROC"]


def make_room() -> None:
    """Gives the CPU backend enough threads for its devices, if it has not started yet.

    The environment is restored after it starts, so that no child inherits NPROC.
    """
    if _backend_started():
        return
    # JAX has no public hook. If this one is missing, init warns of a small pool.
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        from jax._src import xla_bridge

        registration: Any = xla_bridge._backend_factories["cpu"]
        registration.factory = _with_room(registration.factory)


def _with_room(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def started(*args: Any, **named: Any) -> Any:
        with _raised_nproc():
            return make(*args, **named)

    return started


def warn_if_short(pool_threads: int, devices: int) -> None:
    """Warns, once per process, if XLA's pool is too small for the local CPU devices."""
    global _warned
    if devices == 1 and not jax.distributed.is_initialized():
        return  # nothing waits for other devices
    if not _warned and 0 < pool_threads < 2 * devices:
        warnings.warn(
            f"jax_ep.init: XLA's CPU pool must have at least {2 * devices} threads for "
            f"{devices} devices, got {pool_threads}, with which several runs in flight "
            "can hang; import jax_ep before the first use of JAX, or set "
            f"NPROC={4 * devices} in the environment",
            RuntimeWarning,
            stacklevel=6,
        )
        _warned = True  # skipped if a filter turned the warning into an exception


def _note_fork() -> None:
    """Runs in a forked child, and notes whether the parent had started JAX."""
    global _forked_from
    if _backend_started():
        _forked_from = os.getppid()


os.register_at_fork(after_in_child=_note_fork)


def require_unforked() -> None:
    """Raises ValueError in a child forked after JAX was started.

    A fork does not copy JAX's threads, so every use of JAX would hang.
    """
    if _forked_from is not None:
        raise errors.unusable(
            "init",
            f"this process was forked from process {_forked_from} after that had "
            "started JAX",
            "start processes with spawn, or fork before the first use of JAX",
        )
