"""Differentiable dispatch and combine over a transport.

Four functions of a rank's arrays, each with a reverse rule made of the others, so that
any order of derivative works and every exchange after the first reuses `route`:

    _dispatch         routes, then sends     its transpose is  _return_rows
    _send_cached      sends along a route    its transpose is  _return_rows
    _return_rows      sums rows back         its transpose is  _send_cached
    _combine          weighted sum of rows   its rule uses     _send_cached

What users' traces and the rules call are `dispatch`, `combine`, `send_cached` and
`return_rows`, which chain the calls of a handle (`_chain`) around these four.

With x tokens, w weights, E expert rows and i = row(t, k):
    dispatch: dx[t] = sum_k drow(t,k), dw[t,k] = dwrow(i)
              (drow of a quantised dispatch is that of grad_port)
    combine:  dE[i] = w[i] dy[t(i)], dw[i] = <dy[t(i)], E[i]>, dresidual = dy
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _chain, _collective, _modes, _p2p, formats
from jax_ep._chain import Token
from jax_ep._names import OUT_NAME, named_dispatch
from jax_ep._native import cpu as native
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle

# Rows or tokens and weights, and from a chained transport what comes next goes after.
Sent = tuple[Any, ...]

# The least width of a row, in bytes, and where rows are quantised in elements.
_ROW_BYTES = native.ROW_ALIGN_BYTES
_NARROW = formats.block("fp8_block128")

_TRANSPORTS = {"collective": _collective, "p2p": _p2p}


def _transport(ep: EPHandle) -> ModuleType:
    """The module that exchanges for `ep`: dispatch, dispatch_cached and combine."""
    return _TRANSPORTS[ep.transport]


def own_rule(*static: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a `jax.custom_vjp` whose arguments `static` are not differentiated."""
    return partial(jax.custom_vjp, nondiff_argnums=static)


def refusing_vmap(function: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body`, with an error that names the remedy where it is batched."""
    guarded = jax.custom_batching.custom_vmap(body)

    @guarded.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise ValueError(
            f"jax_ep.{function}: must not be called under vmap, got a batch of "
            f"{axis_size}; fold the batch into the tokens dimension"
        )

    return guarded


def dispatch(
    ep: EPHandle,
    weighted: bool,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    given: Token | None = None,
) -> Dispatched:
    """As `jax_ep.dispatch`; `weighted` says whether the weights take gradients."""
    after = _chain.before(ep, tokens, given)
    d = _dispatch(ep, weighted, tokens, topk_ids, router_weights, input_scale, after)
    _chain.passed(ep, (d.num_dropped,))
    return d


@own_rule(0, 1)
def _dispatch(
    ep: EPHandle,
    weighted: bool,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    after: Token,
) -> Dispatched:
    body = refusing_vmap("dispatch", partial(_transport(ep).dispatch, ep))
    return named_dispatch(body(tokens, topk_ids, router_weights, input_scale, *after))


def _dispatch_fwd(ep: EPHandle, weighted: bool, *args: Any) -> Any:
    # Named again: names inside the nested rule do not reach the residuals.
    d = named_dispatch(dispatch(ep, weighted, *args))
    return d, d.route


def _dispatch_bwd(ep: EPHandle, weighted: bool, route: Route, ct: Dispatched) -> Any:
    dx, dw = dispatch_cotangents(ep, weighted, route, ct)
    return dx, None, dw, None, None


def dispatch_cotangents(
    ep: EPHandle, weighted: bool, route: Route, ct: Dispatched
) -> tuple[jax.Array, jax.Array | None]:
    """Those of the tokens and of their weights."""
    dweights = ct.router_weights if weighted else None
    drows = ct.tokens if ct.grad_port is None else ct.grad_port
    dx, dw, *_ = return_rows(ep, route, drows, dweights)
    return dx, dw


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def send_cached(
    ep: EPHandle,
    route: Route,
    tokens: jax.Array,
    weights: jax.Array | None,
    given: Token | None = None,
) -> Sent:
    """Tokens and their weights as rows along `route`."""
    after = _chain.before(ep, tokens, given)
    sent = _send_cached(ep, route, tokens, weights, after)
    _chain.passed(ep, sent[2:])
    return sent


@own_rule(0)
def _send_cached(
    ep: EPHandle,
    route: Route,
    tokens: jax.Array,
    weights: jax.Array | None,
    after: Token,
) -> Sent:
    body = refusing_vmap("combine", partial(_transport(ep).dispatch_cached, ep))
    return body(route, tokens, weights, *after)


def _send_cached_fwd(ep: EPHandle, route: Route, *args: Any) -> Any:
    return send_cached(ep, route, *args), route


def _send_cached_bwd(ep: EPHandle, route: Route, ct: Any) -> Any:
    drows, dweights, *_ = ct
    dtokens, dsent, *_ = return_rows(ep, route, drows, dweights)
    return None, dtokens, dsent, None


_send_cached.defvjp(_send_cached_fwd, _send_cached_bwd)


def return_rows(
    ep: EPHandle,
    route: Route,
    rows: jax.Array,
    row_weights: jax.Array | None,
    given: Token | None = None,
) -> Sent:
    """Rows summed back to their tokens, and the rows' weights beside them."""
    after = _chain.before(ep, rows, given)
    returned = _return_rows(ep, route, rows, row_weights, after)
    _chain.passed(ep, returned[2:])
    return returned


@own_rule(0)
def _return_rows(
    ep: EPHandle,
    route: Route,
    rows: jax.Array,
    row_weights: jax.Array | None,
    after: Token,
) -> Sent:
    def body(
        route: Route, rows: jax.Array, row_weights: jax.Array | None, *after: jax.Array
    ) -> Sent:
        return _transport(ep).combine(
            ep, route, rows, None, row_weights, None, ep.config.grad_wire, *after
        )

    return refusing_vmap("dispatch", body)(route, rows, row_weights, *after)


def _return_rows_fwd(ep: EPHandle, route: Route, *args: Any) -> Any:
    return return_rows(ep, route, *args), route


def _return_rows_bwd(ep: EPHandle, route: Route, ct: Any) -> Any:
    dtokens, dweights, *_ = ct
    drows, dreturned, *_ = send_cached(ep, route, dtokens, dweights)
    return None, drows, dreturned, None


_return_rows.defvjp(_return_rows_fwd, _return_rows_bwd)


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
    after = _chain.before(ep, expert_out, given)
    out = _combine(ep, route, expert_out, router_weights, residual, after)
    _chain.passed(ep, out[1:])
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
        y, _, *done = _transport(ep).combine(
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
