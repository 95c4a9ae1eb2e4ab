"""apply_experts on global arrays: which part of each array a rank gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jax_ep._core import context, errors, traces
from jax_ep._core.arrays import as_array, as_ids
from jax_ep._core.varying import all_gather, varying
from jax_ep._layers import apply, moe_checks
from jax_ep._layers.params import entry_axes, spec_axes
from jax_ep._ops import mapped
from jax_ep._setup.shared import shared_handle

FUNCTION = "sharded.apply_experts"


def run(
    fn: Callable[..., jax.Array],
    params: Any,
    arrays: Mapping[str, Any],
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None,
    spec: PartitionSpec | None,
    param_specs: Any,
    fsdp_axis: str | Sequence[str] | None,
    scatter_axis: str | None,
    transport: Any,
    input_scale: Any,
    chunks: int,
    config: Mapping[str, Any],
) -> apply.Results:
    """Runs a call of `jax_ep.sharded.apply_experts`, on global arrays.

    `arrays` are tokens, topk_ids and router_weights by name.
    """
    errors.require_type(
        FUNCTION,
        "fn",
        fn,
        Callable,
        "a function of params, rows, group_sizes and expert_of_row",
        "pass one that returns a row for each row",
    )
    apply.require_fn(FUNCTION, fn, ("params", *apply.ROWS))
    mesh = _mesh(mesh)
    context.require_usable(FUNCTION, mesh)
    ep_axes = _names("axis_name", axis_name, mesh)
    fsdp = () if fsdp_axis is None else _names("fsdp_axis", fsdp_axis, mesh, ep_axes)
    params = jax.tree.map(lambda leaf: as_array(FUNCTION, "params", leaf), params)
    specs = _param_specs(params, param_specs, mesh, ep_axes, fsdp, num_experts)
    arrays = {
        name: (as_ids if name == "topk_ids" else as_array)(FUNCTION, name, value)
        for name, value in arrays.items()
    }
    moe_checks.require_chunks(FUNCTION, chunks)
    given = apply.flattened(FUNCTION, *arrays.values(), chunks=1)
    model = {axis for each in jax.tree.leaves(specs) for axis in spec_axes(each)}
    model -= {*ep_axes, *fsdp}
    model |= set() if scatter_axis is None else {scatter_axis}
    spec = _leading_spec(spec, given.leading, mesh, ep_axes, scatter_axis, model)
    split = spec_axes(spec)
    n = math.prod(given.leading) // _size(mesh, split)
    most = -(-n // chunks)
    sizes = given.config | {"max_tokens_per_rank": most, "num_experts": num_experts}
    fields = apply.config_of(FUNCTION, sizes, config)
    apply.require_scatter(FUNCTION, mesh, ep_axes, scatter_axis, fields)
    with errors.told_of(FUNCTION, part=False):
        ep = shared_handle(mesh, ep_axes, fields, transport)
    shapes = {name: jax.numpy.shape(value) for name, value in arrays.items()}

    def body(operands: Any) -> apply.Results:
        own, tokens, topk_ids, router_weights, input_scale = operands
        own = jax.tree.map(partial(_gathered, fsdp), own, specs)
        with errors.told_of(FUNCTION, shapes):
            results = apply.applied(
                "apply_experts",
                ep,
                fn,
                apply.flattened("apply_experts", tokens, topk_ids, router_weights, 1),
                scatter_axis,
                input_scale,
                (own,),
            )
        _require_equal(results.y, mesh, split, scatter_axis)
        return results

    columns = [None] * (len(given.leading) - len(spec))
    counts = PartitionSpec(split)
    # Any, because the fields hold specs here, not arrays.
    whole: Any = PartitionSpec(*spec, *columns, scatter_axis), counts, counts
    outs = apply.Results(*whole)
    key: Any = (
        FUNCTION,
        fn,
        jax.tree.structure(params),
        tuple(jax.tree.leaves(specs)),
        spec,
        len(given.leading),
        fsdp,
        scatter_axis,
        input_scale is None,
    )
    if traces.is_tracing() and getattr(fn, "__closure__", ()) is not None:
        # fn may hold tracers, which must not outlive their trace.
        key = None
    return mapped.run_specs(
        body,
        ep,
        key,
        mesh.axis_names,
        (params, *arrays.values(), input_scale),
        (specs, spec, spec, spec, PartitionSpec()),
        outs,
    )


def _mesh(mesh: Any) -> Mesh:
    if mesh is None:
        mesh = context.concrete_mesh()
    errors.require_type(
        FUNCTION,
        "mesh",
        mesh,
        Mesh,
        "a jax.sharding.Mesh, or None under jax.set_mesh",
        "pass mesh= or set one",
    )
    return mesh


def _names(
    argument: str, given: Any, mesh: Mesh, others: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Returns mesh axes as a tuple; raises if one is unknown or in `others`."""
    names = (given,) if isinstance(given, str) else given
    known = [name for name in mesh.axis_names if name not in others]
    if (
        not isinstance(names, tuple | list)
        or not names
        or not all(errors.is_one_of(name, known) for name in names)
        or len(set(names)) < len(names)
    ):
        raise errors.invalid(
            FUNCTION,
            f"{argument} must be a mesh axis of {known}, or a tuple of distinct ones",
            errors.brief(given),
            "name the axes as the mesh does",
        )
    return tuple(names)


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _is_spec(value: Any) -> bool:
    # Other entries do not determine the layout.
    free = PartitionSpec.UNCONSTRAINED
    return isinstance(value, PartitionSpec) and free not in tuple(value)


