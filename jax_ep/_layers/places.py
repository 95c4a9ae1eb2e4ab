"""Gathers a layer's weights by place from its parameters, which are by expert."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep import placement as placements
from jax_ep._core import errors
from jax_ep._layers import codes
from jax_ep._layers.params import Param

# Parameters of the routed experts; the others are the same for all places.
_OF_EXPERTS = ("gate_up", "down", "gate_bias", "up_bias", "down_bias", "experts")


def checked_slots(
    function: str, slots: Any, experts: Any, top_k: Any, ranks: int
) -> int:
    """Returns the number of places; None means one per expert.

    `EPConfig` only checks sizes against the number of places. This checks them against
    the number of experts.
    """
    if slots is None:
        return experts
    for name, value in (("num_slots", slots), ("num_experts", experts)):
        if type(value) is not int or value < 1:
            raise errors.invalid(
                function,
                f"{name} must be a positive int",
                errors.brief(value),
                "convert it with int()"
                if isinstance(value, np.integer)
                else "leave num_slots out for one place per expert",
            )
    errors.require(
        slots >= experts,
        function,
        f"num_slots must be at least num_experts, {errors.brief(experts)}",
        slots,
        "it counts a place for every expert, and those of the copies",
    )
    errors.require(
        slots % ranks == 0,
        function,
        f"num_slots must be a multiple of {ranks}, the number of ranks in the EP group",
        slots,
        f"the next is {errors.brief(-(-slots // ranks) * ranks)}",
    )
    errors.require(
        not isinstance(top_k, int) or top_k <= experts,
        function,
        f"top_k must be at most num_experts, {errors.brief(experts)}",
        top_k,
        "choose fewer experts per token",
    )
    return slots


def checked(
    function: str, placement: Any, experts: int, slots: int, ep_size: int
) -> placements.Placement | None:
    """Returns the placement to use; None if expert e is at place e for all e."""
    if placement is None:
        return None if slots == experts else _even(experts, slots, ep_size)
    what = "a jax_ep.placement.Placement"
    remedy = "jax_ep.placement.balance makes one"
    errors.require_type(
        function, "placement", placement, placements.Placement, what, remedy
    )
    found = placement.expert_of.shape, placement.num_experts
    errors.require(
        found == ((slots,), experts),
        function,
        f"placement must be of one layer, with its {slots} places (num_slots) and "
        f"{experts} experts",
        f"places of shape {found[0]} and {found[1]} experts",
        "make it with jax_ep.placement.balance from this layer's load, and scan over a "
        "stack of layers",
    )
    return placement


@functools.cache
def _even(experts: int, slots: int, ep_size: int) -> placements.Placement:
    return placements.balance(np.ones(experts), slots, ep_size=ep_size)


def gathered(
    placement: placements.Placement,
    values: Mapping[str, Any],
    layout: Mapping[str, Param],
    mesh: Mesh,
) -> dict[str, Any]:
    """Returns `values`, global arrays, with experts' weights by place.

    `layout` has the sharding of the results. Gradients of copies are summed.
    """
    moved = {name: values[name] for name in _OF_EXPERTS if name in values}
    specs: dict[str, Any] = {
        name: PartitionSpec(*layout[name].spec) for name in moved if name in layout
    }
    if "experts" in moved:
        specs["experts"] = codes.specs(layout, codes.Form.of(moved["experts"]))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )
    with jax.named_scope("jax_ep.placement"):
        return {**values, **placement.gather(moved, sharding=shardings)}
