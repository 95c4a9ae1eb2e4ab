"""Experts with biases and the activation inside the matmuls, by kernels that have them.

The kernel of gate_up applies the activation to its float32 sums, and the kernel for the
backward pass of down applies its derivative to the float32 cotangents. The kernels are
differentiated as the same formula in grouped matmuls, so derivatives of any order work.
gate_up may be a pair of gate and up, which the kernels read where they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._core import batching
from jax_ep._experts import activations, grouped, kernels
from jax_ep._experts.kernels import Biases, GateUp
from jax_ep._ops.remat import GATE_UP_NAME


class Static(NamedTuple):
    """What does not change while a program runs.

    Attributes:
        products: the kernels.
        activation: what they do with gate and up.
        dtypes: of gate_up, or of gate and of up, and of down.
    """

    products: grouped.OfKernels
    activation: kernels.Activation
    dtypes: Any


def apply(
    rows: jax.Array,
    gate_up: GateUp,
    down: jax.Array,
    sizes: jax.Array,
    biases: Biases,
    activation: kernels.Activation,
    products: grouped.OfKernels,
) -> jax.Array:
    """Applies experts; rows past the groups are unspecified, and may hold anything.

    Args:
        rows: `[N, H]`, of a dtype that the kernels take.
        gate_up: `[L, H, 2, F]`, or gate and up `[L, H, F]`, of any floating dtype: they
            are multiplied in the dtype of the rows, and get gradients in their own.
        down: `[L, F, H]`, likewise.
        sizes: int32 `[L]`.
        biases: see there.
        activation: what makes h of gate and up.
        products: the kernels.

    Returns:
        `[N, H]` in the dtype of the rows.
    """
    hidden, last = rows.shape[1], 2 if isinstance(gate_up, tuple) else 3
    # Here, and not around each kernel, so that nothing between them is copied.
    rows, down = grouped.aligned(rows, 1), grouped.aligned(down, 1, 2)
    gate_up = jax.tree.map(lambda side: grouped.aligned(side, 1, last), gate_up)
    biases = jax.tree.map(lambda bias: grouped.aligned(bias, bias.ndim - 1), biases)
    dtypes = jax.tree.map(lambda matrix: matrix.dtype, (gate_up, down))
    given = grouped.varied(rows, gate_up, down, sizes, biases)
    out = _apply(*given, Static(products, activation, dtypes))
    return grouped.cut(out, hidden)


def _cast(rows: Any, *matrices: Any) -> Any:
    return jax.tree.map(lambda matrix: matrix.astype(rows.dtype), matrices)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _apply(
    rows: Any, gate_up: Any, down: Any, sizes: Any, biases: Biases, static: Static
) -> Any:
    gate_up, down = _cast(rows, gate_up, down)
    run = partial(static.products.experts, activation=static.activation)
    return batching.in_turn(run)(rows, gate_up, down, sizes, biases)


def _forward(
    rows: Any, gate_up: Any, down: Any, sizes: Any, biases: Biases, static: Static
) -> Any:
    gate_up, down = _cast(rows, gate_up, down)
    # Both have one name, so that a policy that saves it repeats no product.
    hidden: Any = _hidden(rows, gate_up, sizes, biases.gate_up, static)
    h, gate_up_rows = (checkpoint_name(part, GATE_UP_NAME) for part in hidden)
    out: Any = _down(h, down, sizes, biases.down, static)
    return out, (rows, gate_up, down, sizes, biases, h, gate_up_rows)


def _backward(static: Static, kept: Any, cotangent: Any) -> Any:
    rows, gate_up, down, sizes, biases, h, gate_up_rows = kept
    back: Any = _down_dgrad(cotangent, down, gate_up_rows, sizes, static)
    to_rows, to_gate_up = _gate_up_grads(
        rows, gate_up, back, sizes, static, static.dtypes[0]
    )
    to_down = grouped.wgrad(h, cotangent, sizes, static.products, static.dtypes[1])
    to_biases = Biases(
        _gate_up_bias_grad(biases.gate_up, back, sizes, static),
        _bias_grad(biases.down, cotangent, sizes, static),
    )
    return to_rows, to_gate_up, to_down, None, to_biases


_apply.defvjp(_forward, _backward)


def _gate_up_grads(
    rows: Any, gate_up: Any, back: Any, sizes: Any, static: Static, dtypes: Any
) -> Any:
    """Returns the cotangents of rows and gate_up from those of their products."""
    products = static.products
    if isinstance(gate_up, tuple):
        to_rows = _dgrad_of_both(back, *gate_up, sizes, static)
        sides = (
            _wgrad_of_side(rows, back, sizes, static, dtype, side)
            for side, dtype in enumerate(dtypes)
        )
        return to_rows, tuple(sides)
    joined = _side_by_side(back)
    to_rows = grouped.dgrad(joined, _side_by_side(gate_up), sizes, products)
    to_gate_up: Any = grouped.wgrad(rows, joined, sizes, products, dtypes)
    return to_rows, to_gate_up.reshape(gate_up.shape)


def _bias_grad(bias: Any, cotangent: Any, sizes: Any, static: Static) -> Any:
    return None if bias is None else static.products.sums(cotangent, sizes)


def _gate_up_bias_grad(bias: Any, back: Any, sizes: Any, static: Static) -> Any:
    found = _bias_grad(bias, _side_by_side(back), sizes, static)
    return None if found is None else found.reshape(bias.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _hidden(rows: Any, gate_up: Any, sizes: Any, bias: Any, static: Static) -> Any:
    """Returns h `[N, F]`, and gate and up `[N, 2, F]`."""
    run = partial(static.products.gate_up, activation=static.activation)
    return batching.in_turn(run)(rows, gate_up, sizes, bias)


def _hidden_forward(
    rows: Any, gate_up: Any, sizes: Any, bias: Any, static: Static
) -> Any:
    found: Any = _hidden(rows, gate_up, sizes, bias, static)
    h, gate_up_rows = found
    return (h, gate_up_rows), (rows, gate_up, sizes, bias, gate_up_rows)


def _hidden_backward(static: Static, kept: Any, cotangents: Any) -> Any:
    rows, gate_up, sizes, bias, gate_up_rows = kept
    to_h, to_gate_up_rows = cotangents
    back = _activation_dgrad(to_h, gate_up_rows, static) + to_gate_up_rows
    dtypes = jax.tree.map(lambda matrix: matrix.dtype, gate_up)
    given = rows, gate_up, back, sizes, static, dtypes
    to_bias = _gate_up_bias_grad(bias, back, sizes, static)
    return *_gate_up_grads(*given), None, to_bias


_hidden.defvjp(_hidden_forward, _hidden_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _down(rows: Any, down: Any, sizes: Any, bias: Any, static: Static) -> Any:
    return batching.in_turn(static.products.down)(rows, down, sizes, bias)


def _down_forward(rows: Any, down: Any, sizes: Any, bias: Any, static: Static) -> Any:
    return _down(rows, down, sizes, bias, static), (rows, down, sizes, bias)


def _down_backward(static: Static, kept: Any, cotangent: Any) -> Any:
    rows, down, sizes, bias = kept
    products = static.products
    to_rows = grouped.dgrad(cotangent, down, sizes, products)
    to_down = grouped.wgrad(rows, cotangent, sizes, products, down.dtype)
    return to_rows, to_down, None, _bias_grad(bias, cotangent, sizes, static)


_down.defvjp(_down_forward, _down_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _down_dgrad(
    cotangent: Any, down: Any, gate_up_rows: Any, sizes: Any, static: Static
) -> Any:
    """Returns the cotangents of gate and up, from those of down's rows."""
    run = partial(static.products.down_dgrad, activation=static.activation)
    return batching.in_turn(run)(cotangent, down, gate_up_rows, sizes)


