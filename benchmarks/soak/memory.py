"""Memory of this process and of GPUs, for soaks and tests of leaks.

What a process holds of the system (`resident`) grows without a leak, since blocks of
several MB that threads take and return leave gaps in the heaps of glibc's arenas. Bytes
that somebody has allocated and not freed (`in_use`) tell the two apart.
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
    """Bytes allocated by malloc and not freed, of all arenas; None without glibc 2.33.

    Compare only when no call is in flight. What threads keep in their caches counts as
    allocated, unless GLIBC_TUNABLES has glibc.malloc.tcache_count=0.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def free_on_gpu(ordinal: int) -> int:
    """Free bytes of a GPU, of all processes together.

    The driver is asked by ctypes, so that no answer comes from the code under test.
    """
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def succeed(code: int) -> None:
        if code:
            raise RuntimeError(f"the CUDA driver returned error {code}")

    succeed(driver.cuInit(0))
    # The device's primary context, as JAX has it.
    succeed(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    try:
        succeed(driver.cuCtxPushCurrent_v2(context))
        succeed(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        succeed(driver.cuCtxPopCurrent_v2(ctypes.byref(context)))
    finally:
        succeed(driver.cuDevicePrimaryCtxRelease_v2(ordinal))
    return free.value
