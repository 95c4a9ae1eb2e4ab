"""What experts compute from quantised rows: dequantised, or as codes and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle, quantizer
from support.errors import check_form, raises
from support.quantized import TILED, config_of, each_format, expect, run


@pytest.mark.few(3)
@each_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_dot_on_dequantized_rows(name: str, dtype: str) -> None:
    """Experts compute the same from dequantised rows as from NumPy's."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    layout = "tiled_128x4" if name in TILED[1] else "rows"
    config = helpers.make_config(**config_of(name, dtype=dtype, scale_layout=layout))
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(8)
    inputs = helpers.make_inputs(rng, config, ep.ep_size, fill=helpers.normal)
    local = config.num_experts // ep.ep_size
    np_dtype = oracle.DTYPES[dtype]
    params = helpers.normal(rng, (ep.ep_size, local, 256, 24), np_dtype)

    def experts(rows: Any, params: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(rows, params[0], sizes)

    def body(tokens: Any, ids: Any, params: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        rows = jax_ep.dequantize(d)
        return rows, d.group_sizes, experts(rows, params, d.group_sizes)

    def run_on_ranks(function: Any, *operands: Any) -> Any:
        spec = P("ep")
        ranks = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(ranks)(*operands)

    tokens, ids, weights = (
        helpers.put(mesh, part)
        for part in (inputs.tokens, inputs.ids, list(params[:, None]))
    )
    rows, sizes, out = run_on_ranks(body, tokens, ids, weights)
    wanted_rows = [
        quantizer.dequantize(rank.tokens, rank.scales, name).astype(np_dtype)
        for rank in expect(config, dataclasses.replace(inputs, weights=None), 1.0)
    ]
    for rank, actual in helpers.unstack(rows, ep.ep_size).items():
        helpers.assert_bits(actual, wanted_rows[rank], f"rows of rank {rank}")
    wanted_rows = helpers.put(mesh, wanted_rows)

    def both(rows: Any, others: Any, params: Any, sizes: Any) -> Any:
        return experts(rows, params, sizes), experts(others, params, sizes)

    again, wanted = run_on_ranks(both, rows, wanted_rows, weights, sizes)
    # One program gives one result for the same rows; another may sum differently.
    if jax.default_backend() == "cpu":
        helpers.assert_bits(again, wanted)
    one_place = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    wanted = np.asarray(wanted, np.float32)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), wanted, rtol=one_place, atol=30 * one_place
    )
    assert np.abs(wanted).max() > 1


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scaled_matmul(name: str) -> None:
    """JAX's block-scaled matmul takes codes and scales as a dispatch returns them.

    If this device cannot multiply them, the matmul is at least lowered for GPUs.
    """
    mesh = helpers.make_mesh(1)
    device = mesh.devices.flat[0]
    config = helpers.make_config(
        **config_of(name, num_experts=1, top_k=1, dtype="float32")
    )
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(9)
    inputs = helpers.make_inputs(rng, config, 1, routing="one:0", fill=helpers.normal)
    d, rows = run(ep, mesh, inputs)
    params = helpers.normal(rng, (128, 256), np.float32)
    codes, scales = jax_ep.formats.quantize(params, name)
    back = jax_ep.formats.dequantize(codes, scales, name)
    left, right = d.tokens, codes
    if name == "nvfp4":
        left, right = (
            jax.lax.bitcast_convert_type(part, jnp.float4_e2m1fn).reshape(len(part), -1)
            for part in (left, right)
        )
    operands = (left[None], right[None], d.scales[None], scales[None])
    program = jax.jit(jax.nn.scaled_matmul).trace(*operands)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    block = 32 if name == "mxfp8" else 16
    assert "block_scaled_dot" in text
    assert f"tensor<1x{len(rows)}x{256 // block}xf8" in text
    if device.platform == "gpu" and float(device.compute_capability) < 10:
        pytest.skip("block-scaled matmuls need compute capability 10.0")
    try:
        executable = program.lower().compile()
    except NotImplementedError as error:
        # The only way to find out whether JAX has it: old ones have it only on GPUs.
        if "not found for platform cpu" not in str(error):
            raise
        pytest.skip(f"this JAX has no scaled_matmul on a CPU: {error}")
    (got,) = executable(*operands)
    wanted = np.asarray(rows) @ np.asarray(back).T
    np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-2)
    assert np.abs(wanted).max() > 10


