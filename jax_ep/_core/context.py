"""Reconciles the mesh of `jax.set_mesh` with the mesh that a handle was made for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, Mesh

from jax_ep._core import errors

Args = ParamSpec("Args")
Result = TypeVar("Result")


def concrete_mesh() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh`, also while tracing; None if none is set."""
    from jax._src import mesh as jax_mesh

    # The public jax.sharding.get_mesh raises inside jax.jit.
    getter = getattr(jax_mesh, "get_concrete_mesh", None) or jax.sharding.get_mesh
    mesh = getter()
    return None if mesh is None or mesh.empty else mesh


def require_usable(function: str, mesh: Mesh) -> None:
    """Raises unless a `shard_map` over `mesh` can run under the mesh that is set.

    Raises:
        ValueError: the mesh that is set differs and one of the two has explicit axes;
            it has other devices; or the call is inside a shard_map.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        call = function.removeprefix("sharded.")
        inside = "moe_ffn" if call == function else call
        raise errors.invalid(
            function,
            "must be called on global arrays",
            f"a call inside jax.shard_map over {context.manual_axes}",
            f"call jax_ep.{inside} there, or jax_ep.{function} outside",
        )
    if context.empty or context == mesh.abstract_mesh:
        return
    remedy = "set the mesh that ep or the layer was made for with jax.set_mesh"
    explicit = [
        (name, found)
        for name, found in (("the mesh that is set", context), ("its own mesh", mesh))
        if AxisType.Explicit in found.axis_types
    ]
    if explicit:
        name, found = explicit[0]
        raise errors.invalid(
            function,
            "the mesh of jax.set_mesh must be the mesh of ep or of the layer, "
            f"{mesh.axis_names}, or both must have automatic axes only",
            f"{context.axis_names}, with explicit axes in {name}, {found.axis_types}",
            remedy,
        )
    # Under an abstract mesh there are no devices to compare; XLA compares them later.
    there = concrete_mesh()
    if there is not None and list(there.devices.flat) != list(mesh.devices.flat):
        wanted = [device.id for device in mesh.devices.flat]
        raise errors.invalid(
            function,
            f"the mesh of jax.set_mesh must have devices {wanted} in this order, as "
            "the mesh of ep or of the layer has",
            [device.id for device in there.devices.flat],
            remedy,
        )


def under(mesh: Mesh, mapped: Callable[Args, Result]) -> Callable[Args, Result]:
    """Wraps `mapped`, a `shard_map` over `mesh`, so that it runs under any set mesh."""

    @functools.wraps(mapped)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        context = jax.sharding.get_abstract_mesh()
        if context.empty or context == mesh.abstract_mesh:
            return mapped(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return mapped(*args, **kwargs)

    return call
