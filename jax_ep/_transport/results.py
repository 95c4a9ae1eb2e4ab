"""What the calls of every transport take and return: types for XLA, `Dispatched`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, Route
from jax_ep._native.loader import cpu as native


def struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result that varies over the mesh axes that `like` varies over."""
    kind = jax.typeof(like)
    # With an explicit axis of one a specification has the length of `like`'s shape.
    whole = kind.sharding.update(spec=jax.sharding.PartitionSpec())
    return kind.update(
        shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=whole
    )


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros: of no size, an operand that stands for "not given"."""
    return jax.lax.full_like(like, 0, dtype=jnp.dtype(dtype), shape=shape)


class Received(NamedTuple):
    """What a dispatch makes of arrivals, in the order of its handlers' results.

    Names are those of `Dispatched` and `Route`.
    """

    tokens: Any
    scales: Any
    row_offsets: Any
    group_sizes: Any
    expert_counts: Any
    expert_ids: Any
    scales_offsets: Any
    src_info: Any
    router_weights: Any
    num_dropped: Any
    row_of: Any
    row_slot: Any
    slot_counts: Any


def received(ep: EPHandle, tokens: jax.Array) -> Received:
    """The types of what a dispatch of these tokens makes of arrivals."""
    config, ranks, rows = ep.config, ep.route_ranks, ep.recv_capacity
    n, hidden = tokens.shape
    groups, top_k = ep.groups, config.top_k + config.fused_shared_expert
    name = config.dispatch_format
    payload = formats.payload_dtype(name, config.dtype)

    def int32(*shape: int) -> Any:
        return struct(tokens, shape, jnp.int32)

    return Received(
        tokens=struct(tokens, (rows, formats.columns(name, hidden)), payload),
        scales=_scales(ep, tokens),
        row_offsets=int32(groups + 1),
        group_sizes=int32(groups),
        expert_counts=int32(groups),
        expert_ids=int32(groups),
        scales_offsets=int32(groups if config.scale_layout != "rows" else 0),
        src_info=int32(rows, 3),
        router_weights=struct(tokens, (rows,), jnp.float32),
        num_dropped=int32(1),
        row_of=int32(ranks, n, top_k),
        row_slot=int32(rows),
        slot_counts=int32(ranks),
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
    arrived: Received,
    slot_of: jax.Array,
    num_invalid: jax.Array,
) -> Dispatched:
    """The result of a first dispatch, from arrivals and the tables of its source."""
    route = Route(
        slot_of, arrived.row_of, arrived.row_slot, arrived.slot_counts, ep.key
    )
    name = ep.config.dispatch_format
    quantized = formats.is_quantized(name)
    port = zeros(tokens, (ep.recv_capacity, tokens.shape[1]), tokens.dtype)
    return Dispatched(
        tokens=arrived.tokens,
        scales=arrived.scales if quantized else None,
        row_offsets=arrived.row_offsets,
        group_sizes=arrived.group_sizes,
        expert_counts=arrived.expert_counts,
        expert_ids=arrived.expert_ids,
        src_info=arrived.src_info,
        router_weights=arrived.router_weights,
        num_dropped=arrived.num_dropped,
        num_invalid=num_invalid,
        route=route,
        grad_port=port if quantized else None,
        scales_offsets=arrived.scales_offsets
        if ep.config.scale_layout != "rows"
        else None,
        input_scale=input_scale if formats.takes_input_scale(name) else None,
        format=name,
        rows_dtype=ep.config.dtype,
    )
