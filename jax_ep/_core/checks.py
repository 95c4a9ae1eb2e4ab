"""Checks the arguments of dispatch and combine, and where they are called."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType

from jax_ep._core import errors, operands, pytrees
from jax_ep._core.handle import EPHandle
from jax_ep._core.operands import Operand
from jax_ep._core.types import Route
from jax_ep._core.varying import vary_alike


def require_open(function: str, ep: EPHandle) -> None:
    """Raises unless `ep` is an open handle of this process."""
    if not isinstance(ep, EPHandle):
        raise errors.invalid(
            function,
            "ep must be the handle that jax_ep.init returned",
            type(ep).__name__,
            "call jax_ep.init once and pass its result",
            operand="ep",
            kind=TypeError,
        )
    if ep.closed:
        raise errors.unusable(
            function,
            "this handle is closed",
            "call jax_ep.init again and pass its result, or make the jax_ep.flax layer "
            "that holds it again",
        )
    if ep.forked:
        raise errors.unusable(
            function,
            "this handle belongs to the parent of this forked process",
            "start processes with spawn and call jax_ep.init in each",
        )


_ROUTE = tuple(
    Operand(f"route.{name}", shape, "int32", "pass d.route unchanged")
    for name, shape in (
        ("slot_of", "[n, K]"),
        ("row_of", "[R, n, K]"),
        ("row_slot", "[N]"),
        ("slot_counts", "[R]"),
        ("row_offsets", "[G + 1]"),
        ("expert_counts", "[G]"),
        ("src_info", "[N, 3]"),
        ("num_dropped", "[1]"),
        ("num_invalid", "[1]"),
    )
)
# A route of global arrays has other numbers of rows.
_ANY_ROUTE = tuple(row._replace(shapes="") for row in _ROUTE)


def require_route(function: str, ep: EPHandle, route: Any) -> Route:
    """Returns `route`; raises unless it came from a dispatch of `ep`, unchanged."""
    if not isinstance(route, Route):
        raise errors.invalid(
            function,
            "route must be the `route` of a Dispatched",
            type(route).__name__,
            "pass d.route of the dispatch",
            operand="route",
            kind=TypeError,
        )
    if type(route.key) is not int:
        raise errors.invalid(
            function,
            "route.key must be the int that dispatch set",
            repr(route.key),
            "pass d.route unchanged",
            operand="route",
            kind=TypeError,
        )
    if route.key != ep.key:
        raise errors.invalid(
            function,
            f"route must come from a dispatch of the same ep, {ep.key:#x}",
            f"a route of handle {route.key:#x}",
            f"pass the ep that dispatched ({pytrees.SAME_HANDLE})",
            operand="route",
        )
    given = {
        f"route.{field.name}": getattr(route, field.name)
        for field in dataclasses.fields(route)
        if field.name != "key"
    }
    operands.checked(function, _ANY_ROUTE, given)
    return route


def require_route_shapes(function: str, ep: EPHandle, route: Route) -> None:
    """Raises unless the tables have the shapes of a dispatch on one rank."""
    sizes = {"N": ep.recv_capacity, "K": ep.config.top_k, "R": ep.route_ranks}
    sizes |= {"G + 1": ep.groups + 1, "G": ep.groups}
    given = {row.names: getattr(route, row.names.split(".")[1]) for row in _ROUTE}
    operands.checked(function, _ROUTE, given, sizes)


def require_columns(function: str, ep: EPHandle, name: str, value: jax.Array) -> None:
    """Raises ValueError unless the columns of `[rows, columns]` can be sent."""
    multiple, most = ep.config.column_multiple, ep.config.hidden_size
    if not 0 < value.shape[1] <= most or value.shape[1] % multiple:
        raise errors.invalid(
            function,
            f"{name} must have at most hidden_size = {most} columns, a multiple of "
            f"{multiple}",
            value.shape,
            "pass rows with all their columns or a part of them",
            operand=name,
        )


def require_combinable(
    function: str, ep: EPHandle, router_weights: Any, residual: Any
) -> None:
    """Raises if combine is given an operand that the mode of `ep` excludes."""
    config = ep.config
    none = config.reduce == "none"
    for name, value, taken in (
        ("router_weights", router_weights, not none),
        ("residual", residual, not none and not config.skip_a2a),
    ):
        if value is not None and not taken:
            mode = 'reduce="none"' if none else "skip_a2a=True"
            raise errors.invalid(
                function,
                f"{name} must be None with {mode}",
                "an array",
                "apply it to the result"
                + (", after the psum" if config.skip_a2a else ""),
                operand=name,
            )


def require_scope(function: str, ep: EPHandle) -> None:
    """Raises unless the call is inside shard_map over the axes of `ep`."""
    names = ep.axis_names
    if not in_scope(names):
        layer = function == "moe_ffn"
        whole = "jax_ep.flax.MoE" if layer else f"jax_ep.sharded.{function}"
        raise errors.invalid(
            function,
            f"mesh axes {names} must be in scope",
            "a call outside jax.shard_map over them",
            "wrap the caller in jax.shard_map(..., mesh=ep.mesh), or use "
            f"{whole} on global arrays",
        )
    mesh = jax.sharding.get_abstract_mesh()
    if dict(mesh.shape) != dict(ep.mesh.shape) or mesh.axis_names != ep.mesh.axis_names:
        raise errors.invalid(
            function,
            "must be called inside jax.shard_map over the mesh of ep, "
            f"{dict(ep.mesh.shape)}",
            dict(mesh.shape),
            "pass mesh=ep.mesh to jax.shard_map (a vmap axis is not a mesh axis)",
        )
    _check_manual(function, mesh)


@contextlib.contextmanager
def calling(function: str) -> Iterator[None]:
    """Names a call in profiles, and explains JAX's error about forward mode.

    Without jit, forward-mode differentiation fails in JAX's caches with a TypeError
    that does not mention differentiation.
    """
    try:
        with jax.named_scope(f"jax_ep.{function}"):
            yield
    except TypeError as error:
        if str(error) != "unhashable type: 'Unhashable'":
            raise
        raise errors.invalid(
            function,
            "must be differentiated in reverse mode",
            "forward mode (jax.jvp, jax.jacfwd)",
            "use jax.grad, jax.vjp or jax.jacrev",
            kind=TypeError,
        ) from error


def in_scope(names: tuple[str, ...]) -> bool:
    """Whether all these axes are bound in the current trace."""
    try:
        jax.lax.axis_size(names)
    except NameError:
        return False
    return True


def _check_manual(function: str, mesh: jax.sharding.AbstractMesh) -> None:
    left = {
        name: kind
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual and mesh.shape[name] > 1
    }
    if AxisType.Explicit in left.values():
        raise errors.invalid(
            function,
            "every mesh axis must be manual or automatic",
            f"explicit axes {list(left)}",
            "leave axis_names out of jax.shard_map",
        )
    if left:
        warnings.warn(
            f"jax_ep.{function}: every mesh axis should be manual, got automatic axes "
            f"{list(left)}, over which XLA gathers the operands; leave axis_names out "
            "of jax.shard_map",
            RuntimeWarning,
            stacklevel=5,
        )


def vary_together(ep: EPHandle, *trees: Any) -> Any:
    """Casts arrays to vary over the EP axes and every axis that any of them varies on.

    A custom call needs operands that vary over the same axes, and a reverse rule needs
    cotangents that vary as its inputs do; both hold once everything varies alike.
    Without check_vma arrays carry no such axes, and this changes nothing.
    """
    return vary_alike(ep.mesh.axis_names, frozenset(ep.axis_names), *trees)
