"""Transport "p2p": combine, whole and in halves. `p2p` says what holds for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core import options as _modes
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import ffi
from jax_ep._native.call_site import site
from jax_ep._transport.p2p_calls import First, first_half, pending_call
from jax_ep._transport.results import struct, zeros


def _alone(ep: EPHandle, slot_of: jax.Array) -> bool:
    """Whether the tables are those of `options.by_entry`, so that rows are alone."""
    return ep.config.reduce == "none" and slot_of.shape[1] == 1


def _at_source(
    ep: EPHandle,
    slot_of: jax.Array,
    expert_out: jax.Array,
    entry_weights: jax.Array | None,
    residual: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """What the last sum of a combine takes besides rows: operands, attributes."""
    (n, top_k), shared = slot_of.shape, ep.config.fused_shared_expert
    no_rows = zeros(expert_out, (0, expert_out.shape[1]), expert_out.dtype)
    no_weights = zeros(expert_out, (0, top_k), jnp.float32)
    no_part = zeros(expert_out, (0,), jnp.int32)
    operands = (
        no_rows if residual is None else residual,
        no_weights if entry_weights is None else entry_weights,
        expert_out if shared else no_rows,
        _modes.shared_part(ep, expert_out, n) if shared else no_part,
    )
    return operands, {
        "with_residual": residual is not None,
        "with_entry_weights": entry_weights is not None,
        "with_shared": shared,
    }


def combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    weight_grads: jax.Array | None,
    residual: jax.Array | None,
    wire: str,
    after: jax.Array,
    by_entry: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Sums rows `[N, H]` back to tokens `[n, H]`; `weight_grads` `[N]` become `[n, K]`.

    `router_weights` scale the rows, `weight_grads` travel beside them unsummed. `wire`
    is what the sums travel as: a dtype or a quantised format. `by_entry` has each row
    travel by itself, and `router_weights` are then `[n, K]` of the source.
    """
    n, top_k = route.slot_of.shape
    none = zeros(expert_out, (0,), jnp.float32)
    alone = by_entry or (weight_grads is None and _alone(ep, route.slot_of))
    rows = _modes.by_entry(route) if by_entry else route
    weights = None if by_entry else router_weights
    given, options = _at_source(
        ep, route.slot_of, expert_out, router_weights if by_entry else None, residual
    )
    out, grads, done = ffi.call(
        "ep_combine",
        (
            struct(expert_out, (n, expert_out.shape[1]), expert_out.dtype),
            struct(expert_out, (n, 0 if weight_grads is None else top_k), jnp.float32),
            struct(expert_out, (1,), jnp.int32),
        ),
        expert_out,
        none if weights is None else weights,
        none if weight_grads is None else weight_grads,
        rows.row_of,
        rows.slot_counts,
        _modes.entry_slots(route.slot_of) if by_entry else route.slot_of,
        *given,
        after,
        key=ep.key,
        site=site(),
        weighted=weights is not None,
        with_weight_grads=weight_grads is not None,
        by_entry=alone,
        combine_dtype=wire,
        **options,
    )
    return out, None if weight_grads is None else grads, done


def combine_send(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    row_weights: jax.Array | None,
    weight_grads: None,
    wire: str,
    by_entry: bool,
    after: jax.Array,
) -> tuple[First, jax.Array]:
    """The part of `combine` that sums and sends."""
    alone = by_entry or _alone(ep, route.slot_of)
    rows = _modes.by_entry(route) if by_entry else route
    first = first_half(
        ep,
        "ep_combine_send",
        (pending_call(expert_out), struct(expert_out, (1,), jnp.int32)),
        expert_out,
        zeros(expert_out, (0,), jnp.float32) if row_weights is None else row_weights,
        rows.row_of,
        rows.slot_counts,
        after,
        weighted=row_weights is not None,
        by_entry=alone,
        combine_dtype=wire,
    )
    return first, first[-1]


def combine_sum(
    ep: EPHandle,
    first: First,
    slot_of: jax.Array,
    expert_out: jax.Array,
    entry_weights: jax.Array | None,
    residual: jax.Array | None,
    wire: str,
    by_entry: bool,
    after: jax.Array,
) -> tuple[jax.Array, None, jax.Array]:
    """The rest of `combine`.

    Of `expert_out` the rows are read only where there is a shared expert.
    """
    given, options = _at_source(ep, slot_of, expert_out, entry_weights, residual)
    out, done = ffi.call(
        "ep_combine_place",
        (
            struct(
                expert_out, (slot_of.shape[0], expert_out.shape[1]), expert_out.dtype
            ),
            struct(expert_out, (1,), jnp.int32),
        ),
        first[0],
        _modes.entry_slots(slot_of) if by_entry else slot_of,
        *given,
        after,
        key=ep.key,
        ranks=ep.route_ranks,
        by_entry=by_entry or _alone(ep, slot_of),
        combine_dtype=wire,
        **options,
    )
    return out, None, done
