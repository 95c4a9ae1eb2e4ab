"""A sigmoid gate of the shared expert, "shared_expert_gate": the dense formula's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import N, config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROUTER = Router()


def dense_loss(params, x):
    scores = moe_dense.scores(params, x, ROUTER)
    chosen = moe_dense.chosen_experts(scores, ROUTER, None, moe_dense.TOP_K)

    def loss(params):
        y = moe_dense.layer(params, x, chosen, ROUTER)[0]
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def assert_equal(found, wanted):
    (_, y), grads = found
    (_, want), want_grads = wanted
    np.testing.assert_allclose(
        np.reshape(y, want.shape), want, rtol=0, atol=1e-5 * np.abs(want).max()
    )
    assert set(grads) == set(want_grads)
    for name, expected in want_grads.items():
        limit = np.abs(expected).max()
        assert limit > 1e-2, name
        np.testing.assert_allclose(
            grads[name], expected, rtol=0, atol=1e-5 * limit, err_msg=name
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("axes", [{"ep": 4}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2}])
@pytest.mark.parametrize("capacity", [None, 2.0])
def test_values_and_gradients(axes, capacity):
    """With room for few rows, `tp` scatters the layer's columns."""
    mesh = helpers.make_mesh(helpers.fit(axes))
    ep = helpers.make_ep(mesh, config(capacity_factor=capacity))
    params = moe_dense.params(shared_gate=True)
    rng = np.random.default_rng(1)
    ranks = mesh.size // mesh.shape.get("tp", 1)
    x = rng.standard_normal((N * ranks, moe_dense.HIDDEN)).astype(np.float32)
    run = expert_parallel(mesh, ep, params, ROUTER)

    def loss(params):
        y, aux = run(params, x, np.ones(len(x), bool))
        return jnp.sum(jnp.sin(y)), (y, aux.num_dropped)

    (value, (y, dropped)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params
    )
    assert not np.any(dropped)
    assert_equal(((value, y), grads), dense_loss(params, x))


@pytest.mark.parametrize(
    ("change", "fused", "message"),
    [
        (lambda p: p.pop("shared_down"), False, "must come together"),
        (
            lambda p: (p.pop("shared_down"), p.pop("shared_gate_up")),
            False,
            "shared_expert_gate needs shared_gate_up and shared_down",
        ),
        (lambda p: None, True, "without fused_shared_expert"),
        (
            lambda p: p.update(shared_expert_gate=p["shared_expert_gate"].T),
            False,
            r"must be \[H, 1\] with H = 16 .*got \(1, 16\); transpose",
        ),
    ],
)
def test_errors(change, fused, message):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, config(fused_shared_expert=fused))
    params = moe_dense.params(shared_gate=True, shared_inner=moe_dense.INNER)
    change(params)
    x = np.zeros((N * mesh.size, moe_dense.HIDDEN), np.float32)
    with pytest.raises(ValueError, match=message) as found:
        expert_parallel(mesh, ep, params, ROUTER)(params, x, np.ones(len(x), bool))
    assert str(found.value).startswith("jax_ep.moe_ffn: ")


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_flax_layers(kind):
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    from flax import linen as nn
    from flax import nnx

    import jax_ep.flax.linen
    from support.flax_layers import fields, inputs, nnx_layer

    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2, "tp": 2}))
    params, x = moe_dense.params(shared_gate=True), inputs()
    how = {"gated_shared_expert": True, "fsdp_axis_name": "dp"}
    wanted = dense_loss(params, x.reshape(-1, moe_dense.HIDDEN))
    if kind == "nnx":

        def loss(layer):
            y = layer(x)
            return jnp.sum(jnp.sin(y)), y

        layer = nnx_layer(mesh, params, **how)
        found, grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer)
        grads = {name: grads[name][...] for name in grads}
        fresh = jax_ep.flax.MoE(**fields(mesh, **how), rngs=nnx.Rngs(0))
        made = fresh.shared_expert_gate[...]
        plain = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))
        assert plain.shared_expert_gate is None
    else:
        layer = jax_ep.flax.linen.MoE(**fields(mesh, **how))
        variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))
        made = variables["params"]["shared_expert_gate"]
        given = dict(params)
        given["router_kernel"] = given.pop("router")
        assert {k: v.shape for k, v in variables["params"].items()} == {
            name: value.shape for name, value in given.items()
        }

        def loss(params):
            y = layer.apply({"params": params}, x)
            return jnp.sum(jnp.sin(y)), y

        found, grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
        grads["router"] = grads.pop("router_kernel")
    assert_equal((found, grads), wanted)
    assert made.shape == (moe_dense.HIDDEN, 1)
    assert np.asarray(made).std() > 0.05
