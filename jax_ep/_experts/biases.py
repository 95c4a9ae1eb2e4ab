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

from jax_ep._experts import grouped, kernels
from jax_ep._ops.expert_of_row import group_of_row


def spread(bias: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
    """Returns `[count, F]`, the bias `[L, F]` of each row's group.

    Rows past the groups get that of the last one. It is for programs that are not
    differentiated, or have a derivative of their own.
    """
    group = group_of_row(jnp.cumsum(sizes), count)
    return bias[jnp.minimum(group, bias.shape[0] - 1)]


def sums(values: jax.Array, sizes: jax.Array, hopper: bool) -> jax.Array:
    """Sums the rows `[N, F]` of each group in float32 (float64, if they are).

    Args:
        values: rows past the groups may hold anything, even NaN.
        sizes: int32 `[L]`.
        hopper: whether to use the kernels for Hopper. They take rows of 16 bits, and F
            must be a multiple of `kernels.ALIGNED`.

    Returns:
        `[L, F]`, float32 or float64.
    """
    count = values.shape[0]
    if hopper:
        ones = jnp.ones((count, kernels.ALIGNED), values.dtype)
        given = grouped.varied(ones, values, sizes)
        found: Any = grouped.by_groups(*given, grouped.Hopper(), jnp.dtype("float32"))
        return found[:, 0]
    group = group_of_row(jnp.cumsum(sizes), count)[:, None]
    own = group == jnp.arange(sizes.shape[0], dtype=jnp.int32)
    # Products with 0 and 1 are exact unless the values themselves are rounded.
    rounds = values.dtype.itemsize > 2
    return jax.lax.dot_general(
        own.astype(values.dtype),
        jnp.where(group < sizes.shape[0], values, 0),
        (((0,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if rounds else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.promote_types(values.dtype, jnp.float32),
    )


def add(
    rows: jax.Array, bias: jax.Array, sizes: jax.Array, hopper: bool = False
) -> jax.Array:
    """Adds each group's bias, in the dtype of the rows; derivatives of any order work.

    Args:
        rows: `[N, F]`. Rows past the groups may hold anything, and so may their
            cotangents.
        bias: `[L, F]`, of any floating dtype.
        sizes: int32 `[L]`.
        hopper: as in `sums`.

    Returns:
        `[N, F]`; rows past the groups are unspecified.
    """
    return _add(*grouped.varied(rows, bias, sizes), hopper, bias.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add(rows: Any, bias: Any, sizes: Any, hopper: bool, dtype: Any) -> Any:
    del hopper, dtype
    return rows + spread(bias.astype(rows.dtype), sizes, rows.shape[0])


def _add_forward(rows: Any, bias: Any, sizes: Any, hopper: bool, dtype: Any) -> Any:
    return _add(rows, bias, sizes, hopper, dtype), sizes


def _add_backward(hopper: bool, dtype: Any, sizes: Any, cotangent: Any) -> Any:
    return cotangent, sums(cotangent, sizes, hopper).astype(dtype), None


_add.defvjp(_add_forward, _add_backward)
