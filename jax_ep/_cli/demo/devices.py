"""Chooses the demo's devices: the GPUs of the machine, or virtual CPU devices."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

from jax_ep._cli.values import no_backend
from jax_ep._native import ffi
from jax_ep._setup import runtime

CPU_DEVICES = 8
# XLA's CPU pool, as jax_ep sizes it, is large enough for this many devices.
MAX_CPU_DEVICES = runtime.MIN_THREADS // 2


class NoBackendError(RuntimeError):
    """JAX has no devices."""


class TooManyDevicesError(ValueError):
    """More devices were requested than there are."""


def choose(wanted: int | None) -> tuple[list[Any], str | None]:
    """Starts JAX's backend and picks devices.

    Args:
        wanted: number of devices; None means every GPU, or CPU_DEVICES without GPUs.

    Returns:
        The devices, and the reason if GPUs are present but not used.

    Raises:
        TooManyDevicesError: there are fewer devices.
        NoBackendError: JAX has no devices.
    """
    # Leaves GPU memory to other processes; JAX reads it when the backend starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Only affects the CPU platform; raises if the backend has already started.
    with contextlib.suppress(RuntimeError):
        count = min(wanted or CPU_DEVICES, MAX_CPU_DEVICES)
        jax.config.update("jax_num_cpu_devices", count)
    remark = None
    try:
        devices = jax.devices()
    except Exception as error:  # JAX raises many types here, even AssertionError
        raise NoBackendError(no_backend(f"{type(error).__name__}: {error}")) from error
    try:
        ffi.native_for(devices[0].platform)
    except ValueError as error:
        remark = f"not on {devices[0].device_kind}: {error}"
        devices = jax.devices("cpu")
    wanted = wanted or len(devices)
    if wanted > len(devices):
        raise TooManyDevicesError(
            f"--devices must be at most {len(devices)} here, got {wanted}: "
            + describe(devices)
        )
    return devices[:wanted], remark


def describe(devices: list[Any]) -> str:
    """Describes the devices in words."""
    count = len(devices)
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0))
        return f"{count} virtual CPU device{'s' * (count > 1)} on {cores} cores"
    return f"{count} x {devices[0].device_kind}"
