"""A fused shared expert in moe_ffn: group 0 is multiplied apart from the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import experts
from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, H, F, T = 8, 128, 128, 24


def parameters(biased):
    sizes = {"experts": E, "hidden": H, "inner": F, "shared_inner": F}
    return moe_dense.params(expert_bias=biased, **sizes)


def layer(run, fields, params):
    """A function of (params, tokens, mask) on global arrays, and its handle."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    sizes = {"num_experts": E, "hidden_size": H, "max_tokens_per_rank": T}
    given = {"fused_shared_expert": True, "dtype": "bfloat16", "top_k": 2} | fields
    ep = helpers.make_ep(mesh, config(**sizes, **given))
    return expert_parallel(mesh, ep, params, Router(), experts=run), ep


def as_ones_own(run):
    """`run` as a function that the layer does not know, which gets all groups."""

    def own(*args, **options):
        return run(*args, **options)

    known = getattr(run, "takes_dispatched", False)
    return experts.takes_dispatched(own) if known else own


CASES = {
    "ragged_dot": (experts.ragged_dot, {}, False),
    "biases": (experts.ragged_dot, {"dtype": "float32"}, True),
    "padded": (experts.Padded(32), {"expert_alignment": 7}, True),
    "auto": (None, {"dispatch_format": "mxfp8", "scale_layout": "tiled_128x4"}, False),
    "dropped": (experts.ragged_dot, {"recv_capacity": 40}, False),
    "nothing_else": (experts.ragged_dot, {"recv_capacity": 12}, False),
    "fp8": (experts.fp8, {"dispatch_format": "fp8_block128"}, True),
    "fp8_columns": (
        experts.fp8,
        {
            "dispatch_format": "fp8_block128",
            "scale_layout": "columns",
            "expert_alignment": 8,
        },
        False,
    ),
    "fp8_plain": (experts.fp8, {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_grouped_matmul(name):
    """For fewer tokens than T, some of them masked: results, drops and gradients."""
    run, fields, biased = CASES[name]
    params = parameters(biased)
    ones_own = as_ones_own(run or experts.auto)
    found = []
    for each in (run, ones_own):
        mapped, ep = layer(each, fields, params)
        n = 19 * ep.ep_size
        x = np.random.default_rng(1).standard_normal((n, H))
        x = jnp.asarray(x, ep.config.dtype)
        mask = np.arange(n) % 5 != 0

        def loss(params, x, mapped=mapped, mask=mask):
            y, aux = mapped(params, x, mask)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, aux.num_dropped)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, outs), grads = jax.jit(grad)(params, x)
        found.append((outs, grads))
    assert bool(np.asarray(found[0][0][1]).any()) == ("recv_capacity" in fields)
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        got, want = (np.asarray(value, np.float32) for value in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("name", ["ragged_dot", "padded", "fp8", "fp8_columns"])
def test_weights_are_not_copied(name):
    """No array has the matrices of all local experts and of the shared one."""
    run, fields, biased = CASES[name]
    params = parameters(biased)

    def found(run):
        mapped, ep = layer(run, fields, params)
        n, groups = T * ep.ep_size, E // ep.ep_size + 1
        given = jnp.zeros((n, H), ep.config.dtype), jnp.ones(n, bool)
        text = str(jax.make_jaxpr(mapped)(params, *given))
        return [f"[{groups},{shape}]" in text for shape in (f"{H},2,{F}", f"{F},{H}")]

    assert not any(found(run))
    assert all(found(as_ones_own(run)))
