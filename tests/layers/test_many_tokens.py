"""Gradients of bfloat16 layers over many tokens: sums of thousands of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, K, H, F, T = 4, 2, 128, 128, 1024
ROUTED = ("gate_up", "down", "gate_bias", "up_bias", "down_bias")


def parameters():
    rng = np.random.default_rng(0)
    shapes = {
        "router": (H, E),
        "gate_up": (E, H, 2, F),
        "down": (E, F, H),
        "gate_bias": (E, F),
        "up_bias": (E, F),
        "down_bias": (E, H),
        "shared_gate_up": (H, 2, F),
        "shared_down": (F, H),
    }
    return {
        name: jnp.asarray(rng.standard_normal(shape) / H**0.5, jnp.bfloat16)
        for name, shape in shapes.items()
    }


def gradients(dtype, experts, fields):
    """Gradients of tokens and parameters, all of them cast to `dtype` first."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = jax_ep.EPConfig(
        num_experts=E,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=T,
        dtype=dtype,
        **helpers.on_nodes(),
        **fields,
    )
    ep = helpers.make_ep(mesh, config)
    params = parameters()
    specs = {name: P("ep") if name in ROUTED else P() for name in params}
    layer = jax.shard_map(
        lambda tokens, params: jax_ep.moe_ffn(ep, tokens, params, experts=experts)[0],
        mesh=mesh,
        in_specs=(P("ep"), specs),
        out_specs=P("ep"),
    )
    rng = np.random.default_rng(1)
    tokens, cotangent = rng.standard_normal((2, T * mesh.size, H))
    given = [jnp.asarray(each, jnp.bfloat16) for each in (tokens, 1 + cotangent / 4)]
    tokens, params, cotangent = jax.tree.map(
        lambda each: each.astype(dtype), (given[0], params, given[1])
    )
    _, back = jax.vjp(jax.jit(layer), tokens, params)
    to_tokens, to_params = back(cotangent)
    found = {"tokens": to_tokens, **to_params}
    return {name: np.asarray(each, np.float32) for name, each in found.items()}


@pytest.fixture(scope="module")
def exact():
    return gradients("float32", None, {})


@pytest.mark.parametrize(
    ("experts", "fields", "tolerance"),
    [
        pytest.param(None, {}, 0.02, id="auto"),
        pytest.param(None, {"fused_shared_expert": True}, 0.02, id="fused"),
        pytest.param(jax_ep.experts.Padded(2 * T), {}, 0.02, id="padded"),
        pytest.param(
            jax_ep.experts.fp8, {"dispatch_format": "fp8_block128"}, 0.12, id="fp8"
        ),
    ],
)
def test_gradients_are_those_of_float32(experts, fields, tolerance, exact):
    """Within rounding of tokens and weights, and none is too small as a whole."""
    for name, got in gradients("bfloat16", experts, fields).items():
        want = exact[name]
        apart = np.abs(got - want).max() / np.abs(want).max()
        ratio = np.linalg.norm(got) / np.linalg.norm(want)
        assert apart <= tolerance, name
        assert abs(ratio - 1) <= 0.01, name
