"""Prepares the process: sizes XLA's CPU thread pool, and detects forks.

XLA's CPU pool has max(NPROC or cores, devices) threads. Collectives block one thread
per device, so several programs in flight on more devices than cores can take all
threads and deadlock (docs/sharp_bits.md). XLA reads NPROC when the backend starts.
"""

from __future__ import annotations

import os
import re
import warnings

THREADS_PER_DEVICE = 4
MIN_THREADS = 32
_warned = False
_forked_from: int | None = None  # parent, if it had started JAX before the fork


def _forced_devices() -> int:
    flags = os.environ.get("XLA_FLAGS", "")
    match = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(match.group(1)) if match else 0


def _backend_started() -> bool:
    try:
        from jax._src import xla_bridge  # public functions would start the backend

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def make_room() -> None:
    """Raises NPROC if XLA's backend has not started yet; never lowers it."""
    if _backend_started():
        return
    current = os.environ.get("NPROC", "")
    wanted = max(
        # Only ASCII digits, as XLA parses it; str.isdigit accepts more.
        int(current) if re.fullmatch("[0-9]{1,9}", current) else 0,
        os.cpu_count() or 1,
        MIN_THREADS,
        THREADS_PER_DEVICE * _forced_devices(),
    )
    os.environ["NPROC"] = str(wanted)


def warn_if_short(pool_threads: int, devices: int) -> None:
    """Warns, once per process, if XLA's pool is too small for the local CPU devices."""
    global _warned
    if not _warned and 0 < pool_threads < 2 * devices:
        warnings.warn(
            f"jax_ep.init: XLA's CPU pool must have at least {2 * devices} threads for "
            f"{devices} devices, got {pool_threads}, with which several runs in flight "
            "can hang; import jax_ep before the first use of JAX, or set "
            f"NPROC={4 * devices} in the environment",
            RuntimeWarning,
            stacklevel=5,
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

    A fork does not copy JAX's threads, so that every use of JAX would hang.
    """
    if _forked_from is not None:
        raise ValueError(
            f"jax_ep.init: this process was forked from process {_forked_from} after "
            "that had started JAX; start processes with spawn, or fork before the "
            "first use of JAX"
        )
