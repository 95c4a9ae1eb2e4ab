"""What the calls of transport "p2p" say besides their operands: where they stand."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ep import _ffi
from jax_ep._results import struct

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle

PENDING_INTS = 4  # of PendingCall in xla_ffi/protocol/pending.h
STREAM_SINCE = (0, 11, 1)  # of custom calls on XLA's stream of collectives

# Their frames, and those of what wraps functions, lie between a user's line and a call.
_NOT_USERS = {"jax_ep", "jax", "jaxlib", "contextlib", "functools"}


def site() -> int:
    """Digest of the user's line that is being traced: the same in every process.

    It goes into the tags of a call's flags, so that ranks that run different calls see
    an error.
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


def pending_call(like: jax.Array) -> Any:
    """The type of what the first half of a call leaves of it."""
    return struct(like, (1, PENDING_INTS), jnp.int32)


def first_half(ep: EPHandle) -> Callable[..., list[jax.Array]]:
    """How the first half of a call is launched: `_ffi.call`, or beside others."""
    if ep.config.overlap != "stream":
        return _ffi.call
    if jax.__version_info__ < STREAM_SINCE:
        raise ValueError(
            f'jax_ep.EPConfig: overlap="stream" must have jax 0.11.1 or newer on '
            f"{ep.transport}, got {jax.__version__}; leave overlap out or update jax"
        )
    return _ffi.call_aside
