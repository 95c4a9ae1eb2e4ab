"""`quantized` of layers that are stacked, and parameters of other shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import helpers
from support.errors import check_form, raises

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import fields

pytestmark = pytest.mark.usefixtures("quick_compiles")

LAYERS, H = 3, 128
SIZES = {"hidden_size": H, "intermediate_size": H, "num_experts": 2, "top_k": 1}


def layer_fields(mesh, **changes):
    return fields(mesh, **SIZES | {"shared_intermediate_size": None} | changes)


@pytest.mark.parametrize("metadata", [{nnx.PARTITION_NAME: None}, {}], ids=len)
def test_a_stack_made_by_nnx_vmap(metadata):
    """Its codes are those of each layer; a scan runs it, as it runs the trained one."""
    mesh = helpers.make_mesh(helpers.fit({"ep": 2}))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata=metadata)
    def make(rngs):
        return jax_ep.flax.MoE(**layer_fields(mesh), rngs=rngs)

    stack = make(nnx.Rngs(0))
    found = stack.quantized()
    one = jax_ep.flax.MoE(**layer_fields(mesh), rngs=nnx.Rngs(1))
    nnx.update(one, jax.tree.map(lambda a: a[1], nnx.state(stack)))
    wanted = one.quantized()
    for name in ("gate_up", "gate_up_scales", "down", "down_scales", "router"):
        value = getattr(found, name).get_value()
        helpers.assert_bits(value[1], getattr(wanted, name).get_value())
        specs = [
            getattr(each, field).get_metadata()["out_sharding"]
            for each, field in ((found, name), (stack, name.removesuffix("_scales")))
        ]
        assert specs[0] == specs[1]
    x = jnp.asarray(np.random.default_rng(2).standard_normal((8, H), np.float32))

    @nnx.scan(in_axes=(0, None), out_axes=0, transform_metadata=metadata)
    def run(layer, x):
        return layer(x)

    np.testing.assert_allclose(run(found, x)[1], wanted(x), rtol=1e-5, atol=1e-5)
    prepared = found.prepared()
    assert prepared.gate_up.shape == (LAYERS, 2, H, 2, H)
    with raises() as caught:
        found(x)
    check_form(caught, "flax.MoE", "one layer", "inside a scan or vmap")


def test_a_stack_of_linen():
    mesh = helpers.make_mesh(helpers.fit({"ep": 2}))
    layer = jax_ep.flax.linen.MoE(**layer_fields(mesh))
    x = jnp.ones((8, H))
    each = [nn.unbox(layer.init(jax.random.key(seed), x)) for seed in range(LAYERS)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    other, found = layer.quantized(stack, "mxfp4")
    alone = layer.quantized(each[2], "mxfp4")[1]
    last = jax.tree.map(lambda leaf: leaf[2], found["codes"])
    jax.tree.map(helpers.assert_bits, last, alone["codes"])
    assert other.prepared(found).down.shape[0] == LAYERS


@pytest.mark.parametrize("call", ["apply", "quantized"])
def test_parameters_of_other_shapes_are_named(call):
    """Also where tensor parallelism would not divide them."""
    mesh = helpers.make_mesh(helpers.fit({"ep": 1, "tp": 2}))
    sizes = {"intermediate_size": 2 * H, "tp_axis_name": "tp"}
    layer = jax_ep.flax.MoE(**layer_fields(mesh, **sizes), rngs=nnx.Rngs(0))
    run = (
        layer.quantized
        if call == "quantized"
        else functools.partial(layer, jnp.ones((8, H)))
    )
    shape = layer.gate_up.get_value().shape
    for change, words in (
        (jnp.ones((*shape[:-1], 2 * H - 1)), f"gate_up must have shape {shape}"),
        (jnp.ones(shape).transpose(0, 2, 3, 1), "gate_up.transpose(0, 3, 1, 2)"),
    ):
        layer.gate_up = nnx.Param(change)
        with raises() as caught:
            run()
        check_form(caught, "flax.MoE", words)
