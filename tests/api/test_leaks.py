"""Thousands of handles and calls leave nothing behind; in a separate process.

test_p2p_faults.py checks the memory of p2p's windows.
"""

from __future__ import annotations

import ctypes

import pytest

from benchmarks.soak import memory as host_memory
from support import compare_transports, gpus, helpers

MB = 2**20
# Bytes allocated and not freed per cycle. JAX keeps about 100 per call at first (as
# many for one without jax_ep), and some 4 kB of each program that it compiles, such as
# ep_init; for GPUs it keeps more.
FEW_BYTES = {"calls": 300, "programs": 200_000, "groups": 4, "handles": 10_000}
if helpers.TRANSPORT != "collective":
    FEW_BYTES |= {"calls": 500, "handles": 40_000}


# All processes share a GPU's free memory, and others' tests take hundreds of MB.
@pytest.mark.slow
@pytest.mark.exclusive
@pytest.mark.parametrize(
    "what",
    ["calls", "groups", "handles", pytest.param("programs", marks=pytest.mark.gpu)],
)
def test_memory_is_flat(what: str) -> None:
    if what == "groups" and helpers.TRANSPORT != "collective":
        pytest.skip("test_windows_a_thousand_times counts those of GPUs")
    found = gpus.run_worker("leaks_worker.py", what, timeout=600)
    assert found["bytes_a_cycle"] < FEW_BYTES[what], found
    assert found["device_lost"] < 64 * MB, found
    assert found["handles_left"] <= 1, found


@pytest.mark.gpu
@pytest.mark.exclusive
def test_windows_a_thousand_times() -> None:
    compare_transports.p2p_mesh(helpers.some_ranks(2))
    env = {"JAX_EP_TEST_TRANSPORT": "p2p"}
    found = gpus.run_worker("leaks_worker.py", "groups", timeout=600, **env)
    assert found["cycles"] == 1000
    # Lost windows would take 2 MB each.
    assert found["device_lost"] < 64 * MB, found
    assert found["bytes_a_cycle"] < 2000, found
    assert found["handles_left"] <= 1, found


def test_what_is_not_freed_is_counted() -> None:
    """Large and small blocks are counted, but not freed ones, wherever they are."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    start = host_memory.in_use()
    if start is None:
        pytest.skip("needs glibc 2.33")
    blocks = [libc.malloc(size) for size in (1500, MB) for _ in range(200)]
    kept = 200 * (1500 + MB)
    held = host_memory.in_use()
    # Gaps between kept blocks are free, but still belong to the process.
    for block in blocks[::2]:
        libc.free(block)
    left = host_memory.in_use()
    for block in blocks[1::2]:
        libc.free(block)
    assert abs(held - start - kept) < MB
    assert abs(left - start - kept / 2) < MB
    assert abs(host_memory.in_use() - start) < MB
