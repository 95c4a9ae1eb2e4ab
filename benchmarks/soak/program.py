"""The program that soak.py runs: layers with random operands, checked on the device.

Every rank draws the operands of all ranks from one key and computes by SPEC.md's
formulas what must come back to it, so that only the calls under test couple the ranks.
Values are small integers times powers of two: every sum is exact in any order, and must
match exactly. The expected rows come from a sort, not from jax_ep.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.soak import codes

CALLS_A_LAYER = 4  # dispatch, combine, and the exchange of each one's derivative
ROUTINGS = 6
ABSENT = -1
STATISTICS = ("rows", "dropped", "invalid")
OF_ROWS = ("tokens", "codes", "scales", "src_info", "router_weights")


@dataclasses.dataclass
class Operands:
    """Operands of all ranks: leaves are [R, n, ...]."""

    ids: Any
    weights: Any
    tokens: Any
    residual: Any
    dy: Any


jax.tree_util.register_dataclass(Operands)


def random_key(seed: Any) -> Any:
    """Makes a key whose draws XLA compiles in half the time of the default kind's."""
    return jax.random.key(seed, impl="rbg")


def draw(config: Any, ranks: int, n: int, key: Any) -> Operands:
    """Draws the operands of one layer; every fourth or so has ids of no experts."""
    experts, shape = config.num_experts, (ranks, n, config.top_k)
    keys = jax.random.split(key, 9)
    any_id = jax.random.randint(keys[0], shape, 0, experts)
    chance = jax.random.uniform(keys[1], shape)
    chosen = jax.random.randint(keys[2], (2,), 0, ranks)
    local = experts // ranks
    source = jnp.arange(ranks)[:, None, None]
    ids = jnp.select(
        [jax.random.randint(keys[3], (), 0, ROUTINGS) == i for i in range(ROUTINGS)],
        [
            any_id,
            jnp.where(chance < 0.3, ABSENT, any_id),
            chosen[0] * local + any_id % local,  # all to one rank
            (experts * chance**4).astype(jnp.int32),  # few experts get most
            jnp.where(chance < 0.98, ABSENT, any_id),
            jnp.where(source == chosen[1], any_id, ABSENT),  # one rank sends
        ],
    )
    extremes = jnp.array([experts, -2, 2**31 - 1, -(2**31)], jnp.int32)
    wrong = extremes[any_id % 4]
    few = (jax.random.randint(keys[4], (), 0, 4) == 0) & (chance > 0.97)
    dtype = jnp.dtype(config.dtype)

    def integers(key: Any) -> Any:
        bits = jax.random.bits(key, (ranks, n, config.hidden_size), jnp.uint8)
        return codes.values(config, bits).astype(dtype)

    power = jax.random.randint(keys[5], (2, *shape), 0, 3)
    weights = (jnp.exp2(power[0] - 1.0) * (1 - 2 * (power[1] % 2))).astype(jnp.float32)
    tensors = (integers(k) for k in keys[6:])
    made = Operands(jnp.where(few, wrong, ids).astype(jnp.int32), weights, *tensors)
    if not config.skip_a2a:
        return made
    # All ranks have the same operands.
    return jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), made)


@dataclasses.dataclass
class Expected:
    """Where the rows of a call must go, as one rank sees it."""

    kept: Any  # bool [n, K]: this rank's entries that have a row somewhere
    entry: Any  # int32 [N]: (source * n + token) * K + k of each row here, or -1
    shared: Any  # bool [N]: rows of a fused shared expert, the rank's tokens in order
    offsets: Any  # int32 [G + 1]
    counts: Any  # int32 [G]
    dropped: Any
    invalid: Any


