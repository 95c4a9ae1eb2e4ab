"""Random numbers on devices that take a few instructions each.

Every new shape is a new program, and XLA for GPUs takes seconds to compile one that
draws several arrays with jax.random.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def bits(seed: Any, stream: int, shape: tuple[int, int]) -> jax.Array:
    """Random uint32, different for each seed, stream and element; to be jitted."""
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in (0, 1))
    first = _mix(_mix(jnp.uint32(seed)) + jnp.uint32(stream))
    return _mix(row * jnp.uint32(shape[1]) + column ^ first)


def numbers(seed: Any, stream: int, shape: tuple[int, int]) -> jax.Array:
    """float32, uniform in [-4, 4]; to be jitted."""
    made = jax.lax.bitcast_convert_type(bits(seed, stream, shape), jnp.int32)
    return made.astype(jnp.float32) * 2.0**-29


def below(limit: int, seed: Any, stream: int, shape: tuple[int, int]) -> jax.Array:
    """int32 in [0, limit), where limit is a power of two; to be jitted."""
    assert limit & (limit - 1) == 0, limit
    return (bits(seed, stream, shape) & (limit - 1)).astype(jnp.int32)


def _mix(x: jax.Array) -> jax.Array:
    # "lowbias32" of Wellons, hash-prospector.
    x = (x ^ x >> 16) * jnp.uint32(0x7FEB_352D)
    x = (x ^ x >> 15) * jnp.uint32(0x846C_A68B)
    return x ^ x >> 16
