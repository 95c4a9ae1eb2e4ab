"""Runs calls of a handle over its tokens in parts, one after the other, in a loop.

Without a derivative, nothing of a part outlives it but its result. With one, neither
does more: in the backward pass each part is dispatched and computed again, from the
tokens and ids that it was given, and its cotangents follow at once. JAX's own
derivative of a loop would keep the rows of every part, and would sum the gradients of
the weights in their own dtype, in which the sum of many parts may stop growing.
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
# combine: without `sent`, in the backward pass, these are not exchanged.
Part = Callable[[Any, Any, Any, bool], tuple[Any, Any]]


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
    """
    stacked = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), tokens)
    # With the cast here gradients are summed over ranks once, not for each part.
    axes = frozenset(ep.axis_names).union(*map(varying, jax.tree.leaves(stacked)))
    order = ep.mesh.axis_names
    given = jax.tree.map(lambda leaf: vary_alike(order, axes, leaf)[0], given)
    dtypes = jax.tree.map(_own_of, given.trained)
    for name in set(wide) & set(given.trained if wide else ()):
        dtypes[name] = jax.tree.map(_wide_of, given.trained[name])
    forward, closed = _traced(ep, part, given, stacked, dtypes, sent=True)
    again, closed_again = _traced(ep, part, given, stacked, dtypes, sent=False)
    operands = _Operands(given, closed, closed_again, stacked)
    results, counts = _loop(function)(ep, operands, _Programs(forward, again))
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
        self, trained: Any, frozen: Any, closed: Any, one: Any, after: Token
    ) -> Any:
        """Returns results, counts and the token for the next part."""
        cast = jax.tree.map(lambda a, dtype: a.astype(dtype), trained, self.dtypes)
        leaves = jax.tree.leaves((cast, frozen, one, after))
        found = eval_jaxpr(self.jaxpr, closed, *leaves)
        return jax.tree.unflatten(self.form, found)


class _Programs(NamedTuple):
    """The program of a part, and that of its backward pass."""

    forward: _Program
    again: _Program


def _own_of(leaf: jax.Array) -> Any:
    return leaf.dtype


def _wide_of(leaf: jax.Array) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _traced(
    ep: EPHandle, part: Part, given: Given, stacked: Any, dtypes: Any, *, sent: bool
) -> tuple[_Program, list[Any]]:
    """Returns the program of a part, and the arrays that it closes over."""
    form: Any = None

    def run(trained: Any, frozen: Any, one: Any, after: Token) -> Any:
        nonlocal form
        (results, counts), done = ordering.mapped(
            ep, after, lambda: part(trained, frozen, one, sent)
        )
        leaves, form = jax.tree.flatten((results, counts, done))
        return leaves

    def examples(axes: frozenset[str]) -> Any:
        def made() -> Any:
            trained = jax.tree.map(lambda a, d: a.astype(d), given.trained, dtypes)
            one = jax.tree.map(lambda a: a[0], stacked)
            after = ()
            if ordering.in_order(ep):
                token = jnp.zeros(1, jnp.int32)
                after = vary_alike(ep.mesh.axis_names, axes, token)
            return trained, given.frozen, one, after

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


def _run(
    ep: EPHandle, programs: _Programs, operands: _Operands, after: Token
) -> tuple[Any, Token]:
    given, closed, _, stacked = operands
    program = programs.forward
    after = _varied(ep, program, after)

    def body(after: Token, one: Any) -> Any:
        *found, done = program(*given, closed, one, after)
        return done, tuple(found)

    done, (results, counts) = jax.lax.scan(body, after, stacked)
    return (results, _summed(counts)), done


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
    program = programs.again
    weights, others = _apart((given.trained, closed))
    rows, indices = _apart(stacked)
    after = _varied(ep, program, after)

    def body(carry: Any, xs: Any) -> Any:
        after, sums = carry
        one, index, cotangent = xs

        def forward(wide: Any, one: Any) -> Any:
            trained, consts = _joined(wide, others)
            consts = [
                a.astype(like.dtype) for a, like in zip(consts, closed, strict=True)
            ]
            tokens = _joined(one, index)
            results, _, done = program(trained, given.frozen, consts, tokens, after)
            return results, done

        def call() -> Any:
            wide = jax.tree.map(lambda a: a.astype(_wide_of(a)), weights)
            _, back, done = jax.vjp(forward, wide, one, has_aux=True)
            # Its program was traced elsewhere, so this trace does not know its calls.
            ordering.passed(ep, done)
            return back(cotangent)

        (to_weights, to_one), done = ordering.mapped(ep, after, call)
        done = _varied(ep, program, done)
        return (done, jax.tree.map(jnp.add, sums, to_weights)), to_one

    zeros = jax.tree.map(lambda a: jnp.zeros_like(a, dtype=_wide_of(a)), weights)
    xs = rows, indices, cotangents
    (done, sums), to_rows = jax.lax.scan(body, (after, zeros), xs)
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
