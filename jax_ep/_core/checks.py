"""Checks of the arguments of dispatch and combine, and of where they are called."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_ep import formats
from jax_ep._core.arrays import as_array
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._core.varying import vary_alike

CODES_REMEDY = "these are the codes of a quantised dispatch: pass jax_ep.dequantize(d)"


def require_dtype(
    function: str, name: str, value: jax.Array, dtype: str, remedy: str | None = None
) -> None:
    """Raises TypeError unless `value` has `dtype`."""
    if value.dtype != jnp.dtype(dtype):
        remedy = remedy or f"cast it with {name}.astype({dtype!r})"
        raise TypeError(
            f"jax_ep.{function}: {name} must be {dtype}, got {value.dtype}; {remedy}"
        )


def widened_weights(function: str, value: Any) -> jax.Array:
    """`router_weights` as float32: of a narrower float type without any rounding.

    Raises:
        TypeError: they are of another type.
    """
    weights = as_array(function, "router_weights", value)
    narrower = (
        jnp.issubdtype(weights.dtype, jnp.floating) and weights.dtype.itemsize < 4
    )
    weights = weights.astype(jnp.float32) if narrower else weights
    require_dtype(function, "router_weights", weights, "float32")
    return weights


def is_codes(dtype: Any) -> bool:
    """Whether a quantised format's tokens have it: no values without their scales."""
    quantized = filter(formats.is_quantized, formats.names())
    return any(dtype == formats.payload_dtype(name, "float32") for name in quantized)


def require_shape(
    function: str,
    name: str,
    value: jax.Array,
    shape: tuple[int, ...],
    why: str,
    remedy: str = "pass arrays of one call, as its docstring gives them",
) -> None:
    """Raises ValueError unless `value` has `shape`."""
    if value.shape != shape:
        raise ValueError(
            f"jax_ep.{function}: {name} must have shape {shape} ({why}), got "
            f"{value.shape}; {remedy}"
        )


def require_open(function: str, ep: EPHandle) -> None:
    """Raises unless `ep` is a handle that has not been closed."""
    if not isinstance(ep, EPHandle):
        raise TypeError(
            f"jax_ep.{function}: ep must be what jax_ep.init returned, got "
            f"{type(ep).__name__}; call jax_ep.init once and pass its result"
        )
    if ep.closed:
        raise ValueError(
            f"jax_ep.{function}: ep must be open, got a closed handle; call "
            "jax_ep.init again and pass its result, or make the layer of jax_ep.flax "
            "again (layers of equal sizes share one)"
        )
    if ep.forked:
        raise ValueError(
            f"jax_ep.{function}: ep must be of this process, got the copy of a forked "
            "child; start processes with spawn and call jax_ep.init in each"
        )


def require_route(function: str, ep: EPHandle, route: Any) -> Route:
    """Raises unless `route` came from a dispatch of `ep`, with its own dtypes."""
    if not isinstance(route, Route):
        raise TypeError(
            f"jax_ep.{function}: route must be the `route` of a Dispatched, got "
            f"{type(route).__name__}; pass d.route of the dispatch"
        )
    if type(route.key) is not int:
        raise TypeError(
            f"jax_ep.{function}: route.key must be the int that dispatch gave it, got "
            f"{route.key!r}; pass d.route as it is"
        )
    if route.key != ep.key:
        raise ValueError(
            f"jax_ep.{function}: route must come from a dispatch of the same ep, got "
            f"one of handle {route.key:#x} for handle {ep.key:#x}; pass the ep that "
            "dispatched"
        )
    for name in ("slot_of", "row_of", "row_slot", "slot_counts"):
        table = as_array(function, f"route.{name}", getattr(route, name))
        require_dtype(function, f"route.{name}", table, "int32")
    return route


def require_route_shapes(function: str, ep: EPHandle, route: Route) -> None:
    """Raises unless the tables have the shapes of one rank's dispatch."""
    top_k, ranks = ep.config.top_k, ep.route_ranks
    n = route.slot_of.shape[0]
    for name, array, shape in (
        ("slot_of", route.slot_of, (n, top_k)),
        ("row_of", route.row_of, (ranks, n, top_k)),
        ("row_slot", route.row_slot, (ep.recv_capacity,)),
        ("slot_counts", route.slot_counts, (ranks,)),
    ):
        require_shape(function, f"route.{name}", array, shape, "as dispatch made it")


