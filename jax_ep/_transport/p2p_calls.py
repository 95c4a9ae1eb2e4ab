"""What the two halves of a call of transport "p2p" pass on to each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core.handle import EPHandle
from jax_ep._native import ffi
from jax_ep._native.call_site import site
from jax_ep._transport.results import struct

PENDING_INTS = 4  # of PendingCall in xla_ffi/protocol/pending.h
STREAM_SINCE = (0, 11, 1)  # of custom calls on XLA's stream of collectives


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
        return tuple(ffi.call(target, results, *operands, **attributes))
    if jax.__version_info__ < STREAM_SINCE:
        raise ValueError(
            f'jax_ep.EPConfig: overlap="stream" must have jax 0.11.1 or newer on '
            f"{ep.transport}, got {jax.__version__}; leave overlap out or update jax"
        )
    # In a CUDA graph nothing would run beside it: this target is not captured.
    target += "_aside"
    whole = struct(operands[0], (1, _ends(results)[-1]), jnp.int32)
    return (ffi.call_aside(target, whole, *operands, **attributes),)


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
