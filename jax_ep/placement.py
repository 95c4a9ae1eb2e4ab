"""Places of experts: more places than experts, so that every rank is equally busy.

A handle with `num_experts=num_slots` has one physical place for each of its experts.
A `Placement` says which logical expert, of those that the router knows, each place
holds; hot experts have copies in several. Usage::

    placement = jax_ep.placement.balance(load, num_slots, ep_size=ep.ep_size)
    weights = placement.gather(weights)       # [E, ...] to [num_slots, ...]
    ...
    y, aux = jax_ep.moe_ffn(ep, tokens, weights, placement=placement)

A `Placement` is a pytree of arrays, so a jitted function that takes one as an argument
is not compiled again for the next one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_ep._core import errors, operands, pytrees
from jax_ep._core.arrays import as_array
from jax_ep._core.operands import Operand
from jax_ep._native.loader import cpu as native
from jax_ep._placement import moving

Tree = TypeVar("Tree")

_ASSIGNED = (Operand("topk_ids", "[..., K]", operands.IDS, "pass one row per token"),)


@pytrees.register()
@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Which expert each place holds; P places of E experts, P / R of them per rank.

    Make one with `balance` or `identity`. The placements of a stack of layers have
    leading dimensions; `jax.tree.map(lambda leaf: leaf[i], placements)` is the one of
    layer i, and a scan over the stack takes one at a time.

    Attributes:
        expert_of: int32 `[P]`, the expert of each place. Rank r has the places
            `[r * P / R, (r + 1) * P / R)`.
        places: int32 `[P]`, the places in the order of their experts.
        offsets: int32 `[E + 1]`; expert e is at `places[offsets[e]:offsets[e + 1]]`.
    """

    expert_of: jax.Array | np.ndarray
    places: jax.Array | np.ndarray
    offsets: jax.Array | np.ndarray

    @property
    def num_experts(self) -> int:
        """E, the number of experts that the router knows."""
        return self.offsets.shape[-1] - 1

    @property
    def num_slots(self) -> int:
        """P, the number of places."""
        return self.expert_of.shape[-1]

    def assign(self, topk_ids: ArrayLike, offset: ArrayLike = 0) -> jax.Array:
        """Returns the places that tokens go to, as `topk_ids` for `dispatch`.

        Token t goes to copy `(t + offset) % copies` of an expert. It needs no exchange,
        and spreads tokens evenly over the copies.

        Args:
            topk_ids: int32 `[..., K]`, expert ids, one row per token.
            offset: int32 `[]`. Pass the rank, `jax.lax.axis_index`, as layers do:
                otherwise the first token of each rank would go to the same copy, and
                at decode there may be no other token.

        Returns:
            int32 `[..., K]`. -1 stays -1. Other ids outside [0, E) stay outside [0, P),
            so that `num_invalid` counts them; those above move up by P - E.

        Raises:
            ValueError, TypeError: an argument is not as described above.
        """
        _require_one_layer("assign", self)
        given = {"topk_ids": topk_ids}
        ids = operands.checked("placement.assign", _ASSIGNED, given)["topk_ids"]
        at = jnp.asarray(offset)
        errors.require(
            at.ndim == 0 and jnp.issubdtype(at.dtype, jnp.integer),
            "placement.assign",
            "offset must be one integer",
            f"{at.dtype} of shape {at.shape}",
            "pass jax.lax.axis_index(axis_name)",
        )
        tokens = ids.shape[:-1]
        token = jnp.arange(math.prod(tokens), dtype=jnp.int32).reshape(*tokens, 1)
        offsets, places = jnp.asarray(self.offsets), jnp.asarray(self.places)
        valid = (ids >= 0) & (ids < self.num_experts)
        expert = jnp.where(valid, ids, 0)
        first = offsets[expert]
        copy = (token + at.astype(jnp.int32)) % (offsets[expert + 1] - first)
        spare = self.num_slots - self.num_experts
        invalid = jnp.where(ids < 0, ids, ids + spare)
        return jnp.where(valid, places[first + copy], invalid)

    def gather(self, params: Tree, *, sharding: Any = None) -> Tree:
        """Returns the weights of all places, from those of the experts.

        Its transpose sums the gradients of copies, so a loss may call it to train
        weights by expert.

        Args:
            params: pytree of global arrays `[E, ...]`; `[layers, E, ...]` for the
                placements of a stack of layers.
            sharding: a NamedSharding of the results, or a pytree of them like `params`.
                None keeps that of each array. Pass it inside jit on a mesh with
                automatic axes, where arrays do not know theirs; otherwise every device
                gets all places.

        Returns:
            Arrays `[P, ...]`. If the dimension of experts is split over devices, all
            its entries pass through each device, in parts of at most 256 MiB.

        Raises:
            ValueError: an array has other leading dimensions, or `sharding` is not as
                described above.
        """
        source, experts = self.expert_of, self.num_experts
        return moving.taken("placement.gather", source, params, experts, sharding)

    def reshard(
        self, physical: Tree, before: Placement, *, sharding: Any = None
    ) -> Tree:
        """Returns the weights of all places, from those of an older placement.

        `identity(E).reshard(physical, before)` returns the weights by expert, which is
        what a checkpoint should hold.

        Args:
            physical: pytree of global arrays, one entry per place of `before`. If an
                expert has several copies, the first one is used.
            before: the placement of these weights, with the same experts.
            sharding: as in `gather`.

        Raises:
            ValueError: `before` has other experts or layers, or for the reasons of
                `gather`.
            TypeError: `before` is not a `Placement`.
        """
        what = "the Placement of these weights"
        errors.require_type(
            "placement.reshard", "before", before, Placement, what, "pass it"
        )
        mine, theirs = (
            (*np.shape(each.offsets)[:-1], each.num_experts) for each in (self, before)
        )
        errors.require(
            mine == theirs,
            "placement.reshard",
            f"before must have the layers and experts of this placement, {mine}",
            theirs,
            "pass the placement that these weights were gathered for",
        )

        # With NumPy if possible, because a program of several processes does not take
        # an array of one process.
        take: Any = np.take_along_axis
        if not all(isinstance(e, np.ndarray) for e in jax.tree.leaves((self, before))):
            take = jnp.take_along_axis
        source = take(before.places, take(before.offsets, self.expert_of, -1), -1)
        places = before.num_slots
        return moving.taken("placement.reshard", source, physical, places, sharding)

    def to_logical(self, counts: Any) -> Any:
        """Returns sums over the copies of each expert.

        Args:
            counts: `[..., P]`, a number for each place, for instance `expert_counts`
                of all ranks. Leading dimensions of the placement come just before P.

        Returns:
            `[..., E]` of the same dtype; a NumPy array if `counts` and the placement
            are NumPy arrays, so that int64 stays int64.

        Raises:
            ValueError, TypeError: `counts` are not such an array.
        """
        layers = np.shape(self.expert_of)[:-1]
        on_host = isinstance(counts, np.ndarray) and isinstance(
            self.expert_of, np.ndarray
        )
        if not on_host:
            counts = as_array("placement.to_logical", "counts", counts)
        wanted = (*layers, self.num_slots)
        errors.require(
            counts.shape[max(0, counts.ndim - len(wanted)) :] == wanted,
            "placement.to_logical",
            f"counts must end with the dimensions {wanted}, one number per place",
            counts.shape,
            "pass those of all ranks",
        )
        of_expert = (*counts.shape[:-1], self.num_experts)
        if on_host:
            # Sums along the last dimension: every row has bins of its own.
            rows = counts.reshape(-1, self.num_slots)
            at = np.broadcast_to(self.expert_of, counts.shape).reshape(rows.shape)
            sums = np.zeros((len(rows), self.num_experts), counts.dtype)
            np.add.at(sums, (np.arange(len(rows))[:, None], at), rows)
            return sums.reshape(of_expert)

        index = jnp.broadcast_to(jnp.asarray(self.expert_of), counts.shape)

        def summed(values: Any, at: Any) -> jax.Array:
            return jnp.zeros(self.num_experts, values.dtype).at[at].add(values)

        for _ in counts.shape[1:]:
            summed = jax.vmap(summed)
        return summed(counts, index)


