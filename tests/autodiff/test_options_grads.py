"""Derivatives of the options: formulas, dense layers, remat, scan, global arrays."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, options, oracle

pytestmark = pytest.mark.usefixtures("quick_compiles")
MODES = pytest.mark.parametrize("mode", options.MODES)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut_aligned": {"recv_capacity": 21, "expert_alignment": 4},
    "cut_short": {"recv_capacity": 5},
    "duplicates": {"num_experts": 4, "zero_tail": False},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", SHAPES)
@MODES
def test_formulas(mode: str, shape: str) -> None:
    """Each rank's vector-Jacobian products; whatever must not be read is NaN."""
    mesh = helpers.make_mesh(4)
    changes = options.MODES[mode] | SHAPES[shape] | {"dtype": "float32"}
    config = helpers.make_config(**helpers.HALVES | changes)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(zlib.crc32(f"{mode} {shape}".encode()))
    routing = "duplicates" if shape == "duplicates" else "invalid"
    inputs = options.make_inputs(
        rng, config, 4, n=7, routing=routing, fill=helpers.normal
    )
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    rows, weights, residual = options.combine_operands(
        rng, config, outputs, inputs, helpers.normal
    )
    d_rows = [helpers.normal(rng, r.shape, np.float32) for r in rows]
    d_weights = [helpers.normal(rng, len(r), np.float32) for r in rows]
    d_rows = helpers.poisoned(outputs, d_rows)
    d_weights = helpers.poisoned(outputs, d_weights)
    dy = [np.empty((7, 16))] * 4
    if config.reduce == "none":
        dy = [np.empty((7, config.top_k, 16))] * 4
    dy = [helpers.normal(rng, y.shape, np.float32) for y in dy]

    def body(x, ids, w, rows, weights, residual, d_rows, d_weights, dy):
        def dispatch(x, w):
            d = jax_ep.dispatch(ep, x, ids, w)
            return (d.tokens, d.router_weights), d.route

        _, pull, route = jax.vjp(dispatch, x, w, has_aux=True)

        def combine(rows, weights, residual):
            return jax_ep.combine(ep, rows, route, weights, residual=residual)

        _, pull_rows = jax.vjp(combine, rows, weights, residual)
        return *pull((d_rows, d_weights)), *pull_rows(dy)

    operands = (
        inputs.tokens,
        inputs.ids,
        inputs.weights,
        rows,
        weights,
        residual,
        d_rows,
        d_weights,
        dy,
    )
    run = jax.jit(moe.sharded(mesh, body))
    dx, dw, de, dv, dr = run(*(helpers.put(mesh, part) for part in operands))
    want_dx, want_dw = oracle.dispatch_vjp(config, inputs.ids, d_rows, d_weights)
    want_de, want_dv = oracle.combine_vjp(config, inputs.ids, rows, weights, dy)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(dx, np.concatenate(want_dx))
    np.testing.assert_array_equal(dw, np.concatenate(want_dw).astype(np.float32))
    close(de, np.concatenate(want_de))
    if weights is not None:
        close(dv, np.concatenate(want_dv))
    if residual is not None:
        np.testing.assert_array_equal(dr, np.concatenate(dy))
    none = np.concatenate([out.src_info[:, 0] < 0 for out in outputs])
    assert not np.any(np.asarray(de)[none])


@pytest.mark.parametrize("name", ["fp8_block128", "nvfp4"])
@pytest.mark.parametrize("mode", ["shared", "local", "local_shared"])
def test_dequantised_rows(mode: str, name: str) -> None:
    """Straight through: cotangents equal those of rows sent unquantised."""
    mesh = helpers.make_mesh(4)
    changes = options.MODES[mode] | {"dtype": "float32", "dispatch_format": name}
    config = helpers.make_config(hidden_size=128, **changes)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(12)
    inputs = options.make_inputs(rng, config, 4, fill=helpers.normal)
    shape = (ep.recv_capacity, 128)
    d_rows = [helpers.normal(rng, shape, np.float32) for _ in range(4)]

    def body(x, ids, d_rows):
        def rows(x):
            return jax_ep.dequantize(jax_ep.dispatch(ep, x, ids))

        return jax.vjp(rows, x)[1](d_rows)[0]

    operands = (helpers.put(mesh, o) for o in (inputs.tokens, inputs.ids, d_rows))
    dx = jax.jit(moe.sharded(mesh, body))(*operands)
    none = [np.zeros(len(rows)) for rows in d_rows]
    want, _ = oracle.dispatch_vjp(config, inputs.ids, d_rows, none)
    np.testing.assert_allclose(dx, np.concatenate(want), rtol=1e-5, atol=1e-5)


