"""GPUs as the driver sees them, and tests' worker processes. Also used by soak.py.

ctypes calls the driver, so that no answer comes from the code under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterable, Iterator

import jax
import pytest

from jax_ep._native import ffi, loader
from jax_ep._transport import p2p
from support import gpu_lock
from support.launch import command, environment, run_to_end

ONE_GPU = "JAX_EP_TEST_ONE_GPU"
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


# Older JAX has no compute_on that takes a function. test_on_stream.py checks with any
# JAX that jax_ep refuses then.
needs_stream = pytest.mark.skipif(
    jax.__version_info__ < p2p.STREAM_SINCE,
    reason="this JAX puts no custom call on the stream of collectives",
)


def require_stream(overlap: str, transport: str = "p2p") -> None:
    """Skips as `needs_stream` does, if the transport's calls need it."""
    if overlap == "stream" and transport != "collective" and needs_stream.args[0]:
        pytest.skip(needs_stream.kwargs["reason"])


def share_one(process: int) -> None:
    """With JAX_EP_TEST_ONE_GPU, lets this process share its GPU with others.

    `init` refuses that, since ranks would wait for each other's time slices. It tells
    GPUs apart by their UUIDs, and goes on if the driver gives none. NCCL refuses
    ranks of one host that share a GPU.
    """
    if ONE_GPU in os.environ:
        ffi.native_cuda.device_uuid = lambda ordinal: ""
        os.environ["NCCL_HOSTID"] = f"process {process}"


def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    _succeed(driver.cuInit(0))
    return driver


def _succeed(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver returned error {code}")


@contextlib.contextmanager
def _context(driver: ctypes.CDLL, ordinal: int) -> Iterator[None]:
    """Makes the primary context of a device current, which JAX uses, too."""
    context, popped = ctypes.c_void_p(), ctypes.c_void_p()
    _succeed(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    _succeed(driver.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        _succeed(driver.cuCtxPopCurrent_v2(ctypes.byref(popped)))
        _succeed(driver.cuDevicePrimaryCtxRelease_v2(ordinal))


def free_bytes(ordinal: int) -> int:
    """Free memory of a GPU, whichever processes use the rest."""
    driver = _driver()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with _context(driver, ordinal):
        _succeed(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value


def why_no_p2p(devices: Iterable[jax.Device]) -> str | None:
    """What these devices of this process lack for transport p2p, or None."""
    devices = list(devices)
    if any(device.platform != "gpu" for device in devices):
        return "p2p needs GPUs"
    driver, value = _driver(), ctypes.c_int()
    ordinals = [device.local_hardware_id for device in devices]
    for ordinal in ordinals:
        _succeed(
            driver.cuDeviceGetAttribute(ctypes.byref(value), _CAPABILITY_MAJOR, ordinal)
        )
        if value.value < 9:
            return f"p2p needs compute capability 9.0, device {ordinal} has less"
    for one in ordinals:
        for other in ordinals:
            if one == other:
                continue
            _succeed(driver.cuDeviceCanAccessPeer(ctypes.byref(value), one, other))
            if not value.value:
                return f"p2p needs peer access, device {one} has none to {other}"
    return None


def launches() -> list[int] | None:
    """Counts of this process's captured and streamed calls; None without GPUs."""
    if jax.default_backend() != "gpu":
        return None
    return list(loader.cuda.launch_counts())


def assert_captured(counts: list[int], calls: int) -> None:
    """Of `calls` calls, all but a few were captured in graphs."""
    captured, streamed = counts
    assert captured > 0, counts
    # A program may run once before it is captured, on each of up to 8 devices.
    assert streamed <= calls // 10, counts


def run_worker(script: str, *args: str, timeout: float, **env: str) -> dict:
    """Runs a file of workers/ in its own process; its last line is JSON.

    A hang or a crash then fails only one test. The session's own process may hold most
    of the GPUs' memory, so the worker takes only what it needs.
    """
    with gpu_lock.for_processes():
        done = run_to_end(
            command(script, *args),
            env=environment(**{"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | env),
            timeout=timeout,
        )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


# Makes graphs of a single node, too, so that the custom calls are captured.
CAPTURE = "--xla_gpu_graph_min_graph_size=1"
