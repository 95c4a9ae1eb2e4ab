"""The layout of a load's ranks on the mesh, with checks and the copy to the host."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep._core.varying import varying
from jax_ep._layers.params import spec_axes
from jax_ep.placement import Placement

Tree = TypeVar("Tree")


class Layout(NamedTuple):
    """The positions of a load's ranks on the mesh.

    Attributes:
        names: mesh axes that tokens are split over, in the mesh's order.
        sizes: sizes of these axes.
        stacked: the same names, in the order in which `init` stacked the ranks.
        group: axes of the EP group, in the group's order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stacked: tuple[str, ...]
    group: tuple[str, ...]

    def places(self) -> np.ndarray:
        """Returns each stacked rank's position in the mesh's order, `[ranks]`."""
        grid = np.arange(np.prod(self.sizes, dtype=int)).reshape(self.sizes)
        return grid.transpose([self.names.index(name) for name in self.stacked]).ravel()

    def owners(self) -> np.ndarray:
        """Returns each rank's number in its EP group, `[ranks]` in the mesh's order."""
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
            f"{type(value).__name__}; pass the object itself"
        )


def require_same_layers(load: jax.Array, aux: jax.Array) -> None:
    """Raises unless both are `[..., ranks]` with the same leading dimensions."""
    layers, given = np.shape(load)[:-1], np.shape(aux)[:-1]
    if layers != given or np.ndim(load) == 0:
        raise ValueError(
            "jax_ep.stats.update: aux must have the layers of load, a stack of shape "
            f"{layers}, got {given}; pass load and aux of one layer, or stack both on "
            "leading dimensions"
        )


def require_alike(load: jax.Array, aux: jax.Array) -> None:
    """Raises if types show that the two arrays have different ranks."""
    remedy = "make load with jax_ep.stats.init(ep, axes) of the tokens' axes"
    more = varying(load) - varying(aux)
    more = [axis for axis in more if jax.lax.axis_size(axis) > 1]
    if more:
        raise ValueError(
            "jax_ep.stats.update: load must be split over the axes that tokens are "
            f"split over, got also {sorted(more)}, along which rows would count again; "
            f"{remedy} and give it the spec P(axes)"
        )
    # Types have a spec only on meshes with explicit axes; otherwise `Load.place` tells.
    over, must = (spec_axes(jax.typeof(value).sharding.spec) for value in (load, aux))
    if over and must and over != must:
        raise ValueError(
            "jax_ep.stats.update: load must be sharded over the same axes as aux, "
            f"{must}, got {over}; {remedy}"
        )


def gathered(load: Tree) -> Tree:
    """Gathers `load` to this process; all processes must call it."""
    leaf = jax.tree.leaves(load)[0]
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return load
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(_itself, out_shardings=whole)(load)


def _itself(load: Tree) -> Tree:
    return load


def checked_placement(
    function: str, placement: Any, places: tuple[int, ...]
) -> Placement:
    """Returns `placement` on the host; raises unless it has `places`, `[..., P]`."""
    require(function, "placement", placement, Placement, "a jax_ep.placement.Placement")
    found: Any = jax.device_get(placement)
    shape = np.shape(found.expert_of)
    if shape not in (places, places[-1:]):
        raise ValueError(
            f"jax_ep.stats.{function}: placement must be of the {places[-1]} places of "
            f"load, for one layer or for each of the layers {places[:-1]}, got places "
            f"of shape {shape}; pass the placement that the steps had"
        )
    return jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (*places[:-1], leaf.shape[-1])), found
    )


def order(function: str, place: np.ndarray, layout: Layout | None) -> np.ndarray:
    """Returns the indices that put the ranks in the mesh's order.

    Positions are those that the steps reported; if there are none, those of `init`.
    """
    if (place == -2).any():
        raise ValueError(
            f"jax_ep.stats.{function}: load must be of steps that stack ranks the same "
            f"way, got different ranks at {np.flatnonzero(place == -2).tolist()}; make "
            "one load for each kind of layer"
        )
    if layout is not None and len(place) != len(layout.places()):
        raise ValueError(
            f"jax_ep.stats.{function}: load must have all {len(layout.places())} ranks "
            f"that jax_ep.stats.init made it for, got {len(place)}; pass the complete "
            "global arrays"
        )
    places, times = np.unique(place, return_counts=True)
    if places[0] >= 0 and times.max() > 1:
        raise ValueError(
            f"jax_ep.stats.{function}: load must count each rank once, got mesh "
            f"positions {place.tolist()}; make it with jax_ep.stats.init(ep, axes) "
            "from the tokens' axes and give it the spec P(axes) in shard_map"
        )
    if places[0] < 0 and layout is not None:
        place = layout.places()
    return np.argsort(place, kind="stable")
