"""Says which devices run the kernels."""

from __future__ import annotations

from typing import Any

import jax

from jax_ep._experts import kernels
from jax_ep._native.plugins import wanted_extra

CAPABILITY = "9.0"
PORTABLE_CAPABILITY = "8.0"


def device_obstacle(device: Any = None) -> str | None:
    """Returns "<what kernels need>, got <what there is>", or None if they run.

    Args:
        device: a `jax.Device` that they run on; None means this process's first.
    """
    device = device or jax.local_devices()[0]
    found = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or found != CAPABILITY:
        return (
            f"GPUs of compute capability {CAPABILITY}, got "
            f"{device.device_kind} {found}".rstrip()
        )
    return _build_obstacle()


def portable_obstacle(device: Any) -> str | None:
    """Returns the same for the portable kernels."""
    found = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not _is_new_enough(found):
        return (
            f"GPUs of compute capability {PORTABLE_CAPABILITY} or newer, got "
            f"{device.device_kind} {found}".rstrip()
        )
    return _build_obstacle()


def _is_new_enough(capability: str) -> bool:
    major, _, _ = capability.partition(".")
    least, _, _ = PORTABLE_CAPABILITY.partition(".")
    return major.isdigit() and int(major) >= int(least)


def _build_obstacle() -> str | None:
    if kernels.built():
        return None
    return (
        f"a CUDA module with its kernels, as jax_ep[{wanted_extra()}] installs, "
        "got none"
    )
