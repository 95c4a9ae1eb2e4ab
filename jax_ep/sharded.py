"""dispatch, combine and apply_experts on global arrays, for pjit-style code.

Each function wraps the one of the same name in `jax.shard_map`; the results of all
ranks are stacked on dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_ep._core import calls, checks
from jax_ep._core.arrays import as_array
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import CallKind, Transport
from jax_ep._core.types import Dispatched, Route
from jax_ep._layers import apply_sharded
from jax_ep._ops import combine as combining
from jax_ep._ops import dequantize as dequantizing
from jax_ep._ops import dispatch as dispatching
from jax_ep._ops import mapped
from jax_ep._ops import pending as pendings
from jax_ep._ops.pending import Pending

_Params = TypeVar("_Params")


def dispatch(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike | None = None,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    token_scales: ArrayLike | None = None,
    route: Route | None = None,
    spec: PartitionSpec | None = None,
) -> Dispatched:
    """Runs `jax_ep.dispatch` on global arrays.

    Args:
        ep: handle from `jax_ep.init`.
        tokens: `[ranks * n, H]` over all ranks of the mesh. With `route` they may have
            fewer columns; with `token_scales` they are codes.
        topk_ids: int32 `[ranks * n, K]`; None with `route`.
        router_weights: float32 `[ranks * n, K]` or None.
        input_scale: as in `jax_ep.dispatch`, the same on every rank.
        token_scales: `[ranks * n, H / block]` or None, as in `jax_ep.dispatch`.
        route: `d.route` of an earlier dispatch, as in `jax_ep.dispatch`, or None.
        spec: sharding of dimension 0; None shards it over all axes of the mesh (except
            the `spmd_axis_name` of a `jax.vmap` around the call).

    Returns:
        A `Dispatched` of global arrays, each with the ranks' arrays stacked on
        dimension 0.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.dispatch`, or if `spec` shards
            another dimension than 0 or leaves out an axis of `ep`.
    """
    given = (tokens, topk_ids, router_weights, input_scale, token_scales, route)
    return _dispatch(dispatching.dispatch, "sharded.dispatch", ep, spec, *given)


def dispatch_async(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    token_scales: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> Pending:
    """Runs `jax_ep.dispatch_async` on global arrays.

    Args:
        ep: handle from `jax_ep.init`.
        tokens: `[ranks * n, H]` over all ranks of the mesh.
        topk_ids: int32 `[ranks * n, K]`.
        router_weights: float32 `[ranks * n, K]` or None.
        input_scale: as in `jax_ep.dispatch`, the same on every rank.
        token_scales: as in `dispatch`.
        spec: as in `dispatch`.

    Returns:
        A `Pending` for `dispatch_wait`.

    Raises:
        ValueError, TypeError: for the reasons of `dispatch`.
    """
    function = "sharded.dispatch_async"
    given = (tokens, topk_ids, router_weights, input_scale, token_scales)
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
    token_scales: ArrayLike | None,
    route: Route | None = None,
) -> Any:
    axes = mapped.axes_of(function, ep, spec)
    operands: dict[str, Any] = {
        name: mapped.checked(function, ep, axes, name, value)
        for name, value in (
            ("tokens", tokens),
            ("topk_ids", topk_ids),
            ("router_weights", router_weights),
            ("token_scales", token_scales),
        )
        if value is not None or (name in ("tokens", "topk_ids") and route is None)
    }
    if route is not None:
        operands["route"] = checks.require_route(function, ep, route)
    sharded_over = dict.fromkeys(operands, axes)
    if input_scale is not None:
        operands["input_scale"] = as_array(function, "input_scale", input_scale)
        sharded_over["input_scale"] = ()
    return mapped.run(called, ep, axes, sharded_over, operands)


@calls.explained("sharded.combine", combining.ARGUMENTS)
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
        spec: the one passed to `jax_ep.sharded.dispatch`; with another one, rows would
            go to the wrong tokens.

    Returns:
        `[ranks * n, H']`; `[ranks * n, K, H']` with `reduce="none"`.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.combine` and
            `jax_ep.sharded.dispatch`.
    """
    given = (expert_out, route, router_weights, residual)
    return _combine(combining.combine, "sharded.combine", ep, spec, *given)


@calls.explained("sharded.combine_async", combining.ARGUMENTS)
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


@calls.explained("sharded.dequantize", "pass the handle, then the Dispatched")
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


@overload
def apply_experts(
    fn: Callable[[_Params, jax.Array, jax.Array, jax.Array], jax.Array],
    params: _Params,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    param_specs: Any = None,
    fsdp_axis: str | Sequence[str] | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[False] = False,
    return_invalid: Literal[False] = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> jax.Array: ...
@overload
def apply_experts(
    fn: Callable[[_Params, jax.Array, jax.Array, jax.Array], jax.Array],
    params: _Params,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    param_specs: Any = None,
    fsdp_axis: str | Sequence[str] | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[True],
    return_invalid: Literal[False] = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def apply_experts(
    fn: Callable[[_Params, jax.Array, jax.Array, jax.Array], jax.Array],
    params: _Params,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    param_specs: Any = None,
    fsdp_axis: str | Sequence[str] | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[False] = False,
    return_invalid: Literal[True],
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def apply_experts(
    fn: Callable[[_Params, jax.Array, jax.Array, jax.Array], jax.Array],
    params: _Params,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    param_specs: Any = None,
    fsdp_axis: str | Sequence[str] | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[True],
    return_invalid: Literal[True],
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def apply_experts(
    fn: Callable[[_Params, jax.Array, jax.Array, jax.Array], jax.Array],
    params: _Params,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    param_specs: Any = None,
    fsdp_axis: str | Sequence[str] | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: bool = False,
    return_invalid: bool = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> jax.Array | tuple[jax.Array, ...]: ...
@calls.explained("sharded.apply_experts")
def apply_experts(
    fn: Callable[[_Params, jax.Array, jax.Array, jax.Array], jax.Array],
    params: _Params,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    param_specs: Any = None,
    fsdp_axis: str | Sequence[str] | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: bool = False,
    return_invalid: bool = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """Runs `jax_ep.apply_experts` on global arrays, with the experts' parameters.

    `fn` is called inside a `jax.shard_map` over the whole mesh, on the arrays of one
    rank: `fn(params, rows, group_sizes, expert_of_row)`. A leaf `[E, ...]` of `params`
    arrives there as this rank's `[L, ...]`. So you write the grouped matmuls of one
    rank, and need no `shard_map`::

        def swiglu(params, rows, group_sizes, expert_of_row):
            gate = jax.lax.ragged_dot(rows, params["wi_0"], group_sizes)
            up = jax.lax.ragged_dot(rows, params["wi_1"], group_sizes)
            return jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["wo"], group_sizes)

    Args:
        fn: a function of this rank's part of `params`, and of `rows` `[N, H]`,
            `group_sizes` `[G]` and `expert_of_row` `[N]` as `jax_ep.apply_experts`
            passes them. It returns `[N, H]`. Without `jax.jit` around the call it
            compiles once per function object, so do not pass a new lambda each time.
        params: a pytree of the experts' parameters, by default each `[E, ...]`.
        tokens: `[..., H]`, with at least one leading dimension.
        topk_ids: int32 `[..., K]`, as in `jax_ep.apply_experts`: ids outside [-1, E)
            count as -1, and `return_invalid` returns their number.
        router_weights: `[..., K]` of any float dtype.
        num_experts: E.
        axis_name: the EP axis, or a tuple of axes whose product is the group.
        mesh: a `jax.sharding.Mesh`, or None for the mesh of `jax.set_mesh`.
        spec: sharding of the leading dimensions of tokens, ids and weights, over axes
            that include those of the group. None splits dimension 0 over all axes
            except `scatter_axis` and those that only `param_specs` name.
        param_specs: a `PartitionSpec` for each leaf of `params`, or a pytree of them
            that is a prefix of `params`. `fn` gets the shards that these specs make,
            except that `fsdp_axis` is gathered. None means `P(axis_name)`, and with
            `fsdp_axis` `P(axis_name, fsdp_axis)` for leaves of 3 dimensions or more.
            Parameters that are not per expert need a spec: `P()` for a shared expert's.
        fsdp_axis: a mesh axis, or several, that the stored parameters are sharded over.
            Each leaf is gathered before `fn`, along the dimension that its spec shards
            over these axes, and its gradient is reduce-scattered, both in the leaf's
            dtype. With `jax.checkpoint` and `jax_ep.save_route` around the call, the
            backward pass gathers again instead of keeping gathered parameters.
        scatter_axis: as in `jax_ep.apply_experts`: `fn` returns partial sums over this
            axis, over which `param_specs` split the experts' matrices.
        transport: as in `jax_ep.init`.
        return_dropped: whether to return the numbers of dropped rows as well.
        return_invalid: whether to return the numbers of bad ids as well, last.
        input_scale: global scale of dispatch_format "nvfp4".
        chunks: as in `jax_ep.apply_experts`.
        **config: further fields of `jax_ep.EPConfig`, as in `jax_ep.apply_experts`.

    Returns:
        `[..., H]` in the dtype of the tokens, sharded as they are; with `scatter_axis`
        the last dimension is sharded over it, too. With `return_dropped` also int32
        `[ranks]`, the number of rows that each rank dropped, for the ranks that tokens
        are split over. With `return_invalid` also int32 `[ranks]`, the number of ids
        outside [-1, E) among each rank's tokens.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.apply_experts`; if a leaf or
            the tokens do not divide over their specs; if the call is inside shard_map;
            or if rows differ along an axis over which nothing is split or scattered.
    """
    results = apply_sharded.run(
        fn,
        params,
        {"tokens": tokens, "topk_ids": topk_ids, "router_weights": router_weights},
        num_experts=num_experts,
        axis_name=axis_name,
        mesh=mesh,
        spec=spec,
        param_specs=param_specs,
        fsdp_axis=fsdp_axis,
        scatter_axis=scatter_axis,
        transport=transport,
        input_scale=input_scale,
        chunks=chunks,
        config=config,
    )
    return results.asked(return_dropped, return_invalid)
