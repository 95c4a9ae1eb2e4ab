"""combine: bits equal to the oracle's float32 arithmetic, and what is not read."""

from __future__ import annotations

import dataclasses
import functools
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
    """One shape, and the optional operands of combine."""

    name: str
    ranks: int
    config: dict = dataclasses.field(default_factory=dict)
    n: int | None = None
    routing: str | tuple[str, ...] = "random"
    weighted: bool = True
    residual: bool = False


def _dtype_cases() -> list[Case]:
    cases = []
    for dtype in oracle.DTYPES:
        for wire in (None, *oracle.DTYPES):
            if wire != dtype:
                config = {"dtype": dtype, "combine_dtype": wire}
                cases.append(Case(f"{dtype}_as_{wire}", 4, config, residual=True))
    return cases


CASES = [
    *[Case(f"ranks{r}", r, residual=True) for r in (1, 2, 3, 4, 6, 8)],
    *_dtype_cases(),
    Case("no_weights", 4, weighted=False),
    Case("no_weights_residual", 8, weighted=False, residual=True),
    Case("weights_only", 4),
    Case("capacity_cut", 4, {"recv_capacity": 13}, residual=True),
    Case("capacity1", 8, {"recv_capacity": 1}),
    Case("aligned_cut", 2, {"recv_capacity": 21, "expert_alignment": 8}),
    Case("free_tail", 4, {"zero_tail": False}, residual=True),
    Case("invalid_ids", 4, routing="invalid"),
    Case("duplicates", 4, {"num_experts": 8, "top_k": 6}, routing="duplicates"),
    Case("same_expert_twice", 2, {"num_experts": 4}, routing="one:1"),
    Case("no_rows", 4, routing="none", residual=True),
    Case("no_rows_no_residual", 4, routing="none"),
    Case("one_rank_sends", 4, routing=("none", "full", "none", "none")),
    Case("one_token", 8, n=1),
    Case("fewer_tokens", 4, n=3, residual=True),
    Case("top32", 4, {"num_experts": 36, "top_k": 32}, routing="full"),
    Case("top32_one_rank", 1, {"num_experts": 33, "top_k": 32}, routing="full"),
    Case("hidden_edge", 4, {"hidden_size": 8}),
    Case("hidden_edge_f32", 3, {"hidden_size": 4, "dtype": "float32"}),
    Case("hidden_odd_vectors", 4, {"hidden_size": 72}, residual=True),
    Case("many_tokens", 4, {"max_tokens_per_rank": 257, "hidden_size": 136}),
]

wide = functools.partial(helpers.normal, spread=6)


def check(case: Case, rng: np.random.Generator, ids=None, fill=wide) -> None:
    """Dispatches, then combines other rows along its route and compares bits."""
    mesh, config = helpers.make_mesh(case.ranks), helpers.make_config(**case.config)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        rng, config, case.ranks, n=case.n, routing=case.routing, fill=fill
    )
    if ids is not None:
        inputs.ids = ids
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    dtype = oracle.DTYPES[config.dtype]
    rows = [fill(rng, out.tokens.shape, dtype) for out in outputs]
    rows = helpers.poisoned(outputs, rows)
    weights = residual = None
    if case.weighted:
        weights = [wide(rng, out.router_weights.shape, np.float32) for out in outputs]
        weights = helpers.poisoned(outputs, weights)
    if case.residual:
        residual = [fill(rng, x.shape, dtype) for x in inputs.tokens]
    d = helpers.run_dispatch(ep, mesh, inputs)
    actual = helpers.run_combine(ep, mesh, d.route, rows, weights, residual)
    expected = oracle.combine(config, inputs.ids, rows, weights, residual)
    assert sorted(actual) == list(range(case.ranks))
    for rank, y in actual.items():
        helpers.assert_sums(y, expected[rank], f"y of rank {rank}")


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_sums(case: Case) -> None:
    check(case, np.random.default_rng(zlib.crc32(case.name.encode())))


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_any_value(dtype: str) -> None:
    """Infinities, NaNs and denormals: nothing is flushed, nothing is skipped."""
    case = Case("values", 4, {"dtype": dtype}, residual=True)
    with np.errstate(all="ignore"):
        check(case, np.random.default_rng(8), fill=helpers.any_bits)


def test_denormals_survive() -> None:
    """Sums and products that a flush-to-zero mode would lose."""

    def tiny(rng, shape, dtype):
        return (rng.integers(-9, 9, shape) * np.float32(2.0**-133)).astype(dtype)

    for dtype in ("bfloat16", "float32"):
        case = Case("tiny", 4, {"dtype": dtype}, weighted=False, residual=True)
        check(case, np.random.default_rng(9), fill=tiny)


def test_no_fused_multiply_add() -> None:
    """Products that cancel: an fma would leave the rounding error of the product."""
    mesh = helpers.make_mesh(1)
    config = helpers.make_config(
        num_experts=2,
        top_k=2,
        max_tokens_per_rank=2,
        recv_capacity=4,
        dtype="float32",
    )
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(0), config, 1, routing="one:0", fill=helpers.normal
    )
    d = helpers.run_dispatch(ep, mesh, inputs)
    third = np.float32(1) / np.float32(3)
    product = np.float32(third * third)
    rows = np.full((4, 16), third, np.float32)
    rows[::2] = -product
    weights = np.array([1, third, 1, third], np.float32)
    assert float(third) * float(third) != float(product)
    y = helpers.run_combine(ep, mesh, d.route, [rows], [weights])[0]
    helpers.assert_bits(y, np.zeros((2, 16), np.float32))