def place(config: Any, ranks: int, capacity: int, ids: Any, me: Any) -> Expected:
    """Places rows by expert, source, token and k: one stable sort of all entries."""
    experts, align = config.num_experts, config.expert_alignment
    local, n = experts // ranks, ids.shape[1]
    own = ids[me]
    valid = (ids >= 0) & (ids < experts)
    if config.skip_a2a:
        # Each rank routes the entries of its own experts to itself.
        rank = jnp.arange(ranks)[:, None, None]
        valid &= (rank == me) & (ids // local == me)
    expert = jnp.where(valid, ids, experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.bincount(expert, length=experts + 1)
    first = jnp.cumsum(counts) - counts
    position = jnp.arange(expert.size) - first[expert[order]]
    position = jnp.zeros_like(expert).at[order].set(position.astype(expert.dtype))
    real = counts[:experts].reshape(ranks, local)
    if config.fused_shared_expert:
        real = jnp.pad(real, ((0, 0), (1, 0)), constant_values=n)
    ends = jnp.cumsum(-(-real // align) * align, axis=1)
    starts = jnp.pad(ends, ((0, 0), (1, 0)))[:, -1 - local : -1].reshape(-1)
    row = starts[jnp.minimum(expert, experts - 1)] + position
    valid = valid.reshape(-1)
    kept, here = valid & (row < capacity), valid & (expert // local == me)
    at = jnp.where(kept & here, row, capacity)
    entry = jnp.full(capacity, ABSENT).at[at].set(jnp.arange(row.size), mode="drop")
    shared_rows = n if config.fused_shared_expert else 0
    offsets = jnp.minimum(jnp.pad(ends[me], (1, 0)), capacity)
    return Expected(
        kept=kept.reshape(ids.shape)[me],
        entry=entry,
        shared=jnp.arange(capacity) < shared_rows,
        offsets=offsets,
        counts=real[me],
        dropped=jnp.sum(here & ~kept) + max(0, shared_rows - capacity),
        invalid=jnp.sum((own < ABSENT) | (own >= experts)),
    )


def delay(key: Any, me: Any, longest: int) -> Any:
    """Does work of random length, none on about half of the ranks; returns False."""
    key = jax.random.fold_in(key, me)
    trips = jnp.maximum(jax.random.randint(key, (), -longest, longest), 0)
    a = jnp.eye(256) + trips / 1e6
    a = jax.lax.fori_loop(0, trips, lambda _, a: jnp.tanh(a @ a), a)
    return jnp.isnan(a[0, 0])


def calls(ep: Any, split: bool) -> tuple[Any, Any]:
    """Returns functions for dispatch and combine of `ep`, whole or in halves."""

    def dispatch(*operands: Any) -> Any:
        options = {}
        if ep.config.dispatch_format == "nvfp4":
            options["input_scale"] = jnp.float32(codes.INPUT_SCALE)
        if split:
            pending = jax_ep.dispatch_async(ep, *operands, **options)
            return jax_ep.dispatch_wait(pending)
        return jax_ep.dispatch(ep, *operands, **options)

    def combine(rows: Any, route: Any, weights: Any, residual: Any) -> Any:
        options = {"residual": residual}
        if split:
            pending = jax_ep.combine_async(ep, rows, route, weights, **options)
            return jax_ep.combine_wait(pending)
        return jax_ep.combine(ep, rows, route, weights, **options)

    return dispatch, combine


def layer(
    ep: Any, o: Operands, key: Any, longest: int, reduce: bool, split: bool = False
) -> Any:
    """Runs one layer and both derivatives; returns mismatches and statistics."""
    config, ranks, n = ep.config, ep.ep_size, o.ids.shape[1]
    apart, at_source = config.reduce == "none", config.reduce == "source"
    dispatch, combine = calls(ep, split)
    me = jax.lax.axis_index(ep.axis_names)
    early, between = jax.random.split(key)
    own = jax.tree.map(lambda a: a[me], o)
    x = jnp.where(delay(early, me, longest), 0, own.tokens).astype(own.tokens.dtype)

    def forward(x: Any, w: Any) -> Any:
        d = dispatch(x, own.ids, w)
        rows = d.tokens if d.scales is None else jax_ep.dequantize(d)
        return (rows, d.router_weights), d

    (tokens, _), pull_dispatch, d = jax.vjp(forward, x, own.weights, has_aux=True)
    want = place(config, ranks, ep.recv_capacity, o.ids, me)
    routed, real = want.entry >= 0, (want.entry >= 0) | want.shared
    token, k = want.entry // config.top_k, want.entry % config.top_k
    token = jnp.where(want.shared, me * n + jnp.arange(want.entry.size), token)
    k = jnp.where(want.shared, ABSENT, k)
    sign = jnp.where(k % 2 == 0, 1, -1).astype(x.dtype)  # -1 for a shared row
    late = jnp.where(delay(between, me, longest), 0, sign)
    # What nothing may read is NaN, in both directions.
    rows = jnp.where(real[:, None], tokens * late[:, None], jnp.nan).astype(x.dtype)
    weights = jnp.where(routed, d.router_weights, jnp.nan)
    if at_source:
        weights = own.weights
    elif apart:
        weights = None
    with_residual = not apart and not config.skip_a2a
    dy = jnp.broadcast_to(own.dy[:, None], (n, config.top_k, own.dy.shape[1]))
    dy = dy if apart else own.dy

    def back(rows: Any, weights: Any, residual: Any) -> Any:
        return combine(rows, d.route, weights, residual if with_residual else None)

    y, pull_combine = jax.vjp(back, rows, weights, own.residual)
    d_rows, d_weights_back, d_residual = pull_combine(dy)
    no_weights = jnp.where(real, 0.0, jnp.nan)
    by_row = not apart and not at_source
    d_row_weights = d_weights_back if by_row else no_weights
    dx, dw = pull_dispatch(
        (
            jnp.where(real[:, None], d_rows, jnp.nan).astype(x.dtype),
            jnp.where(routed, d_row_weights, jnp.nan),
        )
    )

    def of_rows(values: Any) -> Any:
        flat = values.reshape(ranks * n, -1).astype(jnp.float32)
        return jnp.where(real[:, None], flat[token], 0)

    row_weight = jnp.where(routed, o.weights.reshape(-1)[want.entry], 0)
    # What combine multiplies each row by.
    factor = jnp.where(routed, 1.0, 0.0) if apart else row_weight
    factor = jnp.where(want.shared, 1.0, factor)
    there, dy_there = of_rows(o.tokens), of_rows(o.dy)
    dot = jnp.sum(there * sign[:, None].astype(jnp.float32) * dy_there, axis=1)
    signs = jnp.where(jnp.arange(config.top_k) % 2 == 0, 1.0, -1.0)
    shared = jnp.float32(config.fused_shared_expert)
    kept_weight = jnp.where(want.kept, own.weights, 0)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), own)
    own_dot = jnp.sum(wide.tokens * wide.dy, axis=1)
    d_weights = jnp.where(want.kept, own_dot[:, None] * signs, 0)
    sums = (jnp.sum(kept_weight * signs, axis=1) - shared)[:, None] * wide.tokens
    there_again = jnp.sum(kept_weight, axis=1) + shared
    if apart:
        sums = (want.kept * signs)[:, :, None] * wide.tokens[:, None]
        there_again = jnp.sum(want.kept, axis=1)
    elif with_residual:
        sums += wide.residual
    info = jnp.stack([token // n, token % n, k], axis=1)
    ids = jnp.arange(want.counts.size) - config.fused_shared_expert
    pairs = {
        "tokens": (tokens, there),
        "src_info": (d.src_info, jnp.where(real[:, None], info, ABSENT)),
        "router_weights": (
            d.router_weights,
            jnp.where(want.shared, 1.0, row_weight),
        ),
        "row_offsets": (d.row_offsets, want.offsets),
        "group_sizes": (d.group_sizes, jnp.diff(want.offsets)),
        "expert_counts": (d.expert_counts, want.counts),
        "expert_ids": (d.expert_ids, ids),
        "num_dropped": (d.num_dropped, want.dropped[None]),
        "num_invalid": (d.num_invalid, want.invalid[None]),
        "combine": (y, sums),
        "d_rows": (d_rows, factor[:, None] * dy_there),
        "d_tokens": (dx, there_again[:, None] * wide.dy),
        "d_weights": (dw, d_weights if by_row else jnp.zeros_like(dw)),
    }
    if d.scales is not None:
        pairs |= codes.pairs(config, d, there)
    if by_row:
        pairs["d_row_weights"] = d_row_weights, jnp.where(routed, dot, 0)
    elif at_source:
        pairs["d_weights_at_source"] = d_weights_back, d_weights
    if with_residual:
        pairs["d_residual"] = d_residual, wide.dy
    if reduce:
        # A collective of XLA between the calls.
        seen = jax.lax.psum(jnp.sum(d.expert_counts), ep.axis_names)
        total = jnp.sum((o.ids >= 0) & (o.ids < config.num_experts))
        pairs["psum"] = (seen[None], total[None])
    free = () if config.zero_tail else OF_ROWS
    tail = jnp.arange(ep.recv_capacity) >= want.offsets[-1]
    counts = {}
    for name, (actual, wanted) in pairs.items():
        assert actual.shape == wanted.shape, (name, actual.shape, wanted.shape)
        # NaN counts as a mismatch: it is unequal to everything.
        bad = actual.astype(wanted.dtype) != wanted
        if name in free:
            bad &= ~tail.reshape(-1, *[1] * (bad.ndim - 1))
        counts[name] = jnp.sum(bad, dtype=jnp.int32)
    statistics = jnp.sum(routed), want.dropped, want.invalid
    return counts, dict(zip(STATISTICS, statistics, strict=True))


def program(
    eps: Any,
    mesh: Any,
    n: int,
    steps: int,
    longest: int,
    reduce: bool = False,
    split: bool = False,
) -> Any:
    """Returns a jitted function: numbers -> mismatches by name of rank, step and layer.

    The numbers are uint32 [3]: a seed, a thread and one of its launches. All that is
    drawn follows from them.

    `reduce` adds collectives of XLA, `split` makes each call in two halves.
    """
    ranks = eps[0].ep_size

    def step(carry: Any, key: Any) -> Any:
        results = []
        for index, ep in enumerate(eps):
            one, other = jax.random.split(jax.random.fold_in(key, index))
            few = min(n, ep.config.max_tokens_per_rank)
            made = draw(ep.config, ranks, few, one)
            results.append(layer(ep, made, other, longest, reduce, split))
        return carry, results

    def body(numbers: Any) -> Any:
        seed, *others = numbers
        key = functools.reduce(jax.random.fold_in, others, random_key(seed))
        _, results = jax.lax.scan(step, 0, jax.random.split(key, steps))
        return jax.tree.map(lambda a: a[None], results)

    run = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False
    )
    return jax.jit(run)
