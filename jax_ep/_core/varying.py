"""Finds the mesh axes that arrays vary over, and casts arrays to vary alike."""

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