@pytest.mark.few(2)
@each_format
def test_codes_are_no_rows(name: str) -> None:
    """Experts and combine refuse codes, but take dequantised rows."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(**config_of(name))
    ep = helpers.make_ep(mesh, config)
    hidden, local, inner = config.hidden_size, ep.local_experts, 128
    shape = (local, hidden, 2, inner)
    gate_up, down = jnp.ones(shape), jnp.ones((local, inner, hidden))
    n = config.max_tokens_per_rank * ep.ep_size
    tokens = jnp.ones((n, hidden), config.dtype)
    d = jax_ep.sharded.dispatch(ep, tokens, jnp.zeros((n, config.top_k), jnp.int32))
    codes, sizes = d.tokens[: ep.recv_capacity], d.group_sizes[:local]
    remedy = "these are codes of a quantised dispatch: pass jax_ep.dequantize(d)"
    experts = jax_ep.experts
    for where, function in (
        ("auto", experts.auto),
        ("ragged_dot", experts.ragged_dot),
        ("hopper", experts.hopper),
        ("Padded", experts.Padded(8)),
    ):
        with raises() as caught:
            function(codes, gate_up, down, sizes)
        assert caught.type is TypeError
        check_form(caught, f"experts.{where}", f"got {codes.dtype}", remedy)
    with raises() as caught:
        jax_ep.sharded.combine(ep, d.tokens, d.route)
    assert caught.type is TypeError
    words = f"expert_out must be {config.dtype}, got {codes.dtype}", remedy
    check_form(caught, "sharded.combine", *words)
    rows = jax_ep.sharded.dequantize(ep, d)
    assert jax_ep.sharded.combine(ep, rows, d.route).shape == tokens.shape
    found = experts.ragged_dot(rows[: ep.recv_capacity], gate_up, down, sizes)
    assert found.dtype == config.dtype


@pytest.mark.parametrize("dtype", ["int32", "int16", "bool", "float8_e5m2"])
def test_rows_that_are_no_values(dtype: str) -> None:
    """Rows of dtypes without a format are refused, also 16-bit ones with `hopper`."""
    rows, sizes = jnp.ones((4, 16)).astype(dtype), jnp.array([4], jnp.int32)
    for name in ("auto", "ragged_dot", "hopper"):
        with raises() as caught:
            function = getattr(jax_ep.experts, name)
            function(rows, jnp.ones((1, 16, 2, 8)), jnp.ones((1, 8, 16)), sizes)
        assert caught.type is TypeError
        check_form(caught, f"experts.{name}", f"got {dtype}", "cast them")


def test_scales_in_columns() -> None:
    """fp8 experts and formats.dequantize treat them like scales by row."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    layouts = ("rows", "columns")
    eps = [
        helpers.make_ep(
            mesh, helpers.make_config(**config_of("fp8_block128", scale_layout=layout))
        )
        for layout in layouts
    ]
    rng = np.random.default_rng(9)
    config = eps[0].config
    inputs = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
    shape = (config.num_experts // mesh.size, 256, 2, 128)
    gate_up = helpers.normal(rng, (mesh.size, *shape), np.float32) / 16
    down = helpers.normal(rng, (mesh.size, shape[0], 128, 256), np.float32) / 16

    def body(tokens: Any, ids: Any, gate_up: Any, down: Any) -> Any:
        made = []
        for ep in eps:
            d = jax_ep.dispatch(ep, tokens, ids)
            out = jax_ep.experts.fp8(d, gate_up[0], down[0])
            # Experts may return anything in rows past the last group.
            in_group = jnp.arange(len(out))[:, None] < d.row_offsets[-1]
            made.append(
                (
                    jnp.where(in_group, out, 0),
                    jax_ep.formats.dequantize(
                        d.tokens,
                        d.scales,
                        "fp8_block128",
                        scale_layout=ep.config.scale_layout,
                    ),
                )
            )
        return made

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    operands = (inputs.tokens, inputs.ids, list(gate_up[:, None]), list(down[:, None]))
    rows, columns = jax.jit(mapped)(*(helpers.put(mesh, part) for part in operands))
    for wanted, got in zip(rows, columns, strict=True):
        helpers.assert_bits(got, wanted)
