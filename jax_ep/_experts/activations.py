"""Applies the user's activation, a function of gate and up, inside custom derivatives.

Rows that hold no token must not change a gradient, not even that of an array which the
function closes over. Setting their cotangents to zero is not enough: where a derivative
is infinite, 0 * inf is NaN. So such rows get the gate and up of a row that holds one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import kernels

# A function of gate and up, `[N, F]` each, or, of experts without a gate, of up alone.
Activation = Callable[[jax.Array, jax.Array], jax.Array] | Callable[..., jax.Array]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The default activation silu(gate) * up, to wrap it in one of your own."""
    return jax.nn.silu(gate) * up


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation gelu(gate) * up for `activation=`, gelu by tanh."""
    return jax.nn.gelu(gate, approximate=True) * up


def relu_squared(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation relu(gate)^2 * up, for `activation=`."""
    return jnp.square(jax.nn.relu(gate)) * up


@dataclasses.dataclass(frozen=True)
class _SwigluClamped:
    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


def swiglu_clamped(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """Returns the activation of gpt-oss, for `activation=`.

    With g = min(gate, limit) and u = clip(up, -limit, limit) it is
    `g * sigmoid(alpha * g) * (u + 1)`. The results of equal arguments are equal.

    Args:
        alpha: factor in the sigmoid.
        limit: bound of gate, and of the magnitude of up.
    """
    return _SwigluClamped(alpha, limit)


def of_kernels(activation: Activation | None) -> kernels.Activation | None:
    """Returns how kernels compute an activation, or None if they do not."""
    if activation is None or activation is swiglu:
        return kernels.SWIGLU
    if isinstance(activation, _SwigluClamped):
        numbers = activation.alpha, activation.limit
        # An array may be a tracer, or be trained.
        known = all(isinstance(each, int | float) for each in numbers)
        return kernels.Activation("swiglu_clamped", *numbers) if known else None
    for named in (geglu, relu_squared):
        if activation is named:
            return kernels.Activation(named.__name__)
    return None


def function_of(activation: kernels.Activation) -> Activation:
    """Returns the function that kernels compute."""
    if activation.activation == "swiglu_clamped":
        return _SwigluClamped(activation.alpha, activation.limit)
    return {each.__name__: each for each in (swiglu, geglu, relu_squared)}[
        activation.activation
    ]


# No usual function is singular here, as many are at 0 and some at 1.
_REGULAR = 0.75


class Closed(NamedTuple):
    """An activation apart from the arrays that it closes over.

    Attributes:
        run: a function of (gate, up, consts), static.
        consts: the arrays, in a derivative's operands as they are: cast to vary over
            more mesh axes they would no longer fit the program of `run`.
        axes: the mesh axes that gate and up must vary over.
    """

    run: Callable[..., jax.Array]
    consts: tuple[jax.Array, ...]
    axes: frozenset[str]


def closed(
    activation: Activation, shape: tuple[int, ...], dtype: Any, axes: frozenset[str]
) -> Closed:
    """Traces `activation` for operands of a shape and dtype.

    Args:
        activation: the user's function.
        shape: (N, F).
        dtype: of gate and up.
        axes: the mesh axes that they vary over at least. Arrays that the function
            closes over may add to them.
    """

    def traced(axes: frozenset[str]) -> Any:
        def operand() -> jax.Array:
            return vary_alike(sorted(axes), axes, jnp.zeros(shape, dtype))[0]

        like = jax.eval_shape(operand)
        return jax.make_jaxpr(activation)(like, like)

    program = traced(axes)
    every = axes.union(*map(varying, map(jnp.asarray, program.consts)))
    if every != axes:
        program = traced(every)
    inner = program.jaxpr

    def run(gate: jax.Array, up: jax.Array, consts: tuple[jax.Array, ...]) -> jax.Array:
        return eval_jaxpr(inner, consts, gate, up)[0].astype(dtype)

    return Closed(run, tuple(map(jnp.asarray, program.consts)), every)


def apply(
    activation: Activation, gate: jax.Array, up: jax.Array, has_token: jax.Array
) -> jax.Array:
    """Returns `activation(gate, up)` `[N, F]` in their dtype; differentiable.

    Args:
        activation: the user's function.
        gate: `[N, F]`.
        up: `[N, F]`.
        has_token: bool `[N]`, False for rows that hold no token. These may hold
            anything, and their results are unspecified. They need not be known: a row
            whose cotangents are all zero is taken for one.
    """
    axes = frozenset().union(*map(varying, (gate, up, has_token)))
    found = closed(activation, gate.shape, gate.dtype, axes)
    order = sorted(found.axes)
    gate, up, has_token = vary_alike(order, found.axes, gate, up, has_token)
    return _apply(found.run, gate, up, found.consts, has_token)


def value(
    run: Callable[..., jax.Array],
    gate: jax.Array,
    up: jax.Array,
    consts: tuple[jax.Array, ...],
    has_token: jax.Array,
) -> jax.Array:
    """Returns the result of a `Closed`; rows without a token are unspecified."""
    return run(*_filled(has_token, gate, up), consts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(run: Any, gate: Any, up: Any, consts: Any, has_token: Any) -> jax.Array:
    return value(run, gate, up, consts, has_token)


def _apply_forward(run: Any, *given: Any) -> Any:
    return _apply(run, *given), given


def _apply_backward(run: Any, given: Any, cotangent: jax.Array) -> Any:
    return *gradients(run, *given, cotangent), None


_apply.defvjp(_apply_forward, _apply_backward)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def gradients(
    run: Callable[..., jax.Array],
    gate: jax.Array,
    up: jax.Array,
    consts: tuple[jax.Array, ...],
    has_token: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
    """Returns the cotangents of gate, up and consts; see `apply` for `has_token`."""
    has_token = has_token & jnp.any(cotangent != 0, axis=1)
    return _known(run, gate, up, consts, has_token, cotangent)


@gradients.defjvp
def _gradients_jvp(run: Any, primals: Any, tangents: Any) -> Any:
    # A cotangent that happens to be zero has a tangent all the same, so here only rows
    # that are known to hold no token are left out.
    _, tangent = jax.jvp(partial(_known, run), primals, tangents)
    return gradients(run, *primals), tangent


def _known(
    run: Any, gate: Any, up: Any, consts: Any, has_token: Any, cotangent: Any
) -> Any:
    """Returns the cotangents; rows without a token take no part."""
    _, back = jax.vjp(run, *_filled(has_token, gate, up), consts)
    to_gate, to_up, to_consts = back(jnp.where(has_token[:, None], cotangent, 0))
    keep = partial(jnp.where, has_token[:, None])
    return keep(to_gate, 0), keep(to_up, 0), to_consts


def _filled(has_token: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Returns arrays `[N, F]` with the first row that has a token in place of others.

    Without any token all are `_REGULAR`. Zeroing the gradients of consts would come
    too late then: where consts are the same on all ranks, they are sums over ranks.
    """
    some, first = jnp.any(has_token), jnp.argmax(has_token)

    def filled(array: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(array, first, 1, 0)
        return jnp.where(has_token[:, None], array, jnp.where(some, row, _REGULAR))

    return list(map(filled, arrays))
