"""What experts compute from quantised rows: dequantised, or as codes and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantizer
from jax.sharding import PartitionSpec as P
from test_quantized import TILED, config_of, each_format, expect, run

import jax_ep


@each_format
def test_ragged_dot_on_dequantized_rows(name: str) -> None:
    """What experts compute from dequantised rows is what they do from NumPy's."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    layout = "tiled_128x4" if name in TILED[1] else "rows"
    config = helpers.make_config(
        **config_of(name, dtype="float32", scale_layout=layout)
    )
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(8)
    inputs = helpers.make_inputs(rng, config, ep.ep_size, fill=helpers.normal)
    local = config.num_experts // ep.ep_size
    params = helpers.normal(rng, (ep.ep_size, local, 256, 24), np.float32)

    def experts(rows: Any, params: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(rows, params, sizes)

    def body(tokens: Any, ids: Any, params: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        return experts(jax_ep.dequantize(d), params[0], d.group_sizes)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    operands = (inputs.tokens, inputs.ids, list(params[:, None]))
    out = jax.jit(mapped)(*(helpers.put(mesh, part) for part in operands))
    got = helpers.unstack(out, ep.ep_size)
    wanted = expect(config, dataclasses.replace(inputs, weights=None), 1.0)
    for rank, actual in got.items():
        out = wanted[rank]
        rows = quantizer.dequantize(out.tokens, out.scales, name)
        wanted_rows = jax.jit(experts)(rows, params[rank], out.group_sizes)
        np.testing.assert_allclose(actual, wanted_rows, rtol=1e-5, atol=1e-4)
        assert np.abs(actual).max() > 1


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scaled_matmul(name: str) -> None:
    """Codes and scales as they came, in JAX's block-scaled matmul."""
    mesh = helpers.make_mesh(1)
    device = mesh.devices.flat[0]
    if device.platform == "gpu" and float(device.compute_capability) < 10:
        pytest.skip("block-scaled matmuls need compute capability 10.0")
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
    try:
        got = jax.jit(jax.nn.scaled_matmul)(*operands)
    except NotImplementedError as error:
        pytest.skip(f"this JAX has no scaled_matmul on {device.platform}: {error}")
    wanted = np.asarray(rows) @ np.asarray(back).T
    np.testing.assert_allclose(got[0], wanted, rtol=1e-2, atol=1e-2)
