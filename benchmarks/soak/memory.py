"""Measures the memory of this process and of GPUs, for soaks and tests of leaks.

A process's resident size (`resident`) grows even without a leak: blocks of several MB
that threads allocate and free leave gaps in the heaps of glibc's arenas. The bytes that
are allocated and not freed (`in_use`) tell the two apart.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib

FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def resident() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def in_use() -> int | None:
    """Returns the bytes that malloc has allocated in all arenas and that are not freed.

    None before glibc 2.33. Compare only when no call is in flight. What threads keep in
    their caches counts as allocated, unless GLIBC_TUNABLES has
    glibc.malloc.tcache_count=0.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def free_on_gpu(ordinal: int) -> int:
    """Returns the free bytes of a GPU, which all processes share.

    It asks the driver through ctypes, so that no code under test is involved.
    """
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def succeed(code: int) -> None:
        if code:
            raise RuntimeError(f"the CUDA driver returned error {code}")

    succeed(driver.cuInit(0))
    # The device's primary context, which JAX uses, too.
    succeed(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    try:
        succeed(driver.cuCtxPushCurrent_v2(context))
        succeed(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        succeed(driver.cuCtxPopCurrent_v2(ctypes.byref(context)))
    finally:
        succeed(driver.cuDevicePrimaryCtxRelease_v2(ordinal))
    return free.value
