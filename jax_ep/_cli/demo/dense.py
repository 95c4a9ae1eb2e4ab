"""The layer of moe.py on one device without jax_ep, as a reference for the demo.

Every expert runs on every token; rows that moe.py drops get weight zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep._cli.demo.moe import LayerStats, balance_loss, route


def kept(ids: jax.Array, num_experts: int, ranks: int, capacity: int) -> jax.Array:
    """Returns which (token, k) of the whole batch fit on their expert's rank.

    A rank's rows are ordered by expert, then by (source rank, token, k), which is the
    order of the whole batch; a row whose index reaches `capacity` is dropped.
    """
    flat = ids.reshape(-1)
    chosen = jax.nn.one_hot(flat, num_experts, dtype=jnp.int32)
    before = jnp.cumsum(chosen, axis=0) - chosen
    counts = jnp.sum(chosen, axis=0).reshape(ranks, -1)
    first_row = (jnp.cumsum(counts, axis=1) - counts).reshape(-1)
    row = jnp.take_along_axis(before, flat[:, None], axis=1)[:, 0] + first_row[flat]
    return (row < capacity).reshape(ids.shape)


def layer(
    top_k: int,
    ranks: int,
    capacity: int,
    params: dict[str, jax.Array],
    x: jax.Array,
    residual: jax.Array,
) -> tuple[jax.Array, jax.Array, LayerStats]:
    """Like `moe.layer`, on the tokens `[ranks * n, H]` and the experts of all ranks."""
    num_experts = params["router"].shape[1]
    routing = route(params["router"], x, top_k)
    has_room = kept(routing.ids, num_experts, ranks, capacity)
    chosen = jax.nn.one_hot(routing.ids, num_experts, dtype=x.dtype)
    weights = jnp.einsum("tke,tk->te", chosen, routing.weights * has_room)
    gate, value = jnp.split(jnp.einsum("th,ehf->tef", x, params["up"]), 2, axis=-1)
    inner = jax.nn.silu(gate) * value * weights[..., None]
    y = residual + jnp.einsum("tef,efh->th", inner, params["down"])
    counts = jnp.sum(chosen, axis=(0, 1)).astype(jnp.int32)
    dropped = jnp.sum(~has_room).astype(jnp.int32)[None]
    balance = balance_loss(routing.load, routing.mean_probability)
    return y, balance, LayerStats(counts, dropped)
