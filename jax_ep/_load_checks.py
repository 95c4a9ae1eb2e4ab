"""What jax_ep.stats checks of a load, and how its numbers come to the host."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep._layer_params import spec_axes
from jax_ep._varying import varying

Tree = TypeVar("Tree")


def require(function: str, name: str, value: Any, kind: type, what: str) -> None:
    """Raises TypeError unless `value` is of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"jax_ep.stats.{function}: {name} must be {what}, got "
            f"{type(value).__name__}; pass that"
        )


def require_one_layer(function: str, name: str, ranks: Any, remedy: str) -> None:
    """Raises unless `ranks`, of `name`, is `[ranks]`; a stack of layers has more."""
    if np.ndim(ranks) != 1:
        raise ValueError(
            f"jax_ep.stats.{function}: {name} must be of one layer, got a stack of "
            f"shape {np.shape(ranks)[:-1]}; {remedy}"
        )


def require_alike(load: jax.Array, aux: jax.Array) -> None:
    """Raises where it can be seen that ranks of the one are not those of the other."""
    remedy = "make load with jax_ep.stats.init(ep, axes) of the tokens' axes"
    more = varying(load) - varying(aux)
    more = [name for name in more if jax.lax.axis_size(name) > 1]
    if more:
        raise ValueError(
            "jax_ep.stats.update: load must be split over the axes that tokens are "
            f"split over, got {sorted(more)} besides, along which rows would count "
            f"again; {remedy} and give it the spec P(axes)"
        )
    # Known of meshes with explicit axes; elsewhere `Load.place` tells who is who.
    over, must = (spec_axes(jax.typeof(value).sharding.spec) for value in (load, aux))
    if over and must and over != must:
        raise ValueError(
            "jax_ep.stats.update: load must lie on the mesh as aux does, over axes "
            f"{must}, got {over}; {remedy}"
        )


def gathered(load: Tree) -> Tree:
    """`load` so that this process has all of it; a program of all processes."""
    leaf = jax.tree.leaves(load)[0]
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return load
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(_itself, out_shardings=whole)(load)


def _itself(load: Tree) -> Tree:
    return load


def order(function: str, place: np.ndarray) -> np.ndarray:
    """Indices of ranks in the mesh's order, where the steps have told it."""
    if (place == -2).any():
        raise ValueError(
            f"jax_ep.stats.{function}: load must be of steps whose ranks are stacked "
            f"alike, got other ranks at {np.flatnonzero(place == -2).tolist()}; make a "
            "load for each kind of layer"
        )
    places, times = np.unique(place, return_counts=True)
    if places[0] >= 0 and times.max() > 1:
        raise ValueError(
            f"jax_ep.stats.{function}: load must count each rank once, got places "
            f"{place.tolist()} in the mesh; make it with jax_ep.stats.init(ep, axes) "
            "of the tokens' axes and give it the spec P(axes) in shard_map"
        )
    return np.argsort(place, kind="stable")
