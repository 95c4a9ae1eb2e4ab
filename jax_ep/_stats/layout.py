"""What jax_ep.stats checks of a load, and how its numbers come to the host."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep._core.varying import varying
from jax_ep._layers.params import spec_axes

Tree = TypeVar("Tree")


class Layout(NamedTuple):
    """How the ranks of a load lie on the mesh.

    Attributes:
        names: mesh axes that tokens are split over, in the mesh's order.
        sizes: their sizes.
        stacked: the same names, in the order that `init` stacked the ranks in.
        group: axes of the EP group, in its order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stacked: tuple[str, ...]
    group: tuple[str, ...]

    def places(self) -> np.ndarray:
        """`[ranks]`: where in the mesh's order each rank is, as they are stacked."""
        grid = np.arange(np.prod(self.sizes, dtype=int)).reshape(self.sizes)
        return grid.transpose([self.names.index(name) for name in self.stacked]).ravel()

    def owners(self) -> np.ndarray:
        """`[ranks]` in the mesh's order: each one's rank in its EP group."""
        at = [self.names.index(name) for name in self.group]
        coordinates = np.indices(self.sizes).reshape(len(self.sizes), -1)
        shape = [self.sizes[axis] for axis in at]
        steps = np.cumprod([1, *shape[:0:-1]])[::-1]
        return steps @ coordinates[at]


def require(
    function: str, name: str, value: Any, kind: type | tuple[type, ...], what: str
) -> None:
    """Raises TypeError unless `value` is of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"jax_ep.stats.{function}: {name} must be {what}, got "
            f"{type(value).__name__}; pass that"
        )


def require_same_layers(load: jax.Array, aux: jax.Array) -> None:
    """Raises unless both are `[..., ranks]` of the same leading dimensions."""
    layers, given = np.shape(load)[:-1], np.shape(aux)[:-1]
    if layers != given or np.ndim(load) == 0:
        raise ValueError(
            "jax_ep.stats.update: aux must be of the layers of load, a stack of shape "
            f"{layers}, got {given}; pass one layer's load with one layer's aux, or "
            "both stacked on leading dimensions"
        )


def require_alike(load: jax.Array, aux: jax.Array) -> None:
    """Raises where it can be seen that ranks of the one are not those of the other."""
    remedy = "make load with jax_ep.stats.init(ep, axes) of the tokens' axes"
    more = varying(load) - varying(aux)
    more = [axis for axis in more if jax.lax.axis_size(axis) > 1]
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


def order(function: str, place: np.ndarray, layout: Layout | None) -> np.ndarray:
    """Indices of the ranks in the mesh's order.

    As the steps told it; where they did not, as `init` stacked the ranks.
    """
    if (place == -2).any():
        raise ValueError(
            f"jax_ep.stats.{function}: load must be of steps whose ranks are stacked "
            f"alike, got other ranks at {np.flatnonzero(place == -2).tolist()}; make a "
            "load for each kind of layer"
        )
    if layout is not None and len(place) != len(layout.places()):
        raise ValueError(
            f"jax_ep.stats.{function}: load must have all {len(layout.places())} ranks "
            f"that jax_ep.stats.init made it for, got {len(place)}; pass the global "
            "arrays, whole"
        )
    places, times = np.unique(place, return_counts=True)
    if places[0] >= 0 and times.max() > 1:
        raise ValueError(
            f"jax_ep.stats.{function}: load must count each rank once, got places "
            f"{place.tolist()} in the mesh; make it with jax_ep.stats.init(ep, axes) "
            "of the tokens' axes and give it the spec P(axes) in shard_map"
        )
    if places[0] < 0 and layout is not None:
        place = layout.places()
    return np.argsort(place, kind="stable")
