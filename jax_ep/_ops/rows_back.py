"""The reverse rule of combine for the rows at an expert rank.

With cotangent c of a row's token, weight w and expert row E: dE = w * c, dw = <c, E>.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core import batching
from jax_ep._native import tables

# Cotangents of expert_out `[N, H]` and of the weights, float32 `[N]`.
Back = tuple[jax.Array, jax.Array]


def rows_back_reference(
    cotangents: jax.Array, expert_out: jax.Array, weights: jax.Array, row_slot: Any
) -> Back:
    """Returns the cotangents of expert_out and weights, in plain JAX.

    Args:
        cotangents: `[N, H]`, those of each row's token.
        expert_out: `[N, H]`, which may hold anything in rows without a slot.
        weights: float32 `[N]`; 1 in rows that have no slot but do have cotangents, as
            those of a shared expert.
        row_slot: int32 `[N]`, negative in rows without a slot.
    """
    wide = cotangents.astype(jnp.float32)
    dot = jnp.sum(wide * expert_out.astype(jnp.float32), axis=-1)
    to_rows = (weights[:, None] * wide).astype(cotangents.dtype)
    return to_rows, jnp.where(row_slot >= 0, dot, 0.0)


@jax.custom_vjp
def rows_back(
    cotangents: jax.Array, expert_out: jax.Array, weights: jax.Array, row_slot: Any
) -> Back:
    """Does what `rows_back_reference` does, with a kernel of the CUDA module.

    It reads and writes each row that has a slot once, and leaves the others as they
    are.
    """
    return batching.in_turn(_call)(cotangents, expert_out, weights, row_slot)


def _call(cotangents: Any, expert_out: Any, weights: Any, row_slot: Any) -> Back:
    back = tables.call(
        "ep_combine_back",
        cotangents,
        {},
        {
            "cotangents": cotangents,
            "expert_out": expert_out,
            "router_weights": weights,
            "row_slot": row_slot,
        },
        {},
    )
    return back.to_rows, back.to_weights


def _forward(*args: Any) -> Any:
    return rows_back(*args), args


def _backward(args: Any, cotangent: Any) -> Any:
    *values, row_slot = args

    def reference(cotangents: Any, expert_out: Any, weights: Any) -> Back:
        return rows_back_reference(cotangents, expert_out, weights, row_slot)

    return (*jax.vjp(reference, *values)[1](cotangent), None)


rows_back.defvjp(_forward, _backward)
