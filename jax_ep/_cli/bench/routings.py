"""Routings drawn from a seed, and what they cost on the wire.

Bytes and capacities are counted from the drawn ids.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 4  # different routings that a program cycles through
ROUTINGS = ("uniform", "zipf")
_CAPACITY_FACTOR = 1.25
_CAPACITY_MULTIPLE = 128


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _draw(
    order_key: Any, noise_key: Any, tokens: int, top_k: int, experts: int, routing: str
) -> Any:
    scores = jax.random.gumbel(noise_key, (tokens, experts), jnp.float32)
    if routing == "zipf":
        rank = jax.random.permutation(order_key, experts)
        scores -= jnp.log1p(rank.astype(jnp.float32))
    return jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)


def draw_ids(
    seed: int, tokens: int, top_k: int, experts: int, routing: str, draws: int = DRAWS
) -> list[np.ndarray]:
    """Draws arrays int32 [tokens, top_k] of expert ids, distinct in every token.

    Gumbel top-k draws experts without replacement. With "uniform" all experts are
    equally likely; with "zipf" an expert's popularity is 1 / its position in an order
    of the experts that is drawn once for all draws.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")
    key = jax.random.fold_in(jax.random.key(seed), tokens)
    order_key, noise_key = jax.random.split(key)
    return [
        np.asarray(_draw(order_key, each, tokens, top_k, experts, routing))
        for each in jax.random.split(noise_key, draws)
    ]


def messages(ids: np.ndarray, ranks: int, experts: int) -> np.ndarray:
    """Counts rows from each rank to each other one, [R, R]: one per (token, rank).

    `ids` are those of all ranks, [R * n, K].
    """
    owner = ids // (experts // ranks)
    reached = (owner[:, :, None] == np.arange(ranks)).any(axis=1)
    found = reached.reshape(ranks, -1, ranks).sum(axis=1)
    np.fill_diagonal(found, 0)
    return found


def remote_rows(ids: np.ndarray, ranks: int, experts: int) -> int:
    """Returns how many rows the busiest rank sends or receives."""
    found = messages(ids, ranks, experts)
    return int(max(found.sum(axis=0).max(), found.sum(axis=1).max()))


def most_rows(ids: np.ndarray, ranks: int, experts: int) -> int:
    """Returns the most rows that a rank gets from dispatch: one per (token, k)."""
    owner = ids // (experts // ranks)
    return int(np.bincount(owner.reshape(-1), minlength=ranks).max())


def recv_capacity(
    draws: Sequence[np.ndarray],
    ranks: int,
    tokens: int,
    top_k: int,
    experts: int,
    routing: str,
) -> int:
    """Returns an N with which none of the `draws` drops a row."""
    needed = max(most_rows(ids, ranks, experts) for ids in draws)
    if routing == "uniform":
        needed = max(needed, int(np.ceil(_CAPACITY_FACTOR * tokens * top_k)))
    return -(-needed // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE


def wire(
    draws: Sequence[np.ndarray],
    ranks: int,
    experts: int,
    row_bytes: int,
    peak_gb_s: float | None,
) -> dict[str, Any]:
    """Returns the busiest rank's bytes per call (mean of draws) and time at peak."""
    rows = np.mean([remote_rows(ids, ranks, experts) for ids in draws])
    sent = float(rows * row_bytes)
    floor_us = sent / peak_gb_s / 1e3 if peak_gb_s else None
    return {"bytes": round(sent), "floor_us": floor_us}
