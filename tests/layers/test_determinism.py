"""A token's result has the same bits in any batch and on any number of ranks.

The order of the layer's own sums is tested, so the experts must not change theirs with
the number of rows: these sum in a fixed order, or in matmuls of a fixed shape.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Routing
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 16, 4, 128, 16, 32
MOST = 8  # ranks


def in_order(rows: Any, gate_up: Any, down: Any, group_sizes: Any) -> Any:
    """Experts that add up products one by one, in the same way for each row.

    Factors have the 8 bits of bfloat16. So products are exact in float32, and it makes
    no difference whether XLA fuses one with the sum that it is added to.
    """
    count, x = rows.shape[0], rows.astype(jnp.float32)
    groups = jnp.arange(group_sizes.shape[0])
    expert = jnp.repeat(groups, group_sizes, total_repeat_length=count)

    def matmul(x: Any, matrices: Any) -> Any:
        of_row = matrices[expert]

        def add(k: Any, total: Any) -> Any:
            return total + x[:, k, None] * of_row[:, k]

        return jax.lax.fori_loop(1, x.shape[1], add, x[:, :1] * of_row[:, 0])

    h = jax.nn.relu(matmul(x, gate_up[:, :, 0])) * matmul(x, gate_up[:, :, 1])
    h = jax.lax.reduce_precision(h, exponent_bits=8, mantissa_bits=7)
    return matmul(h, down).astype(rows.dtype)


# As large as the largest group, so that it drops nothing.
padded = jax_ep.experts.Padded(TOKENS)


def bfloat16s(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return helpers.normal(rng, shape, jnp.bfloat16).astype(np.float32)


def params() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (
        bfloat16s(rng, EXPERTS, HIDDEN, 2, INNER) / 8,
        bfloat16s(rng, EXPERTS, INNER, HIDDEN) / 4,
    )


def batch(seed: int, dtype: str, count: int = TOKENS) -> list[np.ndarray]:
    """Tokens, ids and router weights."""
    rng = np.random.default_rng(seed)
    config = helpers.make_config(num_experts=EXPERTS, top_k=TOP_K)
    ids = helpers.make_ids(rng, config, count)
    weights = rng.random(ids.shape).astype(np.float32)
    return [bfloat16s(rng, count, HIDDEN).astype(dtype), ids, weights]


def layer(
    ranks: int, given: Any, experts: Any = in_order, own: Any = None, **options: Any
) -> np.ndarray:
    """Runs `sharded.apply_experts`, with `reduce="source"` unless told otherwise."""
    options = {"reduce": "source"} | helpers.on_nodes() | options

    def fn(own: Any, rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
        del expert_of_row
        return experts(rows, *own, group_sizes)

    run = functools.partial(
        jax_ep.sharded.apply_experts,
        fn,
        num_experts=EXPERTS,
        axis_name="ep",
        mesh=helpers.make_mesh(ranks),
        transport=helpers.TRANSPORT,
        **options,
    )
    return np.asarray(jax.jit(run)(own or params(), *given))


def bits(y: np.ndarray) -> np.ndarray:
    """So that zeros of both signs differ."""
    return y.view(f"uint{8 * y.dtype.itemsize}")


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(want.astype(np.float32)).max() > 1
    np.testing.assert_array_equal(bits(found), bits(want))


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "formats": {"dispatch_format": "mxfp8", "combine_format": "fp8_block128"},
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks(case: str) -> None:
    dtype = "float32" if case == "float32" else "bfloat16"
    given, most = batch(1, dtype), helpers.some_ranks(MOST)
    want = layer(1, given, **CASES[case])
    every = (2, 4, 8) if case == "float32" else (8,)
    for ranks in {min(each, most) for each in every}:
        assert_same(layer(ranks, given, **CASES[case]), want)


def test_sums_at_the_experts_ranks_depend_on_their_number() -> None:
    """The test above would find it."""
    given, most = batch(1, "float32"), helpers.some_ranks(MOST)
    # On a machine with one GPU all experts are on one rank, which has nothing to differ
    # from.
    if most == 1:
        pytest.skip("needs 2 devices")
    one, several = (layer(ranks, given, reduce="rank") for ranks in (1, most))
    np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-4)
    assert np.mean(bits(several) != bits(one)) > 0.1


def test_experts_on_other_ranks() -> None:
    most = helpers.some_ranks(MOST)
    tokens, ids, weights = batch(2, "float32")
    want = layer(most, (tokens, ids, weights))
    moved = np.random.default_rng(3).permutation(EXPERTS).astype(np.int32)
    own = tuple(each[np.argsort(moved)] for each in params())
    ids = np.where(ids < 0, ids, moved[ids])
    assert_same(layer(most, (tokens, ids, weights), own=own), want)


def elsewhere(given: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """A smaller batch: some of the tokens, in another order and among new ones."""
    rng, count = np.random.default_rng(4), TOKENS // 2
    kept = rng.permutation(TOKENS)[: count // 2]
    places = rng.permutation(count)[: len(kept)]
    other = batch(5, given[0].dtype.name, count)
    for new, old in zip(other, given, strict=True):
        new[places] = old[kept]
    where = np.full(count, -1)
    where[places] = kept
    return other, where


@pytest.mark.parametrize("experts", [in_order, padded], ids=["in order", "padded"])
def test_a_token_among_others(experts: Any) -> None:
    """Fewer ranks, other places, other tokens beside it, and chunks."""
    # XLA promises no order of sums. On CPUs it keeps one for a shape, which is what is
    # tested; on GPUs it may time several algorithms and take another in each process.
    if experts is padded and jax.default_backend() != "cpu":
        pytest.skip("XLA chooses matmuls on GPUs")
    given, most = batch(1, "bfloat16"), helpers.some_ranks(MOST)
    want = layer(most, given, experts)
    other, where = elsewhere(given)
    for ranks, chunks in ((most, 1), (min(most, 2), 3)):
        found = layer(ranks, other, experts, chunks=chunks)
        assert_same(found[where >= 0], want[where[where >= 0]])


def whole_layer(
    ranks: int, given: Any, reduce: str = "rank", **options: Any
) -> np.ndarray:
    """Runs `moe_ffn` with its routing given."""
    mesh = helpers.make_mesh(ranks)
    config = helpers.make_config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=len(given[0]) // ranks // options.get("chunks", 1),
        dtype=given[0].dtype.name,
        reduce=reduce,
    )

    def body(own: Any, tokens: Any, ids: Any, weights: Any) -> Any:
        scores = jnp.zeros((len(tokens), EXPERTS))
        routing = Routing(ids, weights, scores, scores)
        own = dict(zip(("gate_up", "down"), own, strict=True))
        ep = helpers.make_ep(mesh, config)
        given = {"routing": routing, "experts": in_order} | options
        return jax_ep.moe_ffn(ep, tokens, own, **given)[0]

    run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return np.asarray(jax.jit(run)(params(), *given))


def test_moe_ffn_on_the_same_ranks() -> None:
    """Sums at the experts' ranks, which do not depend on other tokens either."""
    given, ranks = batch(1, "float32"), helpers.some_ranks(4)
    want = whole_layer(ranks, given)
    other, where = elsewhere(given)
    for chunks in (1, 2):
        found = whole_layer(ranks, other, chunks=chunks)
        assert_same(found[where >= 0], want[where[where >= 0]])


def test_moe_ffn_on_any_number_of_ranks() -> None:
    given, most = batch(1, "float32"), helpers.some_ranks(MOST)
    other, where = elsewhere(given)
    want = whole_layer(1, given, "source")
    assert_same(whole_layer(most, given, "source"), want)
    found = whole_layer(min(most, 2), other, "source", chunks=2)
    assert_same(found[where >= 0], want[where[where >= 0]])
