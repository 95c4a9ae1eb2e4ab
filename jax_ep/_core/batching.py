"""Computing the entries of a vmap one after the other, where there is no other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, which vmap calls once for each entry of the batch.

    It has no derivative of its own: call it inside of a `jax.custom_vjp`.
    """
    guarded = jax.custom_batching.custom_vmap(function)

    @guarded.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        # By itself, for batches around this one.
        entries = [
            in_turn(function)(*entry(args, tuple(in_batched), index))
            for index in range(axis_size)
        ]
        whole = stacked(entries)
        return whole, jax.tree.map(lambda _: True, whole)

    return guarded


def entry(tree: Any, batched: Any, index: int) -> Any:
    """Entry `index` of a batch: of those arrays of `tree` that `batched` names."""

    def take(value: jax.Array, is_batched: bool) -> jax.Array:
        if not is_batched:
            return value
        return jax.lax.index_in_dim(value, index, 0, keepdims=False)

    return jax.tree.map(take, tree, batched)


def stacked(entries: list[Any]) -> Any:
    """The trees of the entries as one, with the batch in front."""

    def join(*values: jax.Array) -> jax.Array:
        whole = [jax.lax.expand_dims(value, (0,)) for value in values]
        # A batch of 1 copies nothing.
        return whole[0] if len(whole) == 1 else jax.lax.concatenate(whole, 0)

    return jax.tree.map(join, *entries)
