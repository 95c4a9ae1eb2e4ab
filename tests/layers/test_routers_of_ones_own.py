"""A custom function as `router=` of jax_ep.moe_ffn and of the layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.router import Router, Routing, route
from support import helpers, moe_dense
from support.errors import check_form, raises
from support.moe_ffn import N, config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

TOP_K, EXPERTS = moe_dense.TOP_K, moe_dense.EXPERTS


def given(mesh, *, masked=False, bias=False):
    params = moe_dense.params(bias=bias, logit_bias=True)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((N * mesh.size, moe_dense.HIDDEN)).astype(np.float32)
    mask = rng.random(len(x)) < 0.6 if masked else np.ones(len(x), bool)
    return params, x, mask


def run(mesh, router, params, x, mask):
    ep = helpers.make_ep(mesh, config())
    return jax.jit(expert_parallel(mesh, ep, params, router))(params, x, mask)


def gradient(mesh, router, params, x, mask):
    ep = helpers.make_ep(mesh, config())
    layer = expert_parallel(mesh, ep, params, router)

    def loss(params, x):
        y, aux = layer(params, x, mask)
        return jnp.sum(jnp.sin(y)) + aux.balance_loss + aux.z_loss

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)


def softmax_top_k(logits):
    """Like `Router()`, but ignores masks."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), TOP_K)
    return ids, weights / weights.sum(-1, keepdims=True)


def whole(logits, *, top_k, mask, bias):
    return route(logits, top_k, Router(score="sigmoid"), bias=bias, mask=mask)


def test_a_pair_has_the_losses_of_a_softmax():
    """Also if it chooses experts for padding, whose logits reach no gradient."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    args = given(mesh, masked=True)
    args[1][~args[2]] = np.nan
    args = (moe_dense.params(shared=False, logit_bias=True), *args[1:])
    for call in (run, gradient):
        found, wanted = (call(mesh, r, *args) for r in (softmax_top_k, Router()))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            found,
            wanted,
        )
        leaves = jax.tree.leaves(found)
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves)


def test_a_routing_and_the_keywords_that_it_asks_for():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    args = given(mesh, masked=True, bias=True)
    sigmoid = Router(score="sigmoid")
    partial = functools.partial(route, router=sigmoid)
    wanted = run(mesh, sigmoid, *args)
    for router in (whole, partial):
        found = run(mesh, router, *args)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_tokens_and_a_loss_of_ones_own():
    """Ranks are weighted by their numbers of tokens, which may be zero."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    params, x, mask = given(mesh, masked=True)
    mask[:N] = mesh.size == 1

    def router(logits, *, tokens, mask):
        ids, weights = softmax_top_k(logits + tokens[:, :1])
        mean = jnp.sum(jnp.where(mask, tokens[:, 0], 0)) / jnp.sum(mask)
        return ids, weights, mean

    y, aux = run(mesh, router, params, x, mask)
    plain, other = run(mesh, Router(), params, x, mask)
    np.testing.assert_allclose(aux.balance_loss, x[mask, 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(aux.z_loss, other.z_loss, rtol=1e-6)
    np.testing.assert_allclose(y[mask], plain[mask], atol=1e-5)


def with_ids(change):
    def router(logits):
        ids, weights = softmax_top_k(logits)
        return change(ids, weights)

    return router


def whole_with(**changes):
    def router(logits):
        found = vars(route(logits, TOP_K)) | {"loss": None}
        return Routing(**found | {k: change(logits) for k, change in changes.items()})

    return router


def needs_no_bias(logits):
    return softmax_top_k(logits)


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (with_ids(lambda ids, w: ids), "router must return (ids, weights)"),
        (with_ids(lambda ids, w: (ids, w, w, w)), "got a tuple of 4 from router"),
        (with_ids(lambda ids, w: (ids[:, :2], w)), f"[n, K] with n = {N} and K = 3"),
        (with_ids(lambda ids, w: (ids, w[0])), "weights of router must be [n, K]"),
        (
            with_ids(lambda ids, w: (ids + 0.0, w)),
            "ids of router must be int32, got float32",
        ),
        (with_ids(lambda ids, w: (w, ids)), "return ids before weights"),
        (with_ids(lambda ids, w: (ids, ids)), "cast it with weights.astype"),
        (with_ids(lambda ids, w: (ids, 3)), "weights of router must be an array"),
        (with_ids(lambda ids, w: (ids, w, w)), "loss of router must be [], got"),
        (whole_with(logits=lambda x: x[:, 1:]), f"[n, E] with n = {N} and E = 16"),
        (
            whole_with(probabilities=lambda x: x > 0),
            "probabilities of router must be of a floating",
        ),
        (needs_no_bias, "must take the keyword bias"),
    ],
)
def test_what_it_returns_is_checked(router, words):
    mesh = helpers.make_mesh(1)
    params, x, mask = given(mesh, bias="bias" in words)
    layer = expert_parallel(mesh, helpers.make_ep(mesh, config()), params, router)
    with raises() as caught:
        jax.eval_shape(layer, params, x, mask)
    check_form(caught, "moe_ffn", words)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_layers_take_one(kind):
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    import jax_ep.flax.linen
    from support.flax_layers import fields, inputs, nnx_layer

    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    params, x = moe_dense.params(), inputs()

    def call(router):
        if kind == "nnx":
            return nnx_layer(mesh, params, router=router)(x, return_aux=True)
        layer = jax_ep.flax.linen.MoE(**fields(mesh), router=router)
        names = {"router_kernel": "router"}
        made = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
        values = {name: params[names.get(name, name)] for name in made}
        return layer.apply({"params": values}, x, return_aux=True)

    for found, wanted in zip(
        *map(jax.tree.leaves, (call(softmax_top_k), call(None))), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)

    def wrong(logits):
        return logits

    with raises() as caught:
        call(wrong)
    where = "flax.MoE" if kind == "nnx" else "flax.linen.MoE"
    check_form(caught, where, "router must return", "(raised by jax_ep.moe_ffn for")
