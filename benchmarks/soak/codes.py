"""Draws values that token formats keep exactly, and computes their expected codes.

The codes follow from section 5 of SPEC.md: for the values that `values` draws, no
quotient is rounded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

BLOCKS = {
    "fp8_block128": 128,
    "mxfp8": 32,
    "mxfp4": 32,
    "fp8_block128_e8m0": 128,
    "nvfp4": 16,
}
FOUR_BITS = ("mxfp4", "nvfp4")
INPUT_SCALE = 0.25  # for nvfp4
# In these formats the largest code is this number times a power of two, so a block's
# largest value must be, too. Scales of other formats are powers of two, which keep any
# small integer.
UNITS = {"fp8_block128": 7, "nvfp4": 3}
POWERS = (0, 1, 2, 4, -1, -2, -4)
# For e8m0 scales: what is added to the bits of the largest value, and subtracted from
# its exponent.
RULES = {
    "mxfp8": (0x1FFFFF, 8),
    "mxfp4": (0x200000, 2),
    "fp8_block128_e8m0": (0x1FFFFF, 8),
}
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def values(config: Any, bits: Any) -> Any:
    """Makes small integers of random bytes, which all formats of `config` keep."""
    wires = config.dispatch_format, config.combine_format, config.grad_format
    units = {UNITS[name] for name in wires if name in UNITS}
    if not units:
        return (bits % 9).astype(jnp.int32) - 4
    (unit,) = units
    return unit * jnp.array(POWERS, jnp.int32)[bits % len(POWERS)]


def encode(name: str, x: Any) -> tuple[Any, Any]:
    """Returns codes `[..., H]` and scales `[..., H / block]` of `x`, as float32."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCKS[name])
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    if name == "fp8_block128":
        scales = jnp.maximum(largest, 1e-4) / 448
        codes = blocks / scales[..., None]
    elif name == "nvfp4":
        scales = INPUT_SCALE * largest / 6
        factor = jnp.where(scales == 0, 0, INPUT_SCALE / scales)
        codes = blocks * factor[..., None]
    else:
        add, less = RULES[name]
        bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
        byte = jnp.clip(((bits + add) >> 23) - less, 0, 254)
        # Byte 0 stands for a denormal, which XLA may flush.
        scales = jax.lax.bitcast_convert_type(byte << 23, jnp.float32)
        codes = jnp.where(byte[..., None] == 0, 0, blocks / scales[..., None])
    return codes.reshape(x.shape), scales


def read(name: str, tokens: Any, scales: Any) -> tuple[Any, Any]:
    """Converts what dispatch returned to the form of `encode`."""
    if name in FOUR_BITS:
        pairs = jnp.stack([tokens & 0xF, tokens >> 4], axis=-1)
        codes = pairs.reshape(*tokens.shape[:-1], -1)
        tokens = jnp.array(E2M1, jnp.float32)[codes & 7]
        tokens = jnp.where(codes & 8, -tokens, tokens)
    if scales.dtype == jnp.float8_e8m0fnu:
        byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
        scales = jax.lax.bitcast_convert_type(byte << 23, jnp.float32)
    return tokens.astype(jnp.float32), scales.astype(jnp.float32)


def pairs(config: Any, d: Any, there: Any) -> dict[str, Any]:
    """Returns (actual, expected) codes of a dispatch of rows `there`, by name.

    Scales are compared, too, unless they are tiled.
    """
    name = config.dispatch_format
    rows = config.scale_layout == "rows"
    scales = d.scales if rows else jnp.zeros(0, d.scales.dtype)
    codes, scales = read(name, d.tokens, scales)
    want_codes, want_scales = encode(name, there)
    found = {"codes": (codes, want_codes)}
    if rows:
        # Scales of padding are byte 0.
        real = jnp.any(there, axis=1)[:, None]
        found["scales"] = scales, jnp.where(real, want_scales, 0)
    return found
