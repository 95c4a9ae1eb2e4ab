"""What counts as an array among arguments. Used by the checks and the formats."""

from __future__ import annotations

import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_array(function: str, name: str, value: Any) -> jax.Array:
    """`value` as a JAX array of its own dtype; nothing is cast."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(
            f"jax_ep.{function}: {name} must be an array, got {reprlib.repr(value)} of "
            f"type {type(value).__name__}; pass one, as jnp.asarray makes with a dtype"
        )
    require_values(function, name, value)
    try:
        array = jnp.asarray(value)
    except TypeError:  # objects, strings, times
        array = None
    if array is None or array.dtype != value.dtype:
        raise TypeError(
            f"jax_ep.{function}: {name} must have a dtype that JAX keeps, got "
            f"{value.dtype}; cast it first"
        )
    return array


def require_values(function: str, name: str, value: Any) -> None:
    """Raises TypeError for a shape without values, as a jax.ShapeDtypeStruct is."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return
    try:
        jnp.asarray(value)
    except TypeError as error:
        raise TypeError(
            f"jax_ep.{function}: {name} must be an array with values, got "
            f"{reprlib.repr(value)} of type {type(value).__name__}; pass values, or "
            "trace with shapes alone: jax.eval_shape(f, ...) or jax.jit(f).lower(...)"
        ) from error