def _param_specs(
    params: Any,
    given: Any,
    mesh: Mesh,
    ep_axes: tuple[str, ...],
    fsdp: tuple[str, ...],
    num_experts: int,
) -> Any:
    """Returns the spec of each leaf of `params`, checked."""
    if given is None:
        wide = PartitionSpec(ep_axes, fsdp) if fsdp else PartitionSpec(ep_axes)
        specs = jax.tree.map(
            lambda leaf: wide if leaf.ndim > 2 else PartitionSpec(ep_axes), params
        )
    else:
        try:
            specs = jax.tree.map(
                lambda spec, part: jax.tree.map(lambda _: spec, part),
                given,
                params,
                is_leaf=_is_spec,
            )
        except (ValueError, TypeError) as error:
            raise errors.invalid(
                FUNCTION,
                "param_specs must have the structure of params, or of its upper part",
                jax.tree.structure(given, is_leaf=_is_spec),
                f"give each of {jax.tree.structure(params)} a PartitionSpec",
            ) from error

    def check(path: Any, leaf: jax.Array, spec: Any) -> None:
        name = "params" + jax.tree_util.keystr(path)
        axes = spec_axes(spec) if _is_spec(spec) else ()
        fits = _is_spec(spec) and len(spec) <= leaf.ndim
        if not fits or len(set(axes)) < len(axes) or set(axes) - set(mesh.axis_names):
            raise errors.invalid(
                FUNCTION,
                f"the spec of {name} {leaf.shape} must be a PartitionSpec of at most "
                f"{leaf.ndim} entries over axes of {mesh.axis_names}, each once",
                spec,
                "correct it in param_specs",
            )
        if given is None and leaf.shape[:1] != (num_experts,):
            raise errors.invalid(
                FUNCTION,
                f"{name} must have num_experts = {num_experts} on dimension 0",
                leaf.shape,
                "say with param_specs how leaves of other shapes are sharded",
            )
        for dim, entry in enumerate(spec):
            parts = _size(mesh, entry_axes(entry))
            if leaf.shape[dim] % parts:
                raise errors.invalid(
                    FUNCTION,
                    f"dimension {dim} of {name} must be a multiple of {parts}, the "
                    f"size of {entry_axes(entry)}",
                    leaf.shape,
                    "pad it, or shard another dimension with param_specs",
                )
            inner = entry_axes(entry)
            whole = [axis for axis in inner if axis not in fsdp]
            if tuple(inner[: len(whole)]) != tuple(whole):
                raise errors.invalid(
                    FUNCTION,
                    f"axes of fsdp_axis must come last in an entry of the spec of "
                    f"{name}",
                    spec,
                    "put them after the other axes, so that they can be gathered",
                )

    jax.tree_util.tree_map_with_path(check, params, specs)
    return specs


def _gathered(fsdp: tuple[str, ...], leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns a leaf without its split over the fsdp axes."""
    for dim, entry in enumerate(spec):
        axes = tuple(axis for axis in entry_axes(entry) if axis in fsdp)
        leaf = all_gather(leaf, axes, dim)
    return leaf


def _leading_spec(
    spec: Any,
    leading: tuple[int, ...],
    mesh: Mesh,
    ep_axes: tuple[str, ...],
    scatter_axis: str | None,
    model: set[str],
) -> PartitionSpec:
    """Returns the spec of the leading dimensions of tokens, checked."""
    if spec is None:
        names = traces.unmapped(mesh.axis_names)
        names = tuple(name for name in names if name not in model)
        spec = PartitionSpec(names)
    axes = spec_axes(spec) if _is_spec(spec) else ()
    entries = list(spec) if _is_spec(spec) else []
    while entries and not entry_axes(entries[-1]):
        entries.pop()
    if (
        not _is_spec(spec)
        or len(entries) > len(leading)
        or not set(ep_axes) <= set(axes) <= set(mesh.axis_names)
        or len(set(axes)) < len(axes)
        or scatter_axis in axes
    ):
        raise errors.invalid(
            FUNCTION,
            f"spec must shard the {len(leading)} leading dimensions of tokens over "
            f"mesh axes that include {ep_axes} and not scatter_axis, each once",
            errors.brief(spec),
            "leave it out to shard dimension 0",
        )
    for size, entry in zip(leading, entries, strict=False):
        parts = _size(mesh, entry_axes(entry))
        if size == 0 or size % parts:
            raise errors.invalid(
                FUNCTION,
                f"leading dimensions of tokens must divide over {spec}",
                f"{size} for {parts} ranks in {leading}",
                "pad the tokens and give the padding ids of -1",
            )
    return PartitionSpec(*entries)


def _require_equal(
    y: jax.Array, mesh: Mesh, split: Sequence[str], scatter_axis: str | None
) -> None:
    """Raises if `y` differs along axes that tokens are not split over."""
    extra = varying(y) - {*split, scatter_axis}
    extra = [name for name in mesh.axis_names if name in extra]
    if extra:
        raise errors.invalid(
            FUNCTION,
            f"fn must return rows that are equal along {extra}, which tokens are not "
            "split over",
            "rows that differ",
            f"sum them there with jax.lax.psum, or pass scatter_axis={extra[0]!r}",
        )
