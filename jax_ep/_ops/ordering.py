"""Orders the calls of a handle, also under vmap and in derivatives.

XLA may run independent calls at the same time, but calls that share windows must run
one after the other. So every call has an operand `after` that its kernel does not read:
a result of the handle's previous call. An optimization barrier would not do, because
XLA orders launches only by buffers.

An `OrderedCall` is a kind of call. It passes that operand, makes the calls of a batch
one after the other, and has a derivative rule made of other such calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
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
    after = _before(ep, call.like(args), given)
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


def _before(ep: EPHandle, like: jax.Array, given: Token | None) -> Token:
    """Returns the token for the next call of `ep`, zeros if it is the first."""
    trace = traces.current_trace()
    for where, token in _links(ep):
        # A call cannot vary over fewer axes than its operands.
        if where is trace and varying(token) <= varying(like):
            _, after = checks.vary_together(ep, like, token)
            return (after,)
    return given or (jax.lax.full_like(like, 0, dtype=jnp.int32, shape=(1,)),)


def _passed(ep: EPHandle, done: Token) -> None:
    """Stores the token for the next call in this trace.

    This keeps the trace alive until the next call of this handle on this thread.
    """
    trace = traces.current_trace()
    # JAX's leak checker would report the stored token.
    leaks = getattr(jax.config, _CHECKS_LEAKS, False)
    (token,) = map(traces.unbatched, done)
    if trace is None or leaks or token is None:
        return
    links = _links(ep)
    # Only traces around this one go on. All others have ended, or belong to a
    # derivative, whose calls end up in this trace.
    around = traces.surrounding(trace)
    links[:] = [link for link in links if any(link[0] is outer for outer in around)]
    links.append((trace, token))


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
    last = _last(ep, ())
    fits = last and last[0].shape == (parts,)
    return last if fits else (jnp.zeros(parts, jnp.int32),)


def mapped(ep: EPHandle, after: Token, call: Callable[[], Any]) -> tuple[Any, Token]:
    """Runs `call()` inside that `shard_map`; returns its result and the next token."""
    if not after:
        return call(), ()
    _passed(ep, after)
    result = call()
    return result, _last(ep, after)


def passed_mapped(ep: EPHandle, last: Token) -> None:
    """Stores the token that `mapped` returned, for calls after that `shard_map`."""
    if last:
        _passed(ep, last)


def _last(ep: EPHandle, otherwise: Token) -> Token:
    """Returns the last token of this trace."""
    trace = traces.current_trace()
    found = [token for where, token in _links(ep) if where is trace]
    return (found[-1],) if found else otherwise


def _links(ep: EPHandle) -> list[tuple[Any, jax.Array]]:
    """Returns (trace, last token in it) of this thread's traces, outermost first.

    A trace must only use tokens of its own. JAX caches what is traced inside it and
    reuses that elsewhere. A value of an outer trace would be a leak there.
    """
    # Stored on the handle, so that traces and handle can be collected together.
    here = vars(ep).setdefault("_chain", threading.local())
    return vars(here).setdefault("links", [])
