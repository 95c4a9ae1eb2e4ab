"""Mesh axes that arrays vary over, and collectives that leave out axes of one rank.

With `jax_remove_size_one_mesh_axis_from_type` no array varies over an axis of one rank,
and JAX refuses to gather over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def varying(value: jax.Array) -> frozenset[str]:
    """Returns the manual axes that `value` varies over; none without check_vma."""
    kind = getattr(jax.typeof(value), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", None) or ())


def vary_alike(order: Iterable[str], least: frozenset[str], *trees: Any) -> Any:
    """Casts arrays to vary over `least` and every axis that another varies on.

    Args:
        order: all possible axis names, in the mesh's order.
        least: axes that every result varies over.
        trees: pytrees of arrays.

    Returns:
        The tuple of `trees`.
    """
    names = tuple(order)
    axes = least.union(*map(varying, jax.tree.leaves(trees)))

    def cast(value: jax.Array) -> jax.Array:
        missing = tuple(name for name in names if name in axes - varying(value))
        return jax.lax.pcast(value, missing, to="varying") if missing else value

    return jax.tree.map(cast, trees)


def all_gather(value: jax.Array, axes: Iterable[str], dim: int) -> jax.Array:
    """Gathers dimension `dim` over `axes`; the result still varies over them."""
    axes = _several(axes)
    return jax.lax.all_gather(value, axes, axis=dim, tiled=True) if axes else value


def psum_scatter(value: jax.Array, axes: Iterable[str], dim: int) -> jax.Array:
    """Sums over `axes`, and returns a rank's part of dimension `dim`."""
    axes = _several(axes)
    if not axes:
        return value
    return jax.lax.psum_scatter(value, axes, scatter_dimension=dim, tiled=True)


def _several(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns those axes that have more than one rank."""
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
