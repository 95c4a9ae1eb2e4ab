"""Biases of the experts in jax_ep.flax's layers: equal to the dense formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.router import Router
from support import helpers, moe_dense

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax.linen
from support.flax_layers import fields, inputs, nnx_layer

pytestmark = pytest.mark.usefixtures("quick_compiles")

BIASES = ("gate_bias", "up_bias", "down_bias")


@pytest.fixture
def mesh():
    return helpers.make_mesh(helpers.fit({"ep": 2, "tp": 2}))


def test_biases_and_activation_against_the_dense_formula(mesh):
    """down's bias is replicated over the tensor axis, but is added only once."""
    params = moe_dense.params(expert_bias=True)
    x = inputs()
    flat = x.reshape(-1, moe_dense.HIDDEN)
    router = Router()
    scores = moe_dense.scores(params, flat, router)
    chosen = moe_dense.chosen_experts(scores, router, None, moe_dense.TOP_K)

    def dense(params):
        found = moe_dense.layer(
            params, flat, chosen, router, activation=moe_dense.clipped
        )
        return jnp.sum(jnp.sin(found[0])), found[0]

    def loss(layer):
        y = layer(x)
        return jnp.sum(jnp.sin(y)), y

    layer = nnx_layer(mesh, params, expert_bias=True, activation=moe_dense.clipped)
    grad = nnx.value_and_grad(loss, has_aux=True)
    (_, y), got = nnx.jit(grad)(layer)
    (_, wanted), want = jax.jit(jax.value_and_grad(dense, has_aux=True))(params)
    np.testing.assert_allclose(y.reshape(wanted.shape), wanted, rtol=0, atol=1e-5)
    assert set(got) == set(params)
    for name, expected in want.items():
        limit = np.abs(expected).max()
        assert limit > 1e-2, name
        found = got[name][...]
        np.testing.assert_allclose(found, expected, atol=1e-5 * limit, err_msg=name)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_biases_are_zeros_sharded_like_their_weights(mesh, kind):
    told = fields(mesh, expert_bias=True)
    if kind == "nnx":
        layer = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0))
        specs = nnx.get_partition_spec(nnx.state(layer))
        made = {name: getattr(layer, name)[...] for name in BIASES}
        specs = {name: specs[name].get_value() for name in BIASES}
        assert nnx_layer(mesh, {}).gate_bias is None
    else:
        layer = jax_ep.flax.linen.MoE(**told)
        variables = jax.jit(layer.init)(jax.random.key(0), inputs())
        specs = nn.get_partition_spec(variables)["params"]
        made = nn.unbox(variables)["params"]
    assert specs["gate_bias"] == specs["up_bias"] == P("ep", "tp")
    assert specs["down_bias"] == P("ep", None)
    for name in BIASES:
        size = moe_dense.HIDDEN if name == "down_bias" else moe_dense.INNER
        assert made[name].shape == (moe_dense.EXPERTS, size)
        assert not np.asarray(made[name]).any()
        assert made[name].sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh, specs[name]), 2
        )