def identity(num_experts: int) -> Placement:
    """Returns the placement of every expert at the place of its own id.

    For more places than experts before any load is known, use `balance` with equal
    loads.

    Raises:
        ValueError: `num_experts` is not a positive int.
    """
    count = _checked_int("identity", "num_experts", num_experts)
    return _placement(np.arange(count))


def balance(
    load: ArrayLike,
    num_slots: int,
    *,
    ep_size: int,
    ranks_per_node: int | None = None,
) -> Placement:
    """Spreads experts, and copies of busy ones, so that ranks are equally busy.

    It runs on the host and depends only on its arguments. So in a job of several
    processes each may call it with the loads that `jax_ep.stats.summary` gives all of
    them. Spare places go to the experts with the largest load per copy, if that helps.
    Copies are packed into ranks from the largest to the smallest, then swapped. No rank
    gets two copies of an expert if one could be elsewhere, unless the ranks would then
    be less even than without copies. The busiest rank is never busier than it would be
    with experts in the order of their ids.

    Args:
        load: `[E]`, how busy each expert was, in any unit: `MoEAux.load`, or
            `jax_ep.stats.summary(load).expert_rows`. `[layers, E]` gives the placements
            of a stack of layers. If all loads are 0, experts count as equally busy.
        num_slots: P, number of places, a multiple of `ep_size`, at least E and at most
            2048; the `num_experts` of the config.
        ep_size: R, number of ranks.
        ranks_per_node: if given, nodes are made equally busy first, and then the ranks
            of each node, so that the copies of an expert lie on different nodes if
            there are enough nodes.

    Returns:
        A `Placement` of NumPy arrays.

    Raises:
        ValueError: an argument is not as described above, or a load is negative or not
            finite.
        TypeError: `load` is not an array of numbers.
    """
    found = _checked_load(load)
    experts = found.shape[-1]
    slots = _checked_int("balance", "num_slots", num_slots)
    ranks = _checked_int("balance", "ep_size", ep_size)
    errors.require(
        slots % ranks == 0 and slots >= experts,
        "placement.balance",
        f"num_slots must be a multiple of ep_size, {errors.brief(ranks)}, and at least "
        f"the number of experts, {experts}",
        slots,
        f"{errors.brief(-(-experts // ranks) * ranks)} is the least",
    )
    errors.require(
        slots <= native.MAX_EXPERTS,
        "placement.balance",
        f"num_slots must be at most {native.MAX_EXPERTS}, as num_experts of a config",
        errors.brief(slots),
        "use fewer copies",
    )
    per_node = ranks
    if ranks_per_node is not None:
        per_node = _checked_int("balance", "ranks_per_node", ranks_per_node)
    errors.require(
        ranks % per_node == 0,
        "placement.balance",
        f"ranks_per_node must divide ep_size, {errors.brief(ranks)}",
        per_node,
        "leave it out if all ranks are equally close",
    )
    from jax_ep._placement import packing  # when it is first used

    shape = packing.Shape(slots, ranks, per_node)
    packed = [packing.pack(each, shape) for each in found.reshape(-1, experts)]
    return _placement(np.reshape(packed, (*found.shape[:-1], slots)))


