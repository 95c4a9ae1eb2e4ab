"""What the calls of transport "p2p" say besides their operands: where they stand."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _ffi
from jax_ep._handle import EPHandle
from jax_ep._results import struct

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


# The results of a first half, all int32. The first begins with the pending call, the
# last is what the handle's next call comes after. With `overlap="stream"` one array
# `[1, M]` is all of them in a row.
First = tuple[jax.Array, ...]


def first_half(
    ep: EPHandle,
    target: str,
    results: Sequence[Any],
    *operands: jax.Array,
    **attributes: Any,
) -> First:
    """Launches the first half of a call, with `overlap="stream"` beside others."""
    attributes |= {"key": ep.key, "site": site()}
    if ep.config.overlap != "stream":
        return tuple(_ffi.call(target, results, *operands, **attributes))
    if jax.__version_info__ < STREAM_SINCE:
        raise ValueError(
            f'jax_ep.EPConfig: overlap="stream" must have jax 0.11.1 or newer on '
            f"{ep.transport}, got {jax.__version__}; leave overlap out or update jax"
        )
    # In a CUDA graph nothing would run beside it: this target is not captured.
    target += "_aside"
    whole = struct(operands[0], (1, _ends(results)[-1]), jnp.int32)
    return (_ffi.call_aside(target, whole, *operands, **attributes),)


def results_of(first: First, results: Sequence[Any]) -> list[jax.Array]:
    """The results of a first half, for the second one."""
    if len(first) == len(results):
        return list(first)
    parts = jnp.split(first[0], _ends(results)[:-1], axis=1)
    return [
        part.reshape(result.shape) for part, result in zip(parts, results, strict=True)
    ]


def _ends(results: Sequence[Any]) -> list[int]:
    return list(itertools.accumulate(math.prod(result.shape) for result in results))
