"""Gradients of bfloat16 layers over many tokens: sums of thousands of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, H, F, T = 4, 128, 128, 1024


def gradients(dtype, experts, fields):
    """Gradients of tokens and parameters, all of them cast to `dtype` first."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    sizes = {"num_experts": E, "hidden_size": H, "max_tokens_per_rank": T}
    ep = helpers.make_ep(mesh, config(top_k=2, dtype=dtype, **sizes, **fields))
    sizes = {"experts": E, "hidden": H, "inner": F, "shared_inner": F}
    params = moe_dense.params(expert_bias=True, logit_bias=True, **sizes)
    layer = expert_parallel(mesh, ep, params, Router(), experts=experts)
    rng = np.random.default_rng(1)
    tokens, cotangent = rng.standard_normal((2, T * mesh.size, H))
    given = jax.tree.map(
        # Rounded first, so that both layers get the same values.
        lambda each: jnp.asarray(each, jnp.bfloat16).astype(dtype),
        (params, tokens, 1 + cotangent / 4),
    )
    params, tokens, cotangent = given
    mask = jnp.ones(len(tokens), bool)
    main = jax.jit(lambda params, tokens: layer(params, tokens, mask)[0])
    _, back = jax.vjp(main, params, tokens)
    to_params, to_tokens = back(cotangent)
    found = {"tokens": to_tokens, **to_params}
    return {name: np.asarray(each, np.float32) for name, each in found.items()}


@pytest.fixture(scope="module")
def exact():
    return gradients("float32", None, {})


@pytest.mark.few(1)
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
