"""dispatch and combine on global arrays, for pjit-style code.

Each function wraps its namesake in `jax.shard_map`; a rank's results are stacked on
dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep import _api, _checks
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
    _checks.require_open("sharded.dispatch", ep)
    arrays = [_checks.as_array("sharded.dispatch", "tokens", tokens)]
    arrays.append(_checks.as_array("sharded.dispatch", "topk_ids", topk_ids))
    if router_weights is not None:
        weights = _checks.as_array("sharded.dispatch", "router_weights", router_weights)
        arrays.append(weights)
    rows = _row_spec("dispatch", ep, spec)
    specs = [rows] * len(arrays)
    names = ["tokens", "topk_ids", "router_weights"][: len(arrays)]
    if input_scale is not None:
        arrays.append(_checks.as_array("sharded.dispatch", "input_scale", input_scale))
        specs.append(PartitionSpec())
        names.append("input_scale")
    return _run(_api.dispatch, ep, rows, tuple(names), tuple(specs), arrays)


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
        spec: as in `jax_ep.sharded.dispatch`.

    Returns:
        `[ranks * n, H]`.

    Raises:
        ValueError, TypeError: as `jax_ep.combine` and `jax_ep.sharded.dispatch`.
    """
    _checks.require_open("sharded.combine", ep)
    arrays: list[Any] = [
        _checks.as_array("sharded.combine", "expert_out", expert_out),
        route,
    ]
    names = ["expert_out", "route"]
    for name, value in (("router_weights", router_weights), ("residual", residual)):
        if value is not None:
            arrays.append(_checks.as_array("sharded.combine", name, value))
            names.append(name)
    rows = _row_spec("combine", ep, spec)
    specs = (rows,) * len(arrays)
    return _run(_api.combine, ep, rows, tuple(names), specs, arrays)


def _row_spec(function: str, ep: EPHandle, spec: PartitionSpec | None) -> PartitionSpec:
    """`spec` reduced to dimension 0, which is all that may be sharded."""
    if spec is None:
        return PartitionSpec(ep.mesh.axis_names)
    first, *rest = tuple(spec) or (None,)
    axes = (first,) if isinstance(first, str) else tuple(first or ())
    if any(entry is not None for entry in rest) or not set(ep.axis_names) <= set(axes):
        raise ValueError(
            f"jax_ep.sharded.{function}: spec must shard dimension 0 alone, over axes "
            f"that include {ep.axis_names}, got {spec}"
        )
    return PartitionSpec(axes)


def _run(
    function: Callable[..., Any],
    ep: EPHandle,
    rows: PartitionSpec,
    names: tuple[str, ...],
    specs: tuple[PartitionSpec, ...],
    arrays: list[Any],
) -> Any:
    if AxisType.Explicit in ep.mesh.axis_types:
        # Explicit meshes check that operands lie as the specs say.
        arrays = [
            jax.tree.map(
                lambda leaf, spec=spec: jax.sharding.reshard(
                    leaf, NamedSharding(ep.mesh, spec)
                ),
                array,
            )
            for array, spec in zip(arrays, specs, strict=True)
        ]
    return _mapped(function, ep, rows, names, specs)(*arrays)


@lru_cache(maxsize=256)
def _mapped(
    function: Callable[..., Any],
    ep: EPHandle,
    rows: PartitionSpec,
    names: tuple[str, ...],
    specs: tuple[PartitionSpec, ...],
) -> Callable[..., Any]:
    def body(*operands: Any) -> Any:
        return function(ep, **dict(zip(names, operands, strict=True)))

    mapped = jax.shard_map(body, mesh=ep.mesh, in_specs=specs, out_specs=rows)
    return jax.jit(mapped)