def _down_dgrad_forward(
    cotangent: Any, down: Any, gate_up_rows: Any, sizes: Any, static: Static
) -> Any:
    given = (cotangent, down, gate_up_rows, sizes)
    return _down_dgrad(*given, static), given


def _down_dgrad_backward(static: Static, kept: Any, cotangents: Any) -> Any:
    *given, sizes = kept

    def plain(cotangent: Any, down: Any, gate_up_rows: Any) -> Any:
        to_h: Any = grouped.dgrad(cotangent, down, sizes, static.products)
        return _activation_dgrad(to_h, gate_up_rows, static)

    _, back = jax.vjp(plain, *given)
    return *back(cotangents), None


_down_dgrad.defvjp(_down_dgrad_forward, _down_dgrad_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _dgrad_of_both(back: Any, gate: Any, up: Any, sizes: Any, static: Static) -> Any:
    """Returns the cotangents of rows from those of gate and up, `[N, 2, F]`."""
    run = batching.in_turn(static.products.dgrad_of_both)
    return run(back, gate, up, sizes)


def _dgrad_of_both_forward(
    back: Any, gate: Any, up: Any, sizes: Any, static: Static
) -> Any:
    return _dgrad_of_both(back, gate, up, sizes, static), (back, gate, up, sizes)


def _dgrad_of_both_backward(static: Static, kept: Any, cotangent: Any) -> Any:
    back, *sides, sizes = kept
    products = static.products
    to_back = [grouped.fprop(cotangent, side, sizes, products) for side in sides]
    to_sides = (
        grouped.wgrad(cotangent, back[:, at], sizes, products, side.dtype)
        for at, side in enumerate(sides)
    )
    return jnp.stack(to_back, 1), *to_sides, None


_dgrad_of_both.defvjp(_dgrad_of_both_forward, _dgrad_of_both_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _wgrad_of_side(
    rows: Any, back: Any, sizes: Any, static: Static, dtype: Any, side: int
) -> Any:
    """`grouped.wgrad` with one side of the cotangents `[N, 2, F]`."""
    run = partial(static.products.wgrad_of_side, dtype=dtype, side=side)
    return batching.in_turn(run)(rows, back, sizes)


def _wgrad_of_side_forward(
    rows: Any, back: Any, sizes: Any, static: Static, dtype: Any, side: int
) -> Any:
    return _wgrad_of_side(rows, back, sizes, static, dtype, side), (rows, back, sizes)


def _wgrad_of_side_backward(
    static: Static, dtype: Any, side: int, kept: Any, cotangent: Any
) -> Any:
    del dtype
    rows, back, sizes = kept
    matrices = cotangent.astype(rows.dtype)
    to_rows = grouped.dgrad(back[:, side], matrices, sizes, static.products)
    to_side: Any = grouped.fprop(rows, matrices, sizes, static.products)
    to_back = [jnp.zeros_like(to_side)] * 2
    to_back[side] = to_side
    return to_rows, jnp.stack(to_back, 1), None


_wgrad_of_side.defvjp(_wgrad_of_side_forward, _wgrad_of_side_backward)


def _activation_dgrad(
    to_h: jax.Array, gate_up_rows: jax.Array, static: Static
) -> jax.Array:
    """Returns the cotangents of gate and up `[N, 2, F]`, from those of h `[N, F]`."""
    gate, up = (gate_up_rows[:, side].astype(jnp.float32) for side in (0, 1))
    _, back = jax.vjp(activations.function_of(static.activation), gate, up)
    return jnp.stack(back(to_h.astype(jnp.float32)), 1).astype(gate_up_rows.dtype)


def _side_by_side(values: jax.Array) -> jax.Array:
    """Merges the last two dimensions: gate's columns, then up's."""
    *leading, sides, columns = values.shape
    return values.reshape(*leading, sides * columns)
