"""Grouped matmuls with derivatives and a vmap rule, by XLA or by Pallas for Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_ep._core import batching
from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import hopper
from jax_ep._experts.grouped_outer import REACH, grouped_outer
from jax_ep._experts.grouped_rows import grouped_rows


def kernels() -> dict[str, Callable[..., jax.Array]]:
    """Returns the kernels by what they compute.

    Raises:
        ImportError, AttributeError: this JAX lacks what the kernels need.
    """
    hopper.pallas()
    return {"rows": grouped_rows, "weights": grouped_outer}


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`, with the Hopper kernels.

    Rows past the last group and their cotangents may hold anything, even NaN; their
    results are unspecified.
    """
    count = rows.shape[0]
    # The kernels need a multiple of SWIZZLED_ROWS rows.
    rows = jnp.pad(rows, ((0, -count % hopper.SWIZZLED_ROWS), (0, 0)))
    return _differentiable(_Mosaic(), rows, weights, group_sizes)[:count]


def ragged_dot(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """As `jax.lax.ragged_dot`, but vmap also works if all entries share the weights."""
    # getattr, because type checkers do not know the fields of JAX's config.
    how = Ragged(getattr(jax.config, "jax_default_matmul_precision", None))
    return _differentiable(how, rows, weights, group_sizes)


def _differentiable(how: _How, *given: jax.Array) -> Any:
    axes = sorted(frozenset().union(*map(varying, given)))
    return _by_rows(*vary_alike(axes, frozenset(), *given), how, False)


class _How(Protocol):
    """An implementation of both matmuls, without derivatives; hashable."""

    def rows(self, rows: Any, weights: Any, sizes: Any, transposed: bool) -> Any:
        """Computes `_by_rows`."""

    def outer(self, left: Any, right: Any, sizes: Any) -> Any:
        """Computes `_by_groups`."""


class _Mosaic(NamedTuple):
    """The Pallas kernels for Hopper."""

    def rows(self, rows: Any, weights: Any, sizes: Any, transposed: bool) -> Any:
        multiply = kernels()["rows"]
        return multiply(rows, weights, group_sizes=sizes, transpose_rhs=transposed)

    def outer(self, left: Any, right: Any, sizes: Any) -> Any:
        # The kernel multiplies some rows past the last group by 0, but NaN * 0 is NaN.
        end = jnp.sum(sizes)
        left, right = _zero_after(left, end), _zero_after(right, end)
        return kernels()["weights"](left, right, group_sizes=sizes)


class Ragged(NamedTuple):
    """XLA's ragged_dot, at the matmul precision that was set at the call."""

    precision: Any

    def rows(self, rows: Any, weights: Any, sizes: Any, transposed: bool) -> Any:
        if not transposed:
            return jax.lax.ragged_dot(rows, weights, sizes, precision=self.precision)
        return self._general(rows, weights, sizes, ((1,), (2,)), [0])

    def outer(self, left: Any, right: Any, sizes: Any) -> Any:
        return self._general(left, right, sizes, ((0,), (0,)), [])

    def _general(
        self, left: Any, right: Any, sizes: Any, contracting: Any, groups: list[int]
    ) -> Any:
        dimensions = jax.lax.RaggedDotDimensionNumbers(
            (contracting, ((), ())), [0], groups
        )
        return jax.lax.ragged_dot_general(
            left, right, sizes, dimensions, precision=self.precision
        )


# The derivatives of both matmuls consist of the two, so derivatives of any order work.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _by_rows(
    rows: Any, weights: Any, group_sizes: Any, how: _How, transposed: bool
) -> Any:
    """Multiplies `[N, A]` by `[L, A, B]`; `transposed`: `[N, B]` by it, to `[N, A]`."""

    def multiply(rows: Any, weights: Any, sizes: Any) -> Any:
        return _varies_as(rows, how.rows(rows, weights, sizes, transposed))

    return batching.in_turn(multiply)(rows, weights, group_sizes)


def _by_rows_forward(
    rows: Any, weights: Any, group_sizes: Any, how: _How, transposed: bool
) -> Any:
    kept = (rows, weights, group_sizes)
    return _by_rows(*kept, how, transposed), kept


def _by_rows_backward(how: _How, transposed: bool, kept: Any, cotangent: Any) -> Any:
    rows, weights, sizes = kept
    pair = (cotangent, rows) if transposed else (rows, cotangent)
    to_rows = _by_rows(cotangent, weights, sizes, how, not transposed)
    return to_rows, _by_groups(*pair, sizes, how), None


_by_rows.defvjp(_by_rows_forward, _by_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_groups(left: Any, right: Any, group_sizes: Any, how: _How) -> Any:
    """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`."""

    def multiply(left: Any, right: Any, sizes: Any) -> Any:
        return _varies_as(left, how.outer(left, right, sizes))

    return batching.in_turn(multiply)(left, right, group_sizes)


def _by_groups_forward(left: Any, right: Any, group_sizes: Any, how: _How) -> Any:
    kept = (left, right, group_sizes)
    return _by_groups(*kept, how), kept


def _by_groups_backward(how: _How, kept: Any, cotangent: Any) -> Any:
    left, right, sizes = kept
    to_left = _by_rows(right, cotangent, sizes, how, True)
    return to_left, _by_rows(left, cotangent, sizes, how, False), None


_by_groups.defvjp(_by_groups_forward, _by_groups_backward)


def _varies_as(like: Any, result: Any) -> Any:
    """Marks a kernel's result as varying over the axes of `like`, for check_vma."""
    axes = varying(like)
    return vary_alike(sorted(axes), axes, result)[0]


def _zero_after(rows: jax.Array, end: jax.Array) -> jax.Array:
    """Sets the REACH rows from `end` on to zero; XLA can do it in place."""
    count = min(REACH, rows.shape[0])
    start = jnp.minimum(end, rows.shape[0] - count)
    tile = jax.lax.dynamic_slice_in_dim(rows, start, count)
    real = start + jnp.arange(count) < end
    tile = jnp.where(real[:, None], tile, 0)
    return jax.lax.dynamic_update_slice_in_dim(rows, tile, start, 0)
