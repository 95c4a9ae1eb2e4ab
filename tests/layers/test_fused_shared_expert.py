"""A fused shared expert in moe_ffn: group 0 is multiplied apart from the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, K, H, F, T = 8, 2, 128, 128, 24
ROUTED = ("gate_up", "down", "gate_bias", "up_bias", "down_bias")


def parameters(biased):
    rng = np.random.default_rng(0)
    shapes = {
        "router": (H, E),
        "gate_up": (E, H, 2, F),
        "down": (E, F, H),
        "shared_gate_up": (H, 2, F),
        "shared_down": (F, H),
    }
    if biased:
        shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, H)}
    return {
        name: rng.standard_normal(shape).astype(np.float32) / 11
        for name, shape in shapes.items()
    }


def layer(run, fields, params):
    """A function of (params, tokens, mask) on global arrays, and its handle."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = jax_ep.EPConfig(
        num_experts=E,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=T,
        fused_shared_expert=True,
        **helpers.on_nodes(),
        **fields,
    )
    ep = helpers.make_ep(mesh, config)

    def body(params, tokens, mask):
        y, aux = jax_ep.moe_ffn(ep, tokens, params, mask=mask, experts=run)
        return y, aux.num_dropped

    specs = {name: P("ep") if name in ROUTED else P() for name in params}
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=P("ep")
    )
    return mapped, ep


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
            y, dropped = mapped(params, x, mask)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, dropped)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, outs), grads = jax.jit(grad)(params, x)
        found.append((outs, grads))
    assert bool(np.asarray(found[0][0][1]).any()) == ("recv_capacity" in fields)
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        got, want = (np.asarray(value, np.float32) for value in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("name", ["ragged_dot", "padded", "fp8", "fp8_columns"])
def test_weights_are_not_copied(name):
    """Nothing has the weights of all local experts and of the shared one."""
    run, fields, biased = CASES[name]
    params = parameters(biased)

    def text(run):
        mapped, ep = layer(run, fields, params)
        n = T * ep.ep_size
        shapes = jnp.zeros((n, H), ep.config.dtype), jnp.ones(n, bool)
        groups = E // ep.ep_size + 1
        return str(jax.make_jaxpr(mapped)(params, *shapes)), f"[{groups},{H},2,{F}]"

    found, whole = text(run)
    assert whole not in found
    found, whole = text(as_ones_own(run))
    assert whole in found
