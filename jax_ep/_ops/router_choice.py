"""The kernel that chooses a router's experts, and where it is used.

It is a custom call, which XLA cannot split. So it is used where every axis of the mesh
is manual, in `shard_map`; elsewhere a router stays in plain JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from jax_ep._core import batching
from jax_ep._core.varying import vary_alike
from jax_ep._native import ffi, tables

_TARGET = "ep_router"
# What the kernel has room for (xla_ffi/ffi/router_calls.h).
_MOST_EXPERTS, _MOST_CHOSEN, _MOST_GROUPS = 1024, 32, 32

# Ids int32 `[n, K]` and weights float32 `[n, K]`.
Choice = tuple[jax.Array, jax.Array]


def has_kernel(experts: int, top_k: int, num_groups: int) -> bool:
    """Whether a GPU would choose with the kernel here."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = not mesh.empty and set(mesh.axis_types) == {AxisType.Manual}
    fits = experts <= _MOST_EXPERTS and top_k <= _MOST_CHOSEN
    there = _TARGET in ffi.gpu_target_names()
    return there and manual and fits and num_groups <= _MOST_GROUPS


def on_gpus(
    kernel: Callable[..., Choice], plain: Callable[..., Choice], *operands: Any
) -> Choice:
    """Returns what `kernel` makes of the operands on GPUs, and `plain` elsewhere."""
    return jax.lax.platform_dependent(*operands, cuda=kernel, default=plain)


def choose(
    logits: jax.Array, bias: jax.Array | None, top_k: int, **attributes: Any
) -> Choice:
    """Chooses experts by the kernel; without a derivative.

    Args:
        logits: float32 `[n, E]`.
        bias: float32 `[E]` or None.
        top_k: K.
        **attributes: those of the call, except whether there is a bias.
    """

    def run(logits: jax.Array, bias: jax.Array | None) -> Choice:
        names = jax.sharding.get_abstract_mesh().axis_names
        logits, bias = vary_alike(names, frozenset(), logits, bias)
        operands = {"logits": logits, "bias": bias}
        found = tables.call(_TARGET, logits, {"K": top_k}, operands, attributes)
        return found.ids, found.weights

    return batching.in_turn(run)(logits, bias)
