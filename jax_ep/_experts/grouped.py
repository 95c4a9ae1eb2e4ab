"""Grouped matmuls for Hopper (Pallas), as one that is differentiable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import hopper
from jax_ep._experts.grouped_outer import REACH, grouped_outer
from jax_ep._experts.grouped_rows import grouped_rows


def kernels() -> dict[str, Callable[..., jax.Array]]:
    """By what each makes; an ImportError or AttributeError where JAX lacks them."""
    hopper.pallas()
    return {"rows": grouped_rows, "weights": grouped_outer}


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """What `mosaic` multiplies with: `[N, A]` by `[L, A, B]` as `[N, B]`.

    Rows past the last group, and their cotangents, may be anything; what comes out for
    them is unspecified.
    """
    count = rows.shape[0]
    # The kernels take no other numbers of rows.
    rows = jnp.pad(rows, ((0, -count % hopper.SWIZZLED_ROWS), (0, 0)))
    given = (rows, weights, group_sizes)
    axes = sorted(frozenset().union(*map(varying, given)))
    alike = vary_alike(axes, frozenset(), *given)
    result: Any = _by_rows(*alike, False)
    return result[:count]


# Each one's derivatives are made of both, so that there are derivatives of any order.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_rows(rows: Any, weights: Any, group_sizes: Any, transposed: bool) -> Any:
    """`[N, A]` by `[L, A, B]`; `transposed`: `[N, B]` by the same, as `[N, A]`."""
    multiply = kernels()["rows"]
    result = multiply(rows, weights, group_sizes=group_sizes, transpose_rhs=transposed)
    return _varies_as(rows, result)


def _by_rows_forward(
    rows: Any, weights: Any, group_sizes: Any, transposed: bool
) -> Any:
    kept = (rows, weights, group_sizes)
    return _by_rows(*kept, transposed), kept


def _by_rows_backward(transposed: bool, kept: Any, cotangent: Any) -> Any:
    rows, weights, sizes = kept
    pair = (cotangent, rows) if transposed else (rows, cotangent)
    to_rows = _by_rows(cotangent, weights, sizes, not transposed)
    return to_rows, _by_groups(*pair, sizes), None


_by_rows.defvjp(_by_rows_forward, _by_rows_backward)


@jax.custom_vjp
def _by_groups(left: Any, right: Any, group_sizes: Any) -> Any:
    """`[N, A]` and `[N, B]` as `[L, A, B]`, the sum of each group's outer products."""
    multiply = kernels()["weights"]
    # It reads rows past the last group, times 0, which of NaN is NaN.
    end = jnp.sum(group_sizes)
    left, right = _zero_after(left, end), _zero_after(right, end)
    return _varies_as(left, multiply(left, right, group_sizes=group_sizes))


def _by_groups_forward(left: Any, right: Any, group_sizes: Any) -> Any:
    kept = (left, right, group_sizes)
    return _by_groups(*kept), kept


def _by_groups_backward(kept: Any, cotangent: Any) -> Any:
    left, right, sizes = kept
    to_left = _by_rows(right, cotangent, sizes, True)
    return to_left, _by_rows(left, cotangent, sizes, False), None


_by_groups.defvjp(_by_groups_forward, _by_groups_backward)


def _varies_as(like: Any, result: Any) -> Any:
    """A kernel's result, of which check_vma knows nothing."""
    axes = varying(like)
    return vary_alike(sorted(axes), axes, result)[0]


def _zero_after(rows: jax.Array, end: jax.Array) -> jax.Array:
    """`rows` with zeros in REACH rows from `end` on; in place where XLA can."""
    count = min(REACH, rows.shape[0])
    start = jnp.minimum(end, rows.shape[0] - count)
    tile = jax.lax.dynamic_slice_in_dim(rows, start, count)
    real = start + jnp.arange(count) < end
    tile = jnp.where(real[:, None], tile, 0)
    return jax.lax.dynamic_update_slice_in_dim(rows, tile, start, 0)
