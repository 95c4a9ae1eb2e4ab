"""Differentiable halves of dispatch and combine.

The first half of a call ends with its exchange and yields what arrived, `held`, and
float zeros, `ports`. The second half makes the result of both. Its reverse rule turns
the result's cotangents into those of the ports, and the first half's takes them on: of
a dispatch they have the shapes of tokens and weights, of a combine that of the sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._core import options
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, Route
from jax_ep._ops import ordering
from jax_ep._ops.combine import combine_cotangents, combine_kept
from jax_ep._ops.dispatch import (
    dispatch_cotangents,
    own_rule,
    refusing_vmap,
    split_transport_of,
    transport_of,
)
from jax_ep._ops.ordering import Token
from jax_ep._ops.remat import OUT_NAME, named_dispatch


def _in_windows(ep: EPHandle) -> bool:
    # Halves that XLA exchanges share nothing with the handle's other calls.
    return split_transport_of(ep) is transport_of(ep)


def _before(ep: EPHandle, like: jax.Array, given: Token | None) -> Token:
    return ordering.before(ep, like, given) if _in_windows(ep) else ()


def _passed(ep: EPHandle, token: Token) -> None:
    if _in_windows(ep):
        ordering.passed(ep, token)


def dispatch_async(
    ep: EPHandle,
    weighted: bool,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
) -> tuple[Any, Any]:
    """The first half of `_ops.dispatch.dispatch`."""
    args = tokens, topk_ids, router_weights, input_scale
    return _chained_dispatch(ep, weighted, *args)[:2]


def _chained_dispatch(
    ep: EPHandle,
    weighted: bool,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    given: Token | None = None,
) -> tuple[Any, Any, Token]:
    after = _before(ep, tokens, given)
    args = tokens, topk_ids, router_weights, input_scale
    held, ports, done = _dispatch_async(ep, weighted, *args, after)
    _passed(ep, done)
    return held, ports, done


@own_rule(0, 1)
def _dispatch_async(
    ep: EPHandle,
    weighted: bool,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    after: Token,
) -> tuple[Any, Any, Token]:
    body = partial(split_transport_of(ep).dispatch_send, ep)
    sent, *done = refusing_vmap("dispatch_async", body)(
        tokens, topk_ids, router_weights, input_scale, *after
    )
    port = jnp.zeros_like(router_weights) if weighted else None
    return (sent, input_scale), (jnp.zeros_like(tokens), port), tuple(done)


def _dispatch_async_fwd(ep: EPHandle, weighted: bool, *args: Any) -> Any:
    return _chained_dispatch(ep, weighted, *args), None


def _dispatch_async_bwd(ep: EPHandle, weighted: bool, _: None, ct: Any) -> Any:
    dx, dw = ct[1]
    return dx, None, dw, None, None


_dispatch_async.defvjp(_dispatch_async_fwd, _dispatch_async_bwd)


def dispatch_wait(
    ep: EPHandle, held: Any, ports: Any, given: Token | None = None
) -> Dispatched:
    """The second half of `_ops.dispatch.dispatch`."""
    after = _before(ep, jax.tree.leaves(held)[0], given)
    d = _dispatch_wait(ep, held, ports, after)
    _passed(ep, (d.num_dropped,))
    return d


@own_rule(0)
def _dispatch_wait(ep: EPHandle, held: Any, ports: Any, after: Token) -> Dispatched:
    sent, input_scale = held
    body = partial(split_transport_of(ep).dispatch_place, ep)
    guarded = refusing_vmap("dispatch_wait", body)
    return named_dispatch(guarded(ports[0], input_scale, sent, *after))


def _dispatch_wait_fwd(ep: EPHandle, held: Any, ports: Any, after: Token) -> Any:
    # Named again, as in `_ops.dispatch`.
    d = named_dispatch(dispatch_wait(ep, held, ports, after))
    # None or (): whether the weights take gradients.
    return d, (d.route, None if ports[1] is None else ())


def _dispatch_wait_bwd(ep: EPHandle, kept: Any, ct: Dispatched) -> Any:
    route, weighted = kept
    return None, dispatch_cotangents(ep, weighted is not None, route, ct), None


_dispatch_wait.defvjp(_dispatch_wait_fwd, _dispatch_wait_bwd)


def combine_async(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
) -> tuple[Any, Any]:
    """The first half of `_ops.combine.combine`."""
    if ep.config.reduce == "none":
        route = options.by_entry(route)
    return _chained_combine(ep, route, expert_out, router_weights, residual)[:2]


def _chained_combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
    given: Token | None = None,
) -> tuple[Any, Any, Token]:
    after = _before(ep, expert_out, given)
    args = route, expert_out, router_weights, residual
    held, port, done = _combine_async(ep, *args, after)
    _passed(ep, done)
    return held, port, done


@own_rule(0)
def _combine_async(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    residual: jax.Array | None,
    after: Token,
) -> tuple[Any, Any, Token]:
    at_source = ep.config.reduce == "source"

    def body(
        route: Route, rows: jax.Array, weights: jax.Array | None, *after: jax.Array
    ) -> tuple[jax.Array, ...]:
        wire = ep.config.combine_wire
        return split_transport_of(ep).combine_send(
            ep, route, rows, weights, None, wire, at_source, *after
        )

    recv, *done = refusing_vmap("combine_async", body)(
        route, expert_out, None if at_source else router_weights, *after
    )
    shape = (route.slot_of.shape[0], expert_out.shape[1])
    held = (
        recv,
        route.slot_of,
        router_weights if at_source else None,
        residual,
        expert_out if ep.config.fused_shared_expert else None,
    )
    return held, jnp.zeros_like(expert_out, shape=shape), tuple(done)


def _combine_async_fwd(ep: EPHandle, route: Route, *args: Any) -> Any:
    return _chained_combine(ep, route, *args), combine_kept(route, *args[:3])


def _combine_async_bwd(ep: EPHandle, kept: Any, ct: Any) -> Any:
    return None, *combine_cotangents(ep, kept, ct[1]), None


_combine_async.defvjp(_combine_async_fwd, _combine_async_bwd)


def combine_wait(ep: EPHandle, held: Any, port: jax.Array) -> jax.Array:
    """The second half of `_ops.combine.combine`."""
    y, *_ = _chained_sum(ep, held, port)
    if ep.config.reduce != "none":
        return y
    top_k = ep.config.top_k
    return y.reshape(y.shape[0] // top_k, top_k, y.shape[1])


def _chained_sum(
    ep: EPHandle, held: Any, port: jax.Array, given: Token | None = None
) -> tuple[jax.Array, ...]:
    after = _before(ep, jax.tree.leaves(held)[0], given)
    out = _combine_wait(ep, held, port, after)
    _passed(ep, out[1:])
    return out


@own_rule(0)
def _combine_wait(
    ep: EPHandle, held: Any, port: jax.Array, after: Token
) -> tuple[jax.Array, ...]:
    def body(held: Any, port: jax.Array, *after: jax.Array) -> tuple[jax.Array, ...]:
        recv, slot_of, weights, residual, shared_rows = held
        rows = port if shared_rows is None else shared_rows
        y, _, *done = split_transport_of(ep).combine_sum(
            ep,
            recv,
            slot_of,
            rows,
            weights,
            residual,
            ep.config.combine_wire,
            ep.config.reduce == "source",
            *after,
        )
        return y, *done

    guarded = refusing_vmap("combine_wait", body)
    return checkpoint_name(guarded(held, port, *after), OUT_NAME)


def _combine_wait_fwd(ep: EPHandle, held: Any, port: jax.Array, after: Token) -> Any:
    return checkpoint_name(_chained_sum(ep, held, port, after), OUT_NAME), None


def _combine_wait_bwd(ep: EPHandle, _: None, ct: Any) -> Any:
    return None, ct[0], None


_combine_wait.defvjp(_combine_wait_fwd, _combine_wait_bwd)
