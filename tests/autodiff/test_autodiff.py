"""Gradients against the dense formula: layers, loops, second order, odd operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("alignment", [1, 8])
def test_layer(alignment: int, check_vma: bool) -> None:
    s = moe.setup(expert_alignment=alignment)
    layer = functools.partial(moe.layer, s.ep)
    moe.check(s, moe.loss(s.mesh, layer, check_vma=check_vma), moe.dense_loss)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
def test_layer_on_ranks(ranks: int) -> None:
    s = moe.setup(ranks=ranks)
    moe.check(s, moe.loss(s.mesh, functools.partial(moe.layer, s.ep)), moe.dense_loss)


def test_without_jit_of_grad() -> None:
    """grad outside of jit runs the forward and the backward pass as two programs."""
    s = moe.setup()
    x, ids, w, p = s.global_arrays()
    run = jax.jit(moe.loss(s.mesh, functools.partial(moe.layer, s.ep)))
    actual = jax.grad(run, (0, 1, 2))(x, w, p, ids)
    expected = jax.grad(moe.dense_loss, (0, 1, 2))(s.tokens, s.weights, s.params, s.ids)
    moe.assert_close(actual, expected)


def test_vjp_is_linear_and_reusable() -> None:
    """One vjp called several times, in any order, reuses one route."""
    s = moe.setup()
    x, ids, w, p = s.global_arrays()
    run = jax.jit(moe.sharded(s.mesh, functools.partial(moe.layer, s.ep)))
    y, pull = jax.vjp(lambda x, w, p: run(x, ids, w, p), x, w, p)
    once, twice = pull(jnp.ones_like(y)), pull(2 * jnp.ones_like(y))
    moe.assert_close(jax.tree.map(lambda a: 2 * a, once), twice, 1e-6)
    y, pull = jax.vjp(
        lambda x, w, p: moe.dense(x, s.ids, w, p), s.tokens, s.weights, s.params
    )
    moe.assert_close(once, pull(jnp.ones_like(y)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_no_rule_is_traced_after_close(op: str, weighted: bool) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    with helpers.init(mesh) as ep:
        tokens = jnp.ones((4 * mesh.size, ep.config.hidden_size), ep.config.dtype)
        ids = jnp.zeros((4 * mesh.size, ep.config.top_k), jnp.int32)
        weights = jnp.ones(ids.shape) if weighted else None
        d = jax_ep.sharded.dispatch(ep, tokens, ids, weights)

        def dispatch(tokens):
            return jax_ep.sharded.dispatch(ep, tokens, ids, weights).tokens

        def combine(rows):
            of_rows = d.router_weights if weighted else None
            return jax_ep.sharded.combine(ep, rows, d.route, of_rows)

        call, operand = (dispatch, tokens) if op == "dispatch" else (combine, d.tokens)
        y, pull = jax.vjp(call, operand)
    with pytest.raises(ValueError, match=r"jax_ep\.\w+: this handle is closed"):
        pull(y)


def test_no_weights() -> None:
    s = moe.setup()

    def layer(x, ids, w, p):
        return moe.layer(s.ep, x, ids, None, p) + 0 * jnp.sum(w)

    def reference(x, w, p, ids):
        return moe.wave(moe.dense(x, ids, None, p))

    x, ids, w, p = s.global_arrays()
    grads = jax.jit(jax.grad(moe.loss(s.mesh, layer), (0, 2)))(x, w, p, ids)
    expected = jax.grad(reference, (0, 2))(s.tokens, s.weights, s.params, s.ids)
    moe.assert_close(grads, expected)


def test_router() -> None:
    """Differentiates all of routing: logits, top-k, softmax, dispatched weights."""
    s = moe.setup(top_k=4)
    config = s.ep.config
    rng = np.random.default_rng(3)
    matrix = helpers.normal(rng, (config.hidden_size, config.num_experts), np.float32)

    def route(x, matrix):
        values, ids = jax.lax.top_k(x @ matrix, config.top_k)
        return jax.nn.softmax(values), ids

    def layer(x, matrix, p):
        w, ids = route(x, matrix)
        return moe.layer(s.ep, x, ids, w, p)

    def dense(x, matrix, p):
        w, ids = route(x, matrix)
        return moe.wave(moe.dense(x, ids, w, p))

    run = moe.sharded(s.mesh, layer, in_specs=(P("ep"), P(), P("ep")))
    x, _, _, p = s.global_arrays()
    grad = jax.jit(jax.grad(lambda *a: moe.wave(run(*a)), (0, 1, 2)))
    actual = grad(x, helpers.put(s.mesh, [matrix], P()), p)
    moe.assert_close(actual, jax.grad(dense, (0, 1, 2))(s.tokens, matrix, s.params))


def test_bfloat16() -> None:
    """Within 2% of the largest gradient: payloads and sums are rounded to 8 bits."""
    s = moe.setup(dtype="bfloat16")
    x, ids, w, p = s.global_arrays()
    run = moe.loss(s.mesh, functools.partial(moe.layer, s.ep))
    actual = jax.jit(jax.grad(run, (0, 1, 2)))(x, w, p, ids)
    assert [a.dtype for a in actual] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    wide = [np.asarray(a, np.float32) for a in (s.tokens, s.weights, s.params)]
    expected = jax.grad(moe.dense_loss, (0, 1, 2))(*wide, s.ids)
    for got, want in zip(actual, expected, strict=True):
        moe.assert_close(got, want, 0.02 * float(np.max(np.abs(want))))


def layered(s: moe.Setup, loop: str, remat: bool = False):
    """Three layers with one handle and equal params, in an unrolled or a real loop."""

    def run(x, ids, w, p):
        def step(x, scale):
            return moe.layer(s.ep, x, ids, w * scale, p)

        step = jax.checkpoint(step) if remat else step
        scales = jnp.arange(1.0, 4.0, dtype=jnp.float32)
        if loop == "scan":
            return jax.lax.scan(lambda x, c: (step(x, c), None), x, scales)[0]
        if loop == "fori_loop":
            return jax.lax.fori_loop(0, 3, lambda i, x: step(x, scales[i]), x)
        for i in range(3):
            x = step(x, scales[i])
        return x

    return run


def dense_layered(x, w, p, ids):
    for scale in (1.0, 2.0, 3.0):
        x = moe.dense(x, ids, w * np.float32(scale), p)
    return moe.wave(x)


@pytest.mark.few(3)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("loop", ["unrolled", "scan", "fori_loop"])
def test_loops(loop: str, remat: bool) -> None:
    s = moe.setup(1)
    s.weights = s.weights / 4  # keeps three layers well conditioned
    moe.check(s, moe.loss(s.mesh, layered(s, loop, remat)), dense_layered)


def test_layers_of_different_configs() -> None:
    """value_and_grad through handles that differ in top_k, alignment and sizes."""
    s = moe.setup(2)
    count = s.ep.ep_size
    changes = [
        {"top_k": 3},
        {"top_k": 1, "expert_alignment": 8},
        {"top_k": 2, "max_tokens_per_rank": 16, "combine_dtype": "float32"},
        {"top_k": 3, "num_experts": 8 * count, "zero_tail": False},
        {"top_k": 3, "recv_capacity": 8 * count * 3},
    ]
    eps = [
        helpers.make_ep(s.mesh, helpers.make_config(dtype="float32", **c))
        for c in changes
    ]
    routes = []
    for i, ep in enumerate(eps):
        made = helpers.make_inputs(np.random.default_rng(i), ep.config, count, n=8)
        routes.append(np.concatenate(made.ids))

    def layer(x, ids, w, p):
        for i, ep in enumerate(eps):
            k, local = ep.config.top_k, ep.config.num_experts // count
            experts = jnp.tile(p, (2, 1, 1))[:local]
            x = moe.layer(ep, x, ids[i], w[:, :k], experts)
        return x

    def dense(x, w, p, ids):
        for i, ep in enumerate(eps):
            k, local = ep.config.top_k, ep.config.num_experts // count
            parts = jnp.split(p, count)
            experts = [jnp.tile(q, (2, 1, 1))[:local] for q in parts]
            x = moe.dense(x, ids[i], w[:, :k], jnp.concatenate(experts))
        return moe.wave(x)

    run = moe.sharded(s.mesh, layer)
    x, _, w, p = s.global_arrays()
    ids = [helpers.put(s.mesh, [route]) for route in routes]
    grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    actual = jax.jit(grad(lambda x, w, p: moe.wave(run(x, ids, w, p))))(x, w, p)
    expected = jax.jit(grad(dense))(s.tokens, s.weights, s.params, routes)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for got, want in zip(actual[1], expected[1], strict=True):
        # Gradients grow over five layers; the tolerance is relative to the largest.
        moe.assert_close(got, want, moe.ATOL * max(1.0, float(np.max(np.abs(want)))))


def test_grad_of_grad() -> None:
    s = moe.setup(4)

    def second(loss):
        def norm(*args):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*args)) / 64

        return norm

    layer = functools.partial(moe.layer, s.ep, dot=moe.gathered_dot)
    moe.check(s, second(moe.loss(s.mesh, layer)), second(moe.dense_loss))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", ["weights", "tokens", "both", "ids"])
def test_replicated_operands(replicated: str, check_vma: bool) -> None:
    """Operands are equal on all ranks: constants in the body, or inputs with P()."""
    s = moe.setup(5)
    n, count = s.ep.config.max_tokens_per_rank, s.ep.ep_size
    same_x = replicated in ("tokens", "both")
    x = s.tokens[:n] if same_x else s.tokens
    ids = s.ids[:n] if replicated == "ids" else s.ids

    def layer(x, ids, w, p):
        if replicated in ("weights", "both"):
            w = jnp.full((n, s.ep.config.top_k), 0.5, jnp.float32)
        return moe.layer(s.ep, x, ids, w, p)

    def dense(x, w, p):
        x = jnp.tile(x, (count, 1)) if same_x else x
        ids_all = np.tile(ids, (count, 1)) if replicated == "ids" else ids
        if replicated in ("weights", "both"):
            w = jnp.full_like(w, 0.5)
        return moe.wave(moe.dense(x, ids_all, w, p))

    specs = (
        P() if same_x else P("ep"),
        P() if replicated == "ids" else P("ep"),
        P("ep"),
        P("ep"),
    )
    run = moe.sharded(s.mesh, layer, check_vma=check_vma, in_specs=specs)
    _, _, w, p = s.global_arrays()
    x_all = helpers.put(s.mesh, [x], specs[0])
    ids_all = helpers.put(s.mesh, [ids], specs[1])
    actual = jax.jit(
        jax.grad(lambda x, w, p: moe.wave(run(x, ids_all, w, p)), (0, 1, 2))
    )(x_all, w, p)
    expected = jax.grad(dense, (0, 1, 2))(x, s.weights, s.params)
    if replicated in ("weights", "both"):
        np.testing.assert_array_equal(actual[1], np.zeros_like(s.weights))
        actual, expected = actual[::2], expected[::2]
    moe.assert_close(actual, expected)


def test_gradient_of_weights_alone() -> None:
    """Differentiates only the dispatched weights, through d.router_weights."""
    s = moe.setup(6)

    def body(x, ids, w, p):
        d = jax_ep.dispatch(s.ep, x, ids, w)
        return jax_ep.combine(
            s.ep, d.tokens, d.route, router_weights=jnp.sin(d.router_weights)
        )

    def dense(w):
        chosen = jnp.where(s.ids[..., None] >= 0, jnp.sin(w)[..., None], 0)
        return moe.wave(jnp.sum(chosen * s.tokens[:, None], axis=1))

    x, ids, w, p = s.global_arrays()
    actual = jax.jit(jax.grad(moe.loss(s.mesh, body), 1))(x, w, p, ids)
    moe.assert_close(actual, jax.grad(dense)(s.weights))
