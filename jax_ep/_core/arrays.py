"""Turns arguments into JAX arrays without casting them."""

from __future__ import annotations

import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._core import errors


def as_array(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a JAX array of the same dtype.

    Raises:
        TypeError: it is not an array, has no values, or has a dtype that JAX would
            change.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise errors.invalid(
            function,
            f"{name} must be an array",
            f"{reprlib.repr(value)} of type {type(value).__name__}",
            "convert it with jnp.asarray and a dtype",
            operand=name,
            kind=TypeError,
        )
    require_values(function, name, value)
    try:
        array = jnp.asarray(value)
    except TypeError:  # objects, strings, times
        array = None
    if array is None or array.dtype != value.dtype:
        raise errors.invalid(
            function,
            f"{name} must have a dtype that JAX keeps",
            value.dtype,
            "cast it first" if array is None else f"cast it to {array.dtype} first",
            operand=name,
            kind=TypeError,
        )
    return array


def require_values(function: str, name: str, value: Any) -> None:
    """Raises TypeError for a shape without values, such as a jax.ShapeDtypeStruct."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return
    try:
        jnp.asarray(value)
    except TypeError as error:
        raise errors.invalid(
            function,
            f"{name} must be an array with values",
            f"{reprlib.repr(value)} of type {type(value).__name__}",
            "pass values, or trace with shapes only: jax.eval_shape(f, ...) or "
            "jax.jit(f).lower(...)",
            operand=name,
            kind=TypeError,
        ) from error


def in_bytes(array: jax.Array) -> jax.Array:
    """Returns floats of one byte as uint8, which XLA never widens; others unchanged."""
    if array.dtype.itemsize > 1 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.lax.bitcast_convert_type(array, jnp.uint8)
