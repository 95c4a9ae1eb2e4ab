"""The same routing on 1, 2, 3, 4, 6 and 8 ranks: equal rows, nearly equal sums."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from support import helpers, oracle

RANKS = (1, 2, 3, 4, 6, 8)
EXPERTS = TOKENS = 24
TOP_K, HIDDEN = 4, 32


def make(ranks: int, dtype: str):
    """Config and operands: 24 tokens, split over the ranks."""
    config = helpers.make_config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS // ranks,
        dtype=dtype,
    )
    inputs = helpers.make_inputs(
        np.random.default_rng(24), config, 1, n=TOKENS, fill=helpers.normal
    )
    whole = (inputs.tokens, inputs.ids, inputs.weights)
    split = [np.split(part[0], ranks) for part in whole]
    return config, helpers.Inputs(*split)


def expert_rows(config, inputs) -> list[np.ndarray]:
    """Outputs of the experts: each row depends only on its token and expert."""
    results = []
    for out in oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights):
        rows = np.full_like(out.tokens, np.nan)
        first = len(results) * len(out.expert_ids)
        for group, start in enumerate(out.row_offsets[:-1]):
            stop = out.row_offsets[group + 1]
            factor = np.float32(1 + (first + group) / 7)
            value = out.tokens[start:stop].astype(np.float32) * factor
            rows[start:stop] = value.astype(rows.dtype)
        results.append(rows)
    return results


@functools.cache
def run(ranks: int, dtype: str):
    """All real rows in expert order with their (global token, k, weight), and y."""
    mesh = helpers.make_mesh(ranks)
    config, inputs = make(ranks, dtype)
    ep = helpers.make_ep(mesh, config)
    d = helpers.run_dispatch(ep, mesh, inputs)
    names = ("tokens", "src_info", "router_weights", "row_offsets")
    tokens, info, weights, offsets = (
        helpers.unstack(getattr(d, name), ranks) for name in names
    )
    ends = [offsets[r][-1] for r in range(ranks)]
    rows = np.concatenate([tokens[r][: ends[r]] for r in range(ranks)])
    info = np.concatenate([info[r][: ends[r]] for r in range(ranks)])
    source = np.stack([info[:, 0] * (TOKENS // ranks) + info[:, 1], info[:, 2]], 1)
    kept = np.concatenate([weights[r][: ends[r]] for r in range(ranks)])
    y = helpers.run_combine(
        ep,
        mesh,
        d.route,
        expert_rows(config, inputs),
        [weights[r] for r in range(ranks)],
    )
    return rows, source, kept, np.concatenate([y[r] for r in range(ranks)])


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", RANKS)
def test_same_rows(ranks: int, dtype: str) -> None:
    actual, expected = run(ranks, dtype), run(1, dtype)
    assert len(expected[0]) > TOKENS
    for got, want, what in zip(
        actual[:3], expected[:3], ("rows", "sources", "weights"), strict=True
    ):
        helpers.assert_bits(got, want, what)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", RANKS)
def test_combine_within_one_rounding_a_rank(ranks: int, dtype: str) -> None:
    """Errors are at most half a unit in the last place per rank, and for y."""
    config, inputs = make(ranks, dtype)
    rows = expert_rows(config, inputs)
    half_ulp = 2.0 ** -(8 if dtype == "bfloat16" else 24)
    exact = np.zeros((TOKENS, HIDDEN))
    roundings = np.zeros((TOKENS, HIDDEN))
    float32_work = np.zeros((TOKENS, HIDDEN))
    for rank, placement in enumerate(oracle.place(config, inputs.ids)):
        partial = np.zeros((TOKENS, HIDDEN))
        for row in placement.kept:
            at = row.source * (TOKENS // ranks) + row.token
            weight = float(inputs.weights[row.source][row.token, row.k])
            term = weight * rows[rank][row.index].astype(np.float64)
            partial[at] += term
            float32_work[at] += np.abs(term)
        exact += partial
        roundings += half_ulp * np.abs(partial)
    # Products and sums in float32: at most K + R + 1 roundings of terms.
    slack = (TOP_K + ranks + 1) * 2.0**-24 * float32_work
    bound = roundings + half_ulp * (np.abs(exact) + roundings) + 2 * slack
    error = np.abs(run(ranks, dtype)[3].astype(np.float64) - exact)
    assert np.all(error <= bound)
    assert np.max(bound) < 0.05 * np.max(np.abs(exact))
