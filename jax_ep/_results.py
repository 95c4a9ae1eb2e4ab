"""What the calls of every transport take and return: types for XLA, `Dispatched`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle


def struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result that varies over the mesh axes that `like` varies over."""
    return jax.typeof(like).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def empty(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A zero-size operand that stands for "not given"."""
    return jax.lax.full_like(like, 0, dtype=jnp.dtype(dtype), shape=shape)


def received(ep: EPHandle, tokens: jax.Array) -> tuple[Any, ...]:
    """What a first dispatch makes of arrivals; `dispatched` takes it in this order."""
    config, ranks, rows = ep.config, ep.ep_size, ep.recv_capacity
    n, hidden = tokens.shape
    groups, top_k = ep.local_experts, config.top_k
    payload = formats.payload_dtype(config.dispatch_format, config.dtype)

    def int32(*shape: int) -> Any:
        return struct(tokens, shape, jnp.int32)

    return (
        struct(tokens, (rows, hidden), payload),
        int32(groups + 1),
        int32(groups),
        int32(groups),
        int32(groups),
        int32(rows, 3),
        struct(tokens, (rows,), jnp.float32),
        int32(1),
        int32(ranks, n, top_k),
        int32(rows),
        int32(ranks),
    )


def dispatched(
    ep: EPHandle,
    arrived: Sequence[jax.Array],
    slot_of: jax.Array,
    num_invalid: jax.Array,
) -> Dispatched:
    """The result of a first dispatch, from `received` and the tables of its source."""
    row_of, row_slot, slot_counts = arrived[8:]
    return Dispatched(
        tokens=arrived[0],
        scales=None,
        row_offsets=arrived[1],
        group_sizes=arrived[2],
        expert_counts=arrived[3],
        expert_ids=arrived[4],
        src_info=arrived[5],
        router_weights=arrived[6],
        num_dropped=arrived[7],
        num_invalid=num_invalid,
        route=Route(slot_of, row_of, row_slot, slot_counts, ep.key),
        grad_port=None,
    )
