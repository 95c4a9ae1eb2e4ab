"""dispatch and combine on global arrays, for pjit-style code.

Each function wraps its namesake in `jax.shard_map`; a rank's results are stacked on
dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep import _api, _checks, _split
from jax_ep._arrays import as_array
from jax_ep._pending import Pending
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from jax_ep._handle import EPHandle


def dispatch(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> Dispatched:
    """`jax_ep.dispatch` on global arrays.

    Args:
        ep: handle of `jax_ep.init`.
        tokens: `[ranks * n, H]` over all ranks of the mesh.
        topk_ids: int32 `[ranks * n, K]`.
        router_weights: float32 `[ranks * n, K]` or None.
        input_scale: as in `jax_ep.dispatch`, the same on every rank.
        spec: how dimension 0 lies on the mesh; default: over all its axes.

    Returns:
        A `Dispatched` of global arrays: every leaf is the ranks' leaves stacked on
        dimension 0.

    Raises:
        ValueError, TypeError: as `jax_ep.dispatch`, or `spec` does not shard dimension
            0 alone over axes that include those of `ep`.
    """
    given = (tokens, topk_ids, router_weights, input_scale)
    return _dispatch(_api.dispatch, "sharded.dispatch", ep, spec, *given)


def dispatch_async(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> Pending:
    """`jax_ep.dispatch_async` on global arrays; operands as those of `dispatch`."""
    function = "sharded.dispatch_async"
    given = (tokens, topk_ids, router_weights, input_scale)
    return _dispatch(_split.dispatch_async, function, ep, spec, *given)


def dispatch_wait(pending: Pending, *, spec: PartitionSpec | None = None) -> Dispatched:
    """`jax_ep.dispatch_wait` on a `Pending` of global arrays.

    Args:
        pending: what `dispatch_async` returned, or a `Pending` that left shard_map.
        spec: that of the `dispatch_async`.

    Returns:
        As `dispatch`.
    """
    return _wait(_dispatch_wait, "dispatch", pending, spec)


def _dispatch(
    called: Callable[..., Any],
    function: str,
    ep: EPHandle,
    spec: PartitionSpec | None,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None,
    input_scale: ArrayLike | None,
) -> Any:
    axes = _axes(function, ep, spec)
    operands: dict[str, Any] = {
        name: _checked(function, ep, axes, name, value)
        for name, value in (
            ("tokens", tokens),
            ("topk_ids", topk_ids),
            ("router_weights", router_weights),
        )
        if value is not None or name != "router_weights"
    }
    sharded_over = dict.fromkeys(operands, axes)
    if input_scale is not None:
        operands["input_scale"] = as_array(function, "input_scale", input_scale)
        sharded_over["input_scale"] = ()
    return _run(called, ep, axes, sharded_over, operands)


def combine(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """`jax_ep.combine` on global arrays.

    Args:
        ep: the handle that dispatched.
        expert_out: `[ranks * N, H]`.
        route: `d.route` of `jax_ep.sharded.dispatch`, or of a `Dispatched` that left
            shard_map.
        router_weights: float32 `[ranks * N]` or None.
        residual: `[ranks * n, H]` or None.
        spec: that of the `jax_ep.sharded.dispatch`; with another one rows would go to
            other tokens.

    Returns:
        `[ranks * n, H]`.

    Raises:
        ValueError, TypeError: as `jax_ep.combine` and `jax_ep.sharded.dispatch`.
    """
    given = (expert_out, route, router_weights, residual)
    return _combine(_api.combine, "sharded.combine", ep, spec, *given)


def combine_async(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    spec: PartitionSpec | None = None,
) -> Pending:
    """`jax_ep.combine_async` on global arrays; operands as those of `combine`."""
    function = "sharded.combine_async"
    given = (expert_out, route, router_weights, residual)
    return _combine(_split.combine_async, function, ep, spec, *given)


def combine_wait(pending: Pending, *, spec: PartitionSpec | None = None) -> jax.Array:
    """`jax_ep.combine_wait` on a `Pending` of global arrays.

    Args:
        pending: what `combine_async` returned, or a `Pending` that left shard_map.
        spec: that of the `combine_async`.

    Returns:
        As `combine`.
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
    axes = _axes(function, ep, spec)
    operands: dict[str, Any] = {
        name: _checked(function, ep, axes, name, value)
        for name, value in (
            ("expert_out", expert_out),
            ("router_weights", router_weights),
            ("residual", residual),
        )
        if value is not None or name == "expert_out"
    }
    operands["route"] = _checks.require_route(function, ep, route)
    return _run(called, ep, axes, dict.fromkeys(operands, axes), operands)


