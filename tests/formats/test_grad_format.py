"""Quantised backward exchanges send the same as NumPy computes, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle, quantizer
from support.quantized_grads import HIDDEN, cotangents, handle, pulled


def over_the_wire(sums: np.ndarray, floor: float = 2.0**-80) -> np.ndarray:
    name = "fp8_block128"
    return quantizer.dequantize(*quantizer.quantize(sums, name, floor=floor), name)


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
@pytest.mark.parametrize("size", [1e-26, 1e-10, 1e6])
def test_grad_format_of_dispatch(name: str, size: float) -> None:
    """A dispatch's backward is a combine that quantises each rank's float32 sums."""
    mesh, ep = handle(dispatch_format=name, grad_format="fp8_block128", dtype="float32")
    inputs = helpers.make_inputs(
        np.random.default_rng(5), ep.config, ep.ep_size, fill=helpers.normal
    )
    ct, ct_weights = cotangents(ep, "float32", size)
    dx, dw = pulled(mesh, ep, inputs, ct, ct_weights)
    wanted = oracle.combine(ep.config, inputs.ids, ct, wire=over_the_wire)
    _, wanted_weights = oracle.dispatch_vjp(ep.config, inputs.ids, ct, ct_weights)
    exact, _ = oracle.dispatch_vjp(ep.config, inputs.ids, ct, ct_weights)
    for rank, actual in helpers.unstack(dx, ep.ep_size).items():
        helpers.assert_bits(actual, wanted[rank])
        error = np.abs(actual - exact[rank]).max() / np.abs(exact[rank]).max()
        assert 0 < error < 1 / 27
    for rank, actual in helpers.unstack(dw, ep.ep_size).items():
        helpers.assert_bits(actual, wanted_weights[rank].astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 1), ("bfloat16", 1e-10), ("float16", 1), ("float32", 1e-26)],
)
def test_grad_format_of_combine(dtype: str, size: float) -> None:
    """A combine's backward sends quantised cotangents along the route."""
    mesh, ep = handle(grad_format="fp8_block128", dtype=dtype)
    rng = np.random.default_rng(6)
    inputs = helpers.make_inputs(rng, ep.config, ep.ep_size, fill=helpers.normal)
    np_dtype = oracle.DTYPES[dtype]
    dy = [
        (size * helpers.normal(rng, (8, HIDDEN), np.dtype("float32"))).astype(np_dtype)
        for _ in range(ep.ep_size)
    ]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def body(tokens: Any, ids: Any, dy: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        _, pull = jax.vjp(lambda rows: jax_ep.combine(ep, rows, d.route), d.tokens)
        return pull(dy)[0]

    operands = (inputs.tokens, inputs.ids, dy)
    got = jax.jit(body)(*(helpers.put(mesh, part) for part in operands))
    sent = [over_the_wire(part).astype(np_dtype) for part in dy]
    wanted = oracle.dispatch(ep.config, sent, inputs.ids)
    for rank, actual in helpers.unstack(got, ep.ep_size).items():
        helpers.assert_bits(actual, wanted[rank].tokens)


def small_gradients(**formats: Any) -> tuple[np.ndarray, ...]:
    """Gradients of a layer whose cotangents are about 1e-10."""
    mesh, ep = handle(dtype="bfloat16", **formats)
    rng = np.random.default_rng(7)
    inputs = helpers.make_inputs(rng, ep.config, ep.ep_size, fill=helpers.normal)
    target = [
        helpers.normal(rng, (8, HIDDEN), oracle.DTYPES["bfloat16"])
        for _ in range(ep.ep_size)
    ]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(x: Any, ids: Any, w: Any, scale: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids, w)
        rows = jax_ep.dequantize(d) * scale
        return jax_ep.combine(ep, rows, d.route, d.router_weights)

    def loss(x: Any, ids: Any, w: Any, scale: Any, target: Any) -> Any:
        y = layer(x, ids, w, scale).astype("float32")
        return 1e-10 * ((y - target.astype("float32")) ** 2).sum()

    scale = [np.ones((1, HIDDEN), oracle.DTYPES["bfloat16"])] * ep.ep_size
    operands = (inputs.tokens, inputs.ids, inputs.weights, scale, target)
    grads = jax.jit(jax.grad(loss, argnums=(0, 2, 3)))(
        *(helpers.put(mesh, part) for part in operands)
    )
    return tuple(np.asarray(grad, np.float32) for grad in grads)


def test_small_gradients_arrive() -> None:
    """Cotangents of 1e-10, which the tokens' floor of 1e-4 would make zeros."""
    for quantised, plain in zip(
        small_gradients(grad_format="fp8_block128"), small_gradients(), strict=True
    ):
        assert 0 < np.abs(plain).max() < 1e-7
        cosine = np.vdot(quantised, plain)
        cosine /= np.linalg.norm(quantised) * np.linalg.norm(plain)
        assert cosine > 0.99


def test_the_forward_pass_keeps_its_floor() -> None:
    """`combine_format` keeps the tokens' floor, also if `grad_format` is set."""
    mesh, ep = handle(
        combine_format="fp8_block128", grad_format="fp8_block128", dtype="float32"
    )
    rng = np.random.default_rng(8)
    inputs = helpers.make_inputs(rng, ep.config, ep.ep_size, fill=helpers.normal)
    tokens = [part * np.float32(1e-6) for part in inputs.tokens]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def body(tokens: Any, ids: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        return jax_ep.combine(ep, d.tokens, d.route)

    got = jax.jit(body)(helpers.put(mesh, tokens), helpers.put(mesh, inputs.ids))
    rows = [part.tokens for part in oracle.dispatch(ep.config, tokens, inputs.ids)]
    wire = functools.partial(over_the_wire, floor=1e-4)
    wanted = oracle.combine(ep.config, inputs.ids, rows, wire=wire)
    for rank, actual in helpers.unstack(got, ep.ep_size).items():
        helpers.assert_bits(actual, wanted[rank])
