"""dispatch and combine on global arrays, for pjit-style code.

Each function wraps the one of the same name in `jax.shard_map`; the results of all
ranks are stacked on dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_ep._core import checks
from jax_ep._core.arrays import as_array
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import CallKind
from jax_ep._core.types import Dispatched, Route
from jax_ep._ops import combine as combining
from jax_ep._ops import dequantize as dequantizing
from jax_ep._ops import dispatch as dispatching
from jax_ep._ops import mapped
from jax_ep._ops import pending as pendings
from jax_ep._ops.pending import Pending


def dispatch(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike | None = None,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    route: Route | None = None,
    spec: PartitionSpec | None = None,
) -> Dispatched:
    """Runs `jax_ep.dispatch` on global arrays.

    Args:
        ep: handle of `jax_ep.init`.
        tokens: `[ranks * n, H]` over all ranks of the mesh; with `route` also fewer
            columns.
        topk_ids: int32 `[ranks * n, K]`; None with `route`.
        router_weights: float32 `[ranks * n, K]` or None.
        input_scale: as in `jax_ep.dispatch`, the same on every rank.
        route: `d.route` of an earlier dispatch, as in `jax_ep.dispatch`, or None.
        spec: sharding of dimension 0; None shards it over all axes of the mesh.

    Returns:
        A `Dispatched` of global arrays, each with the ranks' arrays stacked on
        dimension 0.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.dispatch`, or if `spec` does
            not shard only dimension 0, over axes that include those of `ep`.
    """
    given = (tokens, topk_ids, router_weights, input_scale, route)
    return _dispatch(dispatching.dispatch, "sharded.dispatch", ep, spec, *given)


def dispatch_async(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> Pending:
    """Runs `jax_ep.dispatch_async` on global arrays.

    Args:
        ep: handle of `jax_ep.init`.
        tokens: `[ranks * n, H]` over all ranks of the mesh.
        topk_ids: int32 `[ranks * n, K]`.
        router_weights: float32 `[ranks * n, K]` or None.
        input_scale: as in `jax_ep.dispatch`, the same on every rank.
        spec: as in `dispatch`.

    Returns:
        A `Pending` for `dispatch_wait`.

    Raises:
        ValueError, TypeError: for the reasons of `dispatch`.
    """
    function = "sharded.dispatch_async"
    given = (tokens, topk_ids, router_weights, input_scale)
    return _dispatch(dispatching.dispatch_async, function, ep, spec, *given)


def dispatch_wait(pending: Pending, *, spec: PartitionSpec | None = None) -> Dispatched:
    """Runs `jax_ep.dispatch_wait` on a `Pending` of global arrays.

    Args:
        pending: result of `dispatch_async`, or a `Pending` that left shard_map.
        spec: the one passed to `dispatch_async`.

    Returns:
        A `Dispatched`, as `dispatch` returns it.

    Raises:
        ValueError, TypeError: `pending` is not a `Pending` of a dispatch, or its handle
            is closed; or `spec` differs.
    """
    return _wait(_dispatch_wait, "dispatch", pending, spec)


def _dispatch(
    called: Callable[..., Any],
    function: str,
    ep: EPHandle,
    spec: PartitionSpec | None,
    tokens: ArrayLike,
    topk_ids: ArrayLike | None,
    router_weights: ArrayLike | None,
    input_scale: ArrayLike | None,
    route: Route | None = None,
) -> Any:
    axes = mapped.axes_of(function, ep, spec)
    operands: dict[str, Any] = {
        name: mapped.checked(function, ep, axes, name, value)
        for name, value in (
            ("tokens", tokens),
            ("topk_ids", topk_ids),
            ("router_weights", router_weights),
        )
        if value is not None or (name != "router_weights" and route is None)
    }
    if route is not None:
        operands["route"] = checks.require_route(function, ep, route)
    sharded_over = dict.fromkeys(operands, axes)
    if input_scale is not None:
        operands["input_scale"] = as_array(function, "input_scale", input_scale)
        sharded_over["input_scale"] = ()
    return mapped.run(called, ep, axes, sharded_over, operands)


def combine(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """Runs `jax_ep.combine` on global arrays.

    Args:
        ep: the handle that dispatched.
        expert_out: `[ranks * N, H']`, H' <= H, as in `jax_ep.combine`.
        route: `d.route` of `jax_ep.sharded.dispatch`, or of a `Dispatched` that left
            shard_map.
        router_weights: float32 `[ranks * N]`, usually `d.router_weights`, or
            `[ranks * n, K]` with `reduce="source"`. None means 1: without weights the
            sum is unweighted even after a weighted dispatch.
        residual: `[ranks * n, H']` or None.
        spec: the one passed to `jax_ep.sharded.dispatch`; with another one rows would
            go to other tokens.

    Returns:
        `[ranks * n, H']`; `[ranks * n, K, H']` with `reduce="none"`.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.combine` and
            `jax_ep.sharded.dispatch`.
    """
    given = (expert_out, route, router_weights, residual)
    return _combine(combining.combine, "sharded.combine", ep, spec, *given)


def combine_async(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> Pending:
    """Runs `jax_ep.combine_async` on global arrays.

    Args:
        ep: the handle that dispatched.
        expert_out: `[ranks * N, H']`, H' <= H, as in `jax_ep.combine`.
        route: as in `combine`.
        router_weights: as in `combine`.
        residual: `[ranks * n, H']` or None.
        spec: the one passed to the dispatch.

    Returns:
        A `Pending` for `combine_wait`.

    Raises:
        ValueError, TypeError: for the reasons of `combine`.
    """
    function = "sharded.combine_async"
    given = (expert_out, route, router_weights, residual)
    return _combine(combining.combine_async, function, ep, spec, *given)


def combine_wait(pending: Pending, *, spec: PartitionSpec | None = None) -> jax.Array:
    """Runs `jax_ep.combine_wait` on a `Pending` of global arrays.

    Args:
        pending: result of `combine_async`, or a `Pending` that left shard_map.
        spec: the one passed to `combine_async`.

    Returns:
        An array, as `combine` returns it.

    Raises:
        ValueError, TypeError: `pending` is not a `Pending` of a combine, or its handle
            is closed; or `spec` differs.
    """
    return _wait(_combine_wait, "combine", pending, spec)


def _combine(
    called: Callable[..., Any],
    function: str,
    ep: EPHandle,
    spec: PartitionSpec | None,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None,
    residual: ArrayLike | None,
) -> Any:
    axes = mapped.axes_of(function, ep, spec)
    operands: dict[str, Any] = {
        name: mapped.checked(function, ep, axes, name, value)
        for name, value in (
            ("expert_out", expert_out),
            ("router_weights", router_weights),
            ("residual", residual),
        )
        if value is not None or name == "expert_out"
    }
    operands["route"] = checks.require_route(function, ep, route)
    return mapped.run(called, ep, axes, dict.fromkeys(operands, axes), operands)


def dequantize(
    ep: EPHandle, d: Dispatched, *, spec: PartitionSpec | None = None
) -> jax.Array:
    """Runs `jax_ep.dequantize` on a `Dispatched` of global arrays.

    Args:
        ep: the handle that dispatched.
        d: result of `jax_ep.sharded.dispatch`, or a `Dispatched` that left shard_map.
        spec: the one passed to `jax_ep.sharded.dispatch`.

    Returns:
        `[ranks * N, H]` in the config's dtype.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.dequantize` and
            `jax_ep.sharded.dispatch`.
    """
    axes = mapped.axes_of("sharded.dequantize", ep, spec)
    return mapped.run(_dequantize, ep, axes, {"d": axes}, {"d": d})


def _dequantize(ep: EPHandle, d: Dispatched) -> jax.Array:
    return dequantizing.dequantize(d)


def _dispatch_wait(ep: EPHandle, pending: Pending) -> Dispatched:
    return dispatching.dispatch_wait(pending)


def _combine_wait(ep: EPHandle, pending: Pending) -> jax.Array:
    return combining.combine_wait(pending)


def _wait(
    called: Callable[..., Any],
    kind: CallKind,
    pending: Pending,
    spec: PartitionSpec | None,
) -> Any:
    function = f"sharded.{kind}_wait"
    ep = pendings.handle_of(function, kind, pending)
    axes = mapped.axes_of(function, ep, spec)
    return mapped.run(called, ep, axes, {"pending": axes}, {"pending": pending})
