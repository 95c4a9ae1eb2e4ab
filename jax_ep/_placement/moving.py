"""Moves experts' weights to other places, on one device or many."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep._core import errors, traces
from jax_ep._core.arrays import in_bytes
from jax_ep._core.varying import all_gather, vary_alike, varying

# How much a device gathers at a time of weights that are split over devices.
_CHUNK_BYTES = 256 * 2**20


def taken(function: str, source: Any, params: Any, experts: int, sharding: Any) -> Any:
    """Returns `params` with entry i of the expert dimension taken from `source[i]`.

    Args:
        function: the name for errors.
        source: int32 `[..., P]`, with the same leading dimensions as `params`.
        params: pytree of arrays `[..., experts, ...]`.
        experts: size of the dimension to take from.
        sharding: None, a NamedSharding, or a pytree of them like `params`.
    """
    layers = source.shape[:-1]

    def of_leaf(path: Any, leaf: Any, sharding: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        shape = jnp.shape(leaf)
        errors.require(
            shape[: len(layers) + 1] == (*layers, experts),
            function,
            f"each array must begin with the dimensions {(*layers, experts)}",
            f"params{name} of shape {shape}",
            "call it on global arrays, outside shard_map, with one entry per expert",
        )
        found = sharding if sharding is not None else _sharding(leaf)
        errors.require(
            found is None or isinstance(found, NamedSharding),
            function,
            "sharding must be None, a NamedSharding or a pytree of them",
            repr(found),
            "leave it out to keep that of params",
        )
        return _moved(jnp.asarray(leaf), source, found, not traces.spmd_axis_names())

    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    if sharding is None or isinstance(sharding, NamedSharding):
        shardings = [sharding] * len(leaves)
    else:
        shardings = tree.flatten_up_to(sharding)
    pairs = zip(leaves, shardings, strict=True)
    return tree.unflatten([of_leaf(*leaf, sharding) for leaf, sharding in pairs])


def _sharding(leaf: Any) -> NamedSharding | None:
    """Returns the NamedSharding of `leaf`; None if it has none or JAX does not tell."""
    if isinstance(leaf, Tracer):
        found = jax.typeof(leaf).sharding
        return found if AxisType.Explicit in found.mesh.axis_types else None
    found = leaf.sharding if isinstance(leaf, jax.Array) else None
    return found if isinstance(found, NamedSharding) else None


@partial(jax.jit, static_argnames=("sharding", "check_vma"))
def _moved(
    array: jax.Array,
    source: jax.Array,
    sharding: NamedSharding | None,
    check_vma: bool,
) -> jax.Array:
    """Takes entries of dimension `source.ndim - 1`.

    `check_vma` is False inside a `vmap` over a mesh axis, where JAX demands it.
    """
    dtype = array.dtype
    array = in_bytes(array)
    if array.dtype != dtype:
        found = _moved(array, source, sharding, check_vma)
        return jax.lax.bitcast_convert_type(found, dtype)
    if sharding is None:
        return _taken(array, source)
    at = source.ndim - 1
    spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    axes = spec[at]
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    parts = math.prod(sharding.mesh.shape[name] for name in names)
    whole = PartitionSpec(*spec[:at], None, *spec[at + 1 :])
    split = PartitionSpec(*spec)
    # A dimension that does not divide is not split.
    before = whole if array.shape[at] % parts else split
    after = whole if source.shape[at] % parts else split
    if after == whole:
        before, names = whole, ()
    if AxisType.Explicit in sharding.mesh.axis_types:
        array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, before))
    take = partial(_taken, axes=names, split=bool(names) and before == split)
    return jax.shard_map(
        take,
        mesh=sharding.mesh,
        in_specs=(before, PartitionSpec(*spec[:at], None)),
        out_specs=after,
        check_vma=check_vma,
    )(array, source)


def _taken(
    array: jax.Array,
    source: jax.Array,
    axes: tuple[str, ...] = (),
    split: bool = False,
) -> jax.Array:
    """Takes entries of dimension `source.ndim - 1`, inside shard_map if there are axes.

    Args:
        array: one rank's part if `split`, else all entries.
        source: the index in `array` that each entry comes from, for all ranks.
        axes: mesh axes that the result is split over.
        split: whether the array is split over them as well.
    """
    if source.ndim > 1:
        one = partial(_taken, axes=axes, split=split)
        return jax.lax.map(lambda both: one(*both), (array, source))
    if axes:
        own = source.shape[0] // jax.lax.axis_size(axes)
        first = jax.lax.axis_index(axes) * own
        source = jax.lax.dynamic_slice_in_dim(source, first, own)
    if not split:
        return _entries(array, source)

    def gathered(columns: jax.Array) -> jax.Array:
        return _entries(all_gather(columns, axes, 0), source)

    # Gathers all experts, but few columns at a time: whole matrices may not fit.
    local, width = array.shape[0], math.prod(array.shape[1:])
    experts = local * jax.lax.axis_size(axes)
    chunks = _chunks(width, experts * array.dtype.itemsize)
    if chunks == 1:
        return gathered(array)
    columns = jnp.moveaxis(array.reshape(local, chunks, -1), 1, 0)
    found = jnp.moveaxis(jax.lax.map(gathered, columns), 0, 1)
    return found.reshape(-1, *array.shape[1:])


def _entries(array: jax.Array, source: jax.Array) -> jax.Array:
    """Returns `array[source]`, along dimension 0.

    Its derivative adds up copies in float32 and rounds once. JAX's would scatter: on a
    GPU, that is an atomic addition in the dtype of the array for every element.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.take(array, source, axis=0)
    axes = sorted(varying(array) | varying(source))
    array, source = vary_alike(axes, frozenset(), array, source)
    return _picked(array, source, array.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _picked(array: Any, source: Any, count: int) -> Any:
    del count
    return jnp.take(array, source, axis=0)


def _picked_forward(array: Any, source: Any, count: int) -> Any:
    return _picked(array, source, count), source


def _picked_backward(count: int, source: Any, cotangent: Any) -> Any:
    return _summed(cotangent, source, count), None


_picked.defvjp(_picked_forward, _picked_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _summed(values: Any, source: Any, count: int) -> Any:
    """Sums the `values` of each of `count` sources; zeros for those without any."""
    order = jnp.argsort(source, stable=True)
    counts = jnp.sum(source[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts

    def copy(at: Any) -> jax.Array:
        index = order[jnp.minimum(starts + at, source.shape[0] - 1)]
        real = jnp.expand_dims(at < counts, range(1, values.ndim))
        return jnp.where(real, values[index], 0)

    def all_copies() -> jax.Array:
        wide = jnp.promote_types(values.dtype, jnp.float32)

        def add(at: Any, total: jax.Array) -> jax.Array:
            return total + copy(at).astype(wide)

        total = jax.lax.fori_loop(1, most, add, copy(0).astype(wide))
        return total.astype(values.dtype)

    most = jnp.max(counts)
    # Copies are on different ranks as far as possible, so most often there is one here.
    return jax.lax.cond(most > 1, all_copies, lambda: copy(0))


def _summed_forward(values: Any, source: Any, count: int) -> Any:
    return _summed(values, source, count), source


def _summed_backward(count: int, source: Any, cotangent: Any) -> Any:
    return _picked(cotangent, source, count), None


_summed.defvjp(_summed_forward, _summed_backward)


def _chunks(width: int, column_bytes: int) -> int:
    """Returns the fewest equal parts of `width` columns that are small enough."""
    wanted = min(width, max(1, math.ceil(width * column_bytes / _CHUNK_BYTES)))
    return next(n for n in range(wanted, width + 1) if width % n == 0)
