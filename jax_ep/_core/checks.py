"""Checks the arguments of dispatch and combine, and where they are called."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_ep._core import errors, formats, pytrees
from jax_ep._core.arrays import as_array, cast_remedy
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._core.varying import vary_alike

CODES_REMEDY = "these are codes of a quantised dispatch: pass jax_ep.dequantize(d)"


def require_dtype(
    function: str, name: str, value: jax.Array, dtype: str, remedy: str | None = None
) -> None:
    """Raises TypeError unless `value` has `dtype`."""
    if value.dtype != jnp.dtype(dtype):
        raise errors.invalid(
            function,
            f"{name} must be {dtype}",
            value.dtype,
            remedy or f"cast it with {name}.astype({dtype!r})",
            operand=name,
            kind=TypeError,
        )


SWAPPED = "ids before weights: jax.lax.top_k returns the weights first"


def require_ids(function: str, value: jax.Array) -> None:
    """Raises TypeError unless `topk_ids` are int32."""
    floats = jnp.issubdtype(value.dtype, jnp.floating)
    remedy = f"pass {SWAPPED}" if floats else None
    require_dtype(function, "topk_ids", value, "int32", remedy)


def widened_weights(function: str, value: Any) -> jax.Array:
    """Returns `router_weights` as float32; narrower float types widen exactly.

    Raises:
        TypeError: they are neither float32 nor a narrower float type.
    """
    weights = as_array(function, "router_weights", value)
    narrower = (
        jnp.issubdtype(weights.dtype, jnp.floating) and weights.dtype.itemsize < 4
    )
    weights = weights.astype(jnp.float32) if narrower else weights
    require_dtype(function, "router_weights", weights, "float32")
    return weights


def is_codes(dtype: Any) -> bool:
    """Whether `dtype` holds the codes of a quantised format, not values."""
    quantized = filter(formats.is_quantized, formats.names())
    return any(dtype == formats.payload_dtype(name, "float32") for name in quantized)


def require_tokens(function: str, ep: EPHandle, tokens: jax.Array) -> None:
    """Raises unless `tokens` are `[n, hidden_size]` in the config's dtype."""
    config = ep.config
    coded = formats.is_quantized(config.dispatch_format) and (
        tokens.dtype == formats.payload_dtype(config.dispatch_format, config.dtype)
    )
    remedy = "pass their scales as token_scales, if they are quantised already"
    require_dtype(function, "tokens", tokens, config.dtype, remedy if coded else None)
    if tokens.ndim != 2 or tokens.shape[1] != config.hidden_size:
        raise errors.invalid(
            function,
            "tokens must have shape [n, hidden_size] with hidden_size "
            f"{config.hidden_size}",
            tokens.shape,
            "reshape the tokens or init with their hidden_size",
            operand="tokens",
        )


def require_codes(
    function: str, ep: EPHandle, tokens: jax.Array, token_scales: Any
) -> jax.Array:
    """Returns `token_scales`; raises unless they can be the scales of `tokens`.

    Raises:
        ValueError, TypeError: the config's format has no scales, or they or the tokens
            are not as `jax_ep.formats.quantize` makes them.
    """
    name, hidden = ep.config.dispatch_format, ep.config.hidden_size
    if not formats.is_quantized(name):
        raise errors.invalid(
            function,
            "token_scales must be None unless the config's dispatch_format has scales",
            f"an array with dispatch_format {name!r}",
            "leave it out, or init with the tokens' format",
            operand="token_scales",
        )
    scales = as_array(function, "token_scales", token_scales)
    remedy = f"pass what jax_ep.formats.quantize(tokens, {name!r}) returns"
    n = tokens.shape[0] if tokens.ndim else 0
    columns, blocks = formats.columns(name, hidden), hidden // formats.block(name)
    for operand, array, dtype, width, words in (
        ("tokens", tokens, formats.payload_dtype(name, ""), columns, "codes"),
        ("token_scales", scales, formats.scale_dtype(name), blocks, "scales"),
    ):
        if array.dtype != dtype:
            rule = f"{operand} must be {dtype}, the {words} of {name!r}"
            raise errors.invalid(
                function,
                rule,
                array.dtype,
                cast_remedy(operand, array.dtype, dtype) or remedy,
                operand=operand,
                kind=TypeError,
            )
        what = f"n {words} of hidden_size {hidden} in {name!r}, in rows"
        require_shape(function, operand, array, (n, width), what, remedy)
    return scales


def require_shape(
    function: str,
    name: str,
    value: jax.Array,
    shape: tuple[int, ...],
    why: str,
    remedy: str = "pass arrays of one call, shaped as its docstring says",
) -> None:
    """Raises ValueError unless `value` has `shape`."""
    if value.shape != shape:
        raise errors.invalid(
            function,
            f"{name} must have shape {shape} ({why})",
            value.shape,
            remedy,
            operand=name,
        )


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
    for field in dataclasses.fields(route):
        if field.name != "key":
            name = f"route.{field.name}"
            table = as_array(function, name, getattr(route, field.name))
            require_dtype(function, name, table, "int32")
    return route


def require_route_shapes(function: str, ep: EPHandle, route: Route) -> None:
    """Raises unless the tables have the shapes of a dispatch on one rank."""
    top_k, ranks = ep.config.top_k, ep.route_ranks
    n = route.slot_of.shape[0]
    for name, array, shape in (
        ("slot_of", route.slot_of, (n, top_k)),
        ("row_of", route.row_of, (ranks, n, top_k)),
        ("row_slot", route.row_slot, (ep.recv_capacity,)),
        ("slot_counts", route.slot_counts, (ranks,)),
        ("row_offsets", route.row_offsets, (ep.groups + 1,)),
        ("expert_counts", route.expert_counts, (ep.groups,)),
        ("src_info", route.src_info, (ep.recv_capacity, 3)),
        ("num_dropped", route.num_dropped, (1,)),
        ("num_invalid", route.num_invalid, (1,)),
    ):
        require_shape(function, f"route.{name}", array, shape, "as dispatch made it")


def require_columns(
    function: str,
    ep: EPHandle,
    name: str,
    value: jax.Array,
    rows: tuple[str, int],
    remedy: str,
) -> None:
    """Raises ValueError unless `value` has these rows, of a width that can be sent.

    `rows` is the letter that docstrings use for their number, and the number itself.
    """
    config, shape = ep.config, value.shape
    multiple = config.column_multiple
    columns = shape[1] if value.ndim == 2 else 0
    fits = 0 < columns <= config.hidden_size and columns % multiple == 0
    letter, number = rows
    if fits and shape[0] == number:
        return
    raise errors.invalid(
        function,
        f"{name} must have shape [{letter}, columns] with {letter} = {number} and at "
        f"most hidden_size = {config.hidden_size} columns, a multiple of {multiple}",
        shape,
        remedy + ("" if fits else ", with all its columns or a part of them"),
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
