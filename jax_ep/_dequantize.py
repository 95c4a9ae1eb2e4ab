"""Rows of a quantised dispatch as values, with a straight-through derivative."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from jax_ep import formats
from jax_ep._types import Dispatched


def dequantize(d: Dispatched) -> jax.Array:
    """As `jax_ep.dequantize`, of one rank's rows in a quantised format."""
    assert d.scales is not None
    assert d.grad_port is not None
    scales = d.scales
    if d.scales_offsets is not None:
        scales = formats.untiled(
            scales, d.scales_offsets, d.row_offsets, d.tokens.shape[0]
        )
    name = _format_of(d.tokens, scales)
    return _values(name, d.grad_port, d.tokens, scales, d.input_scale)


def _format_of(tokens: jax.Array, scales: jax.Array) -> str:
    """The dtypes of codes and scales tell the formats apart."""
    (found,) = (
        name
        for name in formats.names()
        if formats.scale_dtype(name) == scales.dtype
        and formats.payload_dtype(name, "float32") == tokens.dtype
    )
    return found


# The port's cotangent is that of the rows; codes and scales have none. Adding the port
# to the values instead would turn -0 into +0.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(
    name: str,
    port: jax.Array,
    tokens: jax.Array,
    scales: jax.Array,
    input_scale: jax.Array | None,
) -> jax.Array:
    return formats.dequantize(tokens, scales, name, input_scale, dtype=port.dtype)


def _values_fwd(name: str, *args: Any) -> Any:
    return _values(name, *args), None


def _values_bwd(name: str, _: None, ct: jax.Array) -> Any:
    return ct, None, None, None


_values.defvjp(_values_fwd, _values_bwd)
