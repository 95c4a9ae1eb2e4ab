"""The inputs that p2p.py measures with, and what they cost on the wire.

Routings are drawn from a seed; bytes and capacities are counted from the drawn ids.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 4  # different routings that a program cycles through
ROUTINGS = ("uniform", "zipf")
_CAPACITY_FACTOR = 1.25
_CAPACITY_MULTIPLE = 128


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _draw(order_key, noise_key, tokens, top_k, experts, routing):
    scores = jax.random.gumbel(noise_key, (tokens, experts), jnp.float32)
    if routing == "zipf":
        rank = jax.random.permutation(order_key, experts)
        scores -= jnp.log1p(rank.astype(jnp.float32))
    return jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)


def draw_ids(seed, tokens, top_k, experts, routing, draws=DRAWS):
    """`draws` arrays int32 [tokens, top_k] of expert ids, distinct in every token.

    Gumbel top-k: `top_k` experts without replacement, all of them alike ("uniform") or
    with a popularity of 1 / place, in an order of the experts drawn at random once for
    all draws ("zipf").
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")
    key = jax.random.fold_in(jax.random.key(seed), tokens)
    order_key, noise_key = jax.random.split(key)
    return [
        np.asarray(_draw(order_key, each, tokens, top_k, experts, routing))
        for each in jax.random.split(noise_key, draws)
    ]


def _destinations(ids, ranks, experts):
    """Ranks of the ids [R * n, K] and, bool [R, n, R], which ranks a token goes to."""
    owner = ids // (experts // ranks)
    reached = (owner[:, :, None] == np.arange(ranks)).any(axis=1)
    return owner, reached.reshape(ranks, -1, ranks)


def remote_rows(ids, ranks, experts):
    """Rows that the busiest rank must send or receive, each (token, rank) once."""
    _, reached = _destinations(ids, ranks, experts)
    messages = reached.sum(axis=1)
    np.fill_diagonal(messages, 0)
    return int(max(messages.sum(axis=0).max(), messages.sum(axis=1).max()))


def most_rows(ids, ranks, experts):
    """Rows of the rank that dispatch gives most, each (token, k) once."""
    owner, _ = _destinations(ids, ranks, experts)
    return int(np.bincount(owner.reshape(-1), minlength=ranks).max())


def recv_capacity(draws, ranks, tokens, top_k, experts, routing):
    """N with which none of the `draws` drops a row."""
    needed = max(most_rows(ids, ranks, experts) for ids in draws)
    if routing == "uniform":
        needed = max(needed, int(np.ceil(_CAPACITY_FACTOR * tokens * top_k)))
    return -(-needed // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE


def wire(draws, ranks, experts, row_bytes, peak_gb_s):
    """Bytes of a call's busiest rank, mean of the draws, and their time at peak."""
    sent = np.mean([remote_rows(ids, ranks, experts) for ids in draws]) * row_bytes
    return {
        "bytes": round(float(sent)),
        "floor_us": float(sent) / peak_gb_s / 1e3 if peak_gb_s else None,
    }
