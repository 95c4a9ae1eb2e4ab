"""Orders the calls of a handle, also under vmap and in derivatives.

XLA may run independent calls at the same time, but calls that share windows must run
one after the other. So every call has an operand `after` that its kernel does not read:
a result of the handle's previous call. An optimization barrier would not do, because
XLA orders launches only by buffers.

A trace only uses tokens of its own, so the first call in the body of a scan comes after
a constant. XLA runs such calls in the order of its main stream. Where it has more than
that stream, calls that would rely on it are refused.

An `OrderedCall` is a kind of call. It passes that operand, makes the calls of a batch
one after the other, and has a derivative rule made of other such calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp

from jax_ep._core import batching, checks, errors, handle, traces
from jax_ep._core.handle import EPHandle
from jax_ep._core.varying import varying
from jax_ep._transport import transport_of
from jax_ep._transport.base import Token

# Results of a call, and the token for the next call.
Outcome = tuple[Any, Token]

# The type of a call's further arguments for `run`; hashable.
Static = TypeVar("Static")

_CHECKS_LEAKS = "jax_check_tracer_leaks"
# XLA's setting with which a CUDA graph runs side by side what no buffer orders.
_CONCURRENT = "xla_gpu_command_buffer_scheduling_mode=CONCURRENT"


def in_order(ep: EPHandle) -> bool:
    """Whether the calls of `ep` must come one after the other."""
    return transport_of(ep).ordered


def _unnamed(results: Any) -> Any:
    return results


def _unlimited(ep: EPHandle) -> int | None:
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class OrderedCall(Generic[Static]):
    """A kind of call of a handle.

    Attributes:
        function: name of the function of jax_ep, for errors.
        run: (ep, static, args, after) -> (results, token for the next call), without a
            derivative. It must make all its results itself. Under vmap a result made
            outside would be one for the whole batch, and its cotangent would be
            wrongly summed over the batch.
        keep: (ep, static, args, results) -> residuals for `transpose`.
        transpose: (ep, static, residuals, cotangents of the results) -> cotangents of
            args, with None for args without one.
        like: args -> an array that varies over mesh axes as the call does.
        named: results -> results with names for remat policies.
        ordered: ep -> whether the handle's calls of this kind must be ordered.
        most_batched: ep -> the largest batch size, or None.
    """

    function: str
    run: Callable[[EPHandle, Static, Any, Token], tuple[Any, Token]]
    keep: Callable[[EPHandle, Static, Any, Any], Any]
    transpose: Callable[[EPHandle, Static, Any, Any], Any]
    like: Callable[[Any], jax.Array]
    named: Callable[[Any], Any] = _unnamed
    ordered: Callable[[EPHandle], bool] = in_order
    most_batched: Callable[[EPHandle], int | None] = _unlimited

    def __call__(self, ep: EPHandle, args: Any, static: Static) -> Any:
        """Makes the call.

        Args:
            ep: the handle.
            args: a pytree of arrays, as `run` takes them.
            static: further arguments for `run`; None for calls without any.

        Returns:
            The results.
        """
        return _made(self, ep, static, args, None)[0]


def _made(
    call: OrderedCall[Static],
    ep: EPHandle,
    static: Static,
    args: Any,
    given: Token | None,
) -> tuple[Any, Token]:
    """Makes the call in order; returns its results and the token for the next call.

    `given` is the token to use if this trace has not made a call yet.
    """
    # Checked again, because a reverse rule may be traced after the handle is closed.
    checks.require_open(call.function, ep)
    if not call.ordered(ep):
        return cast(Outcome, _rule(call, ep, static, args, ()))
    _require_traces(call.function, ep)
    after = _before(call.function, ep, call.like(args), given)
    results, done = cast(Outcome, _rule(call, ep, static, args, after))
    _passed(ep, done)
    return results, done


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(
    call: OrderedCall[Static], ep: EPHandle, static: Static, args: Any, after: Token
) -> tuple[Any, Token]:
    results, done = _one_by_one(call, ep, static)(args, after)
    return call.named(results), done


def _rule_fwd(
    call: OrderedCall[Static], ep: EPHandle, static: Static, args: Any, after: Token
) -> Any:
    # Ordered again, because in this trace another call may have come before it.
    results, done = _made(call, ep, static, args, after)
    # Named again, because names inside the nested rule do not reach the residuals.
    results = call.named(results)
    return (results, done), call.keep(ep, static, args, results)


def _rule_bwd(
    call: OrderedCall[Static], ep: EPHandle, static: Static, kept: Any, cotangents: Any
) -> Any:
    return call.transpose(ep, static, kept, cotangents[0]), None


_rule.defvjp(_rule_fwd, _rule_bwd)


def _one_by_one(
    call: OrderedCall[Static], ep: EPHandle, static: Static
) -> Callable[[Any, Token], tuple[Any, Token]]:
    """Returns `call.run` with a vmap rule that makes the calls of a batch in turn."""
    guarded = jax.custom_batching.custom_vmap(partial(call.run, ep, static))
    # JAX caches the rule, which therefore must not hold a reference to the handle.
    key = ep.key

    @guarded.def_vmap
    def _(axis_size: int, in_batched: Any, args: Any, after: Token) -> Any:
        args_batched, after_batched = in_batched
        ep = handle.find(key)
        if ep is None:
            raise errors.unusable(
                call.function,
                "the handle of this call no longer exists",
                "keep a reference to it while functions traced with it are used",
            )
        body = _one_by_one(call, ep, static)
        token = batching.entry(after, after_batched, axis_size - 1)
        outcomes = []
        with _batch_of(call, ep, axis_size):
            for index in range(axis_size):
                one = batching.entry(args, args_batched, index)
                # `body` has the vmap rule again, for an outer vmap. The token must be a
                # result of its own: if it were a slice of the stacked results, XLA
                # would simplify that, and order call i of the next op only after call i
                # of this one.
                results, token = body(one, token)
                outcomes.append(results)
        stacked = batching.stacked(outcomes)
        batched = (
            jax.tree.map(lambda _: True, stacked),
            jax.tree.map(lambda _: False, token),
        )
        return (stacked, token), batched

    return guarded


_batches = threading.local()


@contextlib.contextmanager
def _batch_of(call: OrderedCall[Any], ep: EPHandle, axis_size: int) -> Iterator[None]:
    """Surrounds the calls of a batch; raises if nested batches exceed the limit."""
    outer = getattr(_batches, "size", 1)
    most = call.most_batched(ep)
    if most is not None and outer * axis_size > most:
        raise batch_error(call.function, ep, outer * axis_size)
    _batches.size = outer * axis_size
    try:
        yield
    finally:
        _batches.size = outer


def batch_error(function: str, ep: EPHandle, size: int) -> Exception:
    """The error for a vmap whose batch is larger than `pending_calls`."""
    kind = function.partition("_")[0]
    return errors.invalid(
        function,
        f"a batch of vmap must have at most pending_calls = {ep.config.most_pending} "
        "calls, which are all pending at once",
        f"{size} per rank",
        f"init with a larger pending_calls, or call jax_ep.{kind}",
    )


@dataclasses.dataclass(eq=False)
class _Link:
    """A trace in which, or inside which, the handle has made calls.

    Attributes:
        trace: () -> the trace, or None once it is gone.
        token: () -> the last token of the trace, or None.
        of_ranks: whether calls on the arrays of one rank were made in it.
        inner: whether traces inside it have made calls after its last call.
    """

    trace: Callable[[], Any]
    token: Callable[[], jax.Array | None]
    of_ranks: bool
    inner: bool


def _require_traces(function: str, ep: EPHandle) -> None:
    """Raises unless JAX says which trace a call is made in."""
    lacks = traces.lacking()
    if lacks is not None:
        raise errors.unusable(
            function,
            f"calls on {ep.transport} must come one after the other, and this JAX, "
            f"{jax.__version__}, lacks {lacks}, by which jax_ep orders them",
            'init with transport="collective", or install a JAX that is supported '
            "(docs/support.md)",
        )


def _before(function: str, ep: EPHandle, like: jax.Array, given: Token | None) -> Token:
    """Returns the token for the next call of `ep`, zeros if it is the first."""
    trace = traces.current_trace()
    link = _link_of(ep, trace)
    if link is not None and link.of_ranks:
        token = link.token()
        # A call cannot vary over fewer axes than its operands.
        if token is not None and varying(token) <= varying(like):
            if link.inner:
                _require_one_stream(function, ep, _AFTER_INNER)
            _, after = checks.vary_together(ep, like, token)
            return (after,)
        # Without a parent it is that of a shard_map outside jit, whose calls are
        # programs of their own.
        if token is None and hasattr(trace, "parent_trace"):
            raise errors.unusable(
                function,
                f"calls on {ep.transport} must come one after the other, and under "
                f"{_CHECKS_LEAKS} this trace has let go of the call before",
                "trace without leak checks",
            )
    if given:
        return given
    first = jax.lax.full_like(like, 0, dtype=jnp.int32, shape=(1,))
    # Calls in a derivative are made, and ordered, in the trace below it.
    reason = _unordered(ep, traces.home(first), like)
    if reason is not None:
        _require_one_stream(function, ep, reason)
    return (first,)


_AFTER_INNER = "an inner jit, loop, branch or checkpoint made a call before it"
_IN_INNER = "it is in an inner jit, loop, branch or checkpoint, after a call outside"
_FEWER_AXES = "its operands vary over fewer mesh axes than those of the call before it"


def _unordered(ep: EPHandle, trace: Any, like: jax.Array) -> str | None:
    """Returns why a first call in `trace` may come after calls that it cannot see."""
    link = _link_of(ep, trace)
    if link is not None:
        token = link.token()
        if token is not None and not varying(token) <= varying(like):
            return _FEWER_AXES
        return _AFTER_INNER if link.inner else None
    outer = _links_around(ep, trace)
    return _IN_INNER if any(link.of_ranks for link in outer) else None


def _require_one_stream(function: str, ep: EPHandle, reason: str) -> None:
    """Raises if XLA may run at once two calls that no token orders."""
    setting = None
    if ep.config.overlap == "stream":
        setting = 'overlap="stream"'
    elif _CONCURRENT in os.environ.get("XLA_FLAGS", ""):
        setting = f"--{_CONCURRENT}"
    if setting is not None:
        raise errors.unusable(
            function,
            f"with {setting} XLA may run this call beside another of the same handle, "
            f"because {reason}",
            "give one of the two a handle of its own (docs/sharp_bits.md, calls of one "
            "p2p handle), or do without that setting",
        )


def _passed(ep: EPHandle, done: Token, of_ranks: bool = True) -> None:
    """Stores the token for the next call in this trace.

    This keeps the trace alive until the next call of this handle on this thread.
    """
    trace = traces.current_trace()
    (token,) = map(traces.unbatched, done)
    if token is None:
        raise TypeError("jax_ep: the token of a call must not be batched")
    made_here = traces.home(token) is trace
    links = _links(ep)
    # Only traces around this one go on. All others have ended, or belong to a
    # derivative, whose calls end up in this trace.
    links[:] = _links_around(ep, trace)
    if made_here:
        known = [link.trace() for link in links]
        for outer in traces.surrounding(trace):
            if not any(outer is each for each in known):
                links.append(_Link(weakref.ref(outer), lambda: None, False, True))
        for link in links:
            link.inner = True
    if not getattr(jax.config, _CHECKS_LEAKS, False):
        links.append(_Link(lambda: trace, lambda: token, of_ranks, False))
    elif made_here:
        # JAX would report a stored token. The equation keeps it as long as the trace.
        jax.lax.optimization_barrier(token)
        links.append(_Link(weakref.ref(trace), weakref.ref(token), of_ranks, False))


def passed(ep: EPHandle, done: Token) -> None:
    """Stores the token of calls that were made in a program of their own."""
    if done:
        _passed(ep, done)


def before_mapped(ep: EPHandle, parts: int) -> Token:
    """Returns the token for a `shard_map` of calls, from the trace around it.

    Args:
        ep: the handle.
        parts: size of dimension 0, one element for each rank's calls.

    Returns:
        int32 `[parts]`; () if calls need no order, or if nothing is traced, because
        programs run one after the other anyway.
    """
    if not in_order(ep) or not traces.is_tracing():
        return ()
    found = last(ep, ())
    fits = found and found[0].shape == (parts,)
    return found if fits else (jnp.zeros(parts, jnp.int32),)


def mapped(ep: EPHandle, after: Token, call: Callable[[], Any]) -> tuple[Any, Token]:
    """Runs `call()` inside that `shard_map`; returns its result and the next token."""
    if not after:
        return call(), ()
    _passed(ep, after)
    result = call()
    return result, last(ep, after)


def passed_mapped(ep: EPHandle, done: Token) -> None:
    """Stores the token that `mapped` returned, for calls after that `shard_map`."""
    if done:
        _passed(ep, done, of_ranks=False)


@contextlib.contextmanager
def apart(ep: EPHandle) -> Iterator[None]:
    """Surrounds the tracing of a program that is called elsewhere, in its own order."""
    links = _links(ep)
    saved = [(link, link.inner) for link in links]
    try:
        yield
    finally:
        links[:] = [link for link, _ in saved]
        for link, inner in saved:
            link.inner = inner


def last(ep: EPHandle, otherwise: Token) -> Token:
    """Returns the last token of this trace."""
    link = _link_of(ep, traces.current_trace())
    token = link.token() if link else None
    return otherwise if token is None else (token,)


def _link_of(ep: EPHandle, trace: Any) -> _Link | None:
    """Returns the link of that trace, or None."""
    return next((link for link in _links(ep) if link.trace() is trace), None)


def _links_around(ep: EPHandle, trace: Any) -> list[_Link]:
    """Returns the links of traces around `trace`."""
    around = traces.surrounding(trace)
    links = [(link, link.trace()) for link in _links(ep)]
    found = [link for link, of in links if any(of is outer for outer in around)]
    if traces.shows_all_around(trace):
        return found
    # All that are open on this thread are around this one.
    return found + [
        link
        for link, of in links
        if link not in found and of is not trace and traces.is_open(of)
    ]


def _links(ep: EPHandle) -> list[_Link]:
    """Returns the links of this thread's traces.

    A trace must only use tokens of its own. JAX caches what is traced inside it and
    reuses that elsewhere. A value of an outer trace would be a leak there.
    """
    # Stored on the handle, so that traces and handle can be collected together.
    here = vars(ep).setdefault("_chain", threading.local())
    return vars(here).setdefault("links", [])
