"""Straight-through gradients of quantised dispatch; quantised backward exchanges."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, quantizer
from support.quantized_grads import HIDDEN, cotangents, handle, pulled

pytestmark = pytest.mark.usefixtures("quick_compiles")

QUANTIZED = tuple(quantizer.BLOCKS)
bare = object()
each_format = pytest.mark.parametrize("name", QUANTIZED)


@pytest.mark.few(6)
@each_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e-4, 1e6])
def test_cotangents_arrive_intact(name: str, dtype: str, size: float) -> None:
    """Cotangents equal those of a dispatch that quantises nothing."""
    mesh, ep = handle(dispatch_format=name, dtype=dtype)
    _, plain = handle(dtype=dtype)
    inputs = helpers.make_inputs(
        np.random.default_rng(1), ep.config, ep.ep_size, fill=helpers.normal
    )
    args = (mesh, ep, inputs, *cotangents(ep, dtype, size))
    got = pulled(*args)
    wanted = pulled(mesh, plain, *args[2:])
    for actual, expected in zip(got, wanted, strict=True):
        helpers.assert_bits(actual, expected)
        assert np.asarray(actual, np.float32).any()


def layer(ep: Any, x: Any, ids: Any, weights: Any, params: Any) -> Any:
    d = jax_ep.dispatch(ep, x, ids, weights)
    rows = jax_ep.dequantize(d)
    rows = jnp.tanh(jax.lax.ragged_dot(rows, params, d.group_sizes))
    return jax_ep.combine(ep, rows, d.route, d.router_weights, residual=x)


@pytest.mark.few(3)
@each_format
@pytest.mark.parametrize("check_vma", [True, False])
def test_layer(name: str, check_vma: bool) -> None:
    s = moe.setup(dispatch_format=name, hidden_size=HIDDEN)
    fn = moe.loss(s.mesh, functools.partial(layer, s.ep), check_vma=check_vma)
    x, ids, w, p = s.global_arrays()
    value_and_grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    values = quantizer.dequantize(*quantizer.quantize(s.tokens, name), name)

    def dense_loss(x: Any, w: Any, p: Any) -> Any:
        sent = x + jax.lax.stop_gradient(values - x)
        return moe.wave(x + (moe.dense(sent, s.ids, w, p) - sent))

    actual = jax.jit(value_and_grad(fn))(x, w, p, ids)
    expected = jax.jit(value_and_grad(dense_loss))(s.tokens, s.weights, s.params)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4)
    moe.assert_close(actual[1], expected[1], 2e-3)


@pytest.mark.parametrize("wrap", ["scan", "remat", "fori"])
def test_loops_and_remat(wrap: str) -> None:
    """Three layers in a loop have the same gradients as three successive layers."""
    s = moe.setup(dispatch_format="mxfp8", hidden_size=HIDDEN)
    once = functools.partial(layer, s.ep)

    def looped(x: Any, ids: Any, w: Any, p: Any) -> Any:
        def step(x: Any) -> Any:
            return once(x, ids, w, p) / 2

        if wrap == "fori":
            return jax.lax.fori_loop(0, 3, lambda _, x: step(x), x)
        if wrap != "scan":
            step = jax.checkpoint(step)
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0]

    def in_a_row(x: Any, ids: Any, w: Any, p: Any) -> Any:
        for _ in range(3):
            x = once(x, ids, w, p) / 2
        return x

    x, ids, w, p = s.global_arrays()
    found = [
        jax.jit(jax.grad(moe.loss(s.mesh, fn), argnums=(0, 1, 2)))(x, w, p, ids)
        for fn in (looped, in_a_row)
    ]
    for actual, expected in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.few(2)
@each_format
def test_remat_that_saves_rows(name: str) -> None:
    """remat restores saved codes unchanged, and nothing is exchanged twice."""
    s = moe.setup(ranks=2, dispatch_format=name, hidden_size=HIDDEN)
    x, ids, w, p = s.global_arrays()

    def program(policy: Any) -> Any:
        def looped(x: Any, ids: Any, w: Any, p: Any) -> Any:
            def step(x: Any, _: Any) -> Any:
                return layer(s.ep, x, ids, w, p) / 2, None

            if policy is not bare:
                step = jax.checkpoint(step, policy=policy)
            return jax.lax.scan(step, x, None, length=3)[0]

        grad = jax.grad(moe.loss(s.mesh, looped), argnums=(0, 1, 2))
        return jax.jit(grad).lower(x, w, p, ids).compile()

    kept, plain = program(jax_ep.save_route), program(bare)
    for actual, expected in zip(kept(x, w, p, ids), plain(x, w, p, ids), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    counts = [moe.exchanges(found) for found in (plain, kept, program(None))]
    assert counts[0] == counts[1] < counts[2]


def test_codes_and_scales_carry_no_gradient() -> None:
    mesh, ep = handle(dispatch_format="fp8_block128")
    inputs = helpers.make_inputs(
        np.random.default_rng(4), ep.config, ep.ep_size, fill=helpers.normal
    )

    def loss(tokens: Any, ids: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        total = jnp.sum(d.scales) + jnp.sum(d.tokens.astype(jnp.float32))
        return jax.lax.psum(total, "ep")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=P("ep"), out_specs=P())
    operands = [helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids)]
    grads = jax.jit(jax.grad(mapped))(*operands)
    assert not np.asarray(grads, np.float32).any()


def test_second_order() -> None:
    """Second derivatives go through the same exchanges."""
    s = moe.setup(dispatch_format="mxfp8", hidden_size=HIDDEN)
    x, ids, w, p = s.global_arrays()

    def smooth(ep: Any, x: Any, ids: Any, weights: Any, params: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids, weights)
        dot = moe.gathered_dot(jax_ep.dequantize(d), params, d.group_sizes)
        return jax_ep.combine(ep, jnp.tanh(dot), d.route, d.router_weights)

    loss = moe.loss(s.mesh, functools.partial(smooth, s.ep))
    values = quantizer.dequantize(*quantizer.quantize(s.tokens, "mxfp8"), "mxfp8")

    def dense(x: Any, w: Any, p: Any) -> Any:
        sent = x + jax.lax.stop_gradient(values - x)
        return moe.wave(moe.dense(sent, s.ids, w, p) - sent)

    def of_gradient(fn: Any, *rest: Any) -> Any:
        def norm(w: Any, p: Any) -> Any:
            return jnp.sum(jax.grad(fn, argnums=2)(rest[0], w, p, *rest[1:]) ** 2)

        return jax.jit(jax.grad(norm, argnums=(0, 1)))

    actual = of_gradient(loss, x, ids)(w, p)
    expected = of_gradient(dense, s.tokens)(s.weights, s.params)
    for got, want in zip(actual, expected, strict=True):
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_both_wires_quantised_in_a_layer() -> None:
    """With everything in fp8, gradients are near those of the exact layer."""
    formats = dict.fromkeys(
        ("dispatch_format", "combine_format", "grad_format"), "fp8_block128"
    )
    s = moe.setup(hidden_size=HIDDEN, **formats)
    x, ids, w, p = s.global_arrays()
    fn = moe.loss(s.mesh, functools.partial(layer, s.ep))
    actual = jax.jit(jax.grad(fn, argnums=(0, 1, 2)))(x, w, p, ids)
    expected = jax.grad(moe.dense_loss, argnums=(0, 1, 2))(
        s.tokens, s.weights, s.params, s.ids
    )
    for got, want in zip(actual, expected, strict=True):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-6 < error < 0.08


def test_gradient_of_global_arrays() -> None:
    mesh, ep = handle(dispatch_format="nvfp4", dtype="float32")
    inputs = helpers.make_inputs(
        np.random.default_rng(7), ep.config, ep.ep_size, fill=helpers.normal
    )
    tokens, ids = (helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids))

    def loss(tokens: Any) -> Any:
        d = jax_ep.sharded.dispatch(ep, tokens, ids)
        return jnp.sum(jax_ep.sharded.dequantize(ep, d) * 3)

    count = (np.concatenate(inputs.ids) >= 0).sum(axis=1)
    wanted = np.broadcast_to(3 * count[:, None], tokens.shape).astype(np.float32)
    np.testing.assert_array_equal(jax.grad(loss)(tokens), wanted)


def test_no_gradient_passes_without_a_port() -> None:
    """A gradient without a port is an error, not zero; no gradient raises nothing."""
    mesh, ep = handle(dispatch_format="mxfp8", dtype="float32")
    inputs = helpers.make_inputs(
        np.random.default_rng(7), ep.config, ep.ep_size, fill=helpers.normal
    )
    tokens, ids = (helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids))

    def loss(tokens: Any, scale: Any, stop: Any = lambda rows: rows) -> Any:
        d = jax_ep.sharded.dispatch(ep, tokens, ids)
        bare = dataclasses.replace(d, grad_port=None)
        return jnp.sum(stop(jax_ep.sharded.dequantize(ep, bare)) * scale)

    with pytest.raises(
        ValueError, match=r"jax_ep\.dequantize: d must have the grad_port"
    ):
        jax.eval_shape(jax.grad(loss), tokens, 2.0)

    @jax.jit
    def others(tokens: Any) -> Any:
        stopped = jax.grad(functools.partial(loss, stop=jax.lax.stop_gradient))
        total = jax.grad(loss, argnums=1)(tokens, 2.0)
        return stopped(tokens, 2.0), loss(tokens, 2.0), total

    stopped, value, total = others(tokens)
    assert not np.asarray(stopped).any()
    assert value != 0
    np.testing.assert_allclose(value, 2 * total, rtol=1e-5)
