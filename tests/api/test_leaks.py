"""Handles and calls by the thousand leave nothing behind; in a process of its own.

How much the windows of p2p take is in test_p2p_faults.py.
"""

from __future__ import annotations

import ctypes

import pytest

from benchmarks.soak import memory as host_memory
from support import compare_transports, gpus, helpers

MB = 2**20
# Allocated and not freed, a cycle. JAX keeps about 100 of a call at first (as many of
# one without jax_ep), and some 4 kB of each program that it compiles, of which ep_init
# is one; for GPUs it keeps more.
FEW_BYTES = {"calls": 300, "programs": 200_000, "groups": 4, "handles": 10_000}
if helpers.TRANSPORT != "collective":
    FEW_BYTES |= {"calls": 500, "handles": 40_000}


# A GPU's free memory is that of all processes: others' tests take hundreds of MB.
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
    # A lost window would take 2 MB a time.
    assert found["device_lost"] < 64 * MB, found
    assert found["bytes_a_cycle"] < 2000, found
    assert found["handles_left"] <= 1, found


def test_what_is_not_freed_is_counted() -> None:
    """Large blocks and small ones; what was freed is not, wherever it lies."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    start = host_memory.in_use()
    if start is None:
        pytest.skip("needs glibc 2.33")
    blocks = [libc.malloc(size) for size in (1500, MB) for _ in range(200)]
    kept = 200 * (1500 + MB)
    held = host_memory.in_use()
    # Gaps between what is kept: freed, and still the process's.
    for block in blocks[::2]:
        libc.free(block)
    left = host_memory.in_use()
    for block in blocks[1::2]:
        libc.free(block)
    assert abs(held - start - kept) < MB
    assert abs(left - start - kept / 2) < MB
    assert abs(host_memory.in_use() - start) < MB
