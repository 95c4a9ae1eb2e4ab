"""Memory of this process, for test_leaks.py and benchmarks/soak/soak.py.

What it holds of the system (`resident`) grows without a leak: blocks of several MB that
threads take and return leave gaps in the heaps of glibc's arenas. Bytes that somebody
has allocated and not freed (`in_use`) tell the two apart.
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
