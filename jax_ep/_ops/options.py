"""Translates `fused_shared_expert`, `skip_a2a` and `reduce` to plain operands.

Transports only know ranks, experts and rows, and serve all options unchanged. Here a
shared expert becomes one more expert per rank, chosen by one more entry per token; a
rank that exchanges nothing becomes a group of its own; and rows that are sent one by
one become tokens with a single row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._core.varying import vary_alike
from jax_ep._native.loader import cpu as native
from jax_ep._transport.base import Arrived, CombineInputs, DispatchInputs


def routed(ep: EPHandle, inputs: DispatchInputs) -> DispatchInputs:
    """Returns operands with ids and weights `[n, K']` for the experts of a transport.

    A transport has `ep.groups` experts on each of `ep.route_ranks` ranks. Invalid ids
    stay invalid; `EPHandle.check` reports their original values.
    """
    topk_ids, router_weights = inputs.topk_ids, inputs.router_weights
    config = ep.config
    if not (config.skip_a2a or config.fused_shared_expert):
        return inputs
    experts, local = config.num_experts, ep.local_experts
    rank = jax.lax.axis_index(ep.axis_names).astype(jnp.int32)
    valid = (topk_ids >= 0) & (topk_ids < experts)
    at, expert = topk_ids // local, topk_ids % local
    if config.skip_a2a:
        ids = jnp.where(at == rank, expert, -1)
        own_first = jnp.int32(0)
    else:
        ids = at * ep.groups + expert
        own_first = rank * ep.groups
    if not config.fused_shared_expert:
        return inputs._replace(topk_ids=jnp.where(valid, ids, topk_ids))
    ids = jnp.where(ids < 0, ids, ids + 1)
    high = (topk_ids >= experts) & (topk_ids <= native.MAX_INDEX - ep.route_ranks)
    invalid = jnp.where(high, topk_ids + ep.route_ranks, topk_ids)
    ids = jnp.where(valid, ids, invalid)
    n = topk_ids.shape[0]
    first, count = _part(ep, n)
    token = jnp.arange(n, dtype=jnp.int32)
    has_copy = (token >= first) & (token < first + count)
    shared = jnp.where(has_copy, own_first, -1)[:, None]
    _, ids, shared, router_weights = vary_alike(
        ep.mesh.axis_names, frozenset(), topk_ids, ids, shared, router_weights
    )
    ones = jnp.ones_like(router_weights, shape=(n, 1))
    return inputs._replace(
        topk_ids=jnp.concatenate([ids, shared], axis=1),
        router_weights=jnp.concatenate([router_weights, ones], axis=1),
    )


def placed(ep: EPHandle, arrived: Arrived) -> Arrived:
    """Translates what arrived for `routed` operands back to the public contract."""
    config, top_k = ep.config, ep.config.top_k
    if not (config.skip_a2a or config.fused_shared_expert):
        return arrived
    source, token, k = jnp.split(arrived.src_info, 3, axis=1)
    if config.skip_a2a:
        rank = jax.lax.axis_index(ep.axis_names).astype(jnp.int32)
        source = jnp.where(source >= 0, rank, source)
    if config.fused_shared_expert:
        shared = k == top_k
        k = jnp.where(shared, -1, k)
        arrived = arrived._replace(
            expert_ids=arrived.expert_ids - 1,
            # A route holds only routed entries; `shared_part` describes the others.
            row_of=arrived.row_of[..., :top_k],
            row_slot=jnp.where(shared[:, 0], -1, arrived.row_slot),
            slot_of=arrived.slot_of[:, :top_k],
        )
    return arrived._replace(src_info=jnp.concatenate([source, token, k], axis=1))


def summed(
    ep: EPHandle, route: Route, inputs: CombineInputs, *, by_entry: bool = False
) -> CombineInputs:
    """Adds the route's tables and the shared expert's rows to operands of a combine.

    With `by_entry` each row is sent by itself.
    """
    tables = entry_route(route) if by_entry else route
    slot_of = entry_slots(route.slot_of) if by_entry else route.slot_of
    sums = inputs.sums._replace(slot_of=slot_of)
    if ep.config.fused_shared_expert:
        rows = inputs.expert_out
        part = shared_part(ep, rows, len(route.slot_of))
        sums = sums._replace(shared_rows=rows, shared_part=part)
    return inputs._replace(
        row_of=tables.row_of, slot_counts=tables.slot_counts, sums=sums
    )


def _world(ep: EPHandle) -> int:
    """Returns how many ranks, one after the other, split a shared expert's tokens."""
    return ep.config.allreduce_world_size or ep.ep_size


