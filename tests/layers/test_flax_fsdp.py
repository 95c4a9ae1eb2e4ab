"""Weights of jax_ep.flax's layers that are sharded over a data axis, too."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from support import helpers

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import fields, inputs, parts, wave

pytestmark = pytest.mark.usefixtures("quick_compiles")

WEIGHTS = ("router", "gate_up", "down", "shared_gate_up", "shared_down")


def loss(layer, x):
    y, aux = layer(x, return_aux=True)
    return wave(y.astype(jnp.float32)) + 3 * aux.balance_loss + aux.z_loss


def graph(layer):
    """A jitted function of (state, x), which lowers without NNX, and the state."""
    definition, state, rest = nnx.split(layer, nnx.Param, ...)

    def grad(state, x):
        return jax.grad(lambda s: loss(nnx.merge(definition, s, rest), x))(state)

    return jax.jit(grad), state


def test_one_gather_and_one_reduce_scatter_per_weight():
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 4})
    told = {"fsdp_axis_name": "fsdp", "dtype": "bfloat16"}
    layer = jax_ep.flax.MoE(**fields(mesh, **told), rngs=nnx.Rngs(0))
    grad, state = graph(layer)
    lowered = grad.lower(state, inputs())
    text = lowered.as_text()
    count = len(WEIGHTS)
    # bfloat16 goes out, for experts, and float32 comes back.
    kinds = re.findall(r'"stablehlo.all_gather".*-> tensor<.*x(\w+)>', text)
    assert sorted(kinds) == ["bf16"] * (count - 1) + ["f32"]
    assert text.count('"stablehlo.reduce_scatter"') == count
    compiled = lowered.compile().as_text()
    if helpers.TRANSPORT == "collective":
        assert text.count('"stablehlo.all_to_all"') == 4
        assert len(re.findall(r" all-to-all(?:-start)?\(", compiled)) == 4
    for name in ("all-gather", "reduce-scatter"):
        found = re.findall(rf" {name}(?:-start)?\(", compiled)
        assert len(found) == count, name
    smallest = min(np.prod(parts(getattr(layer, name)[...])) for name in WEIGHTS)
    reduced = re.findall(r"= (.*) all-reduce(?:-start)?\(", compiled)
    assert reduced  # losses
    for shape in re.findall(r"\[([\d,]*)\]", " ".join(reduced)):
        assert np.prod([int(each) for each in shape.split(",") if each]) < smallest
