"""Training states of jax_ep.flax's layers, restored on meshes of other sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from support import helpers

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
pytest.importorskip("optax", reason="needs pip install optax")
pytest.importorskip("orbax.checkpoint", reason="needs pip install orbax-checkpoint")

import optax
from flax import linen as nn
from flax import nnx
from orbax import checkpoint

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import fields, inputs, parts

pytestmark = pytest.mark.usefixtures("quick_compiles")

STEPS = 4


def layout(mesh):
    """The target of restoring arrays; those on one device go to all of `mesh`."""

    def abstract(array):
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return abstract


def save(path, state):
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path, mesh, like):
    with checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(layout(mesh), like))


def make(mesh, seed):
    layer = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(seed))
    return layer, nnx.Optimizer(layer, optax.adam(3e-2), wrt=nnx.Param)


def train(layer, optimizer):
    x, target = inputs(), inputs(5)

    @nnx.jit
    def step(layer, optimizer):
        def distance(layer):
            return jnp.mean((layer(x) - target) ** 2)

        loss, grads = nnx.value_and_grad(distance)(layer)
        optimizer.update(layer, grads)
        return loss

    return [float(step(layer, optimizer)) for _ in range(STEPS)]


def test_train_state_on_another_mesh(tmp_path):
    mesh = helpers.make_mesh(helpers.fit({"ep": 8}))
    layer, optimizer = make(mesh, 0)
    losses = train(layer, optimizer)
    moments = optimizer.opt_state[0].mu
    assert parts(moments["gate_up"][...]) == (16 // mesh.size, 16, 2, 8)
    save(tmp_path / "state", nnx.to_pure_dict(nnx.state((layer, optimizer))))
    losses += train(layer, optimizer)
    assert losses[-1] < 0.8 * losses[0]

    small = helpers.make_mesh({"ep": 2, "tp": 2})
    other = make(small, 1)
    state = nnx.state(other)
    pure = restore(tmp_path / "state", small, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(other, state)
    assert int(other[1].opt_state[0].count[...]) == STEPS
    assert parts(other[0].down[...]) == (8, 4, 16)
    assert parts(other[1].opt_state[0].nu["down"][...]) == (8, 4, 16)
    np.testing.assert_allclose(train(*other), losses[STEPS:], rtol=1e-4)


def test_linen_train_state_on_another_mesh(tmp_path):
    x, rule = inputs(), optax.adam(1e-2)

    def make(mesh, seed):
        layer = jax_ep.flax.linen.MoE(**fields(mesh))
        params = nn.unbox(jax.jit(layer.init)(jax.random.key(seed), x))["params"]
        return layer, (params, rule.init(params))

    def step(layer, params, moments):
        def loss(params):
            return jnp.mean(layer.apply({"params": params}, x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = rule.update(grads, moments, params)
        return value, (optax.apply_updates(params, updates), moments)

    run = jax.jit(step, static_argnums=0)
    mesh = helpers.make_mesh(helpers.fit({"ep": 4}))
    layer, state = make(mesh, 0)
    _, state = run(layer, *state)
    save(tmp_path / "state", state)
    small = helpers.make_mesh({"ep": 2, "tp": 2})
    other, fresh = make(small, 1)
    restored = restore(tmp_path / "state", small, fresh)
    assert parts(restored[0]["down"]) == (8, 4, 16)
    assert int(restored[1][0].count) == 1
    value, state = run(layer, *state)
    got, again = run(other, *restored)
    np.testing.assert_allclose(got, value, rtol=1e-4)
    for name, array in state[0].items():
        np.testing.assert_allclose(again[0][name], array, atol=1e-4, err_msg=name)