def dequantize(
    ep: EPHandle, d: Dispatched, *, spec: PartitionSpec | None = None
) -> jax.Array:
    """`jax_ep.dequantize` on a `Dispatched` of global arrays.

    Args:
        ep: the handle that dispatched.
        d: what `jax_ep.sharded.dispatch` returned, or a `Dispatched` that left
            shard_map.
        spec: that of the `jax_ep.sharded.dispatch`.

    Returns:
        `[ranks * N, H]` in the config's dtype.

    Raises:
        ValueError, TypeError: as `jax_ep.dequantize` and `jax_ep.sharded.dispatch`.
    """
    axes = _axes("sharded.dequantize", ep, spec)
    return _run(_dequantize, ep, axes, {"d": axes}, {"d": d})


def _dequantize(ep: EPHandle, d: Dispatched) -> jax.Array:
    return _api.dequantize(d)


def _dispatch_wait(ep: EPHandle, pending: Pending) -> Dispatched:
    return _split.dispatch_wait(pending)


def _combine_wait(ep: EPHandle, pending: Pending) -> jax.Array:
    return _split.combine_wait(pending)


def _wait(
    called: Callable[..., Any],
    kind: str,
    pending: Pending,
    spec: PartitionSpec | None,
) -> Any:
    function = f"sharded.{kind}_wait"
    ep = _split.handle_of(function, kind, pending)
    axes = _axes(function, ep, spec)
    return _run(called, ep, axes, {"pending": axes}, {"pending": pending})


def _axes(function: str, ep: EPHandle, spec: PartitionSpec | None) -> tuple[str, ...]:
    """The mesh axes that `spec` shards dimension 0 over: all that may be sharded."""
    _checks.require_open(function, ep)
    if _checks.in_scope(ep.axis_names):
        raise ValueError(
            f"jax_ep.{function}: must be called on global arrays, got a call inside "
            f"shard_map; call jax_ep.{function.removeprefix('sharded.')} there"
        )
    if spec is None:
        return ep.mesh.axis_names
    entries = tuple(spec) if isinstance(spec, PartitionSpec) else ()
    first, *rest = entries or (None,)
    # An entry that is neither a name nor a tuple of them leaves the layout open.
    axes = (first,) if isinstance(first, str) else ()
    axes = first if isinstance(first, tuple) else axes
    others_sharded = any(entry is not None for entry in rest)
    known = set(ep.axis_names) <= set(axes) <= set(ep.mesh.axis_names)
    if others_sharded or not known or len(set(axes)) < len(axes):
        raise ValueError(
            f"jax_ep.{function}: spec must be a PartitionSpec of dimension 0 alone, "
            f"over mesh axes that include {ep.axis_names}, got {spec!r}; leave it out "
            "to shard over all axes"
        )
    return axes


def _checked(
    function: str, ep: EPHandle, axes: tuple[str, ...], name: str, value: Any
) -> jax.Array:
    """`value` as an array that splits evenly over the ranks."""
    array = as_array(function, name, value)
    parts = int(np.prod([ep.mesh.shape[axis] for axis in axes]))
    if array.ndim == 0 or array.shape[0] == 0 or array.shape[0] % parts:
        of_dispatch = function.startswith("sharded.dispatch")
        remedy = "pad it, with ids of -1" if of_dispatch else "pass arrays of one call"
        raise ValueError(
            f"jax_ep.{function}: {name} must have a positive multiple of {parts} rows, "
            f"one part for each rank, got shape {array.shape}; {remedy}"
        )
    return array


def _run(
    function: Callable[..., Any],
    ep: EPHandle,
    axes: tuple[str, ...],
    sharded_over: dict[str, tuple[str, ...]],
    operands: dict[str, Any],
) -> Any:
    placed = {name: _place(ep, sharded_over[name], operands[name]) for name in operands}
    key = (function, axes, *operands)
    program = ep._programs.get(key)
    if program is None:
        specs = {
            name: PartitionSpec(*([over] if over else []))
            for name, over in sharded_over.items()
        }

        def body(operands: dict[str, Any]) -> Any:
            with _checks.told_of(f"sharded.{function.__name__.lstrip('_')}"):
                return function(ep, **operands)

        mapped = jax.shard_map(
            body, mesh=ep.mesh, in_specs=(specs,), out_specs=PartitionSpec(axes)
        )
        program = ep._programs[key] = jax.jit(mapped)
    return program(placed)


def _place(ep: EPHandle, axes: tuple[str, ...], tree: Any) -> Any:
    """Moves arrays to where the explicit axes of a mesh want them; others follow."""
    kinds = dict(zip(ep.mesh.axis_names, ep.mesh.axis_types, strict=True))
    explicit = tuple(axis for axis in axes if kinds[axis] == AxisType.Explicit)
    if not explicit:
        return tree
    sharding = NamedSharding(ep.mesh, PartitionSpec(explicit))
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)
