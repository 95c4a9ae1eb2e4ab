"""What processes that `launch` starts share: which GPUs are theirs, when they end."""

from __future__ import annotations

import os
import signal

LIMIT = "JAX_EP_TEST_LIMIT_S"


def visible() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, as it names it; None where it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [gpu for gpu in named.split(",") if gpu]


def local_ids(process: int, devices: int) -> list[int] | None:
    """Which of the visible GPUs are a process's own; None where it sees no others."""
    gpus = visible()
    if gpus is not None and len(gpus) == devices:
        return None
    return list(range(process * devices, (process + 1) * devices))


def bound_life() -> None:
    """For a worker: the kernel ends it, whatever it hangs in, a little after `launch`.

    jax.distributed ignores SIGTERM.
    """
    signal.alarm(5 + int(float(os.environ.get(LIMIT, "300"))))
