"""What JAX is tracing, by names that it keeps private.

A JAX that has renamed one of them loses what it is for: calls are then not ordered, or
batches not counted. `tests/tools/test_compatibility.py` says so first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from jax_ep._core import threads


@functools.cache
def _core() -> Any:
    # jax.extend.core has some of it in public, but imports Pallas, which adds to what
    # newer JAX keeps compiled programs by: all that was jitted before would compile
    # once more.
    from jax._src import core

    return core


@functools.cache
def _batching() -> Any:
    from jax._src.interpreters import batching

    return batching


def current_trace() -> Any:
    """The trace that a call is made in, or None where JAX does not tell.

    Inside of `vmap` it is the one around: the calls of a batch are made there, one
    after the other.
    """
    take_current_trace = getattr(_core(), "take_current_trace", None)
    if take_current_trace is None:
        return None
    with take_current_trace() as trace:
        while _is_batch(trace):
            trace = trace.parent_trace
        return trace


@functools.cache
def untraced_trace() -> Any:
    """The trace where nothing is traced, that of a new thread."""
    return threads.untraced(current_trace)


def surrounding(trace: Any) -> list[Any]:
    """The traces that `trace` lies in."""
    found = []
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        found.append(trace)
    return found


def unbatched(value: Any) -> Any:
    """`value` as the trace around all `vmap`s knows it, or None if it is batched."""
    while _is_batch(getattr(value, "_trace", None)):
        if isinstance(value.batch_dim, int):
            return None
        value = value.val
    return value


def batch_size(*values: Any) -> int:
    """How many calls `vmap` makes of one with these operands."""
    return max(map(_batch_size, values), default=1)


def _batch_size(value: Any) -> int:
    sizes = []
    while (trace := getattr(value, "_trace", None)) is not None:
        if _is_batch(trace):
            if isinstance(value.batch_dim, int):
                sizes.append(value.val.shape[value.batch_dim])
            value = value.val
        elif hasattr(value, "primal"):  # of a derivative around or inside the batch
            value = value.primal
        else:
            break
    return math.prod(sizes)


def spmd_axis_names() -> frozenset[str]:
    """The mesh axes that surrounding `vmap`s have as their `spmd_axis_name`."""
    get_axis_env = getattr(_core(), "get_axis_env", None)
    env = get_axis_env() if get_axis_env is not None else None
    return frozenset(getattr(env, "spmd_axis_names", ()))


def _is_batch(trace: Any) -> bool:
    kind = getattr(_batching(), "BatchTrace", None)
    return kind is not None and isinstance(trace, kind)
