"""JAX's grouped matmuls for Hopper (Pallas), as one that is differentiable."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._varying import vary_alike, varying

_TILES = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
}
_ROWS_MULTIPLE = 8  # of a tile in shared memory


def kernels() -> dict[str, Callable[..., jax.Array]]:
    """By what each makes; an ImportError or AttributeError where this JAX has none."""
    from jax.experimental.pallas.ops.gpu import (
        ragged_dot_mgpu,
        transposed_ragged_dot_mgpu,
    )

    return {
        "rows": ragged_dot_mgpu.ragged_dot,
        "weights": transposed_ragged_dot_mgpu.transposed_ragged_dot,
    }


def _grouped(which: str, columns: int) -> Callable[..., jax.Array]:
    # Tiles of neighbouring columns run side by side and share what they read.
    side_by_side = math.gcd(columns // _TILES["block_n"], 8)
    return functools.partial(kernels()[which], grid_block_n=side_by_side, **_TILES)


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """What `mosaic` multiplies with: `[N, A]` by `[L, A, B]` as `[N, B]`.

    Rows past the last group, and their cotangents, may be anything; what comes out for
    them is unspecified.
    """
    count = rows.shape[0]
    # The kernels take no other numbers of rows.
    rows = jnp.pad(rows, ((0, -count % _ROWS_MULTIPLE), (0, 0)))
    given = (rows, weights, group_sizes)
    axes = sorted(frozenset().union(*map(varying, given)))
    return _grouped_matmul(*vary_alike(axes, frozenset(), *given))[:count]


@jax.custom_vjp
def _grouped_matmul(rows: Any, weights: Any, group_sizes: Any) -> Any:
    multiply = _grouped("rows", weights.shape[2])
    return _varies_as(rows, multiply(rows, weights, group_sizes=group_sizes))


def _grouped_forward(rows: Any, weights: Any, group_sizes: Any) -> Any:
    return _grouped_matmul(rows, weights, group_sizes), (rows, weights, group_sizes)


def _grouped_backward(kept: Any, cotangent: Any) -> Any:
    rows, weights, sizes = kept
    multiply = _grouped("rows", weights.shape[1])
    to_rows = multiply(cotangent, weights, group_sizes=sizes, transpose_rhs=True)
    multiply = _grouped("weights", weights.shape[2])
    # It reads the last group's tile to its end, times 0, which of NaN is NaN.
    end = jnp.sum(sizes)
    rows, cotangent = _zero_tile_after(rows, end), _zero_tile_after(cotangent, end)
    to_weights = multiply(rows, cotangent, group_sizes=sizes)
    return _varies_as(rows, to_rows), _varies_as(rows, to_weights), None


_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _varies_as(like: Any, result: Any) -> Any:
    """A kernel's result, of which check_vma knows nothing."""
    axes = varying(like)
    return vary_alike(sorted(axes), axes, result)[0]


def _zero_tile_after(rows: jax.Array, end: jax.Array) -> jax.Array:
    """`rows` with zeros in a tile's rows from `end` on; in place where XLA can."""
    count = min(max(_TILES["block_m"], _TILES["block_k"]), rows.shape[0])
    start = jnp.minimum(end, rows.shape[0] - count)
    tile = jax.lax.dynamic_slice_in_dim(rows, start, count)
    real = start + jnp.arange(count) < end
    tile = jnp.where(real[:, None], tile, 0)
    return jax.lax.dynamic_update_slice_in_dim(rows, tile, start, 0)
