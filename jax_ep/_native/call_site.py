"""The place of a call in the user's program, part of its tag on every transport."""

from __future__ import annotations

import hashlib
import sys

# Packages whose frames lie between a user's line and a call.
_NOT_USERS = {"jax_ep", "jax", "jaxlib", "contextlib", "functools"}


def site() -> int:
    """Returns a digest of the user's line being traced, the same in every process.

    It is part of a call's tag, which the collective transport sends with each region
    and the others with each flag, so that ranks that run different calls see an error.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_USERS:
            break
        frame = frame.f_back
    code = frame.f_code
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    place = f"{file}:{frame.f_lineno}:{code.co_name}"
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little") >> 1
