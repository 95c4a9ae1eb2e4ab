"""Vector-Jacobian products of dispatch and combine alone, against the formulas.

The cotangents of dropped rows, padding and tails are exactly zero, and their contents
(NaN here) are never read.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import jax_ep
from support import helpers, moe, oracle

SHAPES = {
    "plain": {},
    "aligned": {"expert_alignment": 8},
    "cut": {"recv_capacity": 13},
    "cut_aligned": {"recv_capacity": 21, "expert_alignment": 4},
    "free_tail": {"zero_tail": False, "expert_alignment": 2},
    "bfloat16": {"dtype": "bfloat16", "recv_capacity": 15},
    "duplicates": {"num_experts": 4},
}
RTOL = {"float32": 1e-5, "bfloat16": 2.0**-6}


@functools.cache
def case(name: str):
    """mesh, ep, operands and the oracle's outputs for one shape."""
    count = helpers.some_ranks(4)
    mesh = helpers.make_mesh(count)
    config = helpers.make_config(**({"dtype": "float32"} | SHAPES[name]))
    ep = helpers.make_ep(mesh, config)
    routing = "duplicates" if name == "duplicates" else "invalid"
    inputs = helpers.make_inputs(
        np.random.default_rng(13), config, count, routing=routing, fill=helpers.normal
    )
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    if "recv_capacity" in SHAPES[name]:
        assert any(out.num_dropped[0] for out in outputs)
    return mesh, ep, inputs, outputs


def assert_near(actual, expected, config) -> None:
    """Rank by rank within RTOL of the largest value."""
    for rank, part in helpers.unstack(actual, len(expected)).items():
        want = expected[rank]
        atol = RTOL[config.dtype] * max(1.0, float(np.max(np.abs(want), initial=0)))
        np.testing.assert_allclose(helpers.float32(part), want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", SHAPES)
def test_dispatch(name: str) -> None:
    mesh, ep, inputs, outputs = case(name)
    config = ep.config
    rng = np.random.default_rng(14)
    dtype = oracle.DTYPES[config.dtype]
    rows = [helpers.normal(rng, out.tokens.shape, dtype) for out in outputs]
    row_weights = [
        helpers.normal(rng, out.router_weights.shape, np.float32) for out in outputs
    ]
    rows = helpers.poisoned(outputs, rows)
    row_weights = helpers.poisoned(outputs, row_weights)

    def body(x, ids, w, d_rows, d_weights):
        def forward(x, w):
            d = jax_ep.dispatch(ep, x, ids, w)
            return d.tokens, d.router_weights

        return jax.vjp(forward, x, w)[1]((d_rows, d_weights))

    operands = (inputs.tokens, inputs.ids, inputs.weights, rows, row_weights)
    dx, dw = jax.jit(moe.sharded(mesh, body))(*(helpers.put(mesh, o) for o in operands))
    assert dx.dtype == dtype
    assert dw.dtype == np.float32
    want_dx, want_dw = oracle.dispatch_vjp(config, inputs.ids, rows, row_weights)
    assert_near(dx, want_dx, config)
    for rank, part in helpers.unstack(dw, len(want_dw)).items():
        # Each weight goes to one row, so its cotangent comes back unchanged.
        np.testing.assert_array_equal(part, want_dw[rank])


@pytest.mark.few(3)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_combine(name: str, weighted: bool) -> None:
    mesh, ep, inputs, outputs = case(name)
    config = ep.config
    rng = np.random.default_rng(15)
    dtype = oracle.DTYPES[config.dtype]
    rows = [helpers.normal(rng, out.tokens.shape, dtype) for out in outputs]
    rows = helpers.poisoned(outputs, rows)
    weights = None
    if weighted:
        weights = [
            helpers.normal(rng, out.router_weights.shape, np.float32) for out in outputs
        ]
        weights = helpers.poisoned(outputs, weights)
    residual = [helpers.normal(rng, x.shape, dtype) for x in inputs.tokens]
    dy = [helpers.normal(rng, x.shape, dtype) for x in inputs.tokens]

    def body(x, ids, rows, weights, residual, dy):
        route = jax_ep.dispatch(ep, x, ids).route

        def forward(rows, weights, residual):
            return jax_ep.combine(
                ep, rows, route, router_weights=weights, residual=residual
            )

        return jax.vjp(forward, rows, weights, residual)[1](dy)

    operands = (inputs.tokens, inputs.ids, rows, weights, residual, dy)
    d_rows, d_weights, d_residual = jax.jit(moe.sharded(mesh, body))(
        *(helpers.put(mesh, o) for o in operands)
    )
    assert d_rows.dtype == d_residual.dtype == dtype
    want_rows, want_weights = oracle.combine_vjp(config, inputs.ids, rows, weights, dy)
    assert_near(d_rows, want_rows, config)
    parts = [helpers.unstack(d_rows, len(rows))]
    if weighted:
        assert d_weights.dtype == np.float32
        assert_near(d_weights, want_weights, config)
        parts.append(helpers.unstack(d_weights, len(rows)))
    for part in parts:
        for rank, grads in part.items():
            outside = outputs[rank].src_info[:, 0] < 0
            assert np.any(outside) or "recv_capacity" in SHAPES[name]
            assert not np.any(grads[outside].astype(np.float32))
    for rank, part in helpers.unstack(d_residual, len(dy)).items():
        helpers.assert_bits(part, dy[rank])


def test_round_trip_cotangent_ignores_padding() -> None:
    """NaNs that an expert computes from padding reach neither value nor gradient."""
    mesh, ep, inputs, outputs = case("aligned")
    operands = [
        helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]

    def body(x, ids, w):
        d = jax_ep.dispatch(ep, x, ids, w)
        bad = d.src_info[:, :1] < 0
        # 0 / 0 and its derivative give NaN in every padding and tail row.
        rows = d.tokens / jax.numpy.where(bad, 0.0, 2.0)
        return jax_ep.combine(ep, rows, d.route, router_weights=d.router_weights)

    run = jax.jit(moe.sharded(mesh, body))
    y, pull = jax.vjp(lambda x, w: run(x, operands[1], w), operands[0], operands[2])
    dx, dw = jax.jit(pull)(jax.numpy.ones_like(y))
    rows = [out.tokens / np.float32(2) for out in outputs]
    weights = [out.router_weights for out in outputs]
    expected = oracle.combine(ep.config, inputs.ids, rows, weights)
    np.testing.assert_allclose(y, np.concatenate(expected), rtol=0, atol=1e-6)
    ones = [np.ones_like(x) for x in inputs.tokens]
    d_rows, d_weights = oracle.combine_vjp(ep.config, inputs.ids, rows, weights, ones)
    want_dx, want_dw = oracle.dispatch_vjp(
        ep.config, inputs.ids, [d / 2 for d in d_rows], d_weights
    )
    np.testing.assert_allclose(dx, np.concatenate(want_dx), rtol=0, atol=1e-5)
    np.testing.assert_allclose(dw, np.concatenate(want_dw), rtol=0, atol=1e-5)
