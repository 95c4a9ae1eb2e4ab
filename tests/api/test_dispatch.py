"""dispatch: every output of every rank equals the oracle's, bit for bit."""

from __future__ import annotations

import dataclasses
import zlib

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape and routing; `config` has changes to helpers.make_config."""

    name: str
    ranks: int
    config: dict = dataclasses.field(default_factory=dict)
    n: int | None = None
    routing: str | tuple[str, ...] = "random"
    weighted: bool = True


CASES = [
    *[Case(f"ranks{r}", r) for r in (1, 2, 3, 4, 6, 8)],
    *[Case(d, 4, {"dtype": d}, n=7) for d in ("bfloat16", "float16", "float32")],
    # The smallest row is 16 bytes: 8 16-bit elements or 4 floats.
    Case("hidden_edge_bf16", 4, {"hidden_size": 8}),
    Case("hidden_edge_f16", 2, {"hidden_size": 8, "dtype": "float16"}),
    Case("hidden_edge_f32", 8, {"hidden_size": 4, "dtype": "float32"}),
    Case("hidden_odd_vectors", 3, {"hidden_size": 72}),
    Case("alignment4", 4, {"expert_alignment": 4}),
    Case("alignment5_empty_groups", 2, {"expert_alignment": 5}, n=2),
    Case("alignment128", 2, {"num_experts": 6, "expert_alignment": 128}),
    Case("alignment16_unused", 4, {"expert_alignment": 16}, routing="none"),
    Case("capacity_cut", 4, {"recv_capacity": 13}),
    Case("capacity1", 8, {"recv_capacity": 1}),
    Case("capacity_aligned_cut", 2, {"recv_capacity": 21, "expert_alignment": 8}),
    Case("capacity_above_need", 2, {"recv_capacity": 999}),
    Case("capacity_factor", 4, {"capacity_factor": 1.25}),
    Case(
        "capacity_factor_cut",
        8,
        {"capacity_factor": 0.5, "top_k": 8},
        n=8,
        routing="one:5",
    ),
    Case("free_tail", 4, {"zero_tail": False}),
    Case("free_tail_aligned", 3, {"zero_tail": False, "expert_alignment": 4}),
    Case("free_tail_cut", 4, {"zero_tail": False, "recv_capacity": 9}),
    Case("all_dropped_ids", 4, routing="none"),
    Case("invalid_ids", 4, routing="invalid"),
    Case("invalid_ids_8", 8, {"top_k": 8}, routing="invalid"),
    Case("duplicates", 4, {"num_experts": 8}, routing="duplicates"),
    # Duplicates may exceed the default N, which is the worst case of distinct ids.
    Case("duplicates_overflow", 4, {"num_experts": 4, "top_k": 4}, routing="one:2"),
    Case("all_to_one_expert", 6, {"top_k": 1}, routing="one:23"),
    Case("one_rank_sends", 4, routing=("none", "full", "none", "none")),
    Case("one_rank_silent", 3, routing=("full", "none", "full")),
    Case("fewer_tokens", 4, n=3),
    Case("one_token", 8, n=1),
    Case("no_weights", 4, weighted=False),
    Case("no_weights_cut", 2, {"recv_capacity": 10}, weighted=False),
    Case("top1", 4, {"top_k": 1}),
    Case("top32", 4, {"num_experts": 36, "top_k": 32}, routing="full"),
    Case("top32_one_rank", 1, {"num_experts": 33, "top_k": 32}, routing="full"),
    Case("experts_not_power_of_two", 6, {"num_experts": 42}),
    Case("one_expert_a_rank", 8, {"num_experts": 8}),
    Case("one_expert", 1, {"num_experts": 1, "top_k": 1}),
    Case("experts2048", 8, {"num_experts": 2048, "top_k": 8}, routing="full"),
    Case("many_tokens", 4, {"max_tokens_per_rank": 257, "hidden_size": 136}),
]


@pytest.mark.few(16)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_oracle(case: Case) -> None:
    mesh = helpers.make_mesh(case.ranks)
    config = helpers.make_config(**case.config)
    ep = helpers.make_ep(mesh, config)
    assert ep.recv_capacity == oracle.capacity(config, case.ranks)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    inputs = helpers.make_inputs(
        rng, config, case.ranks, n=case.n, routing=case.routing, weighted=case.weighted
    )
    d = helpers.run_dispatch(ep, mesh, inputs)
    helpers.assert_dispatched(config, d, inputs)


def test_cases_reach_their_corners() -> None:
    """The table above really drops, pads, cuts groups and leaves ranks empty."""
    drops = pads = cuts = empties = 0
    for case in CASES:
        config = helpers.make_config(**case.config)
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        inputs = helpers.make_inputs(
            rng, config, case.ranks, n=case.n, routing=case.routing
        )
        for out in oracle.dispatch(config, inputs.tokens, inputs.ids):
            drops += out.num_dropped[0] > 0
            pads += out.group_sizes.sum() > out.expert_counts.sum() > 0
            cuts += any(out.group_sizes[out.group_sizes < out.expert_counts] > 0)
            empties += out.expert_counts.sum() == 0
    assert min(drops, pads, cuts, empties) > 4


def test_oracle_by_hand() -> None:
    """Checks the oracle itself with a routing that was worked out by hand."""
    config = helpers.make_config(
        num_experts=4,
        top_k=2,
        hidden_size=8,
        max_tokens_per_rank=2,
        expert_alignment=2,
        recv_capacity=5,
        dtype="float32",
    )
    ids = [np.array([[3, 2], [2, -1]], np.int32), np.array([[2, 3], [9, 3]], np.int32)]
    first_column = np.arange(2, dtype=np.float32)[:, None]
    tokens = [np.tile(10 * rank + first_column, 8) for rank in range(2)]
    first, last = oracle.dispatch(config, tokens, ids)
    assert first.row_offsets.tolist() == [0, 0, 0]
    assert first.num_invalid.tolist() == [0]
    # Expert 2: rank 0's tokens 0 (k 1) and 1, rank 1's token 0, and one padding row.
    # Expert 3: three rows from row 4 on, of which N = 5 leaves one.
    assert last.row_offsets.tolist() == [0, 4, 5]
    assert last.expert_counts.tolist() == [3, 3]
    assert last.num_dropped.tolist() == [2]
    assert last.num_invalid.tolist() == [1]
    assert last.tokens[:, 0].tolist() == [0, 1, 10, 0, 0]
    rows = [[0, 0, 1], [0, 1, 0], [1, 0, 0], [-1, -1, -1], [0, 0, 0]]
    assert last.src_info.tolist() == rows
    assert last.router_weights.tolist() == [1, 1, 1, 0, 1]


# One compiled program each: hypothesis varies only the values.
POOL = [
    (8, {"top_k": 4}, 5),
    (4, {"num_experts": 8, "top_k": 3, "recv_capacity": 20, "expert_alignment": 4}, 8),
    (3, {"num_experts": 9, "top_k": 2, "dtype": "float32", "zero_tail": False}, 6),
    (2, {"num_experts": 6, "top_k": 5, "dtype": "float16"}, 4),
]
SPECIAL_IDS = [-1, -1, -2, helpers.INT_MIN, helpers.INT_MAX]


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, list[np.ndarray], int]:
    """A shape of POOL, ids of all its ranks and a seed for the payload."""
    which = draw(st.integers(0, len(POOL) - 1))
    ranks, changes, n = POOL[which]
    config = helpers.make_config(**changes)
    experts = config.num_experts
    some = draw(
        st.lists(
            st.one_of(
                st.integers(-1, experts - 1), st.sampled_from([*SPECIAL_IDS, experts])
            ),
            min_size=1,
            max_size=12,
        )
    )
    picks = draw(
        st.lists(
            st.integers(0, len(some) - 1),
            min_size=ranks * n * config.top_k,
            max_size=ranks * n * config.top_k,
        )
    )
    ids = np.array(some, np.int32)[picks].reshape(ranks, n, config.top_k)
    return which, list(ids), draw(st.integers(0, 2**32 - 1))


@hypothesis.settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(routings())
def test_any_routing(routing: tuple[int, list[np.ndarray], int]) -> None:
    which, ids, seed = routing
    ranks, changes, n = POOL[which]
    mesh, config = helpers.make_mesh(ranks), helpers.make_config(**changes)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(seed), config, ranks, n=n)
    inputs.ids = ids
    d = helpers.run_dispatch(ep, mesh, inputs)
    helpers.assert_dispatched(config, d, inputs)


def test_repeats_bit_for_bit() -> None:
    mesh, config = helpers.make_mesh(8), helpers.make_config(top_k=4)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(5), config, 8, n=5)
    first, *others = [helpers.run_dispatch(ep, mesh, inputs) for _ in range(5)]
    for other in others:
        jax.tree.map(helpers.assert_bits, other, first)


def test_every_leaf_stacks() -> None:
    mesh, config = helpers.make_mesh(4), helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(6), config, 4)
    d = helpers.run_dispatch(ep, mesh, inputs)
    leaves = jax.tree.leaves(d)
    assert len(leaves) > len(oracle.FIELDS)
    assert all(leaf.ndim >= 1 and leaf.shape[0] % 4 == 0 for leaf in leaves)
    route = jax.tree.leaves(d.route)
    assert route
    assert all(np.issubdtype(leaf.dtype, np.integer) for leaf in route)


def test_weights_default_and_keyword() -> None:
    """router_weights may be left out, positional or by keyword."""
    mesh, config = helpers.make_mesh(2), helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(7), config, 2)
    tokens, ids, weights = (
        helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids, inputs.weights)
    )

    def body(x, i, w):
        bare = jax_ep.dispatch(ep, x, i)
        named = jax_ep.dispatch(ep, x, i, router_weights=w, input_scale=None)
        return bare, named

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    bare, named = run(tokens, ids, weights)
    helpers.assert_dispatched(config, named, inputs)
    inputs.weights = None
    helpers.assert_dispatched(config, bare, inputs)


@pytest.mark.parametrize("alignment", [1, 8])
def test_no_token(alignment: int) -> None:
    """n = 0 on a rank, with the combine. Global arrays of size 0 fail in XLA."""
    mesh = helpers.make_mesh(4)
    config = helpers.make_config(expert_alignment=alignment)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(8), config, 4)

    def body(x, i, w):
        d = jax_ep.dispatch(ep, x[:0], i[:0], w[:0])
        y = jax_ep.combine(ep, d.tokens, d.route, d.router_weights, residual=x[:0])
        assert y.shape == (0, config.hidden_size)
        return dataclasses.replace(d, route=None), jax.numpy.sum(y)[None]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    parts = inputs.tokens, inputs.ids, inputs.weights
    d, total = run(*(helpers.put(mesh, part) for part in parts))
    empty = [[a[:0] for a in part] for part in parts]
    helpers.assert_dispatched(config, d, helpers.Inputs(*empty))
    assert not np.any(np.asarray(total, np.float32))
