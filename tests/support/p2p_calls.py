"""Ways to make calls of p2p, whole and in halves, which tests compare."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from support import compare_transports, options


def halves(ep: Any, o: compare_transports.Operands) -> Any:
    """All results of a dispatch and a combine, each in halves."""
    scale = jnp.float32(0.37) if ep.config.dispatch_format == "nvfp4" else None
    pending = jax_ep.dispatch_async(ep, o.dy, o.ids, o.weights, input_scale=scale)
    d = jax_ep.dispatch_wait(pending)
    pending = jax_ep.combine_async(
        ep, o.rows, d.route, o.row_weights, residual=o.residual
    )
    return d, jax_ep.combine_wait(pending)


def whole(ep: Any, o: compare_transports.Operands) -> Any:
    scale = jnp.float32(0.37) if ep.config.dispatch_format == "nvfp4" else None
    d = jax_ep.dispatch(ep, o.dy, o.ids, o.weights, input_scale=scale)
    return d, jax_ep.combine(ep, o.rows, d.route, o.row_weights, residual=o.residual)


def pipelined(ep: Any, o: compare_transports.Operands) -> Any:
    """Two dispatches and two combines in flight, with whole calls between."""
    scaled = [o.dy * jnp.asarray(i, o.dy.dtype) for i in (1, 2, 3)]
    begin = functools.partial(jax_ep.dispatch_async, ep)
    first = begin(scaled[0], o.ids, o.weights)
    second = begin(scaled[1], o.ids[::-1], o.weights)
    between = jax_ep.dispatch(ep, scaled[2], o.ids, o.weights)
    y_between = jax_ep.combine(ep, between.tokens, between.route)
    d = jax_ep.dispatch_wait(first)
    third = begin(scaled[2], o.ids, o.weights)
    back = jax_ep.combine_async(ep, d.tokens * 2, d.route, residual=o.dy)
    e = jax_ep.dispatch_wait(second)
    also = jax_ep.combine_async(ep, e.tokens, e.route, e.router_weights)
    again = jax_ep.combine(ep, between.tokens * 2, between.route)
    f = jax_ep.dispatch_wait(third)
    # In another order than they were begun.
    y_also = jax_ep.combine_wait(also)
    return d, e, f, y_between, jax_ep.combine_wait(back), y_also, again


def results(ep: Any, calls: Any, o: compare_transports.Operands) -> dict[str, Any]:
    """Both calls and both backward passes; whatever must not be read is NaN."""
    dispatch, combine = calls
    config = ep.config

    def forward(tokens: Any, weights: Any) -> Any:
        d = dispatch(ep, tokens, o.ids, weights)
        return (jax_ep.dequantize(d), d.router_weights), d

    _, pull_dispatch, d = jax.vjp(forward, o.dy, o.weights, has_aux=True)
    absent = d.src_info[:, 0] < 0
    rows = jnp.where(absent[:, None], jnp.nan, o.rows).astype(o.rows.dtype)
    row_weights = jnp.where(absent, jnp.nan, o.row_weights)
    weights = {"rank": row_weights, "source": o.weights, "none": None}[config.reduce]
    residual = o.residual if options.takes_residual(config) else None

    def back(rows: Any, weights: Any, residual: Any) -> Any:
        return combine(ep, rows, d.route, weights, residual=residual)

    y, pull_combine = jax.vjp(back, rows, weights, residual)
    dy = o.dy
    if config.reduce == "none":
        scale = jnp.arange(1, config.top_k + 1, dtype=dy.dtype)
        dy = dy[:, None] * scale[None, :, None]
    d_rows, d_weights, d_residual = pull_combine(dy)
    dx, dw = pull_dispatch((rows, d_rows[:, 0].astype(jnp.float32)))
    # XLA computes products with E and may sum in another order in another program.
    return {"exact": (d, y, d_rows, d_residual, dx, dw), "near": d_weights}
