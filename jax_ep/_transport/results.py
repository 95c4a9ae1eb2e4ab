"""Result types of the transports' custom calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core.handle import EPHandle
from jax_ep._native.loader import cpu as native
from jax_ep._transport.base import Received


def struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the type of a result that varies over the same mesh axes as `like`."""
    kind = jax.typeof(like)
    # If an explicit axis has size 1, the spec has the length of like's shape.
    whole = kind.sharding.update(spec=jax.sharding.PartitionSpec())
    return kind.update(
        shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=whole
    )


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros that vary as `like`; of size 0, a placeholder for no operand."""
    return jax.lax.full_like(like, 0, dtype=jnp.dtype(dtype), shape=shape)


def received(ep: EPHandle, tokens: jax.Array) -> Received:
    """Returns the result types of a dispatch of these tokens."""
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
