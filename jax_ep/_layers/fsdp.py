"""Weights that are also sharded over a data axis, and gathered where they are used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jax_ep._core import errors
from jax_ep._core.arrays import in_bytes
from jax_ep._core.varying import all_gather, psum_scatter, vary_alike
from jax_ep._experts.quantized import CANONICAL, TRANSPOSED, QuantizedWeights
from jax_ep._layers.params import Param, entry_axes

# The name of gathered weights for remat policies. A policy that does not save them
# gathers them again in the backward pass.
WEIGHTS_NAME = "jax_ep_weights"

# Mesh axes, and the dimension to shard of each of several weights.
_Choice = tuple[tuple[str, ...], tuple[int, ...]]

# Dimensions to shard, in order of preference: a gather of the first dimension moves no
# bytes within a rank. Biases are small and stay whole.
_ROUTED = {"gate_up": (0, 1, 3), "down": (0, 1, 2)}
# The same for weights that are quantised. A rank has the same part of H, or of F, in
# both matrices, because `jax_ep.experts.quantize_weights` takes both at once.
_BLOCKS = {"gate_up": (0, 1, 3), "down": (0, 2, 1)}
# These are the same for all ranks of an EP group, so they are also sharded over it.
_SHARED = {"router": (0, 1), "shared_gate_up": (0, 2), "shared_down": (0, 1)}


def require_axis(
    function: str, mesh: Mesh, axis: Any, used: tuple[str, ...], split: tuple[str, ...]
) -> None:
    """Raises unless `axis` is None or an axis to shard weights over.

    Args:
        function: the layer's name in error messages.
        mesh: the layer's mesh.
        axis: the argument `fsdp_axis_name`.
        used: axes that weights are sharded over already.
        split: axes that tokens are split over.
    """
    if axis is None:
        return
    if not isinstance(axis, str) or axis not in mesh.axis_names or axis in used:
        raise errors.invalid(
            function,
            f"fsdp_axis_name must be an axis of the mesh outside of {used}",
            f"{errors.brief(axis)} for axes {mesh.axis_names}",
            "pass the name of the data axis",
        )
    if axis not in split:
        # Ranks with equal tokens would have equal gradients, and sum them.
        raise errors.invalid(
            function,
            "fsdp_axis_name must be an axis that spec splits tokens over, one of "
            f"{split}",
            repr(axis),
            "add it to spec, or leave spec out",
        )


def sharded(
    function: str,
    mesh: Mesh,
    axis: str,
    ep_axes: tuple[str, ...],
    layouts: Sequence[Mapping[str, Param]],
    multiple: int = 1,
) -> list[dict[str, Param]]:
    """Shards weights over `axis`, each in the first dimension that `axis` divides.

    Args:
        function: the layer's name in error messages.
        mesh: the layer's mesh.
        axis: the axis.
        ep_axes: the axes of the EP group.
        layouts: several dicts of parameters by name, such as those by expert and those
            by place; a weight is sharded in the same dimension in all of them.
        multiple: what each rank's part of H and F must be a multiple of in experts'
            weights; above 1 if they are quantised.
    """
    found = [dict(params) for params in layouts]

    def blocks(name: str, dim: int) -> int:
        return multiple if name in _ROUTED and dim > 0 else 1

    def choose(names: tuple[str, ...], choices: Iterable[_Choice]) -> bool:
        """Shards these weights by the first choice that fits all; whether one does."""
        for axes, dims in choices:
            size = math.prod(mesh.shape[each] for each in axes)
            if all(
                _part(mesh, params[name], dim) % (size * blocks(name, dim)) == 0
                for params in found
                for name, dim in zip(names, dims, strict=True)
            ):
                for params in found:
                    for name, dim in zip(names, dims, strict=True):
                        params[name] = _over(params[name], dim, axes)
                return True
        return False

    def refuse(name: str, dims: Sequence[int], parts: str = "") -> Exception:
        sizes = " or ".join(str(_part(mesh, found[0][name], dim)) for dim in dims)
        return errors.invalid(
            function,
            f"fsdp_axis_name must be an axis whose size divides {sizes}, dimensions"
            f" of a rank's part of {name}{parts}",
            f"{axis!r} of size {mesh.shape[axis]}",
            "choose another axis, or leave fsdp_axis_name out",
        )

    if multiple > 1:
        pairs = list(zip(*_BLOCKS.values(), strict=True))
        if not choose(tuple(_BLOCKS), (((axis,), dims) for dims in pairs)):
            parts = f", H and F into multiples of {multiple}"
            raise refuse("gate_up", _BLOCKS["gate_up"], parts)
    others = _SHARED if multiple > 1 else _ROUTED | _SHARED
    for name in found[0]:
        dims = others.get(name)
        if dims is None:
            continue
        choices: list[_Choice] = [((axis,), (dim,)) for dim in dims]
        if name in _SHARED:
            choices = [((axis, *ep_axes), (dim,)) for dim in dims] + choices
        # The router is small enough to stay whole.
        if not choose((name,), choices) and name != "router":
            raise refuse(name, dims)
    return found


def _part(mesh: Mesh, param: Param, dim: int) -> int:
    """Returns the size of a dimension on one rank."""
    return param.shape[dim] // math.prod(
        mesh.shape[name] for name in entry_axes(param.spec[dim])
    )


def _over(param: Param, dim: int, axes: tuple[str, ...]) -> Param:
    """Returns `param` with dimension `dim` also sharded over `axes`."""
    every = (*entry_axes(param.spec[dim]), *axes)
    entry = every[0] if len(every) == 1 else every
    spec = (*param.spec[:dim], entry, *param.spec[dim + 1 :])
    return dataclasses.replace(param, spec=spec, gathered=(dim, axes))


def gather(
    params: Mapping[str, Param],
    values: Mapping[str, Any],
    dtype: str,
    order: tuple[str, ...],
    split: tuple[str, ...],
) -> dict[str, Any]:
    """Returns one rank's `values` with whole weights, in the dtype they are used in.

    Weights are sent in the narrower of their own dtype and the one they are used in,
    gradients in the wider of the two.

    Args:
        params: the parameters by name.
        values: arrays of one rank by name.
        dtype: dtype of the computation.
        order: all axes of the mesh.
        split: axes that tokens are split over.
    """
    found = dict(values)
    for name, param in params.items():
        if param.gathered is None or name not in values:
            continue
        value = values[name]
        # moe_ffn casts the router's weights to float32.
        used = "float32" if name == "router" else dtype
        narrower = value.dtype.itemsize < jnp.dtype(used).itemsize
        sent = value.dtype.name if narrower else used
        value = value.astype(jnp.promote_types(value.dtype, used))
        # The backward pass of this cast sums gradients over the other data axes. Placed
        # before the gather, it sums the shards that the reduce-scatter leaves; placed
        # after it, it would sum whole weights.
        (value,) = vary_alike(order, frozenset(split), value)
        how = _How(*param.gathered, sent, used)
        found[name] = checkpoint_name(_whole(value, how), WEIGHTS_NAME)
    return found


def gather_codes(
    params: Mapping[str, Param], codes: QuantizedWeights
) -> QuantizedWeights:
    """Gathers one rank's codes and scales, as bytes."""

    def whole(field: str) -> jax.Array:
        value = getattr(codes, field)
        gathered = params[field.removesuffix("_scales")].gathered
        if gathered is None:
            return value
        dim, axes = gathered
        # Sent as integers, which no device widens.
        bits = in_bytes(value)
        found = checkpoint_name(all_gather(bits, axes, dim), WEIGHTS_NAME)
        if found.dtype != value.dtype:
            found = jax.lax.bitcast_convert_type(found, value.dtype)
        return found

    # Turned codes are dropped, and each rank makes them again: that halves the bytes.
    split = (
        name for name in TRANSPOSED if params[name.removesuffix("_transposed")].gathered
    )
    return dataclasses.replace(
        codes, **{name: whole(name) for name in CANONICAL}, **dict.fromkeys(split)
    )


class _How(NamedTuple):
    """How shards are gathered: in dtype `sent`, to an array of `dtype`."""

    dim: int
    axes: tuple[str, ...]
    sent: str
    dtype: str


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(shard: jax.Array, how: _How) -> jax.Array:
    """Gathers a weight; its gradient is reduce-scattered in the dtype of `shard`."""
    whole = all_gather(shard.astype(how.sent), how.axes, how.dim)
    return whole.astype(how.dtype)


def _whole_forward(shard: jax.Array, how: _How) -> tuple[jax.Array, jax.Array]:
    # An empty array with the dtype of the shard.
    return _whole(shard, how), shard[:0]


def _whole_backward(
    how: _How, like: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    return (psum_scatter(cotangent.astype(like.dtype), how.axes, how.dim),)


_whole.defvjp(_whole_forward, _whole_backward)
