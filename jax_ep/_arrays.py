"""What counts as an array among arguments. Used by the checks and the formats."""

from __future__ import annotations

import reprlib
from typing import Any

import jax
import jax.numpy as jnp


def as_array(function: str, name: str, value: Any) -> jax.Array:
    """`value` as a JAX array of its own dtype; nothing is cast."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(
            f"jax_ep.{function}: {name} must be an array, got {reprlib.repr(value)} of "
            f"type {type(value).__name__}; pass one, as jnp.asarray makes with a dtype"
        )
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
