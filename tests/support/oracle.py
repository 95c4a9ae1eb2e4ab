"""NumPy oracle of dispatch, combine and their gradients, written from the contract.

It simulates all ranks of one EP group at once and knows nothing of jax_ep. Every
semantics test compares with it. `config` is anything with EPConfig's field names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class Row(NamedTuple):
    """One (token, k) copy at an expert rank; it is dropped if `index >= N`."""

    index: int
    source: int
    token: int
    k: int


@dataclasses.dataclass
class Placement:
    """Where the rows of one expert rank go, before anything is copied."""

    rows: list[Row]
    row_offsets: np.ndarray
    expert_counts: np.ndarray
    capacity: int

    @property
    def kept(self) -> list[Row]:
        """The rows that N did not cut off."""
        return [row for row in self.rows if row.index < self.capacity]


@dataclasses.dataclass
class RankOutput:
    """What dispatch returns on one rank; fields are named as in the contract."""

    tokens: np.ndarray
    row_offsets: np.ndarray
    group_sizes: np.ndarray
    expert_counts: np.ndarray
    expert_ids: np.ndarray
    src_info: np.ndarray
    router_weights: np.ndarray
    num_dropped: np.ndarray
    num_invalid: np.ndarray


FIELDS = tuple(field.name for field in dataclasses.fields(RankOutput))
ROW_FIELDS = ("tokens", "src_info", "router_weights")
SHARED = -1  # k of a shared expert's row


def capacity(config: Any, num_ranks: int) -> int:
    """N, the number of rows of a rank's output."""
    if config.recv_capacity is not None:
        return config.recv_capacity
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    if config.capacity_factor is not None:
        rows = math.ceil(config.capacity_factor * tokens * top_k)
        return -(-rows // 128) * 128
    local = config.num_experts // num_ranks
    groups = local + bool(config.fused_shared_expert)
    sources = 1 if config.skip_a2a else num_ranks
    shared = tokens if config.fused_shared_expert else 0
    padding = groups * (config.expert_alignment - 1)
    return sources * tokens * min(top_k, local) + padding + shared


def shared_tokens(config: Any, rank: int, num_ranks: int, n: int) -> range:
    """The tokens that the shared expert on `rank` computes."""
    if not config.fused_shared_expert:
        return range(0)
    if not config.skip_a2a:
        return range(n)
    world = config.allreduce_world_size or num_ranks
    rank %= world
    first = rank * (n // world) + min(rank, n % world)
    return range(first, first + (n + world - rank - 1) // world)


def place(config: Any, ids: Sequence[np.ndarray]) -> list[Placement]:
    """Rows of every rank in order: by expert, source rank, source token, k."""
    num_ranks = len(ids)
    local = config.num_experts // num_ranks
    limit = capacity(config, num_ranks)
    placements = []
    for rank in range(num_ranks):
        sources = [rank] if config.skip_a2a else range(num_ranks)
        groups: list[list[tuple[int, int, int]]] = []
        if config.fused_shared_expert:
            own = shared_tokens(config, rank, num_ranks, len(ids[rank]))
            groups.append([(rank, token, SHARED) for token in own])
        for expert in range(rank * local, (rank + 1) * local):
            groups.append(
                [
                    (source, int(token), int(k))
                    for source in sources
                    for token, k in np.argwhere(np.asarray(ids[source]) == expert)
                ]
            )
        rows: list[Row] = []
        offsets = [0]
        for group in groups:
            rows += [Row(offsets[-1] + i, *entry) for i, entry in enumerate(group)]
            align = config.expert_alignment
            offsets.append(offsets[-1] + -(-len(group) // align) * align)
        counts = np.array([len(group) for group in groups], np.int32)
        clamped = np.minimum(np.array(offsets), limit).astype(np.int32)
        placements.append(Placement(rows, clamped, counts, limit))
    return placements


def dispatch(
    config: Any,
    tokens: Sequence[np.ndarray],
    ids: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] | None = None,
) -> list[RankOutput]:
    """Outputs of dispatch on every rank.

    Args:
      config: EPConfig's fields.
      tokens: [n, H] of each rank.
      ids: int32 [n, K] of each rank.
      weights: float32 [n, K] of each rank, or None (rows then have weight 1).
    """
    outputs = []
    for rank, placement in enumerate(place(config, ids)):
        size = placement.capacity
        rows = np.zeros((size, config.hidden_size), tokens[0].dtype)
        src_info = np.full((size, 3), -1, np.int32)
        row_weights = np.zeros(size, np.float32)
        for row in placement.kept:
            rows[row.index] = tokens[row.source][row.token]
            src_info[row.index] = (row.source, row.token, row.k)
            plain = weights is None or row.k == SHARED
            row_weights[row.index] = (
                1 if plain else weights[row.source][row.token, row.k]
            )
        own = np.asarray(ids[rank])
        invalid = np.count_nonzero((own < -1) | (own >= config.num_experts))
        dropped = len(placement.rows) - len(placement.kept)
        outputs.append(
            RankOutput(
                tokens=rows,
                row_offsets=placement.row_offsets,
                group_sizes=np.diff(placement.row_offsets),
                expert_counts=placement.expert_counts,
                expert_ids=np.arange(len(placement.expert_counts), dtype=np.int32)
                - bool(config.fused_shared_expert),
                src_info=src_info,
                router_weights=row_weights,
                num_dropped=np.array([dropped], np.int32),
                num_invalid=np.array([invalid], np.int32),
            )
        )
    return outputs


def combine(
    config: Any,
    ids: Sequence[np.ndarray],
    expert_out: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] | None = None,
    residual: Sequence[np.ndarray] | None = None,
    wire: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[np.ndarray]:
    """y of every rank, in the contract's arithmetic: float32, one rounding per step.

    With reduce="none" y is [n, K, H]. It has as many columns as expert_out.

    Args:
      config: EPConfig's fields.
      ids: what dispatch was given.
      expert_out: [N, H] of each rank; padding and dropped rows are not read.
      weights: float32 [N] of each rank, or None (= 1); with reduce="source" [n, K].
      residual: [n, H] of each rank, or None.
      wire: what the source sees of a rank's float32 sums; None rounds them to the dtype
        in which they travel.
    """
    wire_dtype = DTYPES[config.combine_dtype or config.dtype]
    seen = wire or (lambda sums: sums.astype(wire_dtype).astype(np.float32))
    columns = expert_out[0].shape[1]
    zero = np.zeros(columns, np.float32)
    if config.reduce != "rank":
        return _combine_rows(config, ids, expert_out, weights, residual, seen)
    sums = [np.zeros((len(i), columns), np.float32) for i in ids]
    with np.errstate(all="ignore"):
        for rank, placement in enumerate(place(config, ids)):
            partial: dict[tuple[int, int], np.ndarray] = {}
            # A token's rows of this rank are added in k order, not in row order.
            for row in sorted(placement.kept, key=lambda row: row[1:]):
                if row.k == SHARED:
                    continue
                value = expert_out[rank][row.index].astype(np.float32)
                if weights is not None:
                    value = weights[rank][row.index] * value
                slot = (row.source, row.token)
                partial[slot] = partial.get(slot, zero) + value
            for (source, token), value in partial.items():
                sums[source][token] += seen(value)
        return _finished(config, ids, sums, expert_out, residual)


def _finished(
    config: Any,
    ids: Sequence[np.ndarray],
    sums: list[np.ndarray],
    expert_out: Sequence[np.ndarray],
    residual: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """Adds the shared expert's rows and then the residual, and rounds once."""
    for rank, placement in enumerate(place(config, ids)):
        for row in placement.kept:
            if row.k == SHARED:
                value = expert_out[rank][row.index].astype(np.float32)
                sums[rank][row.token] = sums[rank][row.token] + value
    if residual is not None:
        sums = [s + r.astype(np.float32) for s, r in zip(sums, residual, strict=True)]
    return [s.astype(DTYPES[config.dtype]) for s in sums]


def _combine_rows(
    config: Any,
    ids: Sequence[np.ndarray],
    expert_out: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] | None,
    residual: Sequence[np.ndarray] | None,
    seen: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """`combine` if rows are sent one by one; dropped rows are sent as zeros."""
    hidden = expert_out[0].shape[1]
    with np.errstate(all="ignore"):
        crossed = [np.zeros((*np.shape(i), hidden), np.float32) for i in ids]
        there = [np.zeros(np.shape(i), bool) for i in ids]
        for rank, placement in enumerate(place(config, ids)):
            for row in placement.rows:
                if row.k == SHARED:
                    continue
                there[row.source][row.token, row.k] = True
                if row.index < placement.capacity:
                    # A sum of one term, so that -0 is sent as +0.
                    value = expert_out[rank][row.index].astype(np.float32) + 0
                    crossed[row.source][row.token, row.k] = seen(value) + 0
        if config.reduce == "none":
            return [c.astype(DTYPES[config.dtype]) for c in crossed]
        sums = [np.zeros((len(i), hidden), np.float32) for i in ids]
        for source, rows in enumerate(crossed):
            for token, k in np.argwhere(there[source]):
                value = rows[token, k]
                if weights is not None:
                    value = weights[source][token, k] * value
                sums[source][token] = sums[source][token] + value
        return _finished(config, ids, sums, expert_out, residual)


def dispatch_vjp(
    config: Any,
    ids: Sequence[np.ndarray],
    row_grads: Sequence[np.ndarray],
    row_weight_grads: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """dx [n, H] and dw [n, K] of every rank, in float64."""
    dx = [np.zeros((len(i), config.hidden_size)) for i in ids]
    dw = [np.zeros(np.shape(i)) for i in ids]
    for rank, placement in enumerate(place(config, ids)):
        for row in placement.kept:
            dx[row.source][row.token] += row_grads[rank][row.index].astype(np.float64)
            if row.k == SHARED:
                continue
            dw[row.source][row.token, row.k] = row_weight_grads[rank][row.index]
    return dx, dw


def combine_vjp(
    config: Any,
    ids: Sequence[np.ndarray],
    expert_out: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] | None,
    dy: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """dE [N, H] and dw of every rank, in float64; zero wherever there is no row.

    Weights are [N], or [n, K] with reduce="source". dy with reduce="none" is [n, K, H].
    """
    at_source = config.reduce == "source"
    d_rows = [np.zeros(np.shape(e)) for e in expert_out]
    d_weights = [
        np.zeros(np.shape(i) if at_source else len(e))
        for i, e in zip(ids, expert_out, strict=True)
    ]
    for rank, placement in enumerate(place(config, ids)):
        for row in placement.kept:
            entry = (row.token, row.k)
            at = entry if config.reduce == "none" else row.token
            grad = dy[row.source][at].astype(np.float64)
            if row.k == SHARED:
                d_rows[rank][row.index] = grad
                continue
            of, index = (row.source, entry) if at_source else (rank, row.index)
            weight = 1.0 if weights is None else float(weights[of][index])
            d_rows[rank][row.index] = weight * grad
            value = expert_out[rank][row.index].astype(np.float64)
            d_weights[of][index] = np.dot(grad, value)
    return d_rows, d_weights
