"""What the calls of every transport take and return: types for XLA, `Dispatched`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._native import cpu as native
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle


def struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result that varies over the mesh axes that `like` varies over."""
    return jax.typeof(like).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros: of no size, an operand that stands for "not given"."""
    return jax.lax.full_like(like, 0, dtype=jnp.dtype(dtype), shape=shape)


def received(ep: EPHandle, tokens: jax.Array) -> tuple[Any, ...]:
    """What a first dispatch makes of arrivals; `dispatched` takes it in this order."""
    config, ranks, rows = ep.config, ep.route_ranks, ep.recv_capacity
    n, hidden = tokens.shape
    groups, top_k = ep.groups, config.top_k + config.fused_shared_expert
    name = config.dispatch_format
    payload = formats.payload_dtype(name, config.dtype)

    def int32(*shape: int) -> Any:
        return struct(tokens, shape, jnp.int32)

    return (
        struct(tokens, (rows, formats.columns(name, hidden)), payload),
        _scales(ep, tokens),
        int32(groups + 1),
        int32(groups),
        int32(groups),
        int32(groups),
        int32(groups if config.scale_layout != "rows" else 0),
        int32(rows, 3),
        struct(tokens, (rows,), jnp.float32),
        int32(1),
        int32(ranks, n, top_k),
        int32(rows),
        int32(ranks),
    )


def _scales(ep: EPHandle, tokens: jax.Array) -> Any:
    config, rows = ep.config, ep.recv_capacity
    dtype = formats.scale_dtype(config.dispatch_format)
    if dtype is None:
        return struct(tokens, (0,), jnp.uint8)
    columns = tokens.shape[1] // formats.block(config.dispatch_format)
    if config.scale_layout == "rows":
        return struct(tokens, (rows, columns), dtype)
    tiles, words = native.scale_tiles(rows, ep.groups, columns)
    return struct(tokens, (tiles, words, 32, 4, 4), dtype)


def dispatched(
    ep: EPHandle,
    tokens: jax.Array,
    input_scale: jax.Array,
    arrived: Sequence[jax.Array],
    slot_of: jax.Array,
    num_invalid: jax.Array,
) -> Dispatched:
    """The result of a first dispatch, from `received` and the tables of its source."""
    row_of, row_slot, slot_counts = arrived[10:]
    name = ep.config.dispatch_format
    quantized = formats.is_quantized(name)
    port = zeros(tokens, (ep.recv_capacity, tokens.shape[1]), tokens.dtype)
    return Dispatched(
        tokens=arrived[0],
        scales=arrived[1] if quantized else None,
        row_offsets=arrived[2],
        group_sizes=arrived[3],
        expert_counts=arrived[4],
        expert_ids=arrived[5],
        src_info=arrived[7],
        router_weights=arrived[8],
        num_dropped=arrived[9],
        num_invalid=num_invalid,
        route=Route(slot_of, row_of, row_slot, slot_counts, ep.key),
        grad_port=port if quantized else None,
        scales_offsets=arrived[6] if ep.config.scale_layout != "rows" else None,
        input_scale=input_scale if formats.takes_input_scale(name) else None,
        format=name,
        rows_dtype=tokens.dtype.name,
    )
