"""Runs calls of a handle over its tokens in parts, one after the other, in a loop.

Without a derivative, nothing of a part outlives it but its result. With one, neither
does more: in the backward pass each part is dispatched and computed again, from the
tokens and ids that it was given, and its cotangents follow at once. JAX's own
derivative of a loop would keep the rows of every part, and would sum the gradients of
the weights in their own dtype, in which the sum of many parts may stop growing.

A part may be dispatched while the one before it is computed (`Ahead`), forward and
backward. Then what has arrived goes from one round of the loop to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from jax_ep._core import errors
from jax_ep._core.handle import EPHandle
from jax_ep._core.varying import vary_alike, varying
from jax_ep._ops import ordering
from jax_ep._ops.ordering import OrderedCall
from jax_ep._transport.base import Token

# (trained, frozen, tokens of a part, sent) -> (results by token, counts). Counts are
# integers, which are added up over parts. Results must be linear in the sums of
# combine: without `sent`, in the backward pass, these are not exchanged. With an
# `Ahead` the fifth argument is the part's dispatch, which `resume` has returned.
Part = Callable[..., tuple[Any, Any]]


class Ahead(NamedTuple):
    """How a part is dispatched while the one before it is computed.

    These functions close over no arrays.

    Attributes:
        send: (frozen, tokens of a part) -> a pending dispatch.
        begun: a pending dispatch -> its arrays that are there before its exchange.
        receive: a pending dispatch -> what has arrived, a pytree.
        resume: (frozen, tokens of a part, what has arrived) -> the part's dispatch,
            which it does not make again, as a function of the tokens.
        only_if: (tokens of a part, bool) -> the same, which send nothing if False.
    """

    send: Callable[[Any, Any], Any]
    begun: Callable[[Any], Any]
    receive: Callable[[Any], Any]
    resume: Callable[[Any, Any, Any], Any]
    only_if: Callable[[Any, jax.Array], Any]


class Given(NamedTuple):
    """What is the same for all parts.

    Attributes:
        trained: a pytree of arrays, which get gradients.
        frozen: a pytree without gradients.
    """

    trained: Any
    frozen: Any = None


def in_parts(
    function: str,
    ep: EPHandle,
    part: Part,
    given: Given,
    tokens: Any,
    count: int,
    wide: Collection[str] = (),
    ahead: Ahead | None = None,
) -> tuple[Any, Any]:
    """Returns the results and counts of `part` over all tokens.

    Args:
        function: the caller, for errors.
        ep: the handle of the calls in `part`.
        part: the program of a part, which may close over arrays.
        given: its operands that are the same for all parts.
        tokens: a pytree of arrays `[count * T, ...]`.
        count: the number of parts.
        wide: keys of `given.trained`, a mapping, of what `part` takes in float32 as
            well, with gradients that are not rounded before they are added up.
        ahead: how to dispatch the next part beside each one; None to do it after.
    """
    stacked = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), tokens)
    # With the cast here gradients are summed over ranks once, not for each part.
    axes = frozenset(ep.axis_names).union(*map(varying, jax.tree.leaves(stacked)))
    order = ep.mesh.axis_names
    given = jax.tree.map(lambda leaf: vary_alike(order, axes, leaf)[0], given)
    dtypes = jax.tree.map(_own_of, given.trained)
    for name in set(wide) & set(given.trained if wide else ()):
        dtypes[name] = jax.tree.map(_wide_of, given.trained[name])
    traced = functools.partial(_traced, ep, part, ahead, given, stacked, dtypes)
    forward, closed = traced(sent=True)
    again, closed_again = traced(sent=False)
    operands = _Operands(given, closed, closed_again, stacked)
    results, counts = _loop(function)(ep, operands, _Programs(forward, again, ahead))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results), counts


class _Operands(NamedTuple):
    """The operands of a loop.

    Attributes:
        given: as in `in_parts`.
        closed: the arrays that its part closes over.
        closed_again: those of the part in the backward pass, which get the gradients.
        stacked: `[count, T, ...]`.
    """

    given: Given
    closed: Any
    closed_again: Any
    stacked: Any


class _Program:
    """A part as a traced program, hashed by identity."""

    def __init__(self, jaxpr: Any, form: Any, dtypes: Any) -> None:
        """Keeps what the program is.

        Args:
            jaxpr: its equations, with the arrays that it closes over as constants.
            form: the structure of its results.
            dtypes: those in which it takes `Given.trained`.
        """
        self.jaxpr, self.form, self.dtypes = jaxpr, form, dtypes

    def __call__(
        self,
        trained: Any,
        frozen: Any,
        closed: Any,
        one: Any,
        after: Token,
        arrived: Any,
    ) -> Any:
        """Returns results, counts and the token for the next part."""
        cast = jax.tree.map(lambda a, dtype: a.astype(dtype), trained, self.dtypes)
        leaves = jax.tree.leaves((cast, frozen, one, after, arrived))
        found = eval_jaxpr(self.jaxpr, closed, *leaves)
        return jax.tree.unflatten(self.form, found)


class _Programs(NamedTuple):
    """The program of a part, and that of its backward pass."""

    forward: _Program
    again: _Program
    ahead: Ahead | None


def _own_of(leaf: jax.Array) -> Any:
    return leaf.dtype


def _wide_of(leaf: jax.Array) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _traced(
    ep: EPHandle,
    part: Part,
    ahead: Ahead | None,
    given: Given,
    stacked: Any,
    dtypes: Any,
    *,
    sent: bool,
) -> tuple[_Program, list[Any]]:
    """Returns the program of a part, and the arrays that it closes over."""
    form: Any = None

    def run(trained: Any, frozen: Any, one: Any, after: Token, arrived: Any) -> Any:
        nonlocal form

        def call() -> Any:
            if ahead is None:
                return part(trained, frozen, one, sent)
            dispatched = ahead.resume(frozen, one, arrived)
            return part(trained, frozen, one, sent, dispatched)

        (results, counts), done = ordering.mapped(ep, after, call)
        leaves, form = jax.tree.flatten((results, counts, done))
        return leaves

    def examples(axes: frozenset[str]) -> Any:
        def made() -> Any:
            trained = jax.tree.map(lambda a, d: a.astype(d), given.trained, dtypes)
            one = jax.tree.map(lambda a: a[0], stacked)
            after, arrived = (), None
            if ordering.in_order(ep):
                token = jnp.zeros(1, jnp.int32)
                after = vary_alike(ep.mesh.axis_names, axes, token)
            if ahead is not None:
                # A part comes after the first half of the next one's dispatch.
                send, receive = ahead.send, ahead.receive
                pending, after = ordering.mapped(
                    ep, after, lambda: send(given.frozen, one)
                )
                arrived = receive(pending)
            return trained, given.frozen, one, after, arrived

        with ordering.apart(ep):
            return jax.eval_shape(made)

    axes = frozenset().union(*map(varying, jax.tree.leaves(stacked)))
    with ordering.apart(ep):
        traced = jax.make_jaxpr(run)(*examples(axes))
    *_, done = jax.tree.unflatten(form, traced.out_avals)
    if done and _axes_of(done[0]) != axes:
        # The calls vary over further axes, and a loop keeps the type of its token.
        with ordering.apart(ep):
            traced = jax.make_jaxpr(run)(*examples(_axes_of(done[0])))
    return _Program(traced.jaxpr, form, dtypes), list(map(jnp.asarray, traced.consts))


def _axes_of(token: Any) -> frozenset[str]:
    """Returns the mesh axes that an abstract value varies over."""
    kind = getattr(token, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", None) or ())


def _first(
    ep: EPHandle, ahead: Ahead | None, frozen: Any, stacked: Any, after: Token
) -> tuple[Any, Token]:
    """Dispatches the first part, if parts are dispatched ahead."""
    if ahead is None:
        return None, after
    send, receive = ahead.send, ahead.receive
    one = _at(stacked, 0)
    return ordering.mapped(ep, after, lambda: receive(send(frozen, one)))


def _at(stacked: Any, index: Any) -> Any:
    def pick(array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)

    return jax.tree.map(pick, stacked)


def _beside(
    ahead: Ahead | None,
    frozen: Any,
    stacked: Any,
    index: jax.Array,
    arrived: Any,
    work: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """Returns `work(arrived)`, and what has arrived of the next part meanwhile."""
    if ahead is None:
        return work(None), None
    last = jax.tree.leaves(stacked)[0].shape[0] - 1
    # The last part has none after it, and the exchange of nothing costs less than a
    # second program.
    following = _at(stacked, jnp.minimum(index + 1, last))
    following = ahead.only_if(following, index < last)
    pending = ahead.send(frozen, following)
    # Without barriers XLA may run the work before the first half has begun, or after
    # the second half, and nothing overlaps.
    begun = ahead.begun(pending), following
    _, arrived = jax.lax.optimization_barrier((begun, arrived))
    found = work(arrived)
    # The results of a barrier vary over the axes of all its operands.
    pending, _ = jax.lax.optimization_barrier((pending, found))
    return found, ahead.receive(pending)


def _run(
    ep: EPHandle, programs: _Programs, operands: _Operands, after: Token
) -> tuple[Any, Token]:
    given, closed, _, stacked = operands
    program, _, ahead = programs
    first, after = _first(ep, ahead, given.frozen, stacked, after)
    after = _varied(ep, program, after)

    def body(carry: Any, xs: Any) -> Any:
        after, arrived = carry
        index, one = xs

        def work(arrived: Any) -> Any:
            before = ordering.last(ep, after)
            *found, done = program(*given, closed, one, before, arrived)
            # The program was traced elsewhere, so this trace does not know its calls.
            ordering.passed(ep, done)
            return tuple(found)

        (found, arrived), done = ordering.mapped(
            ep,
            after,
            lambda: _beside(ahead, given.frozen, stacked, index, arrived, work),
        )
        return (_varied(ep, program, done), arrived), found

    xs = _indices(stacked), stacked
    (done, _), (results, counts) = jax.lax.scan(body, (after, first), xs)
    return (results, _summed(counts)), done


def _indices(stacked: Any) -> jax.Array:
    return jnp.arange(jax.tree.leaves(stacked)[0].shape[0], dtype=jnp.int32)


def _summed(counts: Any) -> Any:
    return jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), counts)


def _varied(ep: EPHandle, program: _Program, after: Token) -> Token:
    """Returns the token of the loop, with the type that the program gives it."""
    if not after:
        return ()
    axes = _axes_of(program.jaxpr.outvars[-1].aval)
    return vary_alike(ep.mesh.axis_names, axes, *after)


def _apart(tree: Any) -> tuple[Any, Any]:
    """Returns the leaves that get gradients, and the others; None in their places."""

    def pick(wanted: bool) -> Any:
        return jax.tree.map(lambda a: a if _is_trained(a) == wanted else None, tree)

    return pick(True), pick(False)


def _joined(trained: Any, others: Any) -> Any:
    """Returns the tree that `_apart` took apart."""
    return jax.tree.map(
        lambda own, other: other if own is None else own,
        trained,
        others,
        is_leaf=lambda leaf: leaf is None,
    )


def _is_trained(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize > 1


def _run_back(
    ep: EPHandle, programs: _Programs, args: Any, after: Token
) -> tuple[Any, Token]:
    """Returns the cotangents of (`trained`, `closed_again`) and of `stacked`."""
    (given, _, closed, stacked), cotangents = args
    program, ahead = programs.again, programs.ahead
    weights, others = _apart((given.trained, closed))
    rows, indices = _apart(stacked)
    if after and ahead is not None:
        # The first part's dispatch needs no cotangent, so XLA may make it before calls
        # of the forward pass, which no token orders if that is another `shard_map`.
        after, _ = jax.lax.optimization_barrier((after, cotangents))
    first, after = _first(ep, ahead, given.frozen, stacked, after)
    after = _varied(ep, program, after)

    def body(carry: Any, xs: Any) -> Any:
        after, sums, arrived = carry
        at, one, index, cotangent = xs

        def work(arrived: Any) -> Any:
            before = ordering.last(ep, after)

            def forward(wide: Any, one: Any) -> Any:
                trained, consts = _joined(wide, others)
                consts = [
                    a.astype(like.dtype) for a, like in zip(consts, closed, strict=True)
                ]
                tokens = _joined(one, index)
                results, _, done = program(
                    trained, given.frozen, consts, tokens, before, arrived
                )
                return results, done

            wide = jax.tree.map(lambda a: a.astype(_wide_of(a)), weights)
            _, back, done = jax.vjp(forward, wide, one, has_aux=True)
            # Its program was traced elsewhere, so this trace does not know its calls.
            ordering.passed(ep, done)
            return back(cotangent)

        ((to_weights, to_one), arrived), done = ordering.mapped(
            ep, after, lambda: _beside(ahead, given.frozen, stacked, at, arrived, work)
        )
        done = _varied(ep, program, done)
        return (done, jax.tree.map(jnp.add, sums, to_weights), arrived), to_one

    zeros = jax.tree.map(lambda a: jnp.zeros_like(a, dtype=_wide_of(a)), weights)
    xs = _indices(stacked), rows, indices, cotangents
    (done, sums, _), to_rows = jax.lax.scan(body, (after, zeros, first), xs)
    to_weights = jax.tree.map(lambda a, like: a.astype(like.dtype), sums, weights)
    return (to_weights, to_rows), done


def _transpose(
    function: str, ep: EPHandle, programs: _Programs, kept: Any, cotangents: Any
) -> _Operands:
    args = kept, cotangents[0]
    (trained, closed), stacked = _back(function)(ep, args, programs)
    return _Operands(Given(trained, None), None, closed, stacked)


def _refused(function: str, *_: Any) -> Any:
    raise errors.unusable(
        function,
        "a layer in chunks has first derivatives only",
        "leave chunks out for derivatives of derivatives",
    )


def _like(operands: _Operands) -> jax.Array:
    return jax.tree.leaves(operands.stacked)[0]


@functools.cache
def _loop(function: str) -> OrderedCall[_Programs]:
    return OrderedCall(
        function,
        _run,
        lambda ep, programs, operands, results: operands,
        functools.partial(_transpose, function),
        like=_like,
    )


@functools.cache
def _back(function: str) -> OrderedCall[_Programs]:
    return OrderedCall(
        function,
        _run_back,
        lambda *_: None,
        functools.partial(_refused, function),
        like=lambda args: _like(args[0]),
    )
