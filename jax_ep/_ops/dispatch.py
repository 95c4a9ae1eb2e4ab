"""Differentiable dispatch and combine over a transport.

Four functions of a rank's arrays, each with a reverse rule made of the others, so that
any order of derivative works and every exchange after the first reuses `route`:

    _dispatch         routes, then sends     its transpose is  _return_rows
    _send_cached      sends along a route    its transpose is  _return_rows
    _return_rows      sums rows back         its transpose is  _send_cached
    _combine          weighted sum of rows   its rule uses     _send_cached
                      (in `_ops.combine`)

What users' traces and the rules call are `dispatch`, `combine`, `send_cached` and
`return_rows`, which chain the calls of a handle (`_ops.ordering`) around these four.

With i = row(t, k): dx[t] = sum_k drow(t,k) and dw[t,k] = dwrow(i), where drow of a
quantised dispatch is that of grad_port.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax

from jax_ep._core import checks
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, Route
from jax_ep._ops import ordering
from jax_ep._ops.ordering import Token
from jax_ep._ops.remat import named_dispatch
from jax_ep._transport import collective, p2p

# Rows or tokens and weights, and from a chained transport what comes next goes after.
Sent = tuple[Any, ...]

_TRANSPORTS = {"collective": collective, "p2p": p2p, "shmem": p2p}


def transport_of(ep: EPHandle) -> ModuleType:
    """The module that exchanges for `ep`: dispatch, dispatch_cached and combine."""
    # Where nothing is exchanged the steps alone are left.
    return collective if ep.config.skip_a2a else _TRANSPORTS[ep.transport]


def split_transport_of(ep: EPHandle) -> ModuleType:
    """As `transport_of`, for calls in halves."""
    return collective if ep.config.overlap == "copy" else transport_of(ep)


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
    after = ordering.before(ep, tokens, given)
    d = _dispatch(ep, weighted, tokens, topk_ids, router_weights, input_scale, after)
    ordering.passed(ep, (d.num_dropped,))
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
    body = refusing_vmap("dispatch", partial(transport_of(ep).dispatch, ep))
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
    # Of a rule that is traced later than the call that it belongs to.
    checks.require_open("combine", ep)
    after = ordering.before(ep, tokens, given)
    sent = _send_cached(ep, route, tokens, weights, after)
    ordering.passed(ep, sent[2:])
    return sent


@own_rule(0)
def _send_cached(
    ep: EPHandle,
    route: Route,
    tokens: jax.Array,
    weights: jax.Array | None,
    after: Token,
) -> Sent:
    body = refusing_vmap("combine", partial(transport_of(ep).dispatch_cached, ep))
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
    checks.require_open("dispatch", ep)
    after = ordering.before(ep, rows, given)
    returned = _return_rows(ep, route, rows, row_weights, after)
    ordering.passed(ep, returned[2:])
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
        return transport_of(ep).combine(
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
