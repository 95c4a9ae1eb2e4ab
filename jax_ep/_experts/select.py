"""Chooses between the kernels for Hopper and the operations that run everywhere."""

from __future__ import annotations

from typing import Any

import jax

from jax_ep._experts import kernels
from jax_ep._experts.hopper_fp8 import HopperOperations
from jax_ep._experts.operations import Operations
from jax_ep._native.plugins import wanted_extra

CAPABILITY = "9.0"


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
    if not kernels.built():
        return (
            f"a CUDA module with its kernels, as jax_ep[{wanted_extra()}] installs, "
            "got none"
        )
    return None


def obstacle(
    hidden_size: int, intermediate_size: int, device: Any = None
) -> str | None:
    """Returns why 16-bit experts of this size cannot use the kernels, or None."""
    found = device_obstacle(device)
    if found is not None:
        return found
    multiple = kernels.ALIGNED
    if hidden_size % multiple or intermediate_size % multiple:
        return (
            f"hidden_size and intermediate_size in multiples of {multiple}, "
            f"got {hidden_size} and {intermediate_size}"
        )
    return None


def operations() -> Operations:
    """Returns the operations of fp8 experts on this process's devices."""
    return Operations() if device_obstacle() else HopperOperations()
