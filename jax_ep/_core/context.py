"""The mesh that a caller has set, where what is called has a mesh of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, Mesh

Args = ParamSpec("Args")
Result = TypeVar("Result")


def concrete_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`, also inside traced functions; None without one."""
    from jax._src import mesh as jax_mesh

    # In public there is jax.sharding.get_mesh alone, which refuses inside jax.jit.
    getter = getattr(jax_mesh, "get_concrete_mesh", None) or jax.sharding.get_mesh
    mesh = getter()
    return None if mesh is None or mesh.empty else mesh


def require_usable(function: str, mesh: Mesh) -> None:
    """Raises unless a `shard_map` over `mesh` can run under the mesh that is set.

    Raises:
        ValueError: it is another mesh, of explicit axes or of other devices; or the
            call is inside shard_map.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        call = function.removeprefix("sharded.")
        inside = "moe_ffn" if call == function else call
        raise ValueError(
            f"jax_ep.{function}: must be called on global arrays, got a call inside "
            f"jax.shard_map over {context.manual_axes}; call jax_ep.{inside} there, or "
            "this outside"
        )
    if context.empty or context == mesh.abstract_mesh:
        return
    remedy = "call it under jax.set_mesh of the mesh that ep or the layer was made for"
    explicit = [
        (name, found)
        for name, found in (("set", context), ("own", mesh))
        if AxisType.Explicit in found.axis_types
    ]
    if explicit:
        name, found = explicit[0]
        raise ValueError(
            f"jax_ep.{function}: the mesh of jax.set_mesh must be {mesh.axis_names}, "
            f"which this was made for, or both must have automatic axes alone, got "
            f"{context.axis_names} and explicit axes in the mesh that is {name}, "
            f"{found.axis_types}; {remedy}"
        )
    # Traced for a mesh without devices, it is XLA who compares them.
    there = concrete_mesh()
    if there is not None and list(there.devices.flat) != list(mesh.devices.flat):
        raise ValueError(
            f"jax_ep.{function}: the mesh of jax.set_mesh must have the devices of the "
            "mesh that this was made for, in the same order, got "
            f"{[device.id for device in there.devices.flat]} for "
            f"{[device.id for device in mesh.devices.flat]}; {remedy}"
        )


def under(mesh: Mesh, mapped: Callable[Args, Result]) -> Callable[Args, Result]:
    """`mapped`, a `shard_map` over `mesh`, to be called under whatever mesh is set."""

    @functools.wraps(mapped)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        context = jax.sharding.get_abstract_mesh()
        if context.empty or context == mesh.abstract_mesh:
            return mapped(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return mapped(*args, **kwargs)

    return call
