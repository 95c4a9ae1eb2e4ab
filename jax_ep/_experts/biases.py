"""Adds each group's bias to its rows; gradients of biases are summed in float32.

JAX's derivative of `bias[group_of_row(...)]` would add up cotangents in their own
dtype, row after row. In bfloat16 such a sum may stop growing after a few hundred rows;
on GPUs it also takes one atomic addition per element, in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._experts import grouped
from jax_ep._experts.grouped import Products
from jax_ep._ops.expert_of_row import group_of_row


def spread(bias: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
    """Returns `[count, F]`, the bias `[L, F]` of each row's group.

    Rows past the groups get that of the last one. It is for programs that are not
    differentiated, or have a derivative of their own.
    """
    group = group_of_row(jnp.cumsum(sizes), count)
    return bias[jnp.minimum(group, bias.shape[0] - 1)]


def joined(
    gate: jax.Array | None, up: jax.Array | None, shape: tuple[int, int]
) -> jax.Array:
    """Joins biases `[L, F]`, zeros for a missing one, so that one pass sums gradients.

    The result is float32 at least: the gradients are rounded once, to each one's dtype.
    """
    sides = [
        jnp.zeros(shape, jnp.float32) if side is None else jnp.asarray(side)
        for side in (gate, up)
    ]
    wide = jnp.result_type(*sides, jnp.float32)
    return jnp.concatenate([side.astype(wide) for side in sides], 1)


def of_kernels(gate: jax.Array | None, up: jax.Array | None) -> jax.Array | None:
    """Returns biases `[L, F]` as float32 `[L, 2, F]`, or None if there are none."""
    given = [side for side in (gate, up) if side is not None]
    if not given:
        return None
    groups, inner = given[0].shape
    both = joined(gate, up, (groups, inner)).astype(jnp.float32)
    return both.reshape(groups, 2, inner)


def add(
    rows: jax.Array, bias: jax.Array, sizes: jax.Array, products: Products
) -> jax.Array:
    """Adds each group's bias, in the dtype of the rows; derivatives of any order work.

    Args:
        rows: `[N, F]`. Rows past the groups may hold anything, and so may their
            cotangents.
        bias: `[L, F]`, of any floating dtype.
        sizes: int32 `[L]`.
        products: the implementation that sums the gradients. That of `Hopper` takes
            rows of 16 bits, and F must be a multiple of `kernels.ALIGNED`.

    Returns:
        `[N, F]`; rows past the groups are unspecified.
    """
    return _add(*grouped.varied(rows, bias, sizes), products, bias.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add(rows: Any, bias: Any, sizes: Any, products: Products, dtype: Any) -> Any:
    del products, dtype
    return rows + spread(bias.astype(rows.dtype), sizes, rows.shape[0])


def _add_forward(
    rows: Any, bias: Any, sizes: Any, products: Products, dtype: Any
) -> Any:
    return _add(rows, bias, sizes, products, dtype), sizes


def _add_backward(products: Products, dtype: Any, sizes: Any, cotangent: Any) -> Any:
    return cotangent, products.sums(cotangent, sizes).astype(dtype), None


_add.defvjp(_add_forward, _add_backward)
