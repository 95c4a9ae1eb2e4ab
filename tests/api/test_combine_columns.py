"""combine of rows with fewer columns: bits, gradients, and refused widths."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, options, oracle
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

N, RANKS = 6, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One config, and a number of columns."""

    columns: int
    mode: str = "rank"
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        mode = options.MODES.get(self.mode, {})
        return helpers.make_config(**helpers.HALVES | mode | dict(self.changes))


FLOAT32 = (("dtype", "float32"),)
CASES = [
    Case(8),
    Case(16, changes=FLOAT32),
    Case(4, changes=(*FLOAT32, ("combine_dtype", "bfloat16"))),
    Case(24, changes=(("hidden_size", 40), ("recv_capacity", 9))),
    Case(8, changes=(("dtype", "float16"),)),
    Case(8, "source"),
    Case(12, "source", (*FLOAT32, ("expert_alignment", 4))),
    Case(8, "none"),
    Case(8, "shared"),
    Case(4, "shared_source", FLOAT32),
    Case(8, "local_shared"),
    Case(4, "local_none", FLOAT32),
]


@functools.cache
def program(ep: Any, mesh: Any, split: bool) -> Any:
    """y of one rank, and the cotangents of rows, weights and residual."""
    combine = options.split_combine if split else jax_ep.combine

    def body(tokens, ids, w, rows, weights, residual, dy):
        route = jax_ep.dispatch(ep, tokens, ids, w).route

        def run(rows, weights, residual):
            return combine(ep, rows, route, weights, residual=residual)

        y, pull = jax.vjp(run, rows, weights, residual)
        return y, *pull(dy)

    return jax.jit(moe.sharded(mesh, body))


@pytest.mark.few(6)
@pytest.mark.parametrize("case", CASES, ids=str)
@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(st.booleans(), st.integers(0, 2**32 - 1))
def test_sums_and_gradients(case: Case, split: bool, seed: int) -> None:
    mesh, config = helpers.make_mesh(RANKS), case.config()
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(seed)
    routing = ("random", "full", "duplicates", "invalid", "none")[seed % 5]
    inputs = options.make_inputs(
        rng, config, RANKS, n=N, routing=routing, fill=helpers.normal
    )
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    rows, weights, residual = options.combine_operands(
        rng, config, outputs, inputs, helpers.normal, case.columns
    )
    wanted = oracle.combine(config, inputs.ids, rows, weights, residual)
    dy = [helpers.normal(rng, y.shape, y.dtype) for y in wanted]
    put = functools.partial(helpers.put, mesh)
    given = (inputs.tokens, inputs.ids, inputs.weights, rows, weights, residual, dy)
    y, d_rows, d_weights, d_residual = program(ep, mesh, split)(*map(put, given))
    for rank, part in helpers.unstack(y, RANKS).items():
        helpers.assert_sums(part, wanted[rank], f"y of rank {rank}")
    want_rows, want_weights = oracle.combine_vjp(config, inputs.ids, rows, weights, dy)
    tolerance = 1e-5 if config.dtype == "float32" else 1e-2
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance)
    close(d_rows, np.concatenate(want_rows), atol=1e-6)
    if weights is not None:
        close(d_weights, np.concatenate(want_weights), atol=1e-5)
    if residual is not None:
        helpers.assert_bits(d_residual, np.concatenate(dy))


@pytest.mark.parametrize("mode", ["rank", "source", "none", "shared"])
def test_formats(mode: str) -> None:
    """Blocks of quantised rows do not depend on missing columns."""
    changes = options.MODES.get(mode, {}) | {"hidden_size": 384}
    wires = {"combine_format": "fp8_block128", "grad_format": "fp8_block128"}
    config = helpers.make_config(dispatch_format="mxfp8", **changes, **wires)
    mesh = helpers.make_mesh(RANKS)
    ep = helpers.make_ep(mesh, config)
    inputs = options.make_inputs(
        np.random.default_rng(0), config, RANKS, fill=helpers.normal
    )

    def body(tokens, ids, w, columns):
        d = jax_ep.dispatch(ep, tokens, ids, w)
        weights = {"rank": d.router_weights, "source": w, "none": None}
        rows = jax_ep.dequantize(d)[:, :columns]

        def run(rows):
            return jax_ep.combine(ep, rows, d.route, weights[config.reduce])

        y, pull = jax.vjp(run, rows)
        return y, *pull(jnp.sin(y * 9))

    part, whole = (
        jax.jit(moe.sharded(mesh, functools.partial(body, columns=columns)))(
            *(helpers.put(mesh, each) for each in dataclasses.astuple(inputs))
        )
        for columns in (128, 384)
    )
    for few, all_columns in zip(part, whole, strict=True):
        helpers.assert_bits(few, all_columns[..., :128])
    assert np.asarray(part[1], np.float32).any()


def test_sharded() -> None:
    mesh, config = helpers.make_mesh(RANKS), helpers.make_config(pending_calls=1)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(1), config, RANKS, fill=helpers.normal
    )
    d = jax_ep.sharded.dispatch(
        ep, *(helpers.put(mesh, each) for each in dataclasses.astuple(inputs))
    )
    whole = jax_ep.sharded.combine(ep, d.tokens, d.route, d.router_weights)
    given = (ep, d.tokens[:, :8], d.route, d.router_weights)
    halves = jax_ep.sharded.combine_wait(jax_ep.sharded.combine_async(*given))
    for y in (jax_ep.sharded.combine(*given), halves):
        helpers.assert_bits(y, whole[:, :8])


WRONG = {
    "narrower_than_16_bytes": ({}, 4, None, "16", "multiple of 8"),
    "not_16_bytes": ({}, 12, None, "16", "multiple of 8"),
    "wider_than_hidden": ({}, 24, None, "at most hidden_size = 16"),
    "no_columns": ({}, 0, None, "multiple of 8"),
    "not_a_block": (
        {"hidden_size": 256, "combine_format": "fp8_block128"},
        64,
        None,
        "multiple of 128",
    ),
    "not_a_block_of_gradients": (
        {"hidden_size": 256, "grad_format": "fp8_block128"},
        64,
        None,
        "multiple of 128",
    ),
    "residual_of_other_width": ({}, 8, 16, "residual", "columns = 8", "(8, 16)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_widths(name: str) -> None:
    changes, columns, beside, *words = WRONG[name]
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(**changes)
    ep = helpers.make_ep(mesh, config)

    def body():
        tokens = jnp.zeros((8, config.hidden_size), "bfloat16")
        d = jax_ep.dispatch(ep, tokens, jnp.zeros((8, 3), jnp.int32))
        rows = jnp.zeros((ep.recv_capacity, columns), "bfloat16")
        residual = beside and jnp.zeros((8, beside), "bfloat16")
        return jax_ep.combine(ep, rows, d.route, residual=residual)

    run = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep"))
    with raises() as caught:
        jax.eval_shape(run)
    check_form(caught, "combine", *words)
