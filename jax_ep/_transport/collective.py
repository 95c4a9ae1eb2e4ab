"""Transport "collective": pack -> all_to_all -> unpack, per rank, inside shard_map.

`dispatch`, `dispatch_cached` and `combine` are the ops of the transport interface: what
they take and return is what `_ops.dispatch` needs of any transport. The `_send` of an
op ends with its exchange and the rest follows it, for `_ops.split`. Nothing here is
differentiated.

XLA pairs up whatever exchanges its processes run. So a pack begins each region with a
tag of the handle and the call, and an unpack whose regions have unequal ones returns
NaN, -1 and 0 and has `EPHandle.check` raise. Python takes no part in that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core import options
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, Route
from jax_ep._native import ffi
from jax_ep._native.call_site import site
from jax_ep._transport.results import Received, dispatched, received, struct, zeros

_WORD_BYTES = 4  # the wire travels as uint32


def exchange(ep: EPHandle, send: jax.Array) -> jax.Array:
    """Row r of `send` goes to rank r; row r of the result came from there."""
    if ep.route_ranks == 1:
        return send
    return jax.lax.all_to_all(send, ep.axis_names, 0, 0, tiled=True)


def dispatch(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
) -> Dispatched:
    """Routes and exchanges tokens `[n, H]` by ids `[n, K]`."""
    send, slot_of, num_invalid = dispatch_pack(
        ep, tokens, topk_ids, router_weights, input_scale
    )
    sent = exchange(ep, send), slot_of, num_invalid
    return dispatch_place(ep, tokens, input_scale, sent)


def held_rows(ep: EPHandle) -> int:
    """Dimension 0 of what the first half of a call leaves at a rank."""
    return ep.route_ranks


# What dispatch_send leaves: arrivals, slot_of, num_invalid.
Sent = tuple[jax.Array, jax.Array, jax.Array]


def dispatch_send(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
) -> tuple[Sent]:
    """The part of `dispatch` up to its exchange: what is there then."""
    send, slot_of, num_invalid = dispatch_pack(
        ep, tokens, topk_ids, router_weights, input_scale, in_halves=True
    )
    return ((exchange(ep, send), slot_of, num_invalid),)


def dispatch_pack(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    in_halves: bool = False,
) -> Sent:
    """As `dispatch_send`, before its exchange: the first is what is to be sent."""
    config, ranks = ep.config, ep.route_ranks
    topk_ids, router_weights = options.routed(ep, topk_ids, router_weights)
    hidden = tokens.shape[1]
    n, top_k = topk_ids.shape
    region_bytes = ffi.native.dispatch_region_bytes(
        config.dispatch_format, hidden, config.element_bytes, n, top_k, ep.groups
    )

    def int32(*shape: int) -> Any:
        return struct(tokens, shape, jnp.int32)

    send, slot_of, _, num_invalid = ffi.call(
        "ep_pack",
        (
            struct(tokens, (ranks, region_bytes // _WORD_BYTES), jnp.uint32),
            int32(n, top_k),
            int32(n, top_k),
            int32(1),
        ),
        tokens,
        topk_ids,
        router_weights,
        input_scale,
        key=ep.key,
        site=site(),
        in_halves=in_halves,
        num_experts=ranks * ep.groups,
        format=config.dispatch_format,
    )
    return send, slot_of, num_invalid


def dispatch_place(
    ep: EPHandle, like: jax.Array, input_scale: jax.Array, sent: Sent
) -> Dispatched:
    """The rest of `dispatch`; `like` has the shape and dtype of the tokens."""
    config = ep.config
    recv, slot_of, num_invalid = sent
    types = received(ep, like)
    *arrived, _, slot_of, num_invalid = ffi.call(
        "ep_unpack",
        (
            *types,
            struct(like, (ep.route_ranks, ep.groups), jnp.int32),
            struct(like, slot_of.shape, jnp.int32),
            struct(like, num_invalid.shape, jnp.int32),
        ),
        recv,
        slot_of,
        num_invalid,
        # In place: where calls were mixed up these are those of no call as well.
        input_output_aliases={1: len(types) + 1, 2: len(types) + 2},
        key=ep.key,
        expert_alignment=config.expert_alignment,
        zero_tail=config.zero_tail,
        format=config.dispatch_format,
        scale_layout=config.scale_layout,
    )
    arrived, slot_of = options.placed(ep, Received(*arrived), slot_of)
    return dispatched(ep, like, input_scale, arrived, slot_of, num_invalid)


def dispatch_cached(
    ep: EPHandle, route: Route, tokens: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Sends tokens `[n, H]` and weights `[n, K]` along `route`: rows `[N, H]`, `[N]`.

    Rows that no token reaches are zero. On the wire tokens are in `grad_format`.
    """
    wire = ep.config.grad_wire_format
    n, hidden = tokens.shape
    rows, top_k = ep.recv_capacity, route.slot_of.shape[1]
    num_weights = 0 if weights is None else top_k
    if weights is None:
        weights = zeros(tokens, (n, 0), jnp.float32)
    region_bytes = ffi.native.cached_region_bytes(
        wire, hidden, ep.config.element_bytes, n, num_weights
    )
    (send,) = ffi.call(
        "ep_pack_cached",
        (struct(tokens, (ep.route_ranks, region_bytes // _WORD_BYTES), jnp.uint32),),
        tokens,
        weights,
        route.slot_of,
        key=ep.key,
        site=site(),
        format=wire,
    )
    out, row_weights = ffi.call(
        "ep_unpack_cached",
        (
            struct(tokens, (rows, hidden), tokens.dtype),
            struct(tokens, (rows if num_weights else 0,), jnp.float32),
        ),
        exchange(ep, send),
        route.row_of,
        route.row_slot,
        key=ep.key,
        format=wire,
    )
    return options.with_shared(ep, out, tokens), row_weights if num_weights else None


def combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    weight_grads: jax.Array | None,
    residual: jax.Array | None,
    wire: str,
    by_entry: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums rows `[N, H]` back to tokens `[n, H]`; `weight_grads` `[N]` become `[n, K]`.

    `router_weights` scale the rows, `weight_grads` travel beside them unsummed. `wire`
    is what the sums travel as: a dtype or a quantised format. `by_entry` has each row
    travel by itself, and `router_weights` are then `[n, K]` of the source.
    """
    row_weights = None if by_entry else router_weights
    send = combine_pack(
        ep, route, expert_out, row_weights, weight_grads, wire, by_entry
    )
    return combine_sum(
        ep,
        exchange(ep, send),
        route.slot_of,
        expert_out,
        router_weights if by_entry else None,
        residual,
        wire,
        by_entry,
        with_weight_grads=weight_grads is not None,
    )


def combine_send(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    row_weights: jax.Array | None,
    weight_grads: jax.Array | None,
    wire: str,
    by_entry: bool,
) -> tuple[jax.Array]:
    """The part of `combine` up to its exchange: what arrived."""
    send = combine_pack(
        ep,
        route,
        expert_out,
        row_weights,
        weight_grads,
        wire,
        by_entry,
        in_halves=True,
    )
    return (exchange(ep, send),)


def combine_pack(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    row_weights: jax.Array | None,
    weight_grads: jax.Array | None,
    wire: str,
    by_entry: bool,
    in_halves: bool = False,
) -> jax.Array:
    """As `combine_send`, before its exchange: what is to be sent."""
    if by_entry:
        route = options.by_entry(route)
    n, top_k = route.slot_of.shape
    none = zeros(expert_out, (0,), jnp.float32)
    quantized = wire in formats.names()
    region_bytes = ffi.native.combine_region_bytes(
        wire if quantized else "bf16",
        expert_out.shape[1],
        ep.config.element_bytes if quantized else jnp.dtype(wire).itemsize,
        n,
        0 if weight_grads is None else top_k,
    )
    (send,) = ffi.call(
        "ep_combine_pack",
        (
            struct(
                expert_out, (ep.route_ranks, region_bytes // _WORD_BYTES), jnp.uint32
            ),
        ),
        expert_out,
        none if row_weights is None else row_weights,
        none if weight_grads is None else weight_grads,
        route.row_of,
        route.slot_counts,
        key=ep.key,
        site=site(),
        in_halves=in_halves,
        weighted=row_weights is not None,
        with_weight_grads=weight_grads is not None,
        combine_dtype=wire,
    )
    return send


def combine_sum(
    ep: EPHandle,
    recv: jax.Array,
    slot_of: jax.Array,
    expert_out: jax.Array,
    entry_weights: jax.Array | None,
    residual: jax.Array | None,
    wire: str,
    by_entry: bool,
    with_weight_grads: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The rest of `combine`.

    Of `expert_out` the rows are read only where there is a shared expert.
    """
    shared = ep.config.fused_shared_expert
    hidden = expert_out.shape[1]
    n, top_k = slot_of.shape
    num_weights = top_k if with_weight_grads else 0
    no_rows = zeros(expert_out, (0, hidden), expert_out.dtype)
    out, grads = ffi.call(
        "ep_combine_unpack",
        (
            struct(expert_out, (n, hidden), expert_out.dtype),
            struct(expert_out, (n, num_weights), jnp.float32),
        ),
        recv,
        options.entry_slots(slot_of) if by_entry else slot_of,
        no_rows if residual is None else residual,
        zeros(expert_out, (0, top_k), jnp.float32)
        if entry_weights is None
        else entry_weights,
        expert_out if shared else no_rows,
        options.shared_part(ep, expert_out, n)
        if shared
        else zeros(expert_out, (0,), jnp.int32),
        key=ep.key,
        with_residual=residual is not None,
        by_entry=by_entry,
        with_entry_weights=entry_weights is not None,
        with_shared=shared,
        combine_dtype=wire,
    )
    return out, grads if num_weights else None