def test_order_of_sums() -> None:
    """Float32 sums that depend on the order: ascending k, ascending ranks, residual."""
    mesh = helpers.make_mesh(3)
    config = helpers.make_config(
        num_experts=9, top_k=5, max_tokens_per_rank=1, dtype="float32"
    )
    ep = helpers.make_ep(mesh, config)
    ids = [np.array([[8, 5, 2, 1, 0]], np.int32), *[np.full((1, 5), -1, np.int32)] * 2]
    inputs = helpers.Inputs([np.ones((1, 16), np.float32)] * 3, ids, None)
    d = helpers.run_dispatch(ep, mesh, inputs)
    by_k = np.array([3, 1, 1, 1, 2.0**24], np.float32)
    rows = []
    for out in oracle.dispatch(config, inputs.tokens, ids):
        k = out.src_info[:, 2]
        rows.append(np.where(k < 0, 0, by_k[k])[:, None] + np.zeros_like(out.tokens))
    residual = [np.full((1, 16), -(2.0**24), np.float32)] * 3
    y = helpers.run_combine(ep, mesh, d.route, rows, None, residual)
    # ((1 + 1) + 2**24) + 1 -> 2**24 + 4, + 3 -> 2**24 + 8. Row order inside rank 0
    # would end at 4; ranks descending, k over all ranks or residual first at 6.
    helpers.assert_bits(y[0], np.full((1, 16), 8, np.float32))


def test_zero_has_no_sign() -> None:
    """Sums start from +0, so that a lone -0 comes back as +0."""
    mesh = helpers.make_mesh(2)
    config = helpers.make_config(dtype="float32", num_experts=2, top_k=1)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(0), config, 2, routing="one:1", fill=helpers.normal
    )
    d = helpers.run_dispatch(ep, mesh, inputs)
    rows = [np.full((ep.recv_capacity, 16), -0.0, np.float32)] * 2
    for y in helpers.run_combine(ep, mesh, d.route, rows).values():
        helpers.assert_bits(y, np.zeros((8, 16), np.float32))


def test_route_serves_many_times() -> None:
    """A route can be used again after newer dispatches, and twice."""
    mesh, config = helpers.make_mesh(4), helpers.make_config(dtype="float32")
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(10)
    calls = []
    for _ in range(3):
        inputs = helpers.make_inputs(rng, config, 4, fill=helpers.normal)
        calls.append((inputs, helpers.run_dispatch(ep, mesh, inputs)))
    for inputs, d in [*calls, calls[0]]:
        rows = [helpers.normal(rng, (ep.recv_capacity, 16), np.float32)] * 4
        actual = helpers.run_combine(ep, mesh, d.route, rows)
        for rank, y in enumerate(oracle.combine(config, inputs.ids, rows)):
            helpers.assert_bits(actual[rank], y)


def test_in_one_program() -> None:
    """dispatch, experts and combine in one shard_map, with d's own weights."""
    mesh, config = helpers.make_mesh(4), helpers.make_config(expert_alignment=4)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(11), config, 4, fill=helpers.normal
    )

    def layer(tokens, ids, weights):
        d = jax_ep.dispatch(ep, tokens, ids, weights)
        return jax_ep.combine(
            ep, d.tokens * 2, d.route, router_weights=d.router_weights, residual=tokens
        )

    run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    y = run(*(helpers.put(mesh, part) for part in dataclasses.astuple(inputs)))
    out = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    expected = oracle.combine(
        config,
        inputs.ids,
        [o.tokens * 2 for o in out],
        [o.router_weights for o in out],
        inputs.tokens,
    )
    for rank, part in helpers.unstack(y, 4).items():
        helpers.assert_bits(part, expected[rank])


POOL = [
    Case("a", 8, {"top_k": 4}, n=5),
    Case("b", 4, {"num_experts": 8, "recv_capacity": 20, "expert_alignment": 4}),
    Case("c", 3, {"num_experts": 9, "dtype": "float32"}, n=6, residual=True),
    Case("d", 2, {"num_experts": 6, "top_k": 5, "dtype": "float16"}, weighted=False),
]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.sampled_from(POOL), st.integers(0, 2**32 - 1), st.data())
def test_any_routing(case: Case, seed: int, data: st.DataObject) -> None:
    config = helpers.make_config(**case.config)
    n = config.max_tokens_per_rank if case.n is None else case.n
    size = case.ranks * n * config.top_k
    pool = data.draw(
        st.lists(st.integers(-2, config.num_experts), min_size=1, max_size=12)
    )
    rng = np.random.default_rng(seed)
    ids = rng.choice(np.array(pool, np.int32), size)
    check(case, rng, list(ids.reshape(case.ranks, n, config.top_k)))