def layer(ep: Any, x: Any, ids: Any, w: Any, params: Any, shared: Any) -> Any:
    """A layer of one rank in the mode of `ep`; `shared` is the shared expert."""
    config = ep.config
    d = jax_ep.dispatch(ep, x, ids, w)
    if config.fused_shared_expert:
        params = jnp.concatenate([shared[None], params])
    rows = jnp.tanh(moe.gathered_dot(d.tokens, params, d.group_sizes))
    if config.reduce == "none":
        z = jax_ep.combine(ep, rows, d.route)
        y = jnp.einsum("nkh,nk->nh", z, w)
    else:
        weights = w if config.reduce == "source" else d.router_weights
        residual = None if config.skip_a2a else x
        y = jax_ep.combine(ep, rows, d.route, weights, residual=residual)
    if config.skip_a2a:
        y = jax.lax.psum(y, "ep")
    return y if options.takes_residual(config) else y + x


def dense(config: Any, x: Any, ids: Any, w: Any, params: Any, shared: Any) -> Any:
    y = moe.dense(x, ids, w, params)
    return y + jnp.tanh(x @ shared) if config.fused_shared_expert else y


def specs(config: Any) -> dict[str, Any]:
    tokens = P() if config.skip_a2a else P("ep")
    return {
        "in_specs": (tokens, tokens, tokens, P("ep"), P()),
        "out_specs": tokens,
    }


class Work:
    """Layers of one mode, expert-parallel and dense, and their operands."""

    def __init__(self, mode: str, **changes: Any) -> None:
        s = moe.setup(zlib.crc32(mode.encode()), 4, **options.MODES[mode], **changes)
        self.s, self.config = s, s.ep.config
        n = self.config.max_tokens_per_rank if self.config.skip_a2a else None
        shared = s.params[0] / 2
        self.host = s.tokens[:n], s.ids[:n], s.weights[:n] / 4, s.params, shared

    def loss(self, layer: Any) -> Any:
        run = moe.sharded(self.s.mesh, layer, **specs(self.config))
        return lambda x, w, p, e: moe.wave(run(x, self.ids(), w, p, e))

    def ids(self) -> Any:
        return jnp.asarray(self.host[1])

    def dense_loss(self, layer: Any) -> Any:
        return lambda x, w, p, e: moe.wave(layer(x, self.host[1], w, p, e))

    def check(self, layer: Any, dense: Any) -> None:
        x, _, w, p, e = self.host
        shared = self.config.fused_shared_expert
        which = (0, 1, 2, 3) if shared else (0, 1, 2)
        grad = functools.partial(jax.value_and_grad, argnums=which)
        actual = jax.jit(grad(self.loss(layer)))(x, w, p, e)
        expected = jax.jit(grad(self.dense_loss(dense)))(x, w, p, e)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=moe.ATOL)
        moe.assert_close(actual[1], expected[1])


