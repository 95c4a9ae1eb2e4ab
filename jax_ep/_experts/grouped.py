"""Grouped matmuls with derivatives and a vmap rule, by XLA or by kernels for Hopper."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_ep._core import batching
from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import kernels


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`, with the kernels for Hopper.

    Rows past the last group and their cotangents may hold anything, even NaN; their
    results are unspecified.
    """
    return _differentiable(Hopper(), rows, weights, group_sizes)


def ragged_dot(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Like `jax.lax.ragged_dot`, but vmap also works if all entries share weights."""
    # getattr, because type checkers do not know the fields of JAX's config.
    how = Ragged(getattr(jax.config, "jax_default_matmul_precision", None))
    return _differentiable(how, rows, weights, group_sizes)


def _differentiable(how: How, *given: jax.Array) -> Any:
    return by_rows(*varied(*given), how, False)


def varied(*given: Any) -> Any:
    """Casts arrays to vary over the same mesh axes, as custom calls need."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves(given))))
    return vary_alike(axes, frozenset(), *given)


class How(Protocol):
    """An implementation of both matmuls, without derivatives; hashable."""

    def rows(self, rows: Any, weights: Any, sizes: Any, transposed: bool) -> Any:
        """Computes `by_rows`."""

    def outer(self, left: Any, right: Any, sizes: Any, dtype: Any) -> Any:
        """Computes `by_groups`."""


class Hopper(NamedTuple):
    """The kernels for Hopper."""

    def rows(self, rows: Any, weights: Any, sizes: Any, transposed: bool) -> Any:
        return kernels.rows(rows, weights, sizes, transposed)

    def outer(self, left: Any, right: Any, sizes: Any, dtype: Any) -> Any:
        # The kernels write either the operands' dtype or the float32 sums.
        out = dtype if dtype == left.dtype else jnp.float32
        return kernels.outer(left, right, sizes, out).astype(dtype)


class Ragged(NamedTuple):
    """XLA's ragged_dot, at the matmul precision that was set when it was called."""

    precision: Any

    def rows(self, rows: Any, weights: Any, sizes: Any, transposed: bool) -> Any:
        if not transposed:
            return jax.lax.ragged_dot(rows, weights, sizes, precision=self.precision)
        return self._general(rows, weights, sizes, ((1,), (2,)), [0])

    def outer(self, left: Any, right: Any, sizes: Any, dtype: Any) -> Any:
        sums = self._general(left, right, sizes, ((0,), (0,)), [])
        return sums.astype(dtype)

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
def by_rows(
    rows: Any, weights: Any, group_sizes: Any, how: How, transposed: bool
) -> Any:
    """Multiplies `[N, A]` by `[L, A, B]`; if `transposed`, `[N, B]` to `[N, A]`."""

    def multiply(rows: Any, weights: Any, sizes: Any) -> Any:
        return _varies_as(rows, how.rows(rows, weights, sizes, transposed))

    return batching.in_turn(multiply)(rows, weights, group_sizes)


def _by_rows_forward(
    rows: Any, weights: Any, group_sizes: Any, how: How, transposed: bool
) -> Any:
    kept = (rows, weights, group_sizes)
    return by_rows(*kept, how, transposed), kept


def _by_rows_backward(how: How, transposed: bool, kept: Any, cotangent: Any) -> Any:
    rows, weights, sizes = kept
    pair = (cotangent, rows) if transposed else (rows, cotangent)
    to_rows = by_rows(cotangent, weights, sizes, how, not transposed)
    return to_rows, by_groups(*pair, sizes, how, weights.dtype), None


by_rows.defvjp(_by_rows_forward, _by_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def by_groups(left: Any, right: Any, group_sizes: Any, how: How, dtype: Any) -> Any:
    """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`.

    The result has dtype `dtype`, to which the sums are rounded once.
    """

    def multiply(left: Any, right: Any, sizes: Any) -> Any:
        return _varies_as(left, how.outer(left, right, sizes, dtype))

    return batching.in_turn(multiply)(left, right, group_sizes)


def _by_groups_forward(
    left: Any, right: Any, group_sizes: Any, how: How, dtype: Any
) -> Any:
    kept = (left, right, group_sizes)
    return by_groups(*kept, how, dtype), kept


def _by_groups_backward(how: How, dtype: Any, kept: Any, cotangent: Any) -> Any:
    del dtype
    left, right, sizes = kept
    matrices = cotangent.astype(left.dtype)
    to_left = by_rows(right, matrices, sizes, how, True)
    return to_left, by_rows(left, matrices, sizes, how, False), None


by_groups.defvjp(_by_groups_forward, _by_groups_backward)


def _varies_as(like: Any, result: Any) -> Any:
    """Marks a kernel's result as varying over the axes of `like`, for check_vma."""
    axes = varying(like)
    return vary_alike(sorted(axes), axes, result)[0]
