"""Exchanges that reuse a route: the building blocks of reverse rules, and of `route=`.

`dispatch_cached` and `return_rows` are each other's transposes, so derivatives of any
order work, and only the first exchange routes. The transpose of a dispatch is
`return_rows`; the reverse rule of a combine uses `dispatch_cached`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import tables
from jax_ep._ops import options
from jax_ep._ops.ordering import OrderedCall
from jax_ep._ops.remat import ROWS_NAME
from jax_ep._transport import transport_of
from jax_ep._transport.base import CombineInputs, Token, Wire

# Rows or tokens, and their weights.
Weighted = tuple[jax.Array, jax.Array | None]


class _Sending(NamedTuple):
    """How to send tokens along a route: the format, and the transport's `zero_tail`."""

    wire: str
    zero_tail: bool


def dispatch_cached(
    ep: EPHandle,
    route: Route,
    tokens: jax.Array,
    weights: jax.Array | None,
    zero_tail: bool = True,
) -> Weighted:
    """Sends tokens `[n, H]` and weights `[n, K]` along `route`, for a reverse rule.

    The tokens are sent in `grad_format`. The results are rows `[N, H]` and their
    weights `[N]`. Without `zero_tail`, rows past the last group may hold anything.
    """
    # With padding it is not known here which rows without a token are past the last
    # group.
    zero_tail = zero_tail or ep.config.expert_alignment > 1
    static = _Sending(ep.config.grad_wire_format, zero_tail)
    return _DISPATCH_CACHED(ep, (route, tokens, weights), static)


def dispatch_unchanged(
    ep: EPHandle, route: Route, tokens: jax.Array, weights: jax.Array | None
) -> Weighted:
    """Sends like `dispatch_cached`, but the tokens' own bits, whatever the formats."""
    return _DISPATCH_UNCHANGED(
        ep, (route, tokens, weights), _Sending("bf16", zero_tail=True)
    )


def return_rows(
    ep: EPHandle, route: Route, rows: jax.Array, router_weights: jax.Array | None
) -> Weighted:
    """Sums rows `[N, H]` back to tokens `[n, H]`; returns weights `[N]` as `[n, K]`."""
    return _RETURN(ep, (route, rows, router_weights), None)


def return_weights(ep: EPHandle, route: Route, router_weights: jax.Array) -> jax.Array:
    """Returns weights `[N]` as `[n, K]`, sent with rows of the fewest columns."""
    config = ep.config
    shape = (ep.recv_capacity, config.column_multiple)
    none = tables.zeros(router_weights, shape, config.dtype)
    weights = return_rows(ep, route, none, router_weights)[1]
    assert weights is not None
    return weights


def _values(args: Any) -> jax.Array:
    return args[1]


def _route(ep: EPHandle, static: Any, args: Any, results: Any) -> Route:
    return args[0]


def _run_dispatch(
    ep: EPHandle, static: _Sending, args: Any, after: Token
) -> tuple[Weighted, Token]:
    route, tokens, weights = args
    (rows, router_weights), done = transport_of(ep).dispatch_cached(
        ep, route, tokens, weights, *static, after
    )
    return (options.with_shared(ep, rows, tokens), router_weights), done


def _transpose_dispatch(
    ep: EPHandle, static: _Sending, route: Route, cotangents: Any
) -> Any:
    return None, *return_rows(ep, route, *cotangents)


def _named(results: Weighted) -> Weighted:
    return jax.tree.map(lambda array: checkpoint_name(array, ROWS_NAME), results)


_DISPATCH_CACHED = OrderedCall(
    "combine", _run_dispatch, _route, _transpose_dispatch, like=_values
)
_DISPATCH_UNCHANGED = OrderedCall(
    "dispatch", _run_dispatch, _route, _transpose_dispatch, like=_values, named=_named
)


def _run_return(
    ep: EPHandle, static: None, args: Any, after: Token
) -> tuple[Weighted, Token]:
    route, rows, router_weights = args
    given = CombineInputs(rows, weight_grads=router_weights)
    inputs = options.summed(ep, route, given)
    wire = Wire(ep.config.grad_wire, by_entry=False, gradients=True)
    return transport_of(ep).combine(ep, inputs, wire, after)


def _transpose_return(ep: EPHandle, static: None, route: Route, cotangents: Any) -> Any:
    return None, *dispatch_cached(ep, route, *cotangents)


_RETURN = OrderedCall("dispatch", _run_return, _route, _transpose_return, like=_values)
