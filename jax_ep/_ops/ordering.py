"""Calls of a handle: in one order, one by one under vmap, with rules of their own.

XLA may run calls that do not depend on each other side by side; calls that share
windows must not. So every call takes an operand `after` that its kernel does not read:
a result of the handle's call before it. A barrier would not do, as XLA orders what it
launches by buffers alone.

An `OrderedCall` is a kind of call. It takes care of that operand, makes the calls of a
batch one after the other, and is differentiable by a rule made of other such calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from jax_ep._core import batching, checks, errors, handle, traces
from jax_ep._core.handle import EPHandle
from jax_ep._core.varying import varying
from jax_ep._transport import transport_of
from jax_ep._transport.base import Token

# Results of a call, and what the next one comes after.
Outcome = tuple[Any, Token]

_CHECKS_LEAKS = "jax_check_tracer_leaks"


def in_order(ep: EPHandle) -> bool:
    """Whether the calls of `ep` must come one after the other."""
    return transport_of(ep).ordered


def _unnamed(results: Any) -> Any:
    return results


def _unlimited(ep: EPHandle) -> int | None:
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class OrderedCall:
    """A kind of call of a handle.

    Attributes:
        function: of jax_ep, which errors name.
        run: (ep, static, args, after) -> (results, what the next call comes after),
            without derivative. All that it returns is made in it: under vmap a result
            that were made elsewhere would be one for the whole batch, and its
            cotangent a sum over the batch.
        keep: (ep, static, args, results) -> what `transpose` needs.
        transpose: (ep, static, kept, cotangents of the results) -> those of args, with
            None for what takes none.
        like: args -> an array that varies over mesh axes as the call does.
        named: results -> results with the names that remat policies go by.
        ordered: ep -> whether its calls of this kind must come in order.
        most_batched: ep -> how many calls a batch may have, or None.
    """

    function: str
    run: Callable[[EPHandle, Any, Any, Token], tuple[Any, Token]]
    keep: Callable[[EPHandle, Any, Any, Any], Any]
    transpose: Callable[[EPHandle, Any, Any, Any], Any]
    like: Callable[[Any], jax.Array]
    named: Callable[[Any], Any] = _unnamed
    ordered: Callable[[EPHandle], bool] = in_order
    most_batched: Callable[[EPHandle], int | None] = _unlimited

    def __call__(self, ep: EPHandle, args: Any, static: Any = None) -> Any:
        """Makes the call.

        Args:
            ep: the handle.
            args: a pytree of arrays, as `run` takes them.
            static: what else it takes; hashable.

        Returns:
            The results.
        """
        return _made(self, ep, static, args, None)[0]


def _made(
    call: OrderedCall, ep: EPHandle, static: Any, args: Any, given: Token | None
) -> tuple[Any, Token]:
    """The call in its order: results, and what the next one comes after.

    `given` is what it comes after where this trace has made no call yet.
    """
    # A reverse rule may be traced later than the call that it belongs to.
    checks.require_open(call.function, ep)
    if not call.ordered(ep):
        return cast(Outcome, _rule(call, ep, static, args, ()))
    after = _before(ep, call.like(args), given)
    results, done = cast(Outcome, _rule(call, ep, static, args, after))
    _passed(ep, done)
    return results, done


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(
    call: OrderedCall, ep: EPHandle, static: Any, args: Any, after: Token
) -> tuple[Any, Token]:
    results, done = _one_by_one(call, ep, static)(args, after)
    return call.named(results), done


def _rule_fwd(
    call: OrderedCall, ep: EPHandle, static: Any, args: Any, after: Token
) -> Any:
    # By its order again: this is traced where the call before it may have been another.
    results, done = _made(call, ep, static, args, after)
    # Named again: names inside the nested rule do not reach the residuals.
    results = call.named(results)
    return (results, done), call.keep(ep, static, args, results)


def _rule_bwd(
    call: OrderedCall, ep: EPHandle, static: Any, kept: Any, cotangents: Any
) -> Any:
    return call.transpose(ep, static, kept, cotangents[0]), None


_rule.defvjp(_rule_fwd, _rule_bwd)


def _one_by_one(
    call: OrderedCall, ep: EPHandle, static: Any
) -> Callable[[Any, Token], tuple[Any, Token]]:
    """`call.run`, which under vmap makes the calls of the batch in turn."""
    guarded = jax.custom_batching.custom_vmap(partial(call.run, ep, static))
    # JAX's caches keep rules, which must not keep the handle open.
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
                # By `body`, for batches around this one. The token is a result of its
                # own: XLA would see through one that is taken out of stacked results,
                # and order call i of the next op after call i of this one alone.
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
def _batch_of(call: OrderedCall, ep: EPHandle, axis_size: int) -> Iterator[None]:
    """Around the calls of a batch: raises where batches within batches are too many."""
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
    """What the next call of `ep` comes after: zero where there is nothing."""
    trace = traces.current_trace()
    for where, token in _links(ep):
        # A call cannot vary over fewer axes than its operands.
        if where is trace and varying(token) <= varying(like):
            _, after = checks.vary_together(ep, like, token)
            return (after,)
    return given or (jax.lax.full_like(like, 0, dtype=jnp.int32, shape=(1,)),)


def _passed(ep: EPHandle, done: Token) -> None:
    """Notes what the next call in this trace comes after.

    It holds the trace until the next call of this handle on this thread.
    """
    trace = traces.current_trace()
    # What is held would be reported as leaked.
    leaks = getattr(jax.config, _CHECKS_LEAKS, False)
    (token,) = map(traces.unbatched, done)
    if trace is None or leaks or token is None:
        return
    links = _links(ep)
    # Of other traces only those that this one lies in go on; the rest has ended, or is
    # a derivative's, whose calls come down to this trace.
    around = traces.surrounding(trace)
    links[:] = [link for link in links if any(link[0] is outer for outer in around)]
    links.append((trace, token))


def before_mapped(ep: EPHandle, parts: int) -> Token:
    """What a `shard_map` of calls comes after, which this trace has around it.

    Args:
        ep: the handle.
        parts: of dimension 0, a rank's calls take one each.

    Returns:
        int32 `[parts]`; () where calls need no order, and where nothing is traced:
        programs run one after the other.
    """
    outside = (None, traces.untraced_trace())
    if not in_order(ep) or traces.current_trace() in outside:
        return ()
    last = _last(ep, ())
    fits = last and last[0].shape == (parts,)
    return last if fits else (jnp.zeros(parts, jnp.int32),)


def mapped(ep: EPHandle, after: Token, call: Callable[[], Any]) -> tuple[Any, Token]:
    """`call()`, inside that `shard_map`, and what comes next goes after."""
    if not after:
        return call(), ()
    _passed(ep, after)
    result = call()
    return result, _last(ep, after)


def passed_mapped(ep: EPHandle, last: Token) -> None:
    """Notes what the calls after that `shard_map` come after, from `mapped`."""
    if last:
        _passed(ep, last)


def _last(ep: EPHandle, otherwise: Token) -> Token:
    """The last result in this trace."""
    trace = traces.current_trace()
    found = [token for where, token in _links(ep) if where is trace]
    return (found[-1],) if found else otherwise


def _links(ep: EPHandle) -> list[tuple[Any, jax.Array]]:
    """(trace, last result in it) of this thread's traces, from the outside in.

    A trace may take a result of its own only. What is traced inside it is kept by JAX
    and used again elsewhere, where an outer trace's value would have escaped.
    """
    # On the handle itself: what is traced refers to it, and both must be collected.
    here = vars(ep).setdefault("_chain", threading.local())
    return vars(here).setdefault("links", [])