def _placement(expert_of: np.ndarray) -> Placement:
    experts = int(expert_of.max()) + 1
    layers, slots = expert_of.shape[:-1], expert_of.shape[-1]
    each = [np.bincount(e, minlength=experts) for e in expert_of.reshape(-1, slots)]
    copies = np.reshape(each, (*layers, experts))
    offsets = np.concatenate([np.zeros((*layers, 1)), copies.cumsum(axis=-1)], axis=-1)
    places = np.argsort(expert_of, axis=-1, kind="stable")
    return Placement(*(each.astype(np.int32) for each in (expert_of, places, offsets)))


def _require_one_layer(function: str, placement: Placement) -> None:
    layers = np.shape(placement.expert_of)[:-1]
    errors.require(
        not layers,
        f"placement.{function}",
        "the placement must be of one layer",
        f"a stack {layers}",
        "take one with jax.tree.map(lambda leaf: leaf[i], placement), or scan over the "
        "stack",
    )


def _checked_load(load: Any) -> np.ndarray:
    """Returns `load` as float64 on the host."""
    what = "an array of numbers [E] or [layers, E]"
    remedy = "pass jax_ep.stats.summary(load).expert_rows, or a layer's aux.load"
    if isinstance(load, Tracer):
        raise errors.unusable(
            "placement.balance",
            "load must have values, but is traced",
            "return it from the jitted function and call balance outside",
        )
    found = np.asarray(load)
    try:
        found = found.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        rule, kind = f"load must be {what}", type(load).__name__
        raise errors.invalid(
            "placement.balance", rule, kind, remedy, operand="load", kind=TypeError
        ) from error
    errors.require(
        found.size > 0 and found.ndim > 0,
        "placement.balance",
        f"load must be {what}",
        found.shape,
        remedy,
    )
    wrong = found[~(np.isfinite(found) & (found >= 0))]
    errors.require(
        not wrong.size,
        "placement.balance",
        "loads must be finite and not negative",
        f"{wrong[:1].tolist()} among them",
        "look for what made them; a count of rows never is",
    )
    return found


def _checked_int(function: str, name: str, value: Any) -> int:
    errors.require(
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and int(value) >= 1,
        f"placement.{function}",
        f"{name} must be a positive int",
        errors.brief(value),
        "pass one",
    )
    return int(value)