@pytest.mark.few(3)
@MODES
def test_layer(mode: str) -> None:
    work = Work(mode)
    work.check(
        functools.partial(layer, work.s.ep), functools.partial(dense, work.config)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", ["plain", "remat", "save_route"])
@MODES
def test_scan(mode: str, wrap: str) -> None:
    work = Work(mode, expert_alignment=4)
    one = functools.partial(layer, work.s.ep)
    if wrap != "plain":
        policy = jax_ep.save_route if wrap == "save_route" else None
        one = jax.checkpoint(one, policy=policy)
    scales = np.array([1.0, 2.0, 3.0], np.float32)

    def layers(x, ids, w, p, e):
        return jax.lax.scan(
            lambda x, c: (one(x, ids, w * c, p, e), None), x, jnp.asarray(scales)
        )[0]

    def dense_layers(x, ids, w, p, e):
        for scale in scales:
            x = dense(work.config, x, ids, w * scale, p, e)
        return x

    work.check(layers, dense_layers)


@pytest.mark.thorough
@MODES
def test_grad_of_grad(mode: str) -> None:
    work = Work(mode)

    def norm(loss):
        def of(*args):
            grads = jax.grad(loss, (0, 1, 2))(*args)
            return sum(jnp.sum(g**2) for g in grads) / 64

        return of

    x, _, w, p, e = work.host
    ours = norm(work.loss(functools.partial(layer, work.s.ep)))
    plain = norm(work.dense_loss(functools.partial(dense, work.config)))
    actual = jax.jit(jax.grad(ours, (0, 1, 2)))(x, w, p, e)
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(x, w, p, e)
    for got, want in zip(actual, expected, strict=True):
        moe.assert_close(got, want, moe.ATOL * max(1.0, float(np.max(np.abs(want)))))


@pytest.mark.parametrize("mode", ["source", "none", "shared", "shared_source"])
def test_global_arrays(mode: str) -> None:
    """jax_ep.sharded has the same gradients as the calls inside shard_map."""
    s = moe.setup(3, 4, **options.MODES[mode])
    config = s.ep.config
    x, ids, w, _ = s.global_arrays()

    def loss(dispatch, combine, x, w):
        d = dispatch(x, ids, w)
        weights = {"rank": d.router_weights, "source": w, "none": None}[config.reduce]
        return moe.wave(combine(jnp.sin(d.tokens), d.route, weights))

    def inside(function):
        return moe.sharded(s.mesh, functools.partial(function, s.ep))

    ours, plain = (
        jax.jit(jax.value_and_grad(functools.partial(loss, *calls), (0, 1)))(x, w)
        for calls in (
            [
                functools.partial(f, s.ep)
                for f in (jax_ep.sharded.dispatch, jax_ep.sharded.combine)
            ],
            [inside(jax_ep.dispatch), inside(jax_ep.combine)],
        )
    )
    jax.tree.map(helpers.assert_bits, ours, plain)


@pytest.mark.parametrize("mode", ["source", "none", "shared_source"])
def test_quantised_gradients(mode: str) -> None:
    """With grad_format, gradients differ only by the format's rounding."""
    grads = []
    for name in (None, "fp8_block128"):
        s = moe.setup(4, 4, hidden_size=128, grad_format=name, **options.MODES[mode])
        run = moe.sharded(s.mesh, functools.partial(layer, s.ep), **specs(s.ep.config))
        args = s.tokens, s.weights, s.params

        def loss(x, w, p, run=run, s=s):
            return moe.wave(run(x, s.ids, w, p, p[0]))

        grads.append(jax.jit(jax.grad(loss, (0, 1, 2)))(*args))
    # The tokens' gradient; others need not be sent.
    assert np.any(np.asarray(grads[0][0]) != np.asarray(grads[1][0]))
    for plain, quantised in zip(*grads, strict=True):
        limit = 0.05 * float(np.max(np.abs(plain)))
        np.testing.assert_allclose(quantised, plain, rtol=0, atol=limit)


@pytest.mark.few(3)
@MODES
def test_no_token(mode: str) -> None:
    """n = 0, whole and in halves: rows have values but no gradients."""
    mesh = helpers.make_mesh(2)
    fields = helpers.HALVES | options.MODES[mode]
    config = helpers.make_config(**fields, expert_alignment=4)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(8)
    inputs = helpers.make_inputs(rng, config, 2)
    rows = [helpers.normal(rng, (ep.recv_capacity, 16), x.dtype) for x in inputs.tokens]
    weights = [np.full(ep.recv_capacity, np.nan, np.float32)] * 2

    def body(x, ids, w, rows, weights):
        def layer(calls, x, w, rows, weights):
            dispatch, combine = calls
            d = dispatch(ep, x[:0], ids[:0], w[:0])
            at_source = w[:0] if config.reduce == "source" else weights
            given = at_source if options.takes_weights(config) else None
            skip = x[:0] if options.takes_residual(config) else None
            return d.tokens, combine(ep, rows, d.route, given, residual=skip)

        pulled = []
        for calls in (options.WHOLE, options.SPLIT):
            run = functools.partial(layer, calls)
            (arrived, y), pull = jax.vjp(run, x, w, rows, weights)
            assert y.size == 0
            pulled.append((arrived, *pull((jnp.full_like(arrived, jnp.nan), y))))
        return pulled

    run = jax.jit(moe.sharded(mesh, body))
    given = (inputs.tokens, inputs.ids, inputs.weights, rows, weights)
    for leaf in jax.tree.leaves(run(*(helpers.put(mesh, part) for part in given))):
        assert not np.any(np.asarray(leaf, np.float32))
