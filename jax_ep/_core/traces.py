"""Finds out what JAX is tracing, from private names of JAX.

If a JAX version renames one of them, batches may not be counted, and calls that must be
ordered are refused (`lacking`). `tests/tools/test_compatibility.py` then fails.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from jax_ep._core import threads


@functools.cache
def _core() -> Any:
    # The public jax.extend.core has some of these names, but it imports Pallas. In
    # newer JAX that changes the key of the jit cache, so that every function jitted
    # before would compile again.
    from jax._src import core

    return core


@functools.cache
def _batching() -> Any:
    from jax._src.interpreters import batching

    return batching


def current_trace() -> Any:
    """Returns the current trace, or None if JAX does not say.

    Inside `vmap` it is the trace around the `vmap`, where the calls of the batch are
    made one after the other.
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
    """Returns the trace of a thread that traces nothing."""
    return threads.untraced(current_trace)


def is_tracing() -> bool:
    """Whether this thread is tracing anything; False if JAX does not say."""
    return current_trace() not in (None, untraced_trace())


def is_staging() -> bool:
    """Whether this thread traces a program that runs later, as inside `jax.jit`."""
    # Outside any trace no array is made, because a device may be stuck.
    return is_tracing() and isinstance(jnp.zeros(()), Tracer)


def lacking() -> str | None:
    """Returns what this JAX lacks to tell where calls are made, or None."""
    if not hasattr(_core(), "take_current_trace"):
        return "jax._src.core.take_current_trace"
    if not hasattr(_batching(), "BatchTrace"):
        return "jax._src.interpreters.batching.BatchTrace"
    trace = current_trace()
    if shows_all_around(trace):
        return None
    outermost = [trace, *surrounding(trace)][-1]
    for name in ("parent_trace", "frame"):
        if not hasattr(outermost, name):
            return f"{name} of {type(outermost).__name__}"
    return None if hasattr(outermost.frame, "tracing_eqns") else "tracing_eqns"


def shows_all_around(trace: Any) -> bool:
    """Whether `surrounding(trace)` goes all the way out.

    Some traces, such as those of derivatives, do not know what is around them.
    """
    outermost = [trace, *surrounding(trace)][-1]
    # Outside jit, shard_map begins at a trace of its own, without a parent.
    return outermost == untraced_trace() or type(outermost).__name__ == "ShardMapTrace"


def is_open(trace: Any) -> bool:
    """Whether a trace is that of a program with equations, to which more may come."""
    # JAX empties the list when the trace ends.
    return bool(getattr(getattr(trace, "frame", None), "tracing_eqns", None))


def home(value: Any) -> Any:
    """Returns the trace that `value` belongs to, below derivatives; None if to none."""
    while hasattr(value, "primal"):
        value = value.primal
    return getattr(value, "_trace", None)


def surrounding(trace: Any) -> list[Any]:
    """Returns all traces around `trace`, innermost first."""
    found = []
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        found.append(trace)
    return found


def unbatched(value: Any) -> Any:
    """Returns `value` as seen outside all `vmap`s, or None if it is batched."""
    while _is_batch(getattr(value, "_trace", None)):
        if isinstance(value.batch_dim, int):
            return None
        value = value.val
    return value


def batch_size(*values: Any) -> int:
    """Returns how many calls `vmap` makes of one call with these operands."""
    return max(map(_batch_size, values), default=1)


def _batch_size(value: Any) -> int:
    sizes = []
    while (trace := getattr(value, "_trace", None)) is not None:
        if _is_batch(trace):
            if isinstance(value.batch_dim, int):
                sizes.append(value.val.shape[value.batch_dim])
            value = value.val
        elif hasattr(value, "primal"):  # differentiated around or inside the vmap
            value = value.primal
        else:
            break
    return math.prod(sizes)


def spmd_axis_names() -> frozenset[str]:
    """Returns the mesh axes that surrounding `vmap`s have as `spmd_axis_name`."""
    get_axis_env = getattr(_core(), "get_axis_env", None)
    env = get_axis_env() if get_axis_env is not None else None
    return frozenset(getattr(env, "spmd_axis_names", ()))


def unmapped(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns `axes` without those over which surrounding `vmap`s split arrays."""
    mapped = spmd_axis_names()
    return tuple(axis for axis in axes if axis not in mapped)


def _is_batch(trace: Any) -> bool:
    kind = getattr(_batching(), "BatchTrace", None)
    return kind is not None and isinstance(trace, kind)
