"""The expert-parallel mixture-of-experts layer, as an example to copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ep


class Routing(NamedTuple):
    """The router's decision for `n` tokens.

    Attributes:
        ids: int32 `[n, K]`, experts of each token.
        weights: float32 `[n, K]`, which sum to 1 for each token.
        load: float32 `[E]`, share of the (token, k) that each expert was chosen for.
        mean_probability: float32 `[E]`, mean over tokens of the router's softmax.
    """

    ids: jax.Array
    weights: jax.Array
    load: jax.Array
    mean_probability: jax.Array


class LayerStats(NamedTuple):
    """Statistics of a layer's experts.

    Attributes:
        expert_counts: int32 `[experts]`, rows sent to each expert.
        num_dropped: int32 `[1]`, rows dropped for lack of room.
    """

    expert_counts: jax.Array
    num_dropped: jax.Array


def route(router: jax.Array, tokens: jax.Array, top_k: int) -> Routing:
    """Chooses the `top_k` likeliest experts of tokens `[n, H]` by a router `[H, E]`."""
    # Scaled down so that a step of Adam changes logits little, and tokens keep their
    # experts.
    probabilities = jax.nn.softmax(tokens @ router * router.shape[0] ** -0.5)
    weights, ids = jax.lax.top_k(probabilities, top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    chosen = jax.nn.one_hot(ids, router.shape[1], dtype=jnp.float32)
    load, mean_probability = jnp.mean(chosen, (0, 1)), jnp.mean(probabilities, 0)
    return Routing(ids.astype(jnp.int32), weights, load, mean_probability)


def balance_loss(load: jax.Array, mean_probability: jax.Array) -> jax.Array:
    """Returns the load-balance loss of the whole batch; 1 for an equal load."""
    return load.size * jnp.sum(load * mean_probability)


def experts(
    rows: jax.Array, params: dict[str, jax.Array], group_sizes: jax.Array
) -> jax.Array:
    """Applies SwiGLU experts to rows `[N, H]` that are grouped by expert."""
    up = jax.lax.ragged_dot(rows, params["up"], group_sizes)
    gate, value = jnp.split(up, 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * value, params["down"], group_sizes)


def layer(
    ep: jax_ep.EPHandle, params: dict[str, jax.Array], x: jax.Array, residual: jax.Array
) -> tuple[jax.Array, jax.Array, LayerStats]:
    """Applies one layer, inside `jax.shard_map` over the mesh of `ep`.

    Args:
        ep: handle of `jax_ep.init`.
        params: "router" `[H, E]` on every rank; "up" `[L, H, 2F]` and "down"
            `[L, F, H]` of this rank's L experts.
        x: `[n, H]`, this rank's tokens.
        residual: `[n, H]`, added to the result.

    Returns:
        `[n, H]`; the balance loss, equal on all ranks; this rank's statistics.
    """
    routing = route(params["router"], x, ep.config.top_k)
    d = jax_ep.dispatch(ep, x, routing.ids, routing.weights)
    rows = experts(d.tokens, params, d.group_sizes)
    y = jax_ep.combine(
        ep, rows, d.route, router_weights=d.router_weights, residual=residual
    )
    whole_batch: Any = jax.lax.pmean(
        (routing.load, routing.mean_probability), ep.axis_names
    )
    return y, balance_loss(*whole_batch), LayerStats(d.expert_counts, d.num_dropped)