def require_combinable(
    function: str, ep: EPHandle, router_weights: Any, residual: Any
) -> None:
    """Raises if combine is given what the mode of `ep` does not take."""
    config = ep.config
    none = config.reduce == "none"
    for name, value, taken in (
        ("router_weights", router_weights, not none),
        ("residual", residual, not none and not config.skip_a2a),
    ):
        if value is not None and not taken:
            mode = 'reduce="none"' if none else "skip_a2a=True"
            raise ValueError(
                f"jax_ep.{function}: {name} must be None with {mode}, got an array; "
                "apply it to the result"
                + (", after the psum" if config.skip_a2a else "")
            )


def require_scope(function: str, ep: EPHandle) -> None:
    """Raises unless the call is inside shard_map over the axes of `ep`."""
    names = ep.axis_names
    if not in_scope(names):
        layer = function == "moe_ffn"
        whole = "jax_ep.flax.MoE" if layer else f"jax_ep.sharded.{function}"
        raise ValueError(
            f"jax_ep.{function}: mesh axis {names} must be in scope, got a call "
            "outside jax.shard_map over it; wrap the caller in jax.shard_map(..., "
            f"mesh=ep.mesh), or use {whole} on global arrays"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if dict(mesh.shape) != dict(ep.mesh.shape) or mesh.axis_names != ep.mesh.axis_names:
        raise ValueError(
            f"jax_ep.{function}: must be called inside jax.shard_map over the mesh of "
            f"ep, {dict(ep.mesh.shape)}, got {dict(mesh.shape)}; pass mesh=ep.mesh (a "
            "vmap axis is no mesh axis)"
        )
    _check_manual(function, mesh)


@contextlib.contextmanager
def told_of(
    function: str, whole: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[None]:
    """Errors of a rank's call as those of `function`, which made it.

    `whole` says of an operand by name what shape the ranks' parts together have.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        name, _, text = str(error).partition(": ")
        if not name.startswith("jax_ep.") or not text:
            raise
        operand = text.partition(" ")[0]
        given = (whole or {}).get(operand)
        of = "" if given is None else f"; {operand} of all ranks is {given}"
        text = f"jax_ep.{function}: {text} ({name}, of one rank's part{of})"
        raise type(error)(text) from error


@contextlib.contextmanager
def calling(function: str) -> Iterator[None]:
    """Around a call: its scope in profiles, and what forward mode makes of it.

    JAX's own error for forward-mode differentiation comes from its caches where nothing
    is jitted, and says nothing.
    """
    try:
        with jax.named_scope(f"jax_ep.{function}"):
            yield
    except TypeError as error:
        if str(error) != "unhashable type: 'Unhashable'":
            raise
        raise TypeError(
            f"jax_ep.{function}: only reverse-mode differentiation is supported, got "
            "forward mode (jax.jvp, jax.jacfwd); use jax.grad, jax.vjp or jax.jacrev"
        ) from error


def in_scope(names: tuple[str, ...]) -> bool:
    """Whether all these axes are bound here."""
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
        raise ValueError(
            f"jax_ep.{function}: every mesh axis must be manual or automatic, got "
            f"explicit axes {list(left)}; leave axis_names out of jax.shard_map"
        )
    if left:
        warnings.warn(
            f"jax_ep.{function}: every mesh axis should be manual, got automatic axes "
            f"{list(left)}: XLA gathers the operands over them; leave axis_names out "
            "of jax.shard_map",
            RuntimeWarning,
            stacklevel=5,
        )


def vary_together(ep: EPHandle, *trees: Any) -> Any:
    """Casts arrays to vary over the EP axes and every axis that another varies on.

    A custom call wants operands of one kind, and the reverse rule cotangents of the
    kind of its inputs; both hold once everything varies alike. Without check_vma no
    array has a kind and this changes nothing.
    """
    return vary_alike(ep.mesh.axis_names, frozenset(ep.axis_names), *trees)
