"""The kernel that chooses a router's experts, and where it is used.

It is a custom call, which XLA cannot split. So it is used only where every axis of the
mesh is manual, inside `shard_map`; elsewhere a router stays in plain JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_ep._core import batching
from jax_ep._core.literals import Score
from jax_ep._core.varying import vary_alike
from jax_ep._native import ffi, tables
from jax_ep._native.loader import cpu as native

_TARGET: Final = "ep_router"

# Ids int32 `[n, K]` and weights float32 `[n, K]`.
Choice = tuple[jax.Array, jax.Array]


def has_kernel(experts: int, top_k: int, num_groups: int) -> bool:
    """Whether a GPU would use the kernel here."""
    fits = (
        experts <= native.MAX_ROUTER_EXPERTS
        and top_k <= native.MAX_ROUTER_CHOSEN
        and num_groups <= native.MAX_ROUTER_GROUPS
    )
    mesh = jax.sharding.get_abstract_mesh()
    manual = not mesh.empty and set(mesh.axis_types) == {AxisType.Manual}
    return fits and manual and _TARGET in ffi.gpu_target_names()


def on_gpus(
    kernel: Callable[..., Choice], plain: Callable[..., Choice], *operands: Any
) -> Choice:
    """Returns what `kernel` makes of the operands on GPUs, and `plain` elsewhere.

    The platform is known only when the program is lowered, perhaps for several ones, so
    the choice is a `cond` until then. It has no derivative.
    """

    def run(*operands: Any) -> Choice:
        return jax.lax.platform_dependent(*operands, cuda=kernel, default=plain)

    # Also hides the cond: checkify would give its branches errors that vary over
    # different axes, as only one of them has float operations.
    return batching.in_turn(run)(*operands)


def choose(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    top_k: int,
    score: Score,
    num_groups: int,
    top_groups: int,
    best_of_group: int,
    least_sum: float,
    scale: float,
) -> Choice:
    """Chooses experts with the kernel; has no derivative, and no rule for vmap.

    Args:
        logits: float32 `[n, E]`.
        bias: `[E]` of any floating dtype, or None.
        top_k: K.
        score: as in `Router`.
        num_groups: as in `Router`.
        top_groups: as in `Router`.
        best_of_group: as in `Router`.
        least_sum: weights are divided by their sum, and computed from logits if it is
            less than this; with 0 they are not divided at all.
        scale: as in `Router`.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    logits, bias = vary_alike(names, frozenset(), logits, bias)
    bias = None if bias is None else bias.astype(jnp.float32)
    found = tables.call(
        _TARGET,
        logits,
        {"K": top_k},
        {"logits": logits, "bias": bias},
        {
            "score": score,
            "num_groups": num_groups,
            "top_groups": top_groups,
            "best_of_group": best_of_group,
            "least_sum": least_sum,
            "scale": scale,
        },
    )
    return found.ids, found.weights