def _part(ep: EPHandle, n: int) -> tuple[jax.Array | int, jax.Array | int]:
    """Returns first and number of the tokens that this rank's shared expert gets."""
    if not ep.config.skip_a2a:
        return 0, n
    size = _world(ep)
    rank = jax.lax.axis_index(ep.axis_names).astype(jnp.int32) % size
    first = rank * (n // size) + jnp.minimum(rank, n % size)
    return first, (n + size - rank - 1) // size


def shared_part(ep: EPHandle, like: jax.Array, n: int) -> jax.Array:
    """Returns `_part` as int32 `[2]` that varies as `like` does."""
    part = jnp.stack([jnp.asarray(value, jnp.int32) for value in _part(ep, n)])
    _, part = vary_alike(ep.mesh.axis_names, frozenset(ep.axis_names), like, part)
    return part


def with_shared(ep: EPHandle, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Puts the shared expert's tokens into group 0 of `rows`."""
    if not ep.config.fused_shared_expert:
        return rows
    n = tokens.shape[0]
    first, count = _part(ep, n)
    if not ep.config.skip_a2a:
        return jax.lax.dynamic_update_slice_in_dim(rows, tokens[: len(rows)], 0, 0)
    size = _world(ep)
    most = min(-(-n // size), len(rows))
    # One more row, because the slice of a rank with one token fewer ends past them.
    tokens = jnp.concatenate(
        [tokens, jnp.zeros_like(tokens, shape=(1, *tokens.shape[1:]))]
    )
    own = jax.lax.dynamic_slice_in_dim(tokens, first, most)
    has_copy = jnp.arange(most, dtype=jnp.int32) < count
    own = jnp.where(has_copy[:, None], own, rows[:most])
    return jax.lax.dynamic_update_slice_in_dim(rows, own, 0, 0)


def shared_rows(ep: EPHandle, n: int) -> jax.Array:
    """Returns a mask `[N]` of the rows of the shared expert."""
    if not ep.config.fused_shared_expert:
        return jnp.zeros(ep.recv_capacity, bool)
    return jnp.arange(ep.recv_capacity, dtype=jnp.int32) < _part(ep, n)[1]


def entry_slots(slot_of: jax.Array) -> jax.Array:
    """Returns slots `[n, K]` if each entry has its own, as in `entry_route`."""
    top_k = slot_of.shape[1]
    entry = jnp.arange(top_k, dtype=jnp.int32)
    return jnp.where(slot_of < 0, -1, slot_of * top_k + entry[None, :])


def entry_route(route: Route) -> Route:
    """Converts `route` so that each (token, k) is a token and each (slot, k) a slot."""
    ranks, n, top_k = route.row_of.shape
    row_of = route.row_of.reshape(-1)
    rows = route.row_slot.shape[0]
    slots = jnp.arange(row_of.size, dtype=jnp.int32)
    row_slot = jnp.full_like(route.row_slot, -1)
    row_slot = row_slot.at[jnp.where(row_of < 0, rows, row_of)].set(slots, mode="drop")
    return dataclasses.replace(
        route,
        slot_of=entry_slots(route.slot_of).reshape(n * top_k, 1),
        row_of=row_of.reshape(ranks, n * top_k, 1),
        row_slot=row_slot,
        slot_counts=route.slot_counts * top_k,
    )
