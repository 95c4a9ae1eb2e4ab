"""One order for the calls of a handle within a trace. Used by calls' modules.

XLA may run calls that do not depend on each other side by side; calls that share
windows must not. So every call takes an operand `after` that its kernel does not read:
a result of the handle's call before it. A barrier would not do, as XLA orders what it
launches by buffers alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core import checks, threads
from jax_ep._core.handle import EPHandle
from jax_ep._core.varying import varying

_CHAINED = {"p2p", "shmem"}
_CHECKS_LEAKS = "jax_check_tracer_leaks"

# What a call of a chained transport takes and yields: one array. () elsewhere, so that
# programs of other transports hold nothing of it.
Token = tuple[jax.Array, ...]


def before(ep: EPHandle, like: jax.Array, given: Token | None = None) -> Token:
    """What the next call of `ep` comes after.

    Args:
        ep: the handle.
        like: an operand of the call, which varies over mesh axes as the call does.
        given: what the call comes after where none came before it in this trace.

    Returns:
        int32, zero where there is nothing; () for an unchained transport.
    """
    if not _chained(ep):
        return ()
    trace = current_trace()
    for where, token in _links(ep):
        # A call cannot vary over fewer axes than its operands.
        if where is trace and varying(token) <= varying(like):
            _, after = checks.vary_together(ep, like, token)
            return (after,)
    return given or (jax.lax.full_like(like, 0, dtype=jnp.int32, shape=(1,)),)


def passed(ep: EPHandle, token: Token) -> None:
    """Notes a result of the call that `ep` has just made in this trace.

    It holds the trace until the next call of this handle on this thread.
    """
    trace = current_trace()
    # What is held would be reported as leaked.
    leaks = getattr(jax.config, _CHECKS_LEAKS, False)
    if not _chained(ep) or trace is None or leaks:
        return
    links = _links(ep)
    # Of other traces only those that this one lies in go on; the rest has ended, or is
    # a derivative's, whose calls come down to this trace.
    around = _around(trace)
    links[:] = [link for link in links if any(link[0] is outer for outer in around)]
    links.append((trace, token[0]))


def before_mapped(ep: EPHandle, parts: int) -> Token:
    """What a `shard_map` of calls comes after, which this trace has around it.

    Args:
        ep: the handle.
        parts: of dimension 0, a rank's calls take one each.

    Returns:
        int32 `[parts]`; () for an unchained transport, and where nothing is traced:
        programs run one after the other.
    """
    if not _chained(ep) or current_trace() in (None, _evaluates()):
        return ()
    last = _last(ep, ())
    fits = last and last[0].shape == (parts,)
    return last if fits else (jnp.zeros(parts, jnp.int32),)


def mapped(ep: EPHandle, after: Token, call: Callable[[], Any]) -> tuple[Any, Token]:
    """`call()`, inside that `shard_map`, and what comes next goes after."""
    if not after:
        return call(), ()
    passed(ep, after)
    result = call()
    return result, _last(ep, after)


def _last(ep: EPHandle, otherwise: Token) -> Token:
    """The last result in this trace."""
    trace = current_trace()
    found = [token for where, token in _links(ep) if where is trace]
    return (found[-1],) if found else otherwise


def _chained(ep: EPHandle) -> bool:
    return ep.transport in _CHAINED and not ep.config.skip_a2a


def _links(ep: EPHandle) -> list[tuple[Any, jax.Array]]:
    """(trace, last result in it) of this thread's traces, from the outside in.

    A trace may take a result of its own only. What is traced inside it is kept by JAX
    and used again elsewhere, where an outer trace's value would have escaped.
    """
    # On the handle itself: what is traced refers to it, and both must be collected.
    here = vars(ep).setdefault("_chain", threading.local())
    return vars(here).setdefault("links", [])


@functools.cache
def _trace_taker() -> Any:
    # jax.extend.core has it in public, but imports Pallas, which adds to what newer JAX
    # keeps compiled programs by: all that was jitted before would compile once more.
    from jax._src import core

    # A JAX that hides its traces: calls are not chained.
    return getattr(core, "take_current_trace", None)


@functools.cache
def _evaluates() -> Any:
    """The trace where nothing is traced, that of a new thread."""
    return threads.untraced(current_trace)


def current_trace() -> Any:
    take_current_trace = _trace_taker()
    if take_current_trace is None:
        return None
    with take_current_trace() as trace:
        return trace


def _around(trace: Any) -> list[Any]:
    """The traces that `trace` lies in."""
    found = []
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        found.append(trace)
    return found
