"""Quantised dispatch and combine: every output equals NumPy's, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._core import formats as table
from support import format_values, helpers, oracle, quantizer
from support.quantized import QUANTIZED, TILED, check, config_of, each_format, run

pytestmark = pytest.mark.usefixtures("quick_compiles")

CASES = {
    "plain": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "aligned": {"expert_alignment": 16},
    "overflow": {"recv_capacity": 9},
    "loose_tail": {"zero_tail": False, "expert_alignment": 4},
    "one_rank": {"ranks": 1},
    "three_ranks": {"ranks": 3},
    "narrow": {"hidden_size": 128},
}


@pytest.mark.few(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("routing", ["random", "invalid"])
@each_format
def test_dispatch(name: str, routing: str, case: str) -> None:
    changes = dict(CASES[case])
    mesh = helpers.make_mesh(changes.pop("ranks", helpers.some_ranks(4)))
    config = helpers.make_config(**config_of(name, **changes))
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(len(case) * 7 + len(routing))
    inputs = helpers.make_inputs(
        rng, config, ep.ep_size, routing=routing, fill=format_values.rows
    )
    check(mesh, ep, inputs)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", quantizer.TILED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert_alignment": 128},
        {"recv_capacity": 200, "max_tokens_per_rank": 64},
        {"max_tokens_per_rank": 150, "num_experts": 4, "top_k": 2},
        {"zero_tail": False, "expert_alignment": 8},
    ],
    ids=["few_rows", "aligned", "overflow", "several_tiles", "loose_tail"],
)
def test_tiled_scales(name: str, changes: dict[str, Any]) -> None:
    ranks = helpers.some_ranks(2)
    mesh = helpers.make_mesh(ranks)
    config = helpers.make_config(
        **config_of(name, scale_layout="tiled_128x4", **changes)
    )
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(6)
    for routing in ("random", "one:0"):
        inputs = helpers.make_inputs(
            rng, config, ranks, routing=routing, fill=helpers.normal
        )
        check(mesh, ep, inputs)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recv_capacity": 9, "expert_alignment": 4},
        # The shape does not determine the layout here.
        {"recv_capacity": 4, "hidden_size": 512},
        {"zero_tail": False, "recv_capacity": 50},
        {"pending_calls": 1},
    ],
    ids=["plain", "overflow", "square", "loose_tail", "halves"],
)
def test_columns_of_scales(changes: dict[str, Any], coded: bool) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(
        **config_of("fp8_block128", scale_layout="columns", **changes)
    )
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(8), config, ep.ep_size, fill=format_values.rows
    )
    check(mesh, ep, inputs, coded=coded, halves=config.most_pending > 0)


@pytest.mark.parametrize("g", [None, 1.0, 300.0, 1e-3])
def test_global_scale(g: float | None) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(**config_of("nvfp4"))
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(7)
    inputs = helpers.make_inputs(rng, config, ep.ep_size, fill=format_values.rows)
    check(mesh, ep, inputs, g)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=15, deadline=None)
def test_shapes_and_routings(data) -> None:
    name = data.draw(st.sampled_from(QUANTIZED))
    unit = max(quantizer.BLOCKS[name], 32)
    tiled = name in TILED[1] and data.draw(st.booleans())
    config = helpers.make_config(
        dispatch_format=name,
        hidden_size=unit * data.draw(st.sampled_from([4, 8] if tiled else [1, 2, 5])),
        scale_layout=TILED[0] if tiled else "rows",
        dtype=data.draw(st.sampled_from(list(oracle.DTYPES))),
        top_k=data.draw(st.sampled_from([1, 3])),
        expert_alignment=data.draw(st.sampled_from([1, 7])),
    )
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    words = ("random", "duplicates", "none", "one:1")
    routing = [data.draw(st.sampled_from(words)) for _ in range(ep.ep_size)]
    n = data.draw(st.sampled_from([1, 5, 8]))
    fill = data.draw(st.sampled_from([format_values.rows, helpers.any_bits]))
    inputs = helpers.make_inputs(
        rng, config, ep.ep_size, n=n, routing=routing, fill=fill
    )
    check(mesh, ep, inputs)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_format(weighted: bool, dtype: str) -> None:
    """A rank's float32 sums are quantised once per slot; NaN stays in its block."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    config = helpers.make_config(
        hidden_size=384, dtype=dtype, combine_format="fp8_block128"
    )
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(10)
    inputs = helpers.make_inputs(rng, config, ep.ep_size)
    d = helpers.run_dispatch(ep, mesh, inputs)
    placed = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    count, np_dtype = ep.ep_size, oracle.DTYPES[dtype]
    rows = [
        helpers.normal(rng, (ep.recv_capacity, 384), np_dtype, 4) for _ in range(count)
    ]
    for part in rows:
        part[rng.random(part.shape) < 1e-3] = np.nan
    rows = helpers.poisoned(placed, rows)
    weights = [out.router_weights for out in placed] if weighted else None
    residual = [helpers.normal(rng, (8, 384), np_dtype) for _ in range(count)]
    got = helpers.run_combine(ep, mesh, d.route, rows, weights, residual)

    def over_the_wire(sums: np.ndarray) -> np.ndarray:
        return quantizer.dequantize(
            *quantizer.quantize(sums, "fp8_block128"), "fp8_block128"
        )

    wanted = oracle.combine(
        config, inputs.ids, rows, weights, residual, wire=over_the_wire
    )
    for position, y in got.items():
        helpers.assert_sums(y, wanted[position], f"y of rank {position}")


@each_format
def test_rows_without_a_port(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decoded by their own format, even if another one has its dtypes."""
    known = table._FORMATS
    twin = known[name] | {"name": "twin", "block": 64}
    monkeypatch.setattr(table, "_FORMATS", {"twin": twin, **known})
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, helpers.make_config(**config_of(name, dtype="float16")))
    inputs = helpers.make_inputs(np.random.default_rng(12), ep.config, ep.ep_size)
    tokens, ids = (helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids))

    def body(tokens: Any, ids: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        bare = dataclasses.replace(d, grad_port=None)
        return bare, jax_ep.dequantize(bare), jax_ep.dequantize(d)

    spec = P("ep")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    d, rows, wanted = jax.jit(mapped)(tokens, ids)
    assert d.grad_port is None
    assert (d.format, d.rows_dtype, rows.dtype) == (name, "float16", np.float16)
    assert rows.shape == (ep.ep_size * ep.recv_capacity, 256)
    helpers.assert_bits(rows, wanted)
    helpers.assert_bits(jax_ep.sharded.dequantize(ep, d), wanted)
    with pytest.raises(
        ValueError, match=f"the scales of its format '{name}', got none"
    ):
        jax_ep.dequantize(dataclasses.replace(d, scales=None))


def test_global_arrays() -> None:
    """jax_ep.sharded takes and returns global arrays, as from a shard_map."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    config = helpers.make_config(**config_of("nvfp4", scale_layout="tiled_128x4"))
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(11), config, ep.ep_size)
    operands = [
        helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    d = jax_ep.sharded.dispatch(ep, *operands, input_scale=jnp.float32(2.5))
    _, wanted = run(ep, mesh, inputs, 2.5)
    helpers.assert_bits(jax_ep.sharded.dequantize(ep, d), wanted)
    if ep.ep_size > 1:
        with pytest.raises(ValueError, match=r"sharded\.dequantize"):
            jax_ep.dequantize(d)
