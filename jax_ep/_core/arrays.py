"""Turns arguments into JAX arrays without casting them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._core import errors
from jax_ep._core.types import Dispatched


def as_array(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a JAX array of the same dtype.

    NumPy's float64 becomes float32 where JAX has no float64, as it does in JAX.

    Raises:
        TypeError: it is not an array, has no values, or has a dtype that JAX would
            change.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        got = f"{errors.brief(value)} of type {type(value).__name__}"
        remedy = "convert it with jnp.asarray and a dtype"
        if value is None:
            remedy = "pass an array here"
        if isinstance(value, Dispatched):
            got = "a whole Dispatched"
            remedy = "pass one of its arrays, such as d.tokens, or rows made of them"
        raise errors.invalid(
            function,
            f"{name} must be an array",
            got,
            remedy,
            operand=name,
            kind=TypeError,
        )
    require_values(function, name, value)
    try:
        array = jnp.asarray(value)
    except TypeError:  # objects, strings, times
        array = None
    narrowed = array is not None and (value.dtype, array.dtype) == (
        np.float64,
        np.float32,
    )
    if array is None or (array.dtype != value.dtype and not narrowed):
        raise errors.invalid(
            function,
            f"{name} must have a dtype that JAX keeps",
            value.dtype,
            "cast it first" if array is None else f"cast it to {array.dtype} first",
            operand=name,
            kind=TypeError,
        )
    return array


def as_ids(function: str, name: str, value: Any) -> jax.Array:
    """Returns ids of experts as `as_array` does, and int64 of NumPy as int32.

    Only where JAX has no int64. An id that int32 cannot hold stays outside of all
    experts; JAX itself would wrap it around.

    Raises:
        TypeError: as in `as_array`.
    """
    wide = isinstance(value, np.ndarray | np.generic) and value.dtype == np.int64
    if wide and jax.dtypes.canonicalize_dtype(np.int64) == np.int32:
        limits = np.iinfo(np.int32)
        value = np.clip(value, limits.min, limits.max).astype(np.int32)
    return as_array(function, name, value)


def dtype_of(value: Any) -> jnp.dtype | None:
    """Returns what `jax.numpy.dtype` makes of `value`, or None if it is no dtype."""
    if value is None:  # NumPy's default
        return None
    try:
        return jnp.dtype(value)
    except Exception:  # of many kinds, for values that NumPy cannot even write
        return None


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
            f"{errors.brief(value)} of type {type(value).__name__}",
            "pass values, or trace with shapes only: jax.eval_shape(f, ...) or "
            "jax.jit(f).lower(...)",
            operand=name,
            kind=TypeError,
        ) from error


def cast_remedy(name: str, found: Any, wanted: Any) -> str | None:
    """Returns how to make codes or scales of one dtype those of another, exactly.

    Returns None if that is not possible.
    """
    found, wanted, e8m0 = map(jnp.dtype, (found, wanted, jnp.float8_e8m0fnu))
    narrow = [jnp.dtype(each) for each in (jnp.bfloat16, jnp.float16, e8m0)]
    floats = [jnp.dtype(each) for each in (jnp.float32, jnp.bfloat16)]
    cast = f"{name}.astype(jnp.{wanted.name})"
    if wanted == jnp.float32 and found in narrow:
        return f"cast them, which is exact: {cast}"
    if wanted == jnp.float32 and found == jnp.uint8:
        bits = f"jax.lax.bitcast_convert_type({name}, jnp.float8_e8m0fnu)"
        return f"if they are bytes of e8m0, pass {bits}.astype(jnp.float32)"
    if wanted == e8m0 and found in floats:
        return f"if all are powers of two, cast them, which is exact: {cast}"
    if wanted.itemsize == found.itemsize == 1:
        return f"if they have the bytes of {wanted.name}, pass " + (
            f"jax.lax.bitcast_convert_type({name}, jnp.{wanted.name})"
        )
    return None


def in_bytes(array: jax.Array) -> jax.Array:
    """Returns floats of one byte as uint8, which XLA never widens; others unchanged."""
    if array.dtype.itemsize > 1 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.lax.bitcast_convert_type(array, jnp.uint8)
