"""Differentiable combine over a transport, in each mode of `reduce`.

With w weights, E expert rows, i = row(t, k) and y the sum:
    dE[i] = w[i] dy[t(i)], dw[i] = <dy[t(i)], E[i]>, dresidual = dy
With `reduce="source"` dw travels back to the source; with "none" each row is a token of
its own, without weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import formats
from jax_ep._core import options as _modes
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native.loader import cpu as native
from jax_ep._ops import ordering
from jax_ep._ops.dispatch import (
    own_rule,
    refusing_vmap,
    return_rows,
    send_cached,
    transport_of,
)
from jax_ep._ops.ordering import Token
from jax_ep._ops.remat import OUT_NAME

# The least width of a row, in bytes, and where rows are quantised in elements.
_ROW_BYTES = native.ROW_ALIGN_BYTES
_NARROW = formats.block("fp8_block128")


def combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """As `jax_ep.combine`."""
    if ep.config.reduce == "none":
        n, top_k = route.slot_of.shape
        rows = _modes.by_entry(route)
        z, *_ = _chained_combine(ep, rows, expert_out, None, None, None)
        return z.reshape(n, top_k, z.shape[1])
    return _chained_combine(ep, route, expert_out, router_weights, residual, None)[0]


def _chained_combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
    given: Token | None,
) -> tuple[jax.Array, ...]:
    after = ordering.before(ep, expert_out, given)
    out = _combine(ep, route, expert_out, router_weights, residual, after)
    ordering.passed(ep, out[1:])
    return out


@own_rule(0)
def _combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
    after: Token,
) -> tuple[jax.Array, ...]:
    def body(
        route: Route,
        expert_out: jax.Array,
        router_weights: jax.Array | None,
        residual: jax.Array | None,
        *after: jax.Array,
    ) -> tuple[jax.Array, ...]:
        wire = ep.config.combine_wire
        # Only transports that let rows cross one by one know the argument.
        options = {"by_entry": True} if ep.config.reduce == "source" else {}
        y, _, *done = transport_of(ep).combine(
            ep,
            route,
            expert_out,
            router_weights,
            None,
            residual,
            wire,
            *after,
            **options,
        )
        return y, *done

    guarded = refusing_vmap("combine", body)
    return checkpoint_name(
        guarded(route, expert_out, router_weights, residual, *after), OUT_NAME
    )


def _combine_fwd(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
    after: Token,
) -> Any:
    out = _chained_combine(ep, route, expert_out, router_weights, residual, after)
    kept = combine_kept(route, expert_out, router_weights, residual)
    return checkpoint_name(out, OUT_NAME), kept


def combine_kept(
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
) -> Any:
    """What `combine_cotangents` takes of the operands."""
    weighting = None if router_weights is None else (router_weights, expert_out)
    # None or (): the structure says whether there was a residual, without an array.
    return route, weighting, None if residual is None else ()


def _combine_bwd(ep: EPHandle, kept: Any, ct: Any) -> Any:
    return None, *combine_cotangents(ep, kept, ct[0]), None


def combine_cotangents(ep: EPHandle, kept: Any, dy: jax.Array) -> Any:
    """Those of the rows, of their weights and of the residual."""
    route, weighting, had_residual = kept
    dresidual = None if had_residual is None else dy
    if weighting is None:
        rows, *_ = send_cached(ep, route, dy, None)
        return rows, None, dresidual
    router_weights, expert_out = weighting
    at_source = ep.config.reduce == "source"
    rows, sent, *_ = send_cached(ep, route, dy, router_weights if at_source else None)
    row_weights = sent if at_source else router_weights
    # Padding may hold anything in E and in w; its cotangents are zero all the same.
    real = route.row_slot >= 0
    rows32 = rows.astype(jnp.float32)
    factor = jnp.where(real, row_weights, 0.0)
    if ep.config.fused_shared_expert:
        factor = jnp.where(_modes.shared_rows(ep, dy.shape[0]), 1.0, factor)
    dot = jnp.sum(rows32 * expert_out.astype(jnp.float32), axis=-1)
    dweights = jnp.where(real, dot, 0.0)
    if at_source:
        # Beside rows of the least width, since these return nothing else.
        width = _NARROW if ep.config.grad_format else _ROW_BYTES // rows.dtype.itemsize
        nothing = jnp.zeros_like(rows, shape=(rows.shape[0], width))
        _, dweights, *_ = return_rows(ep, route, nothing, dweights)
    drows = (factor[:, None] * rows32).astype(rows.dtype)
    return drows, dweights, dresidual


_combine.defvjp(_combine_fwd, _combine_bwd)
