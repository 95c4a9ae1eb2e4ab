"""Layers and jax_ep.sharded under a jax.set_mesh with another mesh than their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))


@pytest.fixture(scope="module")
def ep(mesh):
    return helpers.make_ep(mesh, helpers.make_config())


def other(mesh, *, kind=AUTO, devices=None):
    devices = mesh.devices.reshape(-1) if devices is None else devices
    return Mesh(devices, ("data",), axis_types=(kind,))


def exchange(ep, tokens, ids):
    d = jax_ep.sharded.dispatch(ep, tokens, ids)
    return jax_ep.sharded.combine(ep, jax_ep.sharded.dequantize(ep, d), d.route)


def operands(mesh):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.standard_normal((8 * mesh.size, 16)), jnp.bfloat16)
    return tokens, jnp.asarray(rng.integers(0, 24, (len(tokens), 3)), jnp.int32)


@pytest.mark.parametrize("jitted", [False, True])
def test_sharded_under_another_mesh(mesh, ep, jitted):
    tokens, ids = operands(mesh)
    expected = exchange(ep, tokens, ids)

    def loss(tokens):
        y = exchange(ep, tokens, ids)
        return y.astype(jnp.float32).sum(), y

    run = jax.value_and_grad(loss, has_aux=True)
    for context in (other(mesh), mesh):
        with jax.set_mesh(context):
            (_, y), dtokens = (jax.jit(run) if jitted else run)(tokens)
        np.testing.assert_array_equal(
            *(np.asarray(a, np.float32) for a in (y, expected))
        )
        np.testing.assert_array_equal(np.asarray(dtokens, np.float32), 3)


@pytest.mark.thorough
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_layers_under_another_mesh(mesh, kind, jitted):
    """Made, called and differentiated there, results equal those without a context."""
    nnx = pytest.importorskip("flax.nnx")
    import jax_ep.flax
    import jax_ep.flax.linen

    size = {"hidden_size": 16, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    size |= {"max_tokens_per_rank": 8, "dtype": "float32"}
    size |= {"mesh": mesh, "axis_name": "ep", "transport": helpers.TRANSPORT}
    x = jax.random.normal(jax.random.key(0), (4 * mesh.size, 16))

    def of_nnx(x):
        layer = jax_ep.flax.MoE(**size, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        return lambda state, x: nnx.merge(graph, state)(x), state

    def of_linen(x):
        layer = jax_ep.flax.linen.MoE(**size)
        return layer.apply, layer.init(jax.random.key(0), x)

    def run():
        apply, state = (of_nnx if kind == "nnx" else of_linen)(x)

        def loss(state, x):
            return (apply(state, x) ** 2).sum()

        grad = jax.value_and_grad(loss, argnums=(0, 1))
        return (jax.jit(grad) if jitted else grad)(state, x)

    expected = run()
    with jax.set_mesh(other(mesh)):
        found = run()
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def bad_contexts(mesh):
    yield other(mesh, kind=EXPLICIT), "automatic axes"
    if mesh.size > 1:
        yield other(mesh, devices=mesh.devices.reshape(-1)[::-1]), "in this order"
        yield other(mesh, devices=mesh.devices.reshape(-1)[:1]), "must have devices"


@pytest.mark.parametrize("jitted", [False, True])
def test_contexts_that_cannot_be(mesh, ep, jitted):
    tokens, ids = operands(mesh)

    def run(tokens):
        return jax_ep.sharded.dispatch(ep, tokens, ids).tokens

    for context, words in bad_contexts(mesh):
        with (
            jax.set_mesh(context),
            pytest.raises(ValueError, match=rf"jax_ep.sharded.dispatch: .*{words}"),
        ):
            (jax.jit(run) if jitted else run)(np.asarray(tokens))


def inside_shard_map(mesh, body):
    run = jax.shard_map(body, mesh=other(mesh), in_specs=P("data"), out_specs=P("data"))
    return run(*operands(mesh))


def test_sharded_inside_shard_map_of_another_mesh(mesh, ep):
    def body(tokens, ids):
        return jax_ep.sharded.dispatch(ep, tokens, ids).tokens

    with pytest.raises(ValueError, match=r"sharded.dispatch: must be called on global"):
        inside_shard_map(mesh, body)


def test_layer_inside_shard_map_of_another_mesh(mesh):
    flax = pytest.importorskip("jax_ep.flax", exc_type=ImportError)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_experts": 8, "top_k": 2}

    def body(tokens, ids):
        layer = {"mesh": mesh, "axis_name": "ep", "max_tokens_per_rank": 8}
        return flax.MoE(**size, **layer, rngs=None)(tokens)

    with pytest.raises(ValueError, match=r"flax.MoE: must be called on global"):
        inside_shard_map(mesh, body)
