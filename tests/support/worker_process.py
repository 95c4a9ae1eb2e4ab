"""For processes that `launch` starts: which GPUs they use, and when they end."""

from __future__ import annotations

import os
import signal

LIMIT = "JAX_EP_TEST_LIMIT_S"


def visible() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, as written; None if it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [gpu for gpu in named.split(",") if gpu]


def local_ids(process: int, devices: int) -> list[int] | None:
    """Which of the visible GPUs are a process's own; None if it sees only its own."""
    gpus = visible()
    if gpus is not None and len(gpus) == devices:
        return None
    return list(range(process * devices, (process + 1) * devices))


def bound_life() -> None:
    """Has the kernel end a worker a little after `launch` would, whatever hangs.

    jax.distributed ignores SIGTERM.
    """
    signal.alarm(5 + int(float(os.environ.get(LIMIT, "300"))))
