"""The whole expert layers that layer.py compares: router, exchange, experts, exchange.

Each is a function of one rank's (tokens [n, H], params as `jax_ep.moe_ffn` takes them)
inside shard_map. It returns (y [n, H], dropped bool [n]), where `dropped` marks the
tokens that lost a row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

import jax_ep
from benchmarks.layers import grouped
from jax_ep._cli.bench import ragged
from jax_ep._layers.logits import logits_of

CAPACITY_FACTOR = 1.25  # for the dense all-to-all


def route(tokens, router, top_k):
    """Routes as `jax_ep.moe_ffn` does; all layers use this router."""
    return jax_ep.router.route(logits_of(tokens, router, jax.devices()[0]), top_k)


def ours(ep, experts):
    """Returns jax_ep's layer, with the transport and format of its handle."""

    def layer(tokens, params):
        y, _ = jax_ep.moe_ffn(ep, tokens, params, experts=experts)
        return y, jnp.zeros(tokens.shape[0], bool)

    return layer


def counted(ep, experts):
    """Like `ours`, and updates `load`, one rank's part of a `Load`, by jax_ep.stats.

    No token is ever marked as dropped, but XLA has to compute the new `Load` to know.
    """

    def layer(tokens, params, load):
        y, aux = jax_ep.moe_ffn(ep, tokens, params, experts=experts)
        leaves = jax.tree.leaves(jax_ep.stats.update(load, aux))
        used = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)
        return y, jnp.broadcast_to(jnp.isnan(used), tokens.shape[:1])

    return layer


def coded(ep):
    """Like `ours`, with experts in fp8 and codes of the weights that exist already.

    The codes are multiplied, and the parameters get the gradients.
    """

    def layer(tokens, params, codes):
        params = {**params, "experts": codes}
        y, _ = jax_ep.moe_ffn(ep, tokens, params, experts=jax_ep.experts.fp8)
        return y, jnp.zeros(tokens.shape[0], bool)

    return layer


def over_ragged(sizes, experts, rows, updates):
    """Returns a layer that sorts rows and exchanges them by `ragged_all_to_all`.

    jax_ep/_cli/bench/ragged.py has the exchange.
    """
    exchange = ragged.exchange_here()

    def layer(tokens, params):
        routing = route(tokens, params["router"], sizes["top_k"])
        received, group_sizes, way = ragged.dispatch(
            tokens,
            routing.ids,
            axis="ep",
            experts=sizes["experts"],
            rows=rows,
            updates=updates,
            exchange=exchange,
        )
        out = experts(received, params["gate_up"], params["down"], group_sizes)
        y = ragged.combine(out, way, routing.weights, axis="ep", exchange=exchange)
        return y, jnp.zeros(tokens.shape[0], bool)

    return layer


def slots(sizes):
    """Returns how many rows each rank has for each expert in the dense all-to-all."""
    mean = sizes["tokens"] * sizes["top_k"] / sizes["experts"]
    return math.ceil(CAPACITY_FACTOR * mean / 8) * 8


def batched_experts(rows, gate_up, down):
    """Runs SwiGLU experts on [L, rows, H]."""
    wide = gate_up.reshape(*gate_up.shape[:2], -1)
    gate, up = jnp.split(jnp.einsum("lnh,lhf->lnf", rows, wide), 2, axis=-1)
    inner = jax.nn.silu(gate) * up
    return jnp.einsum("lnf,lfh->lnh", inner, down)


def over_dense(sizes):
    """Returns a layer over `all_to_all`, with batched matmuls.

    It drops what does not fit into `slots` rows per (rank, expert).
    """
    room, experts, top_k = slots(sizes), sizes["experts"], sizes["top_k"]

    def layer(tokens, params):
        n, hidden = tokens.shape
        routing = route(tokens, params["router"], top_k)
        ids = routing.ids.reshape(-1)
        copy = jnp.arange(n * top_k, dtype=jnp.int32)
        order = jnp.argsort(ids, stable=True)
        sorted_at = jnp.zeros_like(copy).at[order].set(copy, unique_indices=True)
        counts = jnp.sum(ids[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
        place = sorted_at - (jnp.cumsum(counts) - counts)[ids]
        kept = place < room
        slot = ids * room + jnp.minimum(place, room - 1)
        outside = jnp.where(kept, slot, experts * room)
        copy_of = jnp.full(experts * room, n * top_k, jnp.int32)
        copy_of = copy_of.at[outside].set(copy, mode="drop")
        filled = copy_of < n * top_k
        copy_of = jnp.minimum(copy_of, n * top_k - 1)
        # Without this, XLA computes places anew for every element of the sums below.
        indices = (slot, kept, copy_of, filled)
        slot, kept, copy_of, filled = lax.optimization_barrier(indices)

        shape = (n, top_k)
        rows = ragged.gather(
            tokens, copy_of // top_k, slot.reshape(shape), kept.reshape(shape)
        )
        rows = jnp.where(filled[:, None], rows, 0)
        exchange = functools.partial(lax.all_to_all, axis_name="ep")
        ranks, local = lax.axis_size("ep"), params["down"].shape[0]
        received = exchange(
            rows.reshape(ranks, local, room, hidden), split_axis=0, concat_axis=0
        )
        by_expert = jnp.swapaxes(received, 0, 1).reshape(local, -1, hidden)
        out = batched_experts(by_expert, params["gate_up"], params["down"])
        out = jnp.swapaxes(out.reshape(local, ranks, room, hidden), 0, 1)
        returned = exchange(out, split_axis=0, concat_axis=0).reshape(-1, hidden)
        copies = ragged.gather(returned, slot, copy_of[:, None])
        weights = jnp.where(kept.reshape(shape), routing.weights, 0)
        copies = copies.reshape(n, top_k, hidden).astype(jnp.float32)
        y = jnp.sum(copies * weights[:, :, None], axis=1).astype(tokens.dtype)
        return y, ~kept.reshape(shape).all(axis=1)

    return layer


def alone(sizes, experts):
    """Returns router and experts without an exchange, on rows that exist already.

    It is a function of (tokens, params, rows [N, H], group_sizes [L]) that returns the
    experts' output and the router's weights, so that XLA leaves nothing out.
    """

    def layer(tokens, params, rows, group_sizes):
        routing = route(tokens, params["router"], sizes["top_k"])
        out = experts(rows, params["gate_up"], params["down"], group_sizes)
        return out, routing.weights

    return layer


def alone_coded(sizes):
    """Like `alone`, for `coded`: rows and weights are codes already.

    `row_codes` were made of `rows`, which get the gradients.
    """

    def layer(tokens, params, rows, group_sizes, row_codes, codes):
        routing = route(tokens, params["router"], sizes["top_k"])
        given = grouped.Coded(rows, row_codes), grouped.Coded(params["gate_up"], codes)
        out = grouped.fp8(*given, params["down"], group_sizes)
        return out, routing.weights

    return layer


def alone_batched(sizes):
    """Like `alone`, for the dense all-to-all: rows are [L, R * slots, H]."""

    def layer(tokens, params, rows):
        routing = route(tokens, params["router"], sizes["top_k"])
        out = batched_experts(rows, params["gate_up"], params["down"])
        return out, routing.weights

    return layer
