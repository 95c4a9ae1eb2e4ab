"""Tokens that reach every code of a format: in NumPy and on devices.

With random bits alone, nearly every block would hold numbers of all magnitudes, or NaN,
so that its only codes would be 0 and the largest. Here every second row holds numbers
of a few magnitudes instead, with some NaN, infinities and denormals, and with whole
runs of zeros or denormals.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from support import device_random, oracle

_RUN = 128  # the largest block of a format
_ELEMENTS, _RUNS = 4096, 16  # each kind of special value: one element or run in these


def rows(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Tokens `[n, H]` of one rank."""
    n, hidden = shape
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-5, 10, (n, 1))
    largest = np.iinfo(unsigned).max
    bits = rng.integers(0, largest, shape, unsigned, endpoint=True)
    made = _with_special(
        np,
        bits,
        values.astype(np.float32).astype(dtype).view(unsigned),
        rng.integers(0, _ELEMENTS, shape),
        rng.integers(0, _RUNS, (n, math.ceil(hidden / _RUN))),
        int(rng.integers(2)),
        dtype,
    )
    return made.view(dtype)


def draw(seed: Any, shape: tuple[int, int], name: str) -> jax.Array:
    """Tokens `[n, H]` of the dtype `name`; to be jitted. Uses streams 0 to 4."""
    n, hidden = shape
    dtype = oracle.DTYPES[name]
    unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
    values = device_random.numbers(seed, 0, shape)
    values *= jnp.exp2(device_random.below(16, seed, 1, (n, 1)).astype(jnp.float32) - 5)
    made = _with_special(
        jnp,
        device_random.bits(seed, 2, shape).astype(unsigned),
        jax.lax.bitcast_convert_type(values.astype(dtype), unsigned),
        device_random.below(_ELEMENTS, seed, 3, shape),
        device_random.below(_RUNS, seed, 4, (n, math.ceil(hidden / _RUN))),
        0,
        dtype,
    )
    return jax.lax.bitcast_convert_type(made, dtype)


def _with_special(
    xp: Any, bits: Any, values: Any, lots: Any, of_runs: Any, first: int, dtype: Any
) -> Any:
    """Bits: alternate rows are `bits` and `values` with special ones by the lots."""
    info, unsigned = jnp.finfo(dtype), bits.dtype
    infinity = ((1 << info.nexp) - 1) << info.nmant
    denormal = bits & unsigned.type(1 << (info.bits - 1) | (1 << info.nmant) - 1)
    for lot, special in enumerate(
        (infinity | 1 << (info.nmant - 1), infinity, infinity | 1 << (info.bits - 1))
    ):
        values = xp.where(lots == lot, unsigned.type(special), values)
    values = xp.where(lots // 64 == 1, denormal, values)
    runs = xp.repeat(of_runs, _RUN, axis=1)[:, : bits.shape[1]]
    values = xp.where(runs == 0, unsigned.type(0), values)
    values = xp.where(runs == 1, denormal, values)
    plain = (xp.arange(len(bits)) + first) % 2 == 0
    return xp.where(plain[:, None], values, bits)
