"""Runs per-rank functions on global arrays, with `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep._core import checks, context, errors, traces
from jax_ep._core.arrays import as_array, as_ids
from jax_ep._core.handle import EPHandle
from jax_ep._ops import ordering
from jax_ep._transport.base import Token

# The most programs that a handle keeps. A function made anew for each call gets a
# program of its own each time, and these must not accumulate.
_MOST_PROGRAMS = 256


def axes_of(function: str, ep: EPHandle, spec: PartitionSpec | None) -> tuple[str, ...]:
    """Returns the mesh axes that `spec` shards dimension 0 over.

    Raises:
        ValueError: the call is inside shard_map, `ep` is closed, or `spec` shards
            another dimension or leaves an axis of `ep` out.
    """
    checks.require_open(function, ep)
    context.require_usable(function, ep.mesh)
    if spec is None:
        return traces.unmapped(ep.mesh.axis_names)
    entries = tuple(spec) if isinstance(spec, PartitionSpec) else ()
    first, *rest = entries or (None,)
    # Other entries, such as UNCONSTRAINED, do not determine the layout.
    axes = (first,) if isinstance(first, str) else ()
    axes = first if isinstance(first, tuple) else axes
    others_sharded = any(entry is not None for entry in rest)
    known = set(ep.axis_names) <= set(axes) <= set(ep.mesh.axis_names)
    if others_sharded or not known or len(set(axes)) < len(axes):
        raise ValueError(
            f"jax_ep.{function}: spec must be a PartitionSpec that shards only "
            f"dimension 0, over mesh axes that include {ep.axis_names}, got {spec!r}; "
            "leave it out to shard over all axes"
        )
    return axes


def checked(
    function: str, ep: EPHandle, axes: tuple[str, ...], name: str, value: Any
) -> jax.Array:
    """Returns `value` as an array that splits evenly over the ranks.

    Raises:
        ValueError: it does not split evenly, or has more than 2 dimensions.
    """
    convert = as_ids if name == "topk_ids" else as_array
    array = convert(function, name, value)
    parts = _parts(ep, axes)
    if array.ndim > 2:
        raise ValueError(
            f"jax_ep.{function}: {name} must have at most 2 dimensions, the first of "
            f"the rows of all ranks, got shape {array.shape}; pass "
            f"{name}.reshape(-1, {array.shape[-1]})"
        )
    if array.ndim == 0 or array.shape[0] == 0 or array.shape[0] % parts:
        of_dispatch = function.startswith("sharded.dispatch")
        remedy = "pad it, with ids of -1" if of_dispatch else "pass arrays of one call"
        raise ValueError(
            f"jax_ep.{function}: {name} must have a positive multiple of {parts} rows, "
            f"one part for each rank, got shape {array.shape}; {remedy}"
        )
    return array


def run(
    function: Callable[..., Any],
    ep: EPHandle,
    axes: tuple[str, ...],
    sharded_over: dict[str, tuple[str, ...]],
    operands: dict[str, Any],
) -> Any:
    """Runs `function(ep, **operands)` on every rank; stacks results on dimension 0.

    Args:
        function: a function of the arrays of one rank.
        ep: the handle.
        axes: mesh axes that dimension 0 of the results is sharded over.
        sharded_over: the same for dimension 0 of each operand, by name.
        operands: global arrays, by name.
    """
    public = f"sharded.{function.__name__.lstrip('_')}"
    specs = {
        name: PartitionSpec(*([over] if over else []))
        for name, over in sharded_over.items()
    }

    def body(operands: dict[str, Any]) -> Any:
        with errors.told_of(public, _whole(ep, sharded_over, operands)):
            return function(ep, **operands)

    key = (function, axes, *operands)
    return run_specs(body, ep, key, axes, operands, specs, PartitionSpec(axes))


def run_specs(
    body: Callable[[Any], Any],
    ep: EPHandle,
    key: Any,
    axes: tuple[str, ...],
    operands: Any,
    in_specs: Any,
    out_specs: Any,
) -> Any:
    """Runs `body(operands)` on every rank, after the handle's earlier calls.

    Args:
        body: a function of the operands of one rank.
        ep: the handle.
        key: identifies `body` and the specs among the handle's programs; None if the
            program is for this call only.
        axes: mesh axes of the token that orders calls; the body varies over no others.
        operands: a pytree of global arrays.
        in_specs: their specs, a prefix of that pytree.
        out_specs: the specs of the results.
    """
    # The axes of pipeline stages around the call, over which `vmap` splits arrays.
    stages = traces.spmd_axis_names()
    axes = traces.unmapped(axes)
    placed = _place(ep, in_specs, operands)
    after = ordering.before_mapped(ep, _parts(ep, axes))
    rows = PartitionSpec(axes)

    def per_rank(operands: Any, after: Token) -> Any:
        return ordering.mapped(ep, after, lambda: body(operands))

    def make() -> Callable[..., Any]:
        mapped = jax.shard_map(
            per_rank,
            mesh=ep.mesh,
            in_specs=(in_specs, rows),
            out_specs=(out_specs, rows),
            # JAX batches a shard_map over a mesh axis only without this check.
            check_vma=not stages,
        )
        return jax.jit(context.under(ep.mesh, mapped))

    program = make() if key is None else _program(ep, (key, bool(after), stages), make)
    result, last = program(placed, _place(ep, rows, after))
    ordering.passed_mapped(ep, last)
    return result


def _program(
    ep: EPHandle, key: Any, make: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns the handle's program of that key, so that eager calls compile once."""
    programs = ep._programs
    try:
        found = programs.get(key)
    except TypeError:  # the key holds a function that cannot be hashed
        return make()
    if found is None:
        if len(programs) >= _MOST_PROGRAMS:
            programs.pop(next(iter(programs)), None)
        found = programs[key] = make()
    return found


def _whole(
    ep: EPHandle, sharded_over: dict[str, tuple[str, ...]], operands: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Returns the global shapes of the operands that are arrays, by name."""
    shapes = {}
    for name, part in operands.items():
        if isinstance(part, jax.Array):
            rows = [size * _parts(ep, sharded_over[name]) for size in part.shape[:1]]
            shapes[name] = (*rows, *part.shape[1:])
    return shapes


def _parts(ep: EPHandle, axes: tuple[str, ...]) -> int:
    """Returns the number of ranks that dimension 0 is split over."""
    return int(np.prod([ep.mesh.shape[axis] for axis in axes]))


def _place(ep: EPHandle, specs: Any, tree: Any) -> Any:
    """Reshards arrays over explicit mesh axes, as shard_map requires for those."""
    kinds = dict(zip(ep.mesh.axis_names, ep.mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in kinds.items() if kind == AxisType.Explicit}

    def entry_of(entry: Any) -> Any:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(axis for axis in axes if axis in explicit) or None

    def place(spec: PartitionSpec, tree: Any) -> Any:
        sharding = NamedSharding(ep.mesh, PartitionSpec(*map(entry_of, spec)))
        return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)

    if not explicit:
        return tree
    return jax.tree.map(
        place, specs, tree, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
