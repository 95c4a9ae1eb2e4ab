"""Runs the entries of a vmap one after the other, for calls that cannot be batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with a vmap rule that calls it once per batch entry.

    The result has no derivative rule: call it inside a `jax.custom_vjp`.
    """
    guarded = jax.custom_batching.custom_vmap(function)

    @guarded.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        # in_turn again, so that an outer vmap finds the same rule.
        entries = [
            in_turn(function)(*entry(args, tuple(in_batched), index))
            for index in range(axis_size)
        ]
        whole = stacked(entries)
        return whole, jax.tree.map(lambda _: True, whole)

    return guarded


def entry(tree: Any, batched: Any, index: int) -> Any:
    """Returns entry `index` of a batch; `batched` marks which arrays are batched."""

    def take(value: jax.Array, is_batched: bool) -> jax.Array:
        if not is_batched:
            return value
        return jax.lax.index_in_dim(value, index, 0, keepdims=False)

    return jax.tree.map(take, tree, batched)


def stacked(entries: list[Any]) -> Any:
    """Stacks the trees of all entries into one, with the batch as dimension 0."""

    def join(*values: jax.Array) -> jax.Array:
        whole = [jax.lax.expand_dims(value, (0,)) for value in values]
        # Without a concatenation, a batch of 1 copies nothing.
        return whole[0] if len(whole) == 1 else jax.lax.concatenate(whole, 0)

    return jax.tree.map(join, *entries)
