"""What this process must be like: room in XLA's CPU thread pool, threads of its own.

Used at import and by init. XLA's CPU pool has max(NPROC or cores, devices) threads.
Collectives block a thread for each device, so several programs in flight on more
devices than cores can take every thread and stop (docs/sharp_bits.md). NPROC is read
when the backend starts.
"""

from __future__ import annotations

import os
import re
import warnings

THREADS_PER_DEVICE = 4
MIN_THREADS = 32
_warned = False
_forked_from: int | None = None  # a process that had started JAX


def _forced_devices() -> int:
    flags = os.environ.get("XLA_FLAGS", "")
    match = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(match.group(1)) if match else 0


def _backend_started() -> bool:
    try:
        from jax._src import xla_bridge  # no public way to ask without starting it

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def make_room() -> None:
    """Raises NPROC while XLA's backend has not started; never lowers it."""
    if _backend_started():
        return
    current = os.environ.get("NPROC", "")
    wanted = max(
        # As XLA reads it: other scripts have digits that no number is made of.
        int(current) if re.fullmatch("[0-9]{1,9}", current) else 0,
        os.cpu_count() or 1,
        MIN_THREADS,
        THREADS_PER_DEVICE * _forced_devices(),
    )
    os.environ["NPROC"] = str(wanted)


def warn_if_short(pool_threads: int, devices: int) -> None:
    """Warns where XLA's pool can deadlock with this many local CPU devices.

    Once in a process: it can do nothing about it any more.
    """
    global _warned
    if not _warned and 0 < pool_threads < 2 * devices:
        warnings.warn(
            f"jax_ep.init: XLA's CPU pool must have at least {2 * devices} threads for "
            f"{devices} devices, got {pool_threads}: several runs in flight can hang. "
            f"Import jax_ep before the first use of JAX, or set NPROC={4 * devices} in "
            "the environment.",
            RuntimeWarning,
            stacklevel=4,
        )
        _warned = True  # not where the warning was raised


def _note_fork() -> None:
    """In a forked child: JAX's threads stayed behind, if there were any."""
    global _forked_from
    if _backend_started():
        _forked_from = os.getppid()


os.register_at_fork(after_in_child=_note_fork)


def require_unforked() -> None:
    """Raises ValueError where JAX's threads stayed behind with the process forked from.

    Without them everything that JAX is asked for would wait for ever.
    """
    if _forked_from is not None:
        raise ValueError(
            "jax_ep.init: must run in a process that has started JAX itself, got a "
            f"child forked from process {_forked_from}, which had; start processes by "
            "spawn, or fork before the first use of JAX"
        )
