"""Transport "p2p": one custom call an op, whose kernel stores into the peers' windows.

The functions are those of `collective`, with the same results bit for bit. Each takes
`after` besides, what `_ops.ordering` has the call come after, and those without
`num_dropped` among their results yield one more to come after. The first half of an op
leaves the place of the call in the windows, which the second is given.
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
from jax_ep._transport.p2p_calls import First, first_half, pending_call, results_of
from jax_ep._transport.p2p_combine import combine, combine_send, combine_sum
from jax_ep._transport.results import Received, dispatched, received, struct, zeros

__all__ = [
    "combine",
    "combine_send",
    "combine_sum",
    "dispatch",
    "dispatch_cached",
    "dispatch_place",
    "dispatch_send",
    "held_rows",
]


def dispatch(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    after: jax.Array,
) -> Dispatched:
    """Routes and exchanges tokens `[n, H]` by ids `[n, K]`."""
    topk_ids, router_weights = options.routed(ep, topk_ids, router_weights)
    results = (
        *received(ep, tokens),
        struct(tokens, topk_ids.shape, jnp.int32),
        struct(tokens, (1,), jnp.int32),
    )
    *arrived, slot_of, num_invalid = ffi.call(
        "ep_dispatch",
        results,
        tokens,
        topk_ids,
        router_weights,
        input_scale,
        after,
        key=ep.key,
        site=site(),
        expert_alignment=ep.config.expert_alignment,
        zero_tail=ep.config.zero_tail,
        format=ep.config.dispatch_format,
        scale_layout=ep.config.scale_layout,
    )
    arrived, slot_of = options.placed(ep, Received(*arrived), slot_of)
    return dispatched(ep, tokens, input_scale, arrived, slot_of, num_invalid)


def held_rows(ep: EPHandle) -> int:
    """Dimension 0 of what the first half of a call leaves at a rank."""
    return 1


# What dispatch_send leaves: its results, and tokens that are not encoded.
Sent = tuple[First, jax.Array | None]


def _sent(ep: EPHandle, tokens: jax.Array) -> tuple[Any, ...]:
    """The types of pending, slot_of and num_invalid."""
    top_k = ep.config.top_k + ep.config.fused_shared_expert
    return (
        pending_call(tokens),
        struct(tokens, (tokens.shape[0], top_k), jnp.int32),
        struct(tokens, (1,), jnp.int32),
    )


def dispatch_send(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    after: jax.Array,
) -> tuple[Sent, jax.Array]:
    """The part of `dispatch` that routes and sends."""
    topk_ids, router_weights = options.routed(ep, topk_ids, router_weights)
    first = first_half(
        ep,
        "ep_dispatch_send",
        _sent(ep, tokens),
        tokens,
        topk_ids,
        router_weights,
        input_scale,
        after,
        ranks=ep.route_ranks,
        local_experts=ep.groups,
        format=ep.config.dispatch_format,
    )
    # Own rows come from the tokens themselves, unless they are encoded.
    encoded = formats.is_quantized(ep.config.dispatch_format)
    return (first, None if encoded else tokens), first[-1]


def dispatch_place(
    ep: EPHandle,
    like: jax.Array,
    input_scale: jax.Array,
    sent: Sent,
    after: jax.Array,
) -> Dispatched:
    """The rest of `dispatch`; `like` has the shape and dtype of the tokens."""
    first, own = sent
    _, slot_of, num_invalid = results_of(first, _sent(ep, like))
    arrived = ffi.call(
        "ep_dispatch_place",
        received(ep, like),
        first[0],
        # Made here: an empty array that comes from another program has no buffer.
        zeros(like, (0, like.shape[1]), like.dtype) if own is None else own,
        after,
        key=ep.key,
        expert_alignment=ep.config.expert_alignment,
        zero_tail=ep.config.zero_tail,
        format=ep.config.dispatch_format,
        scale_layout=ep.config.scale_layout,
    )
    arrived, slot_of = options.placed(ep, Received(*arrived), slot_of)
    return dispatched(ep, like, input_scale, arrived, slot_of, num_invalid)


def dispatch_cached(
    ep: EPHandle,
    route: Route,
    tokens: jax.Array,
    weights: jax.Array | None,
    after: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Sends tokens `[n, H]` and weights `[n, K]` along `route`: rows `[N, H]`, `[N]`.

    Rows that no token reaches are zero. On the wire tokens are in `grad_format`.
    """
    n, hidden = tokens.shape
    rows = ep.recv_capacity
    weighted = weights is not None
    out, row_weights, done = ffi.call(
        "ep_dispatch_cached",
        (
            struct(tokens, (rows, hidden), tokens.dtype),
            struct(tokens, (rows if weighted else 0,), jnp.float32),
            struct(tokens, (1,), jnp.int32),
        ),
        tokens,
        zeros(tokens, (n, 0), jnp.float32) if weights is None else weights,
        route.slot_of,
        route.row_of,
        route.row_slot,
        after,
        key=ep.key,
        site=site(),
        format=ep.config.grad_wire_format,
    )
    out = options.with_shared(ep, out, tokens)
    return out, row_weights if weighted else None, done
