"""Dequantises the rows of a dispatch, with a straight-through derivative."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core import calls, errors
from jax_ep._core.literals import Dtype, Format
from jax_ep._core.types import Dispatched
from jax_ep._ops.expert_of_row import (
    group_of_row,
    require_dispatched,
    require_one_rank,
)


@calls.explained("dequantize", "pass the Dispatched alone, inside jax.shard_map")
def dequantize(d: Dispatched) -> jax.Array:
    """Returns the rows of a dispatch in the token dtype; differentiable.

    The derivative is straight-through: cotangents of the rows become those of the
    tokens, as if nothing had been quantised. They pass through `d.grad_port`, so a
    quantised `d` whose port was set to None has no derivative. `d.tokens` and
    `d.scales` of a quantised format carry no gradient.

    Args:
        d: the `Dispatched` of one rank. Use `jax_ep.sharded.dequantize` for one that
            left shard_map.

    Returns:
        `[N, H]` in the config's dtype; for "bf16" `d.tokens` itself.

    Raises:
        TypeError: `d` is not a `Dispatched`.
        ValueError: `d` holds several ranks or lacks its scales; in the backward pass,
            if it lacks its port.
    """
    require_dispatched("dequantize", d)
    if (d.scales is not None) != formats.is_quantized(d.format):
        raise errors.invalid(
            "dequantize",
            f"d must have the scales of its format {d.format!r}",
            "none" if d.scales is None else "some",
            "keep `scales` and `format` as the dispatch returned them",
            operand="d",
        )
    if not formats.is_quantized(d.format):
        return d.tokens
    require_one_rank("dequantize", d, "use jax_ep.sharded.dequantize on global arrays")
    with jax.named_scope("jax_ep.dequantize"):
        return _dequantized(d)


def _dequantized(d: Dispatched) -> jax.Array:
    scales = scales_by_row(d)
    static = _Static(d.format, d.rows_dtype, d.grad_port is not None)
    return _values(static, d.grad_port, d.tokens, scales, d.input_scale)


def scales_by_row(d: Dispatched) -> jax.Array:
    """Returns the scales `[N, H / block]` of a quantised dispatch in any layout."""
    assert d.scales is not None
    rows = d.tokens.shape[0]
    if d.scale_layout == "columns":
        return d.scales.T[:rows]
    if d.scales_offsets is not None:
        return _untiled(d.scales, d.scales_offsets, d.row_offsets, rows)
    return d.scales


def _untiled(
    scales: jax.Array, scales_offsets: jax.Array, row_offsets: jax.Array, rows: int
) -> jax.Array:
    """Converts tiled scales `[tiles, words, 32, 4, 4]` to `[rows, columns]`.

    Rows past the last group get the byte 0x00.
    """
    tiles, words = scales.shape[:2]
    values = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    by_row = values.transpose(0, 3, 2, 1, 4).reshape(tiles * 128, words * 4)
    index = jnp.arange(rows, dtype=jnp.int32)
    group = group_of_row(row_offsets[1:], rows)
    inside = group < scales_offsets.shape[0]
    group = jnp.minimum(group, scales_offsets.shape[0] - 1)
    start = row_offsets[group]
    first_tile = start // 128 + scales_offsets[group]
    found = by_row.at[first_tile * 128 + index - start].get(mode="clip")
    found = jnp.where(inside[:, None], found, jnp.uint8(0))
    return jax.lax.bitcast_convert_type(found, scales.dtype)


class _Static(NamedTuple):
    format: Format
    dtype: Dtype  # dtype of the result
    has_port: bool


# The cotangent of the rows becomes that of the port; codes and scales have none. Adding
# the port to the values would do the same, but turn -0 into +0.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(
    static: _Static,
    port: jax.Array | None,
    tokens: jax.Array,
    scales: jax.Array,
    input_scale: jax.Array | None,
) -> jax.Array:
    return formats.dequantize(
        tokens, scales, static.format, input_scale, dtype=static.dtype
    )


def _values_fwd(static: _Static, *args: Any) -> Any:
    return _values(static, *args), None


def _values_bwd(static: _Static, _: None, ct: jax.Array) -> Any:
    # Raises, because silently missing gradients would be wrong.
    if not static.has_port:
        raise errors.invalid(
            "dequantize",
            "d must have the grad_port of its dispatch when it is differentiated",
            "None",
            "keep it, or stop the gradient at the rows with jax.lax.stop_gradient",
            operand="d",
        )
    return ct, None, None, None


_values.defvjp(_values_fwd, _values_bwd)
