"""Chooses between the kernels for fp8 and the operations that run everywhere."""

from __future__ import annotations

from jax_ep._experts import devices
from jax_ep._experts.hopper_fp8 import HopperOperations
from jax_ep._experts.operations import Operations


def operations() -> Operations:
    """Returns the operations of fp8 experts on this process's devices."""
    return Operations() if devices.device_obstacle() else HopperOperations()
