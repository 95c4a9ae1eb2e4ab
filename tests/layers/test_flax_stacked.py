"""Layers of jax_ep.flax stacked by the transformations of NNX and Linen."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from support import helpers

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep
import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import fields, inputs

pytestmark = pytest.mark.usefixtures("quick_compiles")

LAYERS = 3
STACKED = {nnx.PARTITION_NAME: None}


def test_nnx_vmap_makes_and_scan_runs_a_stack():
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 4}))
    make = functools.partial(jax_ep.flax.MoE, **fields(mesh))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata=STACKED)
    def stack(rngs):
        return make(rngs=rngs)

    layers = stack(nnx.Rngs(0))
    specs = nnx.get_partition_spec(nnx.state(layers))
    assert specs["down"].get_value() == P(None, "ep", None, None)
    x = inputs()

    def run(layers, x):
        @nnx.scan(
            in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=STACKED
        )
        def body(layer, x):
            return x + layer(x)

        return body(layers, x)

    y = nnx.jit(run)(layers, x)
    expected = x
    alone = make(rngs=nnx.Rngs(1))
    for index in range(LAYERS):
        nnx.update(alone, jax.tree.map(lambda a, i=index: a[i], nnx.state(layers)))
        expected = expected + alone(expected)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
    grads = nnx.jit(nnx.grad(lambda layers: jnp.sum(run(layers, x) ** 2)))(layers)
    norms = np.linalg.norm(np.asarray(grads["down"][...]).reshape(LAYERS, -1), axis=1)
    assert (norms > 1e-2).all()


def test_linen_scan_runs_a_stack():
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 4}))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            layer = jax_ep.flax.linen.MoE(**fields(mesh), name="moe")
            return x + layer(x), None

    stack = nn.scan(
        Block,
        variable_axes={"params": 0, "losses": 0},
        split_rngs={"params": True},
        length=LAYERS,
        metadata_params=STACKED,
    )()
    x = inputs()
    variables = jax.jit(stack.init)(jax.random.key(0), x, None)
    assert nn.get_partition_spec(variables)["params"]["moe"]["down"] == P(
        None, "ep", None, None
    )
    run = jax.jit(functools.partial(stack.apply, mutable=["losses"]))
    (y, _), sown = run(variables, x, None)
    assert sown["losses"]["moe"]["balance_loss"][0].shape == (LAYERS,)
    expected = x
    alone = jax_ep.flax.linen.MoE(**fields(mesh))
    values = nn.unbox(variables)["params"]["moe"]
    for index in range(LAYERS):
        one = {name: array[index] for name, array in values.items()}
        expected = expected + alone.apply({"params": one}, expected)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
